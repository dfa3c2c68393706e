// Finds which queries see a tile of keys, and the longest gap between them. All functions are for
// whole warps, whose lanes search together.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "burst/kernels/flash_attention.h"

namespace burst {
namespace cuda {

// The ranges of keys that the queries of a batch row see. Null arrays: every query sees every key.
struct RowRanges {
  __device__ __forceinline__ RowRanges(const KeyRanges& visible, int64_t b, int64_t q_len)
      : begin(visible.begin), end(visible.end), q_len(static_cast<int>(q_len)) {
    if (begin == nullptr) return;
    begin += b * visible.batch_stride;
    end += b * visible.batch_stride;
  }
  const int32_t *begin, *end;  // [q_len], never decreasing
  int q_len;
};

// The numbers begin, ..., end - 1 of queries or of their tiles.
struct Run {
  int begin, end;
};

// Finds, in each of the non-decreasing values[i][0, n), the first index whose value is at least
// bounds[i], or n. A whole warp does all searches at the same time.
template <int kCount>
__device__ __forceinline__ void LowerBounds(const int32_t* const (&values)[kCount],
                                            const int (&bounds)[kCount], int n,
                                            int (&first)[kCount]) {
  constexpr int kLanes = 32;
  const int lane = threadIdx.x % kLanes;
  int length[kCount];  // first + length bounds the answer
  bool open = n > 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) first[i] = 0, length[i] = n;
  while (open) {
    bool below[kCount];
    int stride[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      stride[i] = max(1, (length[i] + kLanes - 1) / kLanes);
      const int at = (lane + 1) * stride[i] - 1;  // last index of the lane's part
      below[i] = at < length[i] && values[i][first[i] + at] < bounds[i];
    }
    open = false;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int skip = __popc(__ballot_sync(~0u, below[i])) * stride[i];
      first[i] += skip;
      length[i] = min(stride[i] - 1, length[i] - skip);
      open = open || length[i] > 0;
    }
  }
}

// Returns the queries from the first to the last whose range meets the keys [key, key_end). Without
// such a query, begin >= end.
__device__ __forceinline__ Run QueriesNear(const RowRanges& ranges, int key, int key_end) {
  if (ranges.begin == nullptr) return {0, ranges.q_len};
  int found[2];
  LowerBounds<2>({ranges.end, ranges.begin}, {key + 1, key_end}, ranges.q_len, found);
  return {found[0], found[1]};
}

// Returns the longest run of tiles whose queries see no key. Tiles have kTile queries, from query
// `origin` on. `near` is the result of QueriesNear.
//
// Where one document's keys end inside a tile of keys, and another's begin, all queries in between
// meet that tile. Many may see none of these keys, but keys of another rank. Their rows have begin
// >= x >= end, where the first document ends at x, or the last one begins. The longer of the two
// gaps is found. No other tile of keys meets these queries.
template <int kTile>
__device__ __forceinline__ Run LongestGap(const RowRanges& ranges, const Run& near, int origin) {
  Run gap = {0, 0};
  if (ranges.begin == nullptr || near.begin >= near.end) return gap;
  const int after = ranges.end[near.begin], before = ranges.begin[near.end - 1];
  int found[4];
  LowerBounds<4>({ranges.begin, ranges.end, ranges.begin, ranges.end},
                 {after, after + 1, before, before + 1}, ranges.q_len, found);
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const int begin = max(found[i] - origin + kTile - 1, near.begin - origin) / kTile;
    const int end = min(found[i + 1] - origin, near.end - origin + kTile - 1) / kTile;
    if (end - begin > gap.end - gap.begin) gap = {begin, end};
  }
  return gap;
}

}  // namespace cuda
}  // namespace burst
