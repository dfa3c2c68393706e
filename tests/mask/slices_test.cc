// Tests masks that are given as slices: the pairs that they show, and the number of calls of a
// kernel.

#include "burst/mask/slices.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "burst/mask/mask.h"
#include "burst/sequence/token_shard.h"
#include "tests/mask/mask_cases.h"

namespace burst {
namespace {

constexpr int64_t kBlock = 128;
constexpr Layout kLayouts[] = {Layout::kContiguous, Layout::kZigzag, Layout::kStriped};

// In these masks a query sees one or two intervals, and the masks take the same number of calls of
// a kernel.
TEST(SlicesTest, SlicesTakeFewParts) {
  const auto parts = [](const MaskSlices& slices, Layout layout, int world_size) {
    size_t most = 0;
    for (int rank = 0; rank < world_size; ++rank) {
      for (int source = 0; source < world_size; ++source) {
        const BlockMask mask =
            Mask::Slices(slices).Between(LocalPositions(layout, 33, rank, world_size),
                                         LocalPositions(layout, 33, source, world_size), kBlock);
        most = std::max(most, mask.parts.size());
      }
    }
    return most;
  };
  for (const Layout layout : kLayouts) {
    for (const int world_size : {1, 2, 4}) {
      SCOPED_TRACE(testing::Message() << Name(layout) << " " << world_size);
      EXPECT_EQ(parts({{{0, 33, 0, 33, SliceKind::kCausal}}}, layout, world_size), 1);
      EXPECT_LE(parts({TreeSlices(9, {6, 1, 17})}, layout, world_size), 2);
      EXPECT_LE(parts({WindowWithGlobalTokens(33, 6, {0, 1}, true)}, layout, world_size), 2);
      EXPECT_LE(parts({WindowWithGlobalTokens(33, 6, {0, 1, 17}, true)}, layout, world_size), 4);
    }
  }
}

// Returns the pairs that these slices show, [n, n].
std::vector<int> Shown(const std::vector<MaskSlice>& slices, int32_t n) {
  std::vector<int> shown(static_cast<size_t>(n) * n);
  for (const MaskSlice& slice : slices) {
    for (int32_t q = slice.q_begin; q < slice.q_end; ++q) {
      for (int32_t k = std::max(0, slice.k_begin); k < std::min(n, slice.k_end); ++k) {
        if (Visible(slice, q, k)) shown[q * n + k] = 1;
      }
    }
  }
  return shown;
}

// Checks that every visible pair is in one part, and no other pair. Returns the calls of a kernel.
size_t CheckDivided(const MaskSlices& slices, int32_t n, const std::vector<int32_t>& queries,
                    const std::vector<int32_t>& keys, const BlockMask& mask) {
  const auto rows = static_cast<int64_t>(slices.size());
  std::vector<int> seen(rows * queries.size() * keys.size()), expected;
  for (const std::vector<MaskSlice>& row : slices) {
    const std::vector<int> shown = Shown(row, n);
    for (const int32_t q : queries) {
      for (const int32_t k : keys) expected.push_back(shown[q * n + k]);
    }
  }
  for (const VisibleKeys& part : mask.parts) {
    for (size_t at = 0; at < rows * queries.size(); ++at) {
      EXPECT_TRUE(at % queries.size() == 0 ||
                  (part.begin[at - 1] <= part.begin[at] && part.end[at - 1] <= part.end[at]));
      for (int32_t k = part.begin[at]; k < part.end[at]; ++k) ++seen[at * keys.size() + k];
    }
  }
  AddBlocks(mask.blocks, rows, static_cast<int64_t>(queries.size()),
            static_cast<int64_t>(keys.size()), &seen);
  EXPECT_EQ(seen, expected);
  return mask.parts.size() + !mask.blocks.none();
}

// The blocks are small, so that slices of a few tokens have whole ones in every layout.
TEST(SlicesTest, WholeBlocksAreListed) {
  constexpr int32_t kSeqlen = 33;
  std::vector<MaskSlices> cases = {
      {BlockSlices(kSeqlen, 4, {{0, 2, 5, 7}, {1, 4}, {0, 3, 6}}, true)}};
  for (unsigned seed = 1; seed <= 40; ++seed) cases.push_back(RandomSlices(seed));
  int masks_with_lists = 0;
  for (const MaskSlices& slices : cases) {
    for (const Layout layout : kLayouts) {
      for (const int ranks : {1, 3}) {
        const TokenShard shard = *TokenShard::Create(0, ranks, layout, kSeqlen);
        for (int source = 0; source < ranks; ++source) {
          const auto &queries = shard.group_positions(0), &keys = shard.group_positions(source);
          size_t fewest = SIZE_MAX;
          for (const int64_t block : {1, 2, 3, 5, 64}) {
            SCOPED_TRACE(testing::Message() << "case " << &slices - cases.data() << " "
                                            << Name(layout) << " " << ranks << " " << block);
            const BlockMask mask = Mask::Slices(slices).Between(queries, keys, block);
            const size_t calls = CheckDivided(slices, kSeqlen, queries, keys, mask);
            masks_with_lists += !mask.blocks.none();
            if (block == 1) fewest = calls;  // then all blocks are whole, which takes one call
            EXPECT_EQ(fewest, 1u);
          }
        }
      }
    }
  }
  EXPECT_GT(masks_with_lists, 100);
}

// Sparse blocks have any size on the kernels' grid. The whole blocks are one call.
TEST(SlicesTest, SparseBlocksAreLists) {
  std::mt19937 random(5);
  const auto chosen = [&](int32_t count) {
    std::vector<std::vector<int32_t>> key_blocks(count);
    for (int32_t i = 0; i < count; ++i) {
      for (int32_t j = 0; j < count; ++j) {
        if (i == j || random() % 3 == 0) key_blocks[i].push_back(j);
      }
    }
    return key_blocks;
  };
  for (const int32_t seqlen : {1000, 1024}) {
    for (const int32_t size : {64, 96, 100, 128, 130, 256}) {
      for (const bool causal : {false, true}) {
        const MaskSlices slices = {
            BlockSlices(seqlen, size, chosen((seqlen + size - 1) / size), causal),
            BlockSlices(seqlen, size, chosen((seqlen + size - 1) / size), causal)};
        for (const Layout layout : kLayouts) {
          for (const int ranks : {1, 2}) {
            SCOPED_TRACE(testing::Message() << seqlen << " tokens, blocks of " << size << " "
                                            << causal << " " << Name(layout) << " " << ranks);
            const TokenShard shard = *TokenShard::Create(ranks - 1, ranks, layout, seqlen);
            const auto &queries = shard.group_positions(ranks - 1),
                       &keys = shard.group_positions(0);
            const BlockMask mask = Mask::Slices(slices).Between(queries, keys, kBlock);
            const size_t calls = CheckDivided(slices, seqlen, queries, keys, mask);
            const bool whole = size % 128 == 0 && layout != Layout::kStriped;
            if (whole && (ranks == 1 || seqlen == 1024)) {
              EXPECT_TRUE(!mask.blocks.none() || size > 128);
              EXPECT_LE(calls, causal ? 2u : 1u);
            }
          }
        }
      }
    }
  }
}

// Windows and trees take few parts of intervals, and lists would not make them fewer.
TEST(SlicesTest, FewPartsNeedNoLists) {
  const int32_t n = 2048;
  for (const std::vector<MaskSlice>& slices :
       {TreeSlices(512, {256, 300, 256, 724}), WindowWithGlobalTokens(n, 300, {0, 1, 2}, true),
        WindowWithGlobalTokens(n, 300, {0, 1, 2}, false)}) {
    const std::vector<int32_t> all = LocalPositions(Layout::kContiguous, n, 0, 1);
    const BlockMask mask = Mask::Slices({slices}).Between(all, all, kBlock);
    EXPECT_TRUE(mask.blocks.none());
    EXPECT_LE(mask.parts.size(), 3u);
  }
}

// The named slices equal their definitions, token by token.
TEST(SlicesTest, NamedSlices) {
  const int32_t n = 33;
  const auto expect = [&](const char* name, const std::vector<MaskSlice>& slices,
                          const std::function<bool(int32_t q, int32_t k)>& visible) {
    ASSERT_TRUE(CheckSlices(n, {slices}).ok()) << name;
    for (int32_t q = 0; q < n; ++q) {
      for (int32_t k = 0; k < n; ++k) {
        EXPECT_EQ(std::any_of(slices.begin(), slices.end(),
                              [&](const MaskSlice& slice) { return Visible(slice, q, k); }),
                  visible(q, k))
            << name << ", query " << q << ", key " << k;
      }
    }
  };
  const auto answer = [](int32_t at) { return at < 9 ? 0 : at < 15 ? 1 : at < 16 ? 2 : 3; };
  expect("tree", TreeSlices(9, {6, 0, 1, 17}), [&](int32_t q, int32_t k) {
    return k <= q && (answer(k) == 0 || answer(k) == answer(q));
  });
  expect("answers without a prompt", TreeSlices(0, {9, 6, 1, 17}),
         [&](int32_t q, int32_t k) { return k <= q && answer(k) == answer(q); });
  const std::set<int32_t> global = {2, 3, 17, 32};
  for (const bool causal : {false, true}) {
    for (const int32_t window : {1, 5, 33, 50, INT32_MAX}) {
      expect("window", WindowWithGlobalTokens(n, window, {2, 3, 17, 32}, causal),
             [&](int32_t q, int32_t k) {
               return (!causal || k <= q) &&
                      (std::abs(q - k) < window || global.count(q) > 0 || global.count(k) > 0);
             });
    }
    const std::vector<std::vector<int32_t>> blocks = {{0}, {0, 1}, {}, {2}, {4, 3, 0}};
    expect("blocks", BlockSlices(n, 7, blocks, causal), [&](int32_t q, int32_t k) {
      const auto& seen = blocks[q / 7];
      return std::count(seen.begin(), seen.end(), k / 7) > 0 &&
             (!causal || k / 7 != q / 7 || k <= q);
    });
  }
}

}  // namespace
}  // namespace burst
