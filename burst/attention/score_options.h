// The options that change attention's scores and weights over ranks: softcap, ALiBi, dropout.
// burst/kernels/scores.h has the equations. Heads and positions are counted in the whole model and
// the whole sequence, so that the result does not depend on the ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "burst/comm/communicator.h"
#include "burst/kernels/flash_attention.h"
#include "burst/tensor/tensor.h"

namespace burst {

struct ScoreOptions {
  double softcap = 0;  // from 1e-30 to 1e30; 0: none
  // The slopes of all query heads, on all ranks, float32; AlibiSlopes gives the paper's. Empty: no
  // ALiBi.
  std::vector<float> alibi_slopes = {};
  // The probability that a weight is dropped; which, follows from AttentionCall::dropout. 0: none.
  double dropout = 0;
};

// The name of the first option that is on, or "max_logits" for a call that wants them; null: none.
const char* NameOfFirst(const ScoreOptions& options, bool wants_max_logits);

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

// Checks options, or `wants_max_logits`, with kernels that may not change scores of such tensors.
absl::Status CheckScoreKernels(const ScoreOptions& options, bool wants_max_logits,
                               const AttentionKernels& kernels, DType dtype,
                               const HeadWidths& widths);

// Checks options for a call with `num_heads` query heads in all, to keys of another sequence or
// the same.
absl::Status CheckScores(const ScoreOptions& options, bool is_cross, int64_t num_heads);

// own: [n] float32 of the host. Becomes the largest of all ranks' numbers, element by element; null
// comm: of one rank. Collective.
absl::Status MaxOverRanks(Communicator* comm, const Tensor& own);

}  // namespace burst
