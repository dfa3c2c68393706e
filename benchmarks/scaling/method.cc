#include "benchmarks/scaling/method.h"

#include "absl/strings/str_cat.h"

namespace burst {

const char* Name(Method method) {
  if (!method.tensor_parallel()) return Name(method.strategy);
  return method.megatron == Megatron::kTp ? "tp" : "tp+sp";
}

absl::StatusOr<Method> ParseMethod(absl::string_view name) {
  for (const Method method : {Megatron::kTp, Megatron::kTpSp}) {
    if (name == Name(method)) return method;
  }
  const absl::StatusOr<Strategy> strategy = ParseStrategy(name);
  if (strategy.ok()) return *strategy;
  return absl::InvalidArgumentError(absl::StrCat(strategy.status().message(), ", tp or tp+sp"));
}

absl::StatusOr<std::unique_ptr<SequenceParallelAttention>> CreateAttentionOf(
    Method method, const BurstAttentionOptions& options, int group_size, Communicator* comm) {
  if (!method.tensor_parallel()) {
    return CreateAttention(method.strategy, options, group_size, comm);
  }
  return CreateAttention(Strategy::kSingle, options, /*group_size=*/1, /*comm=*/nullptr,
                         {comm->world_size(), comm->rank()});
}

}  // namespace burst
