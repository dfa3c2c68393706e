#include "burst/attention/strategy.h"

#include "absl/strings/str_cat.h"
#include "burst/attention/tensor_parallel_attention.h"
#include "burst/attention/ulysses_attention.h"
#include "burst/base/status.h"

namespace burst {

absl::StatusOr<Strategy> ParseStrategy(absl::string_view name) {
  for (Strategy strategy :
       {Strategy::kSingle, Strategy::kBurst, Strategy::kRing, Strategy::kUlysses,
        Strategy::kBurstUlysses, Strategy::kTp, Strategy::kTpSp}) {
    if (name == Name(strategy)) return strategy;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown strategy '", name,
                   "': use single, burst, ring, ulysses, burst+ulysses, tp or tp+sp"));
}

const char* Name(Strategy strategy) {
  switch (strategy) {
    case Strategy::kSingle:
      return "single";
    case Strategy::kBurst:
      return "burst";
    case Strategy::kRing:
      return "ring";
    case Strategy::kUlysses:
      return "ulysses";
    case Strategy::kBurstUlysses:
      return "burst+ulysses";
    case Strategy::kTp:
      return "tp";
    case Strategy::kTpSp:
      return "tp+sp";
  }
  return "?";
}

absl::StatusOr<std::unique_ptr<SequenceParallelAttention>> CreateAttention(
    Strategy strategy, const BurstAttentionOptions& options, int group_size, Communicator* comm) {
  const BackwardDirection own =
      strategy == Strategy::kRing ? BackwardDirection::kRing : BackwardDirection::kAuto;
  if (!HasDirections(strategy) && options.backward != BackwardDirection::kAuto &&
      options.backward != own) {
    return absl::InvalidArgumentError(absl::StrCat("the strategy ", Name(strategy), " has no ",
                                                   Name(options.backward), " backward"));
  }
  if (!HasRing(strategy) && options.ranks_per_node != 0) {
    return absl::InvalidArgumentError(absl::StrCat("the strategy ", Name(strategy),
                                                   " has no ring, and no use for ranks_per_node"));
  }
  if (comm == nullptr) strategy = Strategy::kSingle;
  if (strategy == Strategy::kSingle && comm != nullptr && comm->world_size() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("the strategy single is for one rank, not for ", comm->world_size()));
  }
  if (strategy == Strategy::kUlysses || strategy == Strategy::kBurstUlysses) {
    const int size = strategy == Strategy::kUlysses ? comm->world_size() : group_size;
    BURST_ASSIGN_OR_RETURN(std::unique_ptr<SequenceParallelAttention> attention,
                           UlyssesAttention::Create(options, size, comm));
    return attention;
  }
  if (IsTensorParallel(strategy)) {
    BURST_ASSIGN_OR_RETURN(std::unique_ptr<SequenceParallelAttention> attention,
                           TensorParallelAttention::Create(options, *comm));
    return attention;
  }
  BurstAttentionOptions ring = options;
  if (strategy == Strategy::kRing) ring.backward = BackwardDirection::kRing;
  BURST_ASSIGN_OR_RETURN(std::unique_ptr<SequenceParallelAttention> attention,
                         BurstAttention::Create(ring, comm));
  return attention;
}

}  // namespace burst
