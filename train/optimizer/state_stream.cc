#include "train/optimizer/state_stream.h"

#include <algorithm>
#include <cstdint>
#include <vector>

namespace burst {

StateStream::StateStream(DeviceType device)
    : device_(device),
      buffers_{Buffer(device), Buffer(device), Buffer(device)},
      in_(device),
      out_(device) {}

absl::Status StateStream::Run(absl::Span<const UpdateStep> steps) {
  std::vector<const UpdateStep*> copied;  // the steps that have a state
  int64_t rows = 0, longest = 0;
  for (const UpdateStep& step : steps) {
    if (step.state.empty()) continue;
    copied.push_back(&step);
    rows = std::max(rows, static_cast<int64_t>(step.state.size()));
    longest = std::max(longest, step.state[0].numel());
  }
  const int64_t stride = (longest + 63) / 64 * 64;  // so that vectorized loads can begin there
  for (Buffer& buffer : buffers_) {
    if (copied.empty()) break;
    buffer.memory = Tensor::Empty({rows, stride}, copied[0]->state[0].dtype(), device_);
  }

  const auto buffer_of = [&](size_t i) -> Buffer& { return buffers_[i % buffers_.size()]; };
  std::vector<std::vector<Tensor>> here(copied.size());  // the state of each on the device
  const auto fetch = [&](size_t i) {
    if (i >= copied.size()) return;
    Buffer& buffer = buffer_of(i);
    if (i >= buffers_.size()) buffer.emptied.Wait();
    for (const Tensor& from : copied[i]->state) {
      const auto row = static_cast<int64_t>(here[i].size());
      here[i].push_back(buffer.memory.Slice(0, row, 1).View({-1}).Slice(0, 0, from.numel()));
      in_.Copy(here[i].back().raw_data(), device_, from.raw_data(), DeviceType::kCpu,
               from.size_bytes(), &buffer.filled);
    }
  };
  fetch(0);
  fetch(1);
  absl::Status status;
  size_t i = 0;  // number of the next copied step
  for (auto step = steps.begin(); step != steps.end() && status.ok(); ++step) {
    if (step->state.empty()) {
      status = step->run({});
      continue;
    }
    Buffer& buffer = buffer_of(i);
    buffer.filled.Wait();
    status = step->run(here[i]);
    for (size_t k = 0; k < step->state.size(); ++k) {
      out_.Copy(step->state[k].raw_data(), DeviceType::kCpu, here[i][k].raw_data(), device_,
                step->state[k].size_bytes(), &buffer.emptied);
    }
    fetch(i + 2);  // takes the buffer of the copied step before this one
    ++i;
  }
  for (size_t k = 0; k < std::min(i, buffers_.size()); ++k) buffers_[k].emptied.Wait();
  for (Buffer& buffer : buffers_) {
    if (!status.ok()) buffer.filled.Wait();
    buffer.memory = Tensor();
  }
  return status;
}

}  // namespace burst
