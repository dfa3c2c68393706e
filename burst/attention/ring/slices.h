// Masks of any shape, given as slices: ranges of queries times ranges of keys. Trees of answers to
// one prompt, global tokens beside a window, sparse blocks.
//
// A query then sees several intervals of keys. The kernels take one interval a query, in
// non-decreasing order (KeyRanges), so the mask is divided into parts of which each has that form,
// and attention is one call for each part, merged as the blocks of a ring are. A tree or a window
// with global tokens takes two or three parts; blocks at random take many.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "burst/attention/ring/mask.h"

namespace burst {

// Which keys of its range a query of a slice sees. The diagonals are those of MagiAttention and of
// FlashAttention's causal mask with fewer queries than keys.
enum class SliceKind {
  kFull,
  kCausal,         // p - k_end <= q - q_end: the last query sees all keys, each before it one less
  kInverseCausal,  // p - k_begin >= q - q_begin: the first query sees all, each after it one less
  kBand,           // both of them: a window that moves with the query
};

// The queries at the positions [q_begin, q_end) see keys at [k_begin, k_end), positions in the
// whole sequence. Slices may overlap: a key that two of them show is seen once.
struct MaskSlice {
  int32_t q_begin = 0, q_end = 0, k_begin = 0, k_end = 0;
  SliceKind kind = SliceKind::kFull;
};

// The slices of each batch row; one row: for all. A query in no slice sees nothing.
using MaskSlices = std::vector<std::vector<MaskSlice>>;

// InvalidArgument for a slice that is empty or beyond the sequence, and for no rows.
absl::Status CheckSlices(int64_t seqlen, const MaskSlices& slices);

// The mask between the tokens of two ranks. Both lists of positions are increasing. O(intervals *
// (parts + log keys)).
BlockMask ComputeVisibleKeys(const MaskSlices& slices, const std::vector<int32_t>& q_positions,
                             const std::vector<int32_t>& k_positions);

// Whether some query sees some key: !ComputeVisibleKeys(...).none(), sooner.
bool SeesAny(const MaskSlices& slices, const std::vector<int32_t>& q_positions,
             const std::vector<int32_t>& k_positions);

}  // namespace burst
