// The order in which thread blocks of the Hopper kernels take tiles, and how many heads are in
// progress at the same time. It decides what stays in the L2 cache, and how long blocks wait for
// each other in a fixed order. It changes no result. A test needs no GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "burst/kernels/gpu/sm90/head_splits.h"
#include "burst/kernels/gpu/sm90/variants.h"

namespace burst {
namespace sm90 {

// The place of a block in the order: the nth tile of a head, which belongs to a group of heads.
struct BlockPlace {
  int group, head, nth;
};

// Blocks take one group of heads after the other. In a group they take the first tile of each head,
// then the second tile of each, and so on. The last group may be smaller.
constexpr BlockPlace PlaceOf(int block, int tiles, int heads, int group_heads) {
  const int group = block / (group_heads * tiles);
  const int in_group = block - group * group_heads * tiles;
  const int left = heads - group * group_heads;
  const int size = left < group_heads ? left : group_heads;
  return {group, group * group_heads + in_group % size, in_group / size};
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
  bool deterministic = true;
  int64_t q_len = 0;
  int64_t most_queries = 0;     // KeyRanges::most_queries; 0: not known
  int64_t row_bytes = 0;        // bytes of q, dout and float32 dq of a query and head
  int64_t heads_per_block = 1;  // query heads that a block takes
  int64_t key_tiles = 0;        // key tiles of one head
  int64_t splits = 0;           // blocks for each key tile, for all KV heads and their splits
};

struct BackwardOrder {
  bool heads_inside;    // a block takes all heads of a query tile before the next tile
  int group;            // splits in a group
  int reversed_groups;  // this many groups, from the first, take the last keys first
};

inline BackwardOrder BackwardOrderOf(const BackwardWork& work) {
  const auto within = [](int64_t mib, int64_t bytes) {
    return (mib << 20) / std::max<int64_t>(1, bytes);
  };
  BackwardOrder order = {};
  order.heads_inside = work.deterministic && work.heads_per_block > 1;
  const int64_t row_bytes = work.row_bytes * work.heads_per_block;
  const int64_t most_queries = work.most_queries == 0 ? work.q_len : work.most_queries;
  const int64_t split_bytes = work.q_len * row_bytes, seen_bytes = most_queries * row_bytes;
  // As many blocks as keep all multiprocessors busy.
  const int64_t wave =
      (kMultiprocessors + work.key_tiles / 2) / std::max<int64_t>(1, work.key_tiles);
  bool reversed = false;
  int64_t fit = 1;  // splits to work on at the same time
  if (!work.deterministic) {
    // One query head of every split is in progress, in half of the L2 cache. Without a mask the
    // blocks of a head stay at the same query tile.
    if (work.mask == MaskForm::kLists) fit = within(24, split_bytes);
    if (work.mask == MaskForm::kRanges) {
      fit = std::max(within(24, split_bytes / work.heads_per_block), wave);
    }
  } else if (work.mask == MaskForm::kLists) {
    fit = std::clamp<int64_t>(within(64, split_bytes), 2, 4);
  } else if (work.mask == MaskForm::kFull) {
    fit = std::clamp<int64_t>(within(order.heads_inside ? 256 : 32, split_bytes), 1, 8);
  } else {
    // If reversed, the blocks of a head read different query tiles at the same time. Measurements
    // show that this is faster while everything they read stays in the L2 cache. In short sequences
    // very many heads would fit, which would make the last group, not reversed, long.
    const int64_t limit = (work.heads_per_block == 1 ? 36 : 20) << 20;
    fit = std::max(std::clamp<int64_t>(within(24, split_bytes), 1, 8), wave);
    reversed = seen_bytes <= limit && fit * seen_bytes <= (36 << 20);
    if (!reversed && order.heads_inside) {
      // Takes more heads, so that fewer blocks meet at a query tile, although their reads then
      // exceed the L2 cache. Packed documents, or another rank's keys, have few blocks in progress
      // at a time. But if the blocks of a head alone fill the GPU twice, more heads only read more.
      const bool fills = work.key_tiles > 2 * kMultiprocessors;
      fit = std::clamp<int64_t>(within(256, fills ? split_bytes : seen_bytes), 1, 8);
      fit = std::max(fit, wave);
    }
  }
  order.group = HeadsPerGroup(work.splits, fit);
  const auto groups = static_cast<int>((work.splits + order.group - 1) / order.group);
  order.reversed_groups = reversed ? groups - 1 : 0;
  return order;
}

}  // namespace sm90
}  // namespace burst
