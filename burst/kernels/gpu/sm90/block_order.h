// The order in which thread blocks of the Hopper kernels take tiles, and how many heads are in
// progress at the same time. It decides what stays in the L2 cache, and how long blocks wait for
// each other in a fixed order. It changes no result. A test needs no GPU.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "burst/kernels/gpu/sm90/head_splits.h"
#include "burst/kernels/gpu/sm90/variants.h"

namespace burst {
namespace sm90 {

// The place of a block in the order: the nth tile of a head, which belongs to a group of heads.
struct BlockPlace {
  int group, head, nth;
};

// Blocks take one group of heads after the other. In a group they take the first tile of each head,
// then the second tile of each, and so on. The last group takes the heads that are left after
// `groups` groups. It may be smaller than the others, or larger.
constexpr BlockPlace PlaceOf(int block, int tiles, int heads, int group_heads,
                             int groups = std::numeric_limits<int>::max()) {
  const int group = std::min(block / (group_heads * tiles), groups);
  const int first = group * group_heads, in_group = block - first * tiles;
  const int left = heads - first;
  const int size = group < groups && left > group_heads ? group_heads : left;
  return {group, first + in_group % size, in_group / size};
}

// Returns how many of `heads` to work on at the same time. `fit` of them have room in the L2 cache.
// The result is about `fit`, and a divisor of `heads` if possible. A small last group would leave
// most multiprocessors idle at the end (4 % of causal attention with 8K tokens and 32 heads).
inline int HeadsPerGroup(int64_t heads, int64_t fit) {
  fit = std::clamp<int64_t>(fit, 1, std::max<int64_t>(1, heads));
  for (int64_t group = std::min(heads, fit * 4 / 3); group > 0 && 2 * group >= fit; --group) {
    if (heads % group == 0) return static_cast<int>(group);
  }
  return static_cast<int>(fit);
}

// Returns the query heads of a forward's group. kv_row_bytes: bytes of a key and its value.
// kv_heads: KV heads of all batch rows.
inline int ForwardGroup(MaskForm mask, int64_t k_len, int64_t kv_row_bytes, int64_t kv_heads,
                        int heads_per_kv) {
  // Without a mask all tiles are equally long, and taking one head after the other is best.
  if (mask == MaskForm::kFull) return 1;
  // Half of the 50 to 60 MB of L2 is for the keys and values of the heads in progress.
  constexpr int64_t kGroupBytes = 24 << 20;
  constexpr int64_t kMaxGroup = 32;  // short sequences: measured faster than all that would fit
  const int64_t kv_bytes = std::max<int64_t>(1, k_len) * kv_row_bytes;
  return HeadsPerGroup(kv_heads, std::min(kGroupBytes / kv_bytes, kMaxGroup)) * heads_per_kv;
}

// What the order of a backward depends on.
struct BackwardWork {
  MaskForm mask = MaskForm::kFull;
  bool fixed_order = true;                // HasFixedOrder
  bool walks_from_first_queries = false;  // WalksFromFirstQueries
  bool wide = false;                      // a head_dim above kNarrowHeadDim
  int64_t q_len = 0;
  int64_t most_queries = 0;     // MostQueries
  int64_t row_bytes = 0;        // bytes of q, dout and float32 dq of a query and head
  int64_t heads_per_block = 1;  // query heads that a block takes
  int64_t key_tiles = 0;        // key tiles of one head
  int64_t splits = 0;           // blocks for each key tile, for all KV heads and their splits
  bool splits_heads = false;    // several blocks add to the same dK and dV
};

struct BackwardOrder {
  bool heads_inside;  // a block takes all heads of a query tile before the next tile
  bool reversed;      // all groups but the last take the last keys first (see KeyTile)
  int group;          // splits in a group
  int groups;         // groups of this size; the splits that are left form the last group
};

// Returns the number of splits whose blocks fill all multiprocessors `waves` times.
inline int64_t SplitsOfWaves(int waves, int64_t key_tiles) {
  const int64_t tiles = std::max<int64_t>(1, key_tiles);
  return std::max<int64_t>(1, (waves * kMultiprocessors + tiles / 2) / tiles);
}

// Returns how many splits are worked on at the same time if no block walks from the first queries.
inline int64_t SplitsAtATime(const BackwardWork& work) {
  const auto within = [](int64_t mib, int64_t bytes) {
    return (mib << 20) / std::max<int64_t>(1, bytes);
  };
  const int64_t row_bytes = work.row_bytes * work.heads_per_block;
  const int64_t split_bytes = work.q_len * row_bytes, seen_bytes = work.most_queries * row_bytes;
  const int64_t wave = SplitsOfWaves(1, work.key_tiles);
  if (!work.fixed_order) {
    // One query head of every split is in progress, in half of the L2 cache. Without a mask the
    // blocks of a head stay at the same query tile.
    if (work.mask == MaskForm::kFull) return 1;
    if (work.mask == MaskForm::kLists) return within(24, split_bytes);
    return std::max(within(24, split_bytes / work.heads_per_block), wave);
  }
  const bool heads_inside = work.heads_per_block > 1;
  if (work.mask == MaskForm::kLists) return std::clamp<int64_t>(within(64, split_bytes), 2, 4);
  if (work.mask == MaskForm::kFull) {
    return std::clamp<int64_t>(within(heads_inside ? 256 : 32, split_bytes), 1, 8);
  }
  // More splits at a time mean that fewer blocks meet at a query tile, although their reads then
  // exceed the L2 cache. Packed documents, or another rank's keys, have few blocks in progress at a
  // time. But if the blocks of a head alone fill the GPU twice, more heads only read more.
  if (work.wide) {
    const int64_t meet = work.most_queries / kBackwardKeys;  // blocks that add to a query tile
    const int64_t most = std::min<int64_t>({4, meet / 24, within(128, seen_bytes)});
    return std::max(most, SplitsOfWaves(2, work.key_tiles));
  }
  const bool fills = work.key_tiles > 2 * kMultiprocessors;
  const int64_t bytes = fills ? split_bytes : seen_bytes;
  return std::max(std::clamp<int64_t>(within(heads_inside ? 256 : 24, bytes), 1, 8), wave);
}

inline BackwardOrder BackwardOrderOf(const BackwardWork& work) {
  BackwardOrder order = {};
  order.heads_inside = work.fixed_order && work.heads_per_block > 1;
  order.reversed = work.walks_from_first_queries;
  if (!order.reversed) {
    order.group = HeadsPerGroup(work.splits, SplitsAtATime(work));
    order.groups = static_cast<int>(work.splits / order.group);
    return order;
  }
  // Few heads are worked on at a time, so that what they read stays in the L2 cache. Blocks that
  // add to the same dK and dV do not run at the same time, because the second one would wait for
  // the first. The last group is longer. It has the longest blocks first, and its short blocks keep
  // all multiprocessors busy to the end.
  const int64_t heads = std::min<int64_t>(4, SplitsOfWaves(1, work.key_tiles));
  order.group =
      static_cast<int>(work.splits_heads ? 1 : std::max<int64_t>(1, heads / work.heads_per_block));
  const int64_t last = std::min(work.splits, SplitsOfWaves(2, work.key_tiles));
  order.groups = static_cast<int>(work.splits - last) / order.group;
  return order;
}

}  // namespace sm90
}  // namespace burst
