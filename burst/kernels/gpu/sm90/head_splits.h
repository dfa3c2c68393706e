// How the Hopper backward divides its work among thread blocks. It says whether additions to dQ
// have a fixed order, and how many blocks share the query heads of a KV head.
// docs/kernels-notebook.md has the measurements.
//
// A block computes dK and dV of a tile of keys. If it does so for all query heads of a KV head,
// nothing of dK and dV has to be added in memory. But with few KV heads there may be fewer blocks
// than multiprocessors. With grouped-query attention, tensor parallelism leaves a GPU one or two.
// Also, in a fixed order, blocks that walk many heads wait for each other and read more at a time
// than the L2 cache delivers.
//
// So several blocks may each take some of the heads. They add their parts to fp32 sums in the order
// of the heads, so the bits do not depend on timing. The last one rounds.
#pragma once

#include <algorithm>
#include <cstdint>

#include "burst/kernels/flash_attention.h"

namespace burst {
namespace sm90 {

inline constexpr int64_t kMultiprocessors = 132;  // of an H100 or H200
inline constexpr int64_t kBackwardKeys = 128;     // keys of a tile, in every variant
inline constexpr int64_t kNarrowHeadDim = 128;    // more is wide (backward_wide.cu)
inline constexpr int64_t kBackwardWarps = 8;      // warps of a tile, each with a part of its keys

struct HeadSplits {
  int64_t splits = 1;  // blocks for a tile of keys and a KV head
  // The kernel allocates sums where dK and dV are assigned, because its caller has none. They are
  // fp32 [sums, k_len, head_dim] for dK, then [sums, k_len, value_dim] for dV. KV heads reuse them
  // in turn.
  int64_t sums = 0;
  int64_t sum_floats = 0;
  int64_t counters = 0;  // int32 for the turns of every sum, tile and warp: dV's, then dK's
};

// Returns the most queries that see one key, as far as the caller knows.
inline int64_t MostQueries(const FlashAttentionShape& shape) {
  return shape.visible.most_queries == 0 ? shape.q_len : shape.visible.most_queries;
}

// Returns whether the key tiles add to dQ in a fixed order. A caller may ask for it. Short rows
// have it anyway, because it is faster: the first addition assigns dQ, which need not be cleared.
inline bool HasFixedOrder(const FlashBackwardParams& params) {
  constexpr int64_t kShort = 2048;
  const FlashAttentionShape& s = params.shape;
  return params.deterministic || (s.visible.begin != nullptr && MostQueries(s) <= kShort);
}

// Returns whether blocks of a fixed order walk from the first queries to the last (see KeyTile).
// They then read different query tiles at the same time. Measured: this is faster while the rows of
// one head stay in the L2 cache, but not for wide heads. Heads of two widths have a wide kernel.
inline bool WalksFromFirstQueries(const FlashBackwardParams& params) {
  const FlashAttentionShape& s = params.shape;
  const bool is_wide = s.head_dim > kNarrowHeadDim || !s.widths().equal();
  if (s.visible.begin == nullptr || !HasFixedOrder(params) || is_wide) return false;
  const int64_t row_bytes = 6 * s.head_dim + 2 * s.value_dim;  // q, dout, and dQ in float32
  return MostQueries(s) * row_bytes <= 36 << 20;
}

// Returns the most channels of query heads that a block takes if they are split under a mask.
inline int64_t MostChannels(const FlashBackwardParams& params) {
  if (!HasFixedOrder(params)) return 512;
  // Blocks of few queries take two heads of 128, because every split adds to dK and dV in memory.
  constexpr int64_t kManyQueries = 4096;
  const bool one = WalksFromFirstQueries(params) && MostQueries(params.shape) >= kManyQueries;
  return one ? 128 : 256;
}

// Returns the part of the multiprocessors that blocks of equal length keep busy.
inline double BusyPart(int64_t blocks) {
  const int64_t waves = (blocks + kMultiprocessors - 1) / kMultiprocessors;
  return blocks == 0 ? 1 : static_cast<double>(blocks) / (waves * kMultiprocessors);
}

// Returns the number of blocks for a tile of keys: a divisor of the heads that share a KV head.
inline int64_t CountHeadSplits(const FlashBackwardParams& params) {
  const FlashAttentionShape& s = params.shape;
  const int64_t heads_per_kv = s.num_heads / s.num_kv_heads;
  if (s.q_len == 0) return 1;
  const int64_t tiles = (s.k_len + kBackwardKeys - 1) / kBackwardKeys;
  const int64_t blocks = s.batch * s.num_kv_heads * tiles;
  const bool ranges = s.visible.begin != nullptr, lists = s.blocks.key_begin != nullptr;
  int64_t best = 1;
  for (int64_t splits = 1; splits <= heads_per_kv; ++splits) {
    if (heads_per_kv % splits != 0) continue;
    if (ranges || lists) {
      // If blocks have different lengths and the longest come first, two for each multiprocessor
      // keep all of them busy.
      constexpr int64_t kEnough = 256;
      best = splits;
      const bool few_heads = lists || heads_per_kv / splits * s.head_dim <= MostChannels(params);
      if (few_heads && blocks * splits >= kEnough) break;
    } else {
      constexpr double kGood = 0.9;
      if (BusyPart(blocks * splits) > BusyPart(blocks * best)) best = splits;
      if (BusyPart(blocks * best) >= kGood) break;
    }
  }
  return best;
}

inline HeadSplits HeadSplitsOf(const FlashBackwardParams& params) {
  const FlashAttentionShape& s = params.shape;
  HeadSplits result;
  result.splits = CountHeadSplits(params);
  if (result.splits == 1) return result;
  const int64_t tiles = (s.k_len + kBackwardKeys - 1) / kBackwardKeys;
  const int64_t kv_heads = s.batch * s.num_kv_heads;
  int64_t sums = kv_heads;
  if (params.dk.assigned()) {
    // There are sums for the KV heads of four waves of blocks, and for the next KV head. So a block
    // hardly ever waits.
    const int64_t blocks = std::max<int64_t>(1, result.splits * tiles);
    sums = (4 * kMultiprocessors + blocks - 1) / blocks;
    sums = result.sums = std::min(std::max<int64_t>(2, sums), kv_heads);
    result.sum_floats = sums * s.k_len * (s.head_dim + s.value_dim);
  }
  result.counters = 2 * sums * tiles * kBackwardWarps;
  return result;
}

// The memory that a backward needs, of any values. Null if it needs none.
struct BackwardScratch {
  int32_t* counters;     // BackwardCounters of flash_attention_sm90.h
  int32_t* query_tiles;  // BackwardQueryTiles: which query tiles see a tile of keys
  float* sums;           // HeadSplits::sum_floats
};

}  // namespace sm90
}  // namespace burst
