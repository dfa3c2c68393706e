#include "train/optimizer/state_stream.h"

#include <algorithm>
#include <vector>

#include "burst/base/check.h"

namespace burst {
namespace {

cuda::AdamWPart Slice(const cuda::AdamWPart& part, int64_t begin, int64_t length) {
  const auto slice = [&](const Tensor& tensor) {
    return tensor.null() ? tensor : tensor.Slice(0, begin, length);
  };
  return {part.offset + begin, slice(part.grads), slice(part.masters),
          slice(part.m),       slice(part.v),     slice(part.compute)};
}

// Returns the part's tensors that are in the host's memory.
std::vector<Tensor*> OnHost(cuda::AdamWPart* part) {
  std::vector<Tensor*> tensors = {&part->m, &part->v};
  if (!part->compute.null()) tensors.push_back(&part->masters);
  return tensors;
}

}  // namespace

StateStream::StateStream(DeviceType device, int64_t piece)
    : device_(device),
      piece_(piece),
      buffers_{Buffer(device), Buffer(device), Buffer(device)},
      in_(device),
      out_(device) {
  BURST_CHECK(piece > 0 && piece % 64 == 0);
}

void StateStream::Update(absl::Span<const cuda::AdamWPart> parts,
                         const std::function<void(const cuda::AdamWPart& piece)>& update) {
  std::vector<cuda::AdamWPart> pieces;
  int64_t longest = 0;
  for (const cuda::AdamWPart& part : parts) {
    const int64_t n = part.masters.numel();
    longest = std::max(longest, std::min(n, piece_));
    for (int64_t at = 0; at < n; at += piece_) {
      pieces.push_back(Slice(part, at, std::min(piece_, n - at)));
    }
  }
  if (pieces.empty()) return;
  const int64_t stride = (longest + 63) / 64 * 64;
  for (Buffer& buffer : buffers_) {
    buffer.memory = Tensor::Empty({3, stride}, pieces[0].m.dtype(), device_);
  }

  const auto buffer_of = [&](size_t i) -> Buffer& { return buffers_[i % buffers_.size()]; };
  std::vector<cuda::AdamWPart> here = pieces;  // the pieces on the device
  const auto fetch = [&](size_t i) {
    if (i >= pieces.size()) return;
    Buffer& buffer = buffer_of(i);
    if (i >= buffers_.size()) buffer.emptied.Wait();
    int64_t row = 0;
    for (Tensor* tensor : OnHost(&here[i])) {
      const Tensor from = *tensor;
      *tensor = buffer.memory.Slice(0, row++, 1).View({-1}).Slice(0, 0, from.numel());
      in_.Copy(tensor->raw_data(), device_, from.raw_data(), DeviceType::kCpu, from.size_bytes(),
               &buffer.filled);
    }
  };
  fetch(0);
  fetch(1);
  for (size_t i = 0; i < pieces.size(); ++i) {
    Buffer& buffer = buffer_of(i);
    buffer.filled.Wait();
    update(here[i]);
    const std::vector<Tensor*> from = OnHost(&here[i]), to = OnHost(&pieces[i]);
    for (size_t k = 0; k < from.size(); ++k) {
      out_.Copy(to[k]->raw_data(), DeviceType::kCpu, from[k]->raw_data(), device_,
                from[k]->size_bytes(), &buffer.emptied);
    }
    fetch(i + 2);  // takes the buffer of the piece before this one
  }
  for (size_t i = 0; i < std::min(pieces.size(), buffers_.size()); ++i) buffers_[i].emptied.Wait();
  for (Buffer& buffer : buffers_) buffer.memory = Tensor();
}

}  // namespace burst
