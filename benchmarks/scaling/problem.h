// One attention call over ranks, the attention that a method makes of it, and what that sends.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "benchmarks/scaling/method.h"
#include "burst/attention/burst_attention.h"
#include "burst/attention/sequence_parallel_attention.h"
#include "burst/comm/communicator.h"

namespace burst {

struct AttentionProblem {
  int64_t batch = 1;
  int64_t seqlen = 0;  // of all ranks together
  int64_t heads = 1;
  int64_t kv_heads = 1;
  int64_t head_dim = 1;
  bool causal = false;
  // For all strategies but tensor parallelism, which spreads tokens contiguously: that spares it
  // copies.
  Layout layout = Layout::kZigzag;
  // The kernels of local attention (burst/kernels/study); neither: those of the device.
  bool tiles = true;      // false: naive attention, which holds its whole score matrix
  int64_t tile_keys = 0;  // keys of a tile; 0: the kernels' own
  DType dtype = DType::kFloat32;
  DeviceType device = DeviceType::kCpu;
  BackwardDirection backward = BackwardDirection::kAuto;  // of strategies that have several
  RingGradDType ring_grad_dtype = RingGradDType::kFp32;   // where there is a ring
  int ulysses = -1;  // ranks that share heads in burst+ulysses; -1: as many as divide the ranks and
                     // the KV heads
  int ranks_per_node = 0;  // of strategies with a ring: a double one; 0: a flat one

  BurstAttentionOptions options(Method method) const;
  Mask mask() const { return causal ? Mask::Causal() : Mask::Full(); }
  // 4 head_dim for each visible pair of query and key, head and batch row.
  double forward_flops() const;
  // The literature counts 2.5 times the forward's for the backward: five products instead of two.
  double forward_backward_flops() const { return 3.5 * forward_flops(); }
};

// The numbers of ranks to measure the method on: `ranks`, or 1 for kSingle.
std::vector<int64_t> RanksFor(Method method, const std::vector<int64_t>& ranks);

// InvalidArgument, naming the option, for a problem that the method cannot take with `ranks`
// ranks.
absl::Status CheckProblem(Method method, const AttentionProblem& problem, int ranks);

// The attention of this rank. Collective.
absl::StatusOr<std::unique_ptr<SequenceParallelAttention>> MakeAttention(
    Method method, const AttentionProblem& problem, Communicator* comm);

// Bytes that all ranks together send, lse not asked for, by the schedule and the strategy's
// formula: what the counters must find.
struct AttentionBytes {
  int64_t forward = 0;
  int64_t backward = 0;
  // The part of it that leaves a node.
  int64_t forward_between_nodes = 0;
  int64_t backward_between_nodes = 0;
};
absl::StatusOr<AttentionBytes> FormulaBytes(Method method, const AttentionProblem& problem,
                                            int ranks);

}  // namespace burst
