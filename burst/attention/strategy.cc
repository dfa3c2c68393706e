#include "burst/attention/strategy.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/attention/ulysses_attention.h"
#include "burst/base/enum_names.h"
#include "burst/base/status.h"

namespace burst {
namespace {

constexpr EnumName<Strategy> kStrategies[] = {{Strategy::kSingle, "single"},
                                              {Strategy::kBurst, "burst"},
                                              {Strategy::kRing, "ring"},
                                              {Strategy::kUlysses, "ulysses"},
                                              {Strategy::kBurstUlysses, "burst+ulysses"}};

}  // namespace

absl::StatusOr<Strategy> ParseStrategy(absl::string_view name) {
  return ParseName(name, kStrategies);
}
const char* Name(Strategy strategy) { return NameOf(strategy, kStrategies); }

absl::StatusOr<std::unique_ptr<SequenceParallelAttention>> CreateAttention(
    Strategy strategy, const BurstAttentionOptions& options, int group_size, Communicator* comm,
    const RankGroup& tensor) {
  return CreateAttentionOver(strategy, options, group_size, std::make_shared<AttentionRanks>(comm),
                             tensor);
}

absl::StatusOr<std::unique_ptr<SequenceParallelAttention>> CreateAttentionOver(
    Strategy strategy, const BurstAttentionOptions& options, int group_size,
    std::shared_ptr<AttentionRanks> ranks, const RankGroup& tensor) {
  const BackwardDirection own =
      strategy == Strategy::kRing ? BackwardDirection::kRing : BackwardDirection::kAuto;
  if (!HasDirections(strategy) && options.backward != BackwardDirection::kAuto &&
      options.backward != own) {
    return absl::InvalidArgumentError(absl::StrCat(
        "backward: must be ", own == BackwardDirection::kRing ? "auto or ring" : "auto",
        " with the strategy ", Name(strategy), "; got ", Name(options.backward)));
  }
  if (!HasRing(strategy) && options.ranks_per_node != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("ranks_per_node: must be 0 with the strategy ", Name(strategy),
                     ", which does not use a ring; got ", options.ranks_per_node));
  }
  const bool beside =
      strategy == Strategy::kSingle || strategy == Strategy::kBurst || strategy == Strategy::kRing;
  if (tensor.size > 1 && !beside) {
    return absl::InvalidArgumentError(absl::StrCat(
        "strategy: must be single, burst or ring if ranks are groups of tensor parallelism; got ",
        Name(strategy)));
  }
  if (ranks->comm() == nullptr) strategy = Strategy::kSingle;
  if (strategy == Strategy::kSingle && ranks->size() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("strategy: must not be single with several ranks; got ", ranks->size()));
  }
  if (strategy == Strategy::kUlysses || strategy == Strategy::kBurstUlysses) {
    const int size = strategy == Strategy::kUlysses ? ranks->size() : group_size;
    BURST_ASSIGN_OR_RETURN(std::unique_ptr<SequenceParallelAttention> attention,
                           UlyssesAttention::CreateOver(options, size, std::move(ranks)));
    return attention;
  }
  BurstAttentionOptions ring = options;
  if (strategy == Strategy::kRing) ring.backward = BackwardDirection::kRing;
  BURST_ASSIGN_OR_RETURN(std::unique_ptr<SequenceParallelAttention> attention,
                         BurstAttention::CreateOver(ring, std::move(ranks), tensor));
  return attention;
}

}  // namespace burst
