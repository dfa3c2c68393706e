// The ways to divide the work of a sequence between ranks that the instrument compares: the
// strategies of burst/attention, and their rival, tensor parallelism of all ranks.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "burst/attention/strategy.h"

namespace burst {

// Megatron-LM's two versions (model/tensor_parallel.h). Attention takes a rank's heads of all
// tokens, and sends nothing.
enum class Megatron { kNone, kTp, kTpSp };

struct Method {
  Method(Strategy of_attention) : strategy(of_attention) {}  // NOLINT: every strategy is a method
  Method(Megatron of_layers) : megatron(of_layers) {}        // NOLINT

  bool single() const { return strategy == Strategy::kSingle && !tensor_parallel(); }
  bool tensor_parallel() const { return megatron != Megatron::kNone; }

  Strategy strategy = Strategy::kSingle;  // kSingle in tensor parallelism
  Megatron megatron = Megatron::kNone;
};
inline bool operator==(Method a, Method b) {
  return a.strategy == b.strategy && a.megatron == b.megatron;
}

const char* Name(Method method);
inline std::string PrintOption(Method method) { return Name(method); }
absl::StatusOr<Method> ParseMethod(absl::string_view name);

// The attention of this rank of `comm`, which must outlive it, by CreateAttention. Collective.
absl::StatusOr<std::unique_ptr<SequenceParallelAttention>> CreateAttentionOf(
    Method method, const BurstAttentionOptions& options, int group_size, Communicator* comm);

}  // namespace burst
