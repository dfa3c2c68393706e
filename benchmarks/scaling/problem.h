// A problem: one attention call over ranks, how a method computes it, and the bytes that it sends.
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
  int64_t seqlen = 0;  // the tokens of all ranks together
  int64_t heads = 1;
  int64_t kv_heads = 1;
  int64_t head_dim = 1;
  bool causal = false;
  // The layout of all strategies but tensor parallelism, which spreads tokens contiguously to spare
  // copies.
  Layout layout = Layout::kZigzag;
  // Kernels for study (benchmarks/study). The defaults take the device's kernels.
  bool tiles = true;      // false: naive attention, which holds its whole score matrix
  int64_t tile_keys = 0;  // keys of a tile; 0: the kernels' own
  DType dtype = DType::kFloat32;
  DeviceType device = DeviceType::kCpu;
  BackwardDirection backward = BackwardDirection::kAuto;  // for strategies that have a choice
  RingGradDType ring_grad_dtype = RingGradDType::kFp32;   // for strategies with a ring
  int ulysses = -1;  // ranks that share heads in burst+ulysses; -1: as many as divide the ranks and
                     // the KV heads
  int ranks_per_node = 0;  // makes the ring a double one; 0: a flat ring

  BurstAttentionOptions options(Method method) const;
  Mask mask() const { return causal ? Mask::Causal() : Mask::Full(); }
  // Returns 4 head_dim for each visible pair of query and key, in each head and batch row.
  double forward_flops() const;
  // The literature counts 2.5 times the forward's for the backward: five products instead of two.
  double forward_backward_flops() const { return 3.5 * forward_flops(); }
};

// Returns the numbers of ranks to measure the method on: `ranks`, or 1 for kSingle.
std::vector<int64_t> RanksFor(Method method, const std::vector<int64_t>& ranks);

// Returns InvalidArgument that names the option if the method cannot take the problem with `ranks`
// ranks.
absl::Status CheckProblem(Method method, const AttentionProblem& problem, int ranks);

// Makes this rank's attention. Collective.
absl::StatusOr<std::unique_ptr<SequenceParallelAttention>> MakeAttention(
    Method method, const AttentionProblem& problem, Communicator* comm);

// The bytes that all ranks together send without lse, by the schedule and the strategy's formula.
// The counters must find the same.
struct AttentionBytes {
  int64_t forward = 0;
  int64_t backward = 0;
  // The part of the forward's bytes that leaves a node.
  int64_t forward_between_nodes = 0;
  int64_t backward_between_nodes = 0;
};
absl::StatusOr<AttentionBytes> FormulaBytes(Method method, const AttentionProblem& problem,
                                            int ranks);

}  // namespace burst
