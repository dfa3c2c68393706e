// Methods: the ways to divide a sequence's work between ranks that this program compares. They are
// the strategies of burst/attention, and tensor parallelism of all ranks.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "burst/attention/strategy.h"

namespace burst {

// The two versions of Megatron-LM (model/tensor_parallel.h). Attention takes a rank's heads on all
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

// Creates this rank's attention by CreateAttention. `comm` must outlive it. Collective.
absl::StatusOr<std::unique_ptr<SequenceParallelAttention>> CreateAttentionOf(
    Method method, const BurstAttentionOptions& options, int group_size, Communicator* comm);

}  // namespace burst
