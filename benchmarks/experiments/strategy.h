// The ways to spread attention over ranks that the benchmarks compare, and what each sends.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "burst/attention/burst_attention.h"
#include "burst/comm/communicator.h"

namespace burst {

enum class Strategy {
  kSingle,  // one rank has the whole sequence
  kBurst,   // BurstAttention: in the backward Q, dO, lse, delta and dQ travel
  kRing,    // RingAttention: in the backward K, V, dK and dV travel
  kAuto,    // of those two, whichever sends less
};

absl::StatusOr<Strategy> ParseStrategy(absl::string_view name);
const char* Name(Strategy strategy);

// One attention call over all ranks.
struct AttentionProblem {
  int64_t batch = 1;
  int64_t seqlen = 0;  // of all ranks together
  int64_t heads = 1;
  int64_t kv_heads = 1;
  int64_t head_dim = 1;
  bool causal = false;
  Layout layout = Layout::kZigzag;
  bool tiles = true;  // false: local attention holds its whole score matrix
  DType dtype = DType::kFloat32;
  DeviceType device = DeviceType::kCpu;

  // 4 head_dim for each visible pair of query and key, head and batch row.
  double forward_flops() const;
  // The literature counts 2.5 times the forward's for the backward: five products instead of two.
  double forward_backward_flops() const { return 3.5 * forward_flops(); }
};

// Those of `ranks` that the strategy runs on; single: one.
std::vector<int64_t> RanksFor(Strategy strategy, const std::vector<int64_t>& ranks);

// InvalidArgument, naming the option, for a problem that the strategy cannot take with so many
// ranks.
absl::Status CheckStrategy(Strategy strategy, const AttentionProblem& problem, int ranks);

// The place where a strategy becomes an attention. `comm` null: one rank.
absl::StatusOr<std::unique_ptr<BurstAttention>> MakeAttention(Strategy strategy,
                                                              const AttentionProblem& problem,
                                                              Communicator* comm);

// Bytes that all ranks together send, by the schedule: what the counters must find.
struct AttentionBytes {
  int64_t forward = 0;
  int64_t backward = 0;
};
absl::StatusOr<AttentionBytes> FormulaBytes(Strategy strategy, const AttentionProblem& problem,
                                            int ranks);

}  // namespace burst
