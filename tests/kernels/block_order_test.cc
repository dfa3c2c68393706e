// The order in which thread blocks of the Hopper kernels take their tiles.

#include "burst/kernels/gpu/sm90/block_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <utility>
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
        for (const int groups : {0, 1, 2, heads / group, 100}) {
          std::vector<int> taken(heads, 0);
          int last_group = 0;
          for (int block = 0; block < tiles * heads; ++block) {
            const BlockPlace place = PlaceOf(block, tiles, heads, group, groups);
            ASSERT_EQ(place.group, std::min(place.head / group, groups));
            ASSERT_GE(place.group, last_group);
            ASSERT_EQ(place.nth, taken.at(place.head)++) << "tiles of a head are not in order";
            last_group = place.group;
          }
          for (const int count : taken) EXPECT_EQ(count, tiles);
        }
      }
    }
  }
}

// The heads of a group are at the same tile, or one apart: 3, 3 and 1 heads, or 3 and 4.
TEST(BlockOrderTest, HeadsOfAGroupGoTogether) {
  for (const int groups : {2, 1}) {
    std::vector<int> next(7, 0);
    for (int block = 0; block < 9 * 7; ++block) {
      const BlockPlace place = PlaceOf(block, 9, 7, 3, groups);
      ++next[place.head];
      const int first = place.group * 3, last = place.group == groups ? 7 : first + 3;
      const auto [low, high] = std::minmax_element(next.begin() + first, next.begin() + last);
      EXPECT_LE(*high - *low, 1);
    }
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
  work.q_len = work.most_queries = tokens;
  work.row_bytes = 1024;  // 128 channels
  work.heads_per_block = heads_per_block;
  work.key_tiles = (tokens + 127) / 128;
  work.splits = splits;
  return work;
}

// Returns the number of splits of the last group, which may be 0 if the groups are equal.
int64_t LastGroup(const BackwardWork& work, const BackwardOrder& order) {
  return work.splits - int64_t{order.group} * order.groups;
}

// Where blocks walk from the first queries, one or two heads are at work. All groups but the last,
// of about two waves, are reversed.
TEST(BlockOrderTest, ReversedGroupsAreSmallAndTheLastOneFillsTheGpu) {
  for (const int64_t tokens : {512, 1024, 2048, 8192, 16384, 32768}) {
    for (const int64_t heads_per_block : {1, 4}) {
      for (const int64_t splits : {1, 8, 32, 768}) {
        BackwardWork work = Work(tokens, splits, heads_per_block, MaskForm::kRanges);
        work.walks_from_first_queries = true;
        const BackwardOrder order = BackwardOrderOf(work);
        EXPECT_TRUE(order.reversed);
        EXPECT_EQ(order.heads_inside, heads_per_block > 1);
        EXPECT_EQ(order.group, heads_per_block == 4 || tokens > 8192 ? 1 : tokens == 8192 ? 2 : 4);
        work.splits_heads = true;
        EXPECT_EQ(BackwardOrderOf(work).group, 1);
        EXPECT_GE(LastGroup(work, order), 1);
        EXPECT_GE(LastGroup(work, order) * work.key_tiles,
                  std::min<int64_t>(splits * work.key_tiles, kMultiprocessors * 3 / 2));
      }
    }
  }
}

TEST(BlockOrderTest, NothingIsReversedWithoutNeed) {
  for (const bool fixed_order : {false, true}) {
    for (MaskForm mask : {MaskForm::kFull, MaskForm::kRanges, MaskForm::kLists}) {
      BackwardWork work = Work(2048, 32, 2, mask);
      work.fixed_order = fixed_order;
      const BackwardOrder order = BackwardOrderOf(work);
      EXPECT_FALSE(order.reversed);
      EXPECT_EQ(order.heads_inside, fixed_order);  // without an order nobody waits
      EXPECT_LT(LastGroup(work, order), order.group);
    }
  }
}

// Short sequences have few blocks a head: enough heads are under way to fill the GPU. A window of
// few queries needs no second head.
TEST(BlockOrderTest, ShortSequencesFillTheGpu) {
  for (const bool fixed_order : {false, true}) {
    BackwardWork work = Work(1024, 768, 1, MaskForm::kRanges);
    work.fixed_order = work.wide = fixed_order;
    const BackwardOrder order = BackwardOrderOf(work);
    EXPECT_GE(order.group * work.key_tiles, kMultiprocessors * 3 / 4);
  }
  BackwardWork wide = Work(32768, 16, 1, MaskForm::kRanges);
  wide.wide = true;
  wide.most_queries = 4096;
  EXPECT_EQ(BackwardOrderOf(wide).group, 1);
}

}  // namespace
}  // namespace sm90
}  // namespace burst
