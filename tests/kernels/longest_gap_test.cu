// Tests common/query_gap.cuh: which queries a tile of keys meets, and the gap that a backward
// leaves out of them. The host looks at each query by itself.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "burst/device/cuda.h"
#include "burst/kernels/gpu/common/query_gap.cuh"
#include "burst/tensor/tensor.h"

namespace burst {
namespace cuda {
namespace {

constexpr int kTile = 64;  // queries

struct Mask {
  std::vector<int32_t> begin, end;  // [q_len]
  int q_len() const { return static_cast<int>(begin.size()); }
  void Add(int queries, int32_t first_key, int32_t last_key) {
    begin.insert(begin.end(), queries, first_key);
    end.insert(end.end(), queries, last_key);
  }
  bool sees_nothing(int i) const { return begin[i] >= end[i]; }
};

// What a tile of keys finds. Gaps are tiles, counted from query 0 and from the first near query.
struct Found {
  Run near, gap, gap_from_near;
};
constexpr int kWords = sizeof(Found) / sizeof(int32_t);

// A block is one warp, for one tile of keys.
__global__ void FindKernel(KeyRanges visible, int q_len, int k_len, int key_tile, Found* found) {
  const RowRanges ranges(visible, /*b=*/0, q_len);
  const int key = static_cast<int>(blockIdx.x) * key_tile;
  const Run near = QueriesNear(ranges, key, min(key + key_tile, k_len));
  const Run gap = LongestGap<kTile>(ranges, near, /*origin=*/0);
  const Run gap_from_near = LongestGap<kTile>(ranges, near, /*origin=*/near.begin);
  if (threadIdx.x == 0) found[blockIdx.x] = {near, gap, gap_from_near};
}

// Returns what each tile of keys finds.
std::vector<Found> Find(const KeyRanges& visible, int q_len, int k_len, int key_tile) {
  const int tiles = (k_len + key_tile - 1) / key_tile;
  const Tensor found = Tensor::Empty({tiles * kWords}, DType::kInt32, DeviceType::kCuda);
  FindKernel<<<tiles, 32, 0, CurrentStream()>>>(visible, q_len, k_len, key_tile,
                                                static_cast<Found*>(found.raw_data()));
  BURST_CUDA_CHECK_LAUNCH("FindKernel");
  const std::vector<int32_t> words = found.ToVector<int32_t>();
  std::vector<Found> results;
  for (size_t n = 0; n < words.size(); n += kWords) {
    results.push_back(
        {{words[n], words[n + 1]}, {words[n + 2], words[n + 3]}, {words[n + 4], words[n + 5]}});
  }
  return results;
}
std::vector<Found> Find(const Mask& mask, int k_len, int key_tile) {
  const Tensor begin = Tensor::FromVector(mask.begin, {mask.q_len()}, DeviceType::kCuda);
  const Tensor end = Tensor::FromVector(mask.end, {mask.q_len()}, DeviceType::kCuda);
  KeyRanges visible;
  visible.begin = static_cast<const int32_t*>(begin.raw_data());
  visible.end = static_cast<const int32_t*>(end.raw_data());
  return Find(visible, mask.q_len(), k_len, key_tile);
}

// Returns the most consecutive tiles, counted from `origin`, whose queries are all near and see
// nothing.
int LongestUnseen(const Mask& mask, const Run& near, int origin) {
  int longest = 0, length = 0;
  for (int first = origin; first + kTile <= mask.q_len(); first += kTile) {
    bool unseen = near.begin <= first && first + kTile <= near.end;
    for (int i = first; i < first + kTile; ++i) unseen = unseen && mask.sees_nothing(i);
    length = unseen ? length + 1 : 0;
    longest = std::max(longest, length);
  }
  return longest;
}

// Checks that no query of a gap sees a key, and that gaps are among the tiles of the near queries.
void ExpectUnseen(const Mask& mask, const Run& near, const Run& gap, int origin) {
  if (gap.begin == gap.end) return;
  const int first = origin + gap.begin * kTile, last = origin + gap.end * kTile;
  EXPECT_GE(first + kTile, near.begin);
  EXPECT_LE(last - kTile, near.end);
  ASSERT_LE(last, mask.q_len());
  for (int i = first; i < last; ++i) ASSERT_TRUE(mask.sees_nothing(i)) << i;
}

// Checks each tile of keys. `longest`: gaps are as long as the longest run of unseen tiles.
void Check(const Mask& mask, int k_len, int key_tile, bool longest) {
  const std::vector<Found> found = Find(mask, k_len, key_tile);
  for (size_t tile = 0; tile < found.size(); ++tile) {
    SCOPED_TRACE(testing::Message() << "tile of keys " << tile);
    const auto& [near, gap, gap_from_near] = found[tile];
    const int key = static_cast<int>(tile) * key_tile, key_end = std::min(key + key_tile, k_len);
    const auto before = [&](int32_t end) { return end <= key; };
    const auto not_after = [&](int32_t begin) { return begin < key_end; };
    ASSERT_EQ(near.begin, std::count_if(mask.end.begin(), mask.end.end(), before));
    ASSERT_EQ(near.end, std::count_if(mask.begin.begin(), mask.begin.end(), not_after));
    ExpectUnseen(mask, near, gap, 0);
    ExpectUnseen(mask, near, gap_from_near, near.begin);
    if (!longest) continue;
    EXPECT_EQ(gap.end - gap.begin, LongestUnseen(mask, near, 0));
    EXPECT_EQ(gap_from_near.end - gap_from_near.begin, LongestUnseen(mask, near, near.begin));
  }
}

// At most three documents share a tile of 128 keys, because each has 64 or more. Queries between
// them, before and after them see nothing.
TEST(LongestGapTest, IsTheLongestBetweenDocuments) {
  std::mt19937 random(1);
  const auto between = [&](int least, int most) {
    return std::uniform_int_distribution<int>(least, most)(random);
  };
  int gaps = 0;
  for (int problem = 0; problem < 200; ++problem) {
    SCOPED_TRACE(problem);
    Mask mask;
    int32_t key = between(0, 1) * between(0, 100);  // no query sees the keys before
    const int documents = between(1, 6);
    for (int n = 0; n < documents; ++n) {
      mask.Add(between(0, 2) * between(0, 300), key, key);
      const int32_t end = key + between(64, 200);
      mask.Add(between(1, 100), key, end);
      key = end;
    }
    mask.Add(between(0, 1) * between(0, 300), key, key);
    const int k_len = key + between(0, 1) * between(0, 100);  // nor these
    for (int key_tile : {32, 64, 128}) Check(mask, k_len, key_tile, /*longest=*/true);
    for (const Found& found : Find(mask, k_len, 128)) gaps += found.gap.end > found.gap.begin;
  }
  EXPECT_GT(gaps, 100);
}

// Any ranges, whose lengths are those around the lanes of a warp and their products.
TEST(LongestGapTest, HoldsNoQueryThatSeesAKey) {
  std::mt19937 random(2);
  for (int q_len : {1, 2, 31, 32, 33, 64, 500, 1023, 1024, 1025, 1056, 1057, 5000, 40000}) {
    for (int k_len : {1, 40, 200, 1000}) {
      SCOPED_TRACE(testing::Message() << q_len << "x" << k_len);
      Mask mask;
      // Bounds may lie outside of the keys.
      std::uniform_int_distribution<int32_t> bound(-20, k_len + 20);
      for (int i = 0; i < q_len; ++i) mask.Add(1, bound(random), bound(random));
      std::sort(mask.begin.begin(), mask.begin.end());
      std::sort(mask.end.begin(), mask.end.end());
      for (int key_tile : {16, 128}) Check(mask, k_len, key_tile, /*longest=*/false);
    }
  }
}

TEST(LongestGapTest, WithoutRangesAllQueriesAreNear) {
  for (const Found& found : Find(KeyRanges(), /*q_len=*/700, /*k_len=*/300, /*key_tile=*/128)) {
    EXPECT_EQ(found.near.begin, 0);
    EXPECT_EQ(found.near.end, 700);
    EXPECT_EQ(found.gap.begin, found.gap.end);
    EXPECT_EQ(found.gap_from_near.begin, found.gap_from_near.end);
  }
}

}  // namespace
}  // namespace cuda
}  // namespace burst
