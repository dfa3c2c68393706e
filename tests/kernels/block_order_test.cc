// The order in which thread blocks of the Hopper kernels take their tiles.

#include "burst/kernels/gpu/sm90/block_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace burst {
namespace sm90 {
namespace {

constexpr int64_t kMiB = 1 << 20;

// Blocks of smaller index start earlier. So a block that waits in a fixed order for an earlier tile
// of its head waits for a block that has started.
TEST(BlockOrderTest, EveryTileOnceAndInOrder) {
  for (const int tiles : {1, 2, 7, 64}) {
    for (const int heads : {1, 2, 5, 12}) {
      for (const int group : {1, 2, 3, 5, 12, 40}) {
        std::vector<int> taken(heads, 0);
        int last_group = 0;
        for (int block = 0; block < tiles * heads; ++block) {
          const BlockPlace place = PlaceOf(block, tiles, heads, group);
          ASSERT_EQ(place.group, place.head / group);
          ASSERT_GE(place.group, last_group);
          ASSERT_EQ(place.nth, taken.at(place.head)++) << "tiles of a head are not in order";
          last_group = place.group;
        }
        for (const int count : taken) EXPECT_EQ(count, tiles);
      }
    }
  }
}

// The heads of a group are at the same tile, or one apart.
TEST(BlockOrderTest, HeadsOfAGroupGoTogether) {
  std::vector<int> next(7, 0);
  for (int block = 0; block < 9 * 7; ++block) {
    const BlockPlace place = PlaceOf(block, 9, 7, 3);
    ++next[place.head];
    const int first = place.group * 3, last = std::min(first + 3, 7);
    const auto [low, high] = std::minmax_element(next.begin() + first, next.begin() + last);
    EXPECT_LE(*high - *low, 1);
  }
}

TEST(BlockOrderTest, GroupsAreEqualIfTheyCanBe) {
  EXPECT_EQ(HeadsPerGroup(/*heads=*/32, /*fit=*/6), 8);  // not 6: two heads would be left over
  EXPECT_EQ(HeadsPerGroup(32, 8), 8);
  EXPECT_EQ(HeadsPerGroup(7, 3), 3);     // no divisor near 3
  EXPECT_EQ(HeadsPerGroup(4, 1000), 4);  // never more than there are
  EXPECT_EQ(HeadsPerGroup(4, 0), 1);
  EXPECT_EQ(HeadsPerGroup(0, 5), 1);
}

TEST(BlockOrderTest, KeysOfAForwardFitHalfOfTheCache) {
  constexpr int64_t kRow = 512;  // bytes of a key and a value of 128 channels
  EXPECT_EQ(ForwardGroup(MaskForm::kFull, 8192, kRow, 32, 4), 1);
  for (const int64_t keys : {1, 1024, 8192, 65536, 1 << 20}) {
    const int group = ForwardGroup(MaskForm::kRanges, keys, kRow, 32, 4);
    ASSERT_EQ(group % 4, 0) << "query heads that share keys are apart";
    // A third more than fits may make the groups equal.
    EXPECT_TRUE(group == 4 || group / 4 * keys * kRow <= 32 * kMiB) << keys;
  }
  EXPECT_EQ(ForwardGroup(MaskForm::kRanges, 128, kRow, 1000, 1), 40);  // 32, or a divisor near it
}

BackwardWork Work(int64_t tokens, int64_t splits, int64_t heads_per_block, MaskForm mask) {
  BackwardWork work;
  work.mask = mask;
  work.q_len = tokens;
  work.row_bytes = 1024;  // 128 channels
  work.heads_per_block = heads_per_block;
  work.key_tiles = (tokens + 127) / 128;
  work.splits = splits;
  return work;
}

// Blocks that take the last keys first read different queries at the same time.
TEST(BlockOrderTest, ReversedOnlyWhileQueriesStayInTheCache) {
  bool some = false;
  for (const int64_t tokens : {512, 2048, 8192, 16384, 65536}) {
    for (const int64_t heads_per_block : {1, 4}) {
      for (const int64_t most_queries : {0, 700}) {
        BackwardWork work = Work(tokens, 32, heads_per_block, MaskForm::kRanges);
        work.most_queries = most_queries;
        const BackwardOrder order = BackwardOrderOf(work);
        EXPECT_EQ(order.heads_inside, heads_per_block > 1);
        if (order.reversed_groups == 0) continue;
        some = true;
        // All but the last group, which keeps the longest blocks first.
        EXPECT_EQ(order.reversed_groups, (32 + order.group - 1) / order.group - 1);
        const int64_t seen = most_queries > 0 ? most_queries : tokens;
        EXPECT_LE(seen * work.row_bytes * heads_per_block, 36 * kMiB);
      }
    }
  }
  EXPECT_TRUE(some);
}

TEST(BlockOrderTest, NothingIsReversedWithoutNeed) {
  BackwardWork free = Work(2048, 32, 1, MaskForm::kRanges);
  EXPECT_GT(BackwardOrderOf(free).reversed_groups, 0);
  free.deterministic = false;  // nobody waits
  EXPECT_EQ(BackwardOrderOf(free).reversed_groups, 0);
  EXPECT_FALSE(BackwardOrderOf(free).heads_inside);
  for (MaskForm mask : {MaskForm::kFull, MaskForm::kLists}) {
    EXPECT_EQ(BackwardOrderOf(Work(2048, 32, 1, mask)).reversed_groups, 0);
  }
}

// Short sequences have few blocks a head: enough heads are under way to fill the GPU.
TEST(BlockOrderTest, ShortSequencesFillTheGpu) {
  for (const bool deterministic : {false, true}) {
    BackwardWork work = Work(1024, 768, 1, MaskForm::kRanges);
    work.deterministic = deterministic;
    const BackwardOrder order = BackwardOrderOf(work);
    EXPECT_GE(order.group * work.key_tiles, kMultiprocessors * 3 / 4);
  }
}

}  // namespace
}  // namespace sm90
}  // namespace burst
