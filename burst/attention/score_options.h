// The options that change attention's scores and weights over ranks: softcap, ALiBi, dropout.
// burst/kernels/scores.h has the equations. Heads and positions are counted in the whole model and
// the whole sequence, so that the result does not depend on the ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "burst/comm/communicator.h"
#include "burst/kernels/flash_attention.h"
#include "burst/sequence/token_shard.h"
#include "burst/tensor/tensor.h"

namespace burst {

struct ScoreOptions {
  double softcap = 0;  // 0: none
  // The slopes of all query heads, on all ranks, float32; AlibiSlopes gives the paper's. Empty: no
  // ALiBi.
  std::vector<float> alibi_slopes = {};
  // The probability that a weight is dropped; which, follows from
  // SequenceParallelAttention::SetDropout. 0: none.
  double dropout = 0;
  // Whether Forward gives the largest score of each head (SequenceParallelAttention::max_logits).
  bool max_logits = false;

  bool any() const { return softcap != 0 || !alibi_slopes.empty() || dropout != 0 || max_logits; }
};

// The name of the first option that is on.
const char* NameOfFirst(const ScoreOptions& options);

// Which weights a call drops, if ScoreOptions says that it drops any: KeepsWeight
// (burst/kernels/scores.h) of this seed, and of rows and heads counted from these on.
struct WeightDropout {
  uint64_t seed = 0;
  int64_t first_row = 0;   // the number of the first batch row, over data-parallel ranks
  int64_t first_head = 0;  // the number of q's first head, where attention takes some of a layer's
  bool enabled = true;     // false: drops none, as in evaluation
};

// InvalidArgument, which names the option, for values out of range.
absl::Status CheckScoreOptions(const ScoreOptions& options);

// Checks options for an attention of `num_heads` query heads in all, to keys of another sequence or
// the same, by kernels that may not change scores.
absl::Status CheckScores(const ScoreOptions& options, bool is_cross, int64_t num_heads,
                         const AttentionKernels& kernels);

// own: [n] float32 of the host. Becomes the largest of all ranks' numbers, element by element; null
// comm: of one rank. Collective.
absl::Status MaxOverRanks(Communicator* comm, const Tensor& own);

// The changes for the calls of one Forward or Backward of a rank.
class RankScores {
 public:
  // The rank has `num_heads` heads; the others of its group have as many each.
  RankScores(const ScoreOptions& options, const WeightDropout& dropout, const RankGroup& group,
             int64_t num_heads, DeviceType device);

  // The changes for one call, whose part of the rank's heads begins at `first_head`. Valid until
  // the next call.
  ScoreChanges For(const std::vector<int32_t>& q_positions, const std::vector<int32_t>& k_positions,
                   int64_t first_head);

 private:
  const ScoreOptions& options_;
  const WeightDropout dropout_;
  const int64_t rank_head_;  // the number of the rank's first head
  const DeviceType device_;
  Tensor slopes_, q_positions_, k_positions_;
};

}  // namespace burst
