// Masks of any shape, given as slices: ranges of queries times ranges of keys. Examples are trees
// of answers to one prompt, a window with global tokens, and sparse blocks.
//
// A query then sees several intervals of keys. The mask between two blocks of tokens is divided
// into parts of one interval a query (VisibleKeys) or of whole blocks (VisibleBlocks). Attention
// makes a call for each part. A tree or a window with global tokens takes two or three parts of
// intervals. Sparse blocks are lists, with a part or two for diagonals and edges.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "burst/mask/block_mask.h"

namespace burst {

// Which keys of its range a query of a slice sees. The diagonals are defined as in MagiAttention,
// and as in FlashAttention's causal mask with fewer queries than keys.
enum class SliceKind {
  kFull,
  kCausal,         // p - k_end <= q - q_end: the last query sees all keys, each before it one less
  kInverseCausal,  // p - k_begin >= q - q_begin: the first query sees all, each after it one less
  kBand,           // both of them: a window that moves with the query
};

// The queries at the positions [q_begin, q_end) see keys at [k_begin, k_end), positions in the
// whole sequence. The range of keys may reach beyond it, for a diagonal that begins or ends there.
// Slices may overlap: a key that two of them show is seen once.
struct MaskSlice {
  int32_t q_begin = 0, q_end = 0, k_begin = 0, k_end = 0;
  SliceKind kind = SliceKind::kFull;
};

// The slices of each batch row; one row: for all. A query in no slice sees nothing.
using MaskSlices = std::vector<std::vector<MaskSlice>>;

// Causal answers to one causal prompt, one after another: each sees the prompt and itself. In
// tokens.
std::vector<MaskSlice> TreeSlices(int32_t prompt, const std::vector<int32_t>& answers);

// A sliding window, |q - p| < window, with global tokens: all tokens see the `global` ones
// (positions, increasing), and these see all (Longformer, Beltagy et al., arXiv 2004.05150). With
// `causal`, no query sees a key after it.
std::vector<MaskSlice> WindowWithGlobalTokens(int32_t seqlen, int32_t window,
                                              const std::vector<int32_t>& global, bool causal);

// Returns the mask of sparse blocks of `size` x `size` tokens, like BigBird's (Zaheer et al., arXiv
// 2007.14062). The queries of block i see the blocks key_blocks[i], numbered from 0. With `causal`,
// a query sees only the keys up to itself in its own block.
std::vector<MaskSlice> BlockSlices(int32_t seqlen, int32_t size,
                                   const std::vector<std::vector<int32_t>>& key_blocks,
                                   bool causal);

// InvalidArgument for a slice that is empty or whose queries are beyond the `q_len` of the
// sequence, and for no rows.
absl::Status CheckSlices(int64_t q_len, const MaskSlices& slices);

// Computes Mask::Between in O(slices * log keys + intervals * parts). A slice without a diagonal
// counts once for a block of queries or a run that it begins or ends, others once a query.
BlockMask SlicesBetween(const MaskSlices& slices, const std::vector<int32_t>& q_positions,
                        const std::vector<int32_t>& k_positions, int64_t block);

// Mask::AnyVisible.
bool AnySliceVisible(const MaskSlices& slices, const std::vector<int32_t>& q_positions,
                     const std::vector<int32_t>& k_positions);

}  // namespace burst
