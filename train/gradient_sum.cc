#include "train/gradient_sum.h"

#include <cstdint>
#include <utility>

#include "burst/base/status.h"
#include "train/adamw.h"

namespace burst {
namespace {

// The last message has little to hide behind, so they are not longer than a few layers: two of
// GPT-2 124M's.
constexpr int64_t kMessageBytes = int64_t{48} << 20;

}  // namespace

absl::StatusOr<std::unique_ptr<GradientSum>> GradientSum::Create(const ParameterList& parameters,
                                                                 Communicator* world,
                                                                 Communicator* group) {
  std::unique_ptr<GradientSum> sum(new GradientSum(parameters, world, group));
  if (group == nullptr) return sum;
  for (const SharedRange& range : parameters.Ranges(0, parameters.size())) {
    Communicator*& among = sum->among_[range.summed];
    if (among != nullptr) continue;
    among = world;
    if (range.summed == group->world_size()) continue;
    BURST_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> owned,
                           world->Split(group->rank() / range.summed, world->rank()));
    among = owned.get();
    sum->owned_.push_back(std::move(owned));
  }
  return sum;
}

absl::Status GradientSum::Post(int first, int last) {
  if (last == first_) {
    first_ = first;
  } else {
    BURST_RETURN_IF_ERROR(Start());
    first_ = first;
    last_ = last;
  }
  int64_t bytes = 0;
  for (int i = first_; i < last_; ++i) {
    bytes += parameters_[i].numel() * SizeOf(parameters_.masters().dtype());
  }
  return bytes < kMessageBytes ? absl::OkStatus() : Start();
}

absl::Status GradientSum::Start() {
  for (const SharedRange& range : parameters_.Ranges(first_, last_)) {
    Communicator* const among = group_ == nullptr ? world_ : among_.at(range.summed);
    BURST_RETURN_IF_ERROR(among->PostAllReduceSum(parameters_.grads(range.begin, range.end)));
  }
  first_ = last_ = 0;
  return absl::OkStatus();
}

absl::Status GradientSum::Wait() {
  BURST_RETURN_IF_ERROR(Start());
  if (group_ == nullptr) return world_->Wait(Channel::kCollective);
  for (const auto& [summed, among] : among_) {
    BURST_RETURN_IF_ERROR(among->Wait(Channel::kCollective));
  }
  return absl::OkStatus();
}

// sqrt(sum over ranges and ranks of |gradient|^2); of what several ranks hold, the first counts.
absl::StatusOr<Tensor> GradientSum::Norm() const {
  const Tensor grads = parameters_.grads();
  if (group_ == nullptr) return L2Norm(grads);
  const std::vector<SharedRange> ranges = parameters_.Ranges(0, parameters_.size());
  const int64_t count = static_cast<int64_t>(ranges.size());
  const Tensor norms =
      Tensor::Zeros({group_->world_size() * count}, DType::kFloat64, grads.device());
  for (int64_t i = 0; i < count; ++i) {
    const SharedRange& range = ranges[i];
    if (group_->rank() % range.copies != 0) continue;
    norms.Slice(0, group_->rank() * count + i, 1)
        .CopyFrom(L2Norm(grads.Slice(0, range.begin, range.end - range.begin)));
  }
  BURST_RETURN_IF_ERROR(group_->AllReduceSum(norms));
  return L2Norm(norms);
}

}  // namespace burst
