#include "train/optimizer/gradient_reducer.h"

#include <cstdint>
#include <utility>

#include "burst/base/status.h"
#include "train/optimizer/adamw.h"

namespace burst {
namespace {

// Hardly any work is left that could hide the last message. So a message has the gradients of a few
// layers at most: two layers of GPT-2 124M.
constexpr int64_t kMessageBytes = int64_t{48} << 20;

}  // namespace

absl::Status NormOfStages(Communicator* stages, const Tensor& norm) {
  const Tensor norms = Tensor::Zeros({stages->world_size()}, DType::kFloat64, norm.device());
  norms.Slice(0, stages->rank(), 1).CopyFrom(norm);
  BURST_RETURN_IF_ERROR(stages->AllReduceSum(norms));
  L2Norm(norms, norm);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<GradientReducer>> GradientReducer::Create(ParameterList& parameters,
                                                                         Communicator* world,
                                                                         Communicator* group) {
  std::unique_ptr<GradientReducer> reducer(new GradientReducer(parameters, world, group));
  if (group == nullptr) return reducer;
  for (const ShardRange& range : parameters.Ranges(0, parameters.size())) {
    Communicator*& among = reducer->among_[range.reduce_ranks];
    if (among != nullptr) continue;
    among = world;
    if (range.reduce_ranks == group->world_size()) continue;
    BURST_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> owned,
                           world->Split(group->rank() / range.reduce_ranks, world->rank()));
    among = owned.get();
    reducer->owned_.push_back(std::move(owned));
  }
  return reducer;
}

absl::Status GradientReducer::Post(int first, int last) {
  if (last == first_) {
    first_ = first;
  } else {
    BURST_RETURN_IF_ERROR(Start());
    first_ = first;
    last_ = last;
  }
  int64_t bytes = 0;
  for (int i = first_; i < last_; ++i) {
    bytes += parameters_[i].numel() * SizeOf(parameters_.master_dtype());
  }
  return bytes < kMessageBytes ? absl::OkStatus() : Start();
}

absl::Status GradientReducer::Start() {
  const std::vector<ShardRange> ranges = parameters_.Ranges(first_, last_);
  if (group_ == nullptr && first_ == 0 && !ranges.empty()) {
    // All earlier messages have arrived when the last one begins.
    last_message_ = ranges.back().end;
    BURST_RETURN_IF_ERROR(Wait());
  }
  for (const ShardRange& range : ranges) {
    Communicator* const among = group_ == nullptr ? world_ : among_.at(range.reduce_ranks);
    BURST_RETURN_IF_ERROR(among->PostAllReduceSum(
        parameters_.sums_grads_exactly() ? parameters_.exact_sums(range.begin, range.end)
                                         : parameters_.grads(range.begin, range.end)));
  }
  first_ = last_ = 0;
  return absl::OkStatus();
}

absl::Status GradientReducer::Wait() {
  if (group_ == nullptr) return world_->Wait(Channel::kCollective);
  for (const auto& [reduce_ranks, among] : among_) {
    BURST_RETURN_IF_ERROR(among->Wait(Channel::kCollective));
  }
  return absl::OkStatus();
}

absl::Status GradientReducer::Finish(const Tensor& norm) {
  BURST_RETURN_IF_ERROR(Start());
  const bool exact = parameters_.sums_grads_exactly();
  const bool beside = group_ == nullptr && stages_ == nullptr && !exact &&
                      world_->world_size() > 1 && norm.device() == DeviceType::kCuda &&
                      last_message_ < parameters_.numel();
  if (beside) return NormBesideLastMessage(norm);
  BURST_RETURN_IF_ERROR(Wait());
  if (stages_ != nullptr) {
    BURST_RETURN_IF_ERROR(AddTied());
    BURST_RETURN_IF_ERROR(NormOfParts(norm));
    return NormOfStages(stages_, norm);
  }
  if (group_ != nullptr) return NormOfParts(norm);
  if (exact) parameters_.RoundSums();
  L2Norm(parameters_.grads(), norm);
  return absl::OkStatus();
}

// The last message holds the embeddings and is the longest one. No backward work is left to hide
// it, so the norm runs in parallel with it.
absl::Status GradientReducer::NormBesideLastMessage(const Tensor& norm) {
  const Tensor norms = Tensor::Empty({2}, DType::kFloat64, norm.device());
  L2Norm(parameters_.grads(last_message_, parameters_.numel()), norms.Slice(0, 0, 1));
  BURST_RETURN_IF_ERROR(Wait());
  L2Norm(parameters_.grads(0, last_message_), norms.Slice(0, 1, 1));
  L2Norm(norms, norm);
  return absl::OkStatus();
}

// Afterward both sides have the same bits, and so do all ranks of both stages.
absl::Status GradientReducer::AddTied() {
  if (tied_ == nullptr) return absl::OkStatus();
  // The sum takes the first stage's first parameter and the last stage's copy of it.
  return tied_->AllReduceSum(
      parameters_.grads(parameters_[0].offset, parameters_[0].offset + parameters_[0].numel()));
}

std::vector<ShardRange> GradientReducer::CountedRanges() const {
  std::vector<ShardRange> ranges;
  for (int first = 0, last = 0; first < parameters_.size(); first = last + 1) {
    for (last = first; last < parameters_.size() && !parameters_[last].copy;) ++last;
    const std::vector<ShardRange> between = parameters_.Ranges(first, last);
    ranges.insert(ranges.end(), between.begin(), between.end());
  }
  return ranges;
}

// Computes sqrt(sum over ranges and ranks of |gradient|^2). If several ranks own a parameter, the
// first one counts it.
absl::Status GradientReducer::NormOfParts(const Tensor& norm) const {
  const Tensor grads = parameters_.grads();
  const std::vector<ShardRange> ranges = CountedRanges();
  const int64_t count = static_cast<int64_t>(ranges.size());
  const int64_t rank = group_ == nullptr ? 0 : group_->rank();
  const int64_t ranks = group_ == nullptr ? 1 : group_->world_size();
  const Tensor norms = Tensor::Zeros({ranks * count}, DType::kFloat64, grads.device());
  for (int64_t i = 0; i < count; ++i) {
    const ShardRange& range = ranges[i];
    if (rank % range.replicas != 0) continue;
    L2Norm(grads.Slice(0, range.begin, range.end - range.begin),
           norms.Slice(0, rank * count + i, 1));
  }
  if (group_ != nullptr) BURST_RETURN_IF_ERROR(group_->AllReduceSum(norms));
  L2Norm(norms, norm);
  return absl::OkStatus();
}

}  // namespace burst
