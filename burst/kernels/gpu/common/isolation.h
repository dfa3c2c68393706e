// Keeps NaN and infinity of a packed document away from rows of other documents. Kernels for tensor
// cores multiply whole tiles, where the zero weight of a hidden key times NaN is NaN. They leave
// out and mark results that are not finite. A repair computes these from the keys that each row
// sees. Without a mark it returns at once.
#pragma once

#include <cstdint>

#include "burst/kernels/flash_attention.h"

namespace burst {
namespace cuda {

// Rows that share a mark: 16, the rows of a warp's accumulators.
constexpr int kMarkRows = 16;
constexpr int64_t MarkGroups(int64_t rows) { return (rows + kMarkRows - 1) / kMarkRows; }

// Bits of a backward's mark: the gradients that miss the contributions of the mark's keys.
constexpr int kMissingDq = 1;  // what the keys add to dQ
constexpr int kMissingDk = 2;
constexpr int kMissingDv = 4;

// The number of int32 words of a call's marks, zeros before the call; 0 without documents. The
// first word is not zero if there is a mark. A forward then has [batch, num_heads,
// MarkGroups(q_len)] words, a bit a row. A backward has [batch, num_kv_heads * splits,
// MarkGroups(k_len)] words of kMissing bits; `splits` divides the query heads of a KV head
// (sm90/head_splits.h).
inline int64_t ForwardMarks(const FlashAttentionShape& shape) {
  if (!shape.visible.documents) return 0;
  return 1 + shape.batch * shape.num_heads * MarkGroups(shape.q_len);
}
inline int64_t BackwardMarks(const FlashAttentionShape& shape, int64_t splits) {
  if (!shape.visible.documents) return 0;
  return 1 + shape.batch * shape.num_kv_heads * splits * MarkGroups(shape.k_len);
}

// Computes the marked results, after the call on the thread's stream, for inputs of 16 bits. A
// forward merges as the call does. A backward adds to the stored gradients; its dQ is float32. Null
// marks: does nothing.
void RepairForward(const FlashForwardParams& params, const int32_t* marks);
void RepairBackward(const FlashBackwardParams& params, const int32_t* marks, int64_t splits);

}  // namespace cuda
}  // namespace burst
