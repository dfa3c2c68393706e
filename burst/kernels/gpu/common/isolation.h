// Keeps NaN and infinity of a packed document away from the rows of other documents, in the kernels
// for tensor cores. These kernels multiply whole tiles, where the zero weight of a hidden key times
// NaN is NaN. So they leave out results that are not finite, and mark them. A repair then computes
// the marked results from the keys that each row sees. Without a mark it is an empty launch.
#pragma once

#include <cstdint>

#include "burst/kernels/flash_attention.h"

namespace burst {
namespace cuda {

// Rows that share a mark: the rows of a warp's accumulators.
constexpr int kMarkRows = 16;
constexpr int64_t MarkGroups(int64_t rows) { return (rows + kMarkRows - 1) / kMarkRows; }

// What a backward left out of the gradients, for all keys of a mark.
constexpr int kMissingDq = 1;  // what the keys add to dQ
constexpr int kMissingDk = 2;
constexpr int kMissingDv = 4;

// The number of int32 words of a call's marks, which are zeros before the call. 0: its mask has no
// documents. The first word is not zero if there is a mark. Behind it are, of a forward,
// [batch, num_heads, MarkGroups(q_len)] words, with a bit for each row, and of a backward
// [batch, num_kv_heads * splits, MarkGroups(k_len)] words of kMissing bits. `splits` are the parts
// of the query heads of a KV head (sm90/head_splits.h).
inline int64_t ForwardMarks(const FlashAttentionShape& shape) {
  if (!shape.visible.documents) return 0;
  return 1 + shape.batch * shape.num_heads * MarkGroups(shape.q_len);
}
inline int64_t BackwardMarks(const FlashAttentionShape& shape, int64_t splits) {
  if (!shape.visible.documents) return 0;
  return 1 + shape.batch * shape.num_kv_heads * splits * MarkGroups(shape.k_len);
}

// Compute what is marked, behind the call on the thread's stream, for inputs of 16 bits. A forward
// merges as the call does. A backward adds to the gradients that the call has stored; its dQ is
// float32. Null marks: nothing to do.
void RepairForward(const FlashForwardParams& params, const int32_t* marks);
void RepairBackward(const FlashBackwardParams& params, const int32_t* marks, int64_t splits);

}  // namespace cuda
}  // namespace burst
