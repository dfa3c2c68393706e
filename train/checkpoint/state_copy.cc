#include "train/checkpoint/state_copy.h"

#include <utility>

#include "burst/base/check.h"

namespace burst {

std::vector<StateRange> OwnState(const ParameterList& parameters) {
  std::vector<StateRange> ranges;
  for (int i = 0; i < parameters.size(); ++i) {
    const ParameterPiece piece = parameters.PieceOf(i, parameters.sharding().rank);
    ranges.push_back({i, piece.begin, piece.length});
  }
  return ranges;
}

StateCopy::StateCopy(const ParameterList& parameters, const AdamW& optimizer,
                     std::vector<StateRange> ranges)
    : parameters_(parameters),
      optimizer_(optimizer),
      state_(optimizer.state()),
      ranges_(std::move(ranges)) {
  BURST_CHECK(parameters.master_dtype() == DType::kFloat32);
  for (const StateRange& range : ranges_) {
    numel_ += range.length;
    for (const AdamW::StateTensor& tensor : state_) {
      if (tensor.Has(ParameterOf(range))) state_numel_ += range.length;
    }
  }
}

int64_t StateCopy::bytes() const {
  const bool masters_in_place = in_place() && parameters_.dtype() != parameters_.master_dtype();
  const int64_t copied = (masters_in_place ? 0 : numel_) + (in_place() ? 0 : state_numel_);
  return copied * static_cast<int64_t>(sizeof(float));
}

void StateCopy::Reserve() {
  if (buffer_ == nullptr) buffer_ = std::make_unique<HostBuffer>(parameters_.device(), bytes());
}

void StateCopy::Take() {
  Reserve();
  optimizer_.WriteBack();
  SynchronizeDevice(parameters_.device());
  elements_.clear();
  auto* to = static_cast<char*>(buffer_->data());
  const auto take = [&](const Tensor& from) {
    if (in_place() && from.device() == DeviceType::kCpu) {
      elements_.push_back(from.raw_data());
      return;
    }
    CopyMemory(to, DeviceType::kCpu, from.raw_data(), from.device(),
               static_cast<size_t>(from.size_bytes()));
    elements_.push_back(to);
    to += from.size_bytes();
  };
  for (const StateRange& range : ranges_) {
    const int64_t begin =
        range.begin - parameters_.PieceOf(range.parameter, parameters_.sharding().rank).begin;
    take(parameters_.Masters(range.parameter).Slice(0, begin, range.length));
  }
  for (const StateRange& range : ranges_) {
    const ParameterPiece piece = parameters_.PieceOf(range.parameter, parameters_.sharding().rank);
    BURST_CHECK(range.length == 0 || (range.begin >= piece.begin &&
                                      range.begin + range.length <= piece.begin + piece.length));
    const int64_t at = piece.at + range.begin - piece.begin;
    for (const AdamW::StateTensor& tensor : state_) {
      if (tensor.Has(ParameterOf(range))) take(tensor.Slice(at, range.length));
    }
  }
}

std::vector<StateCopy::Part> StateCopy::parts() const {
  BURST_CHECK(buffer_ != nullptr) << "nothing was copied yet";
  std::vector<Part> parts;
  const auto add = [&](const char* prefix, size_t range) {
    const int64_t bytes = ranges_[range].length * static_cast<int64_t>(sizeof(float));
    parts.push_back(
        {prefix + ParameterOf(ranges_[range]).name, range, elements_[parts.size()], bytes});
  };
  for (size_t i = 0; i < ranges_.size(); ++i) add("", i);
  for (size_t i = 0; i < ranges_.size(); ++i) {
    for (const AdamW::StateTensor& tensor : state_) {
      if (tensor.Has(ParameterOf(ranges_[i]))) add(tensor.prefix, i);
    }
  }
  return parts;
}

}  // namespace burst
