// Tests how many thread blocks of the Hopper backward share a tile of keys. It follows from the
// shape alone.

#include "burst/kernels/gpu/sm90/head_splits.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>

namespace burst {
namespace sm90 {
namespace {

constexpr int32_t kSomeRanges[1] = {0};

FlashBackwardParams Params(int64_t batch, int64_t tokens, int64_t heads, int64_t kv_heads,
                           bool ranges, const HeadWidths& widths = 128) {
  FlashBackwardParams params;
  params.shape.batch = batch;
  params.shape.q_len = params.shape.k_len = tokens;
  params.shape.num_heads = heads;
  params.shape.num_kv_heads = kv_heads;
  params.shape.head_dim = widths.head_dim;
  params.shape.value_dim = widths.value_dim;
  params.shape.dtype = DType::kBFloat16;
  if (ranges) params.shape.visible.begin = params.shape.visible.end = kSomeRanges;
  params.deterministic = true;
  return params;
}

TEST(HeadSplitsTest, HeadsOfTheirOwnAreNotSplit) {
  for (const int64_t tokens : {1, 1000, 100000}) {
    const HeadSplits of = HeadSplitsOf(Params(1, tokens, 4, 4, true));
    EXPECT_EQ(of.splits, 1);
    EXPECT_EQ(of.sum_floats, 0);
    EXPECT_EQ(of.counters, 0);
  }
}

// Every split takes the same number of heads. Without a mask all blocks take the same time. So the
// choice is the fewest splits that keep nine tenths of the multiprocessors busy, or else the most
// splits. Under a mask, it is the fewest that give each multiprocessor two blocks of MostChannels
// at most, or else one block for each head.
TEST(HeadSplitsTest, SplitsUntilAllMultiprocessorsAreBusy) {
  for (const bool ranges : {false, true}) {
    for (const int64_t head_dim : {64, 128, 256}) {
      for (const int64_t tokens : {100, 1024, 5000, 8192, 40000}) {
        for (const int64_t kv_heads : {1, 2, 3, 8}) {
          for (const int64_t per_kv : {2, 3, 8, 12}) {
            const int64_t heads = kv_heads * per_kv;
            const FlashBackwardParams params = Params(2, tokens, heads, kv_heads, ranges, head_dim);
            const int64_t splits = HeadSplitsOf(params).splits;
            ASSERT_EQ(per_kv % splits, 0);
            const int64_t blocks = 2 * kv_heads * ((tokens + 127) / 128);
            const double busy = BusyPart(blocks * splits);
            for (int64_t other = 1; other <= per_kv && !ranges; ++other) {
              if (per_kv % other != 0) continue;
              EXPECT_GE(busy, std::min(0.9, BusyPart(blocks * other))) << tokens;
              if (other >= splits) continue;
              EXPECT_LT(BusyPart(blocks * other), busy) << tokens;
            }
            if (!ranges) continue;
            const auto enough = [&](int64_t n) {
              return blocks * n >= 256 && per_kv / n * head_dim <= MostChannels(params);
            };
            for (int64_t other = 1; other < splits; ++other) {
              if (per_kv % other != 0) continue;
              EXPECT_FALSE(enough(other)) << tokens;
            }
            if (splits == per_kv) continue;
            EXPECT_TRUE(enough(splits)) << tokens;
          }
        }
      }
    }
  }
  // The shapes are Llama 3.1 8B on one GPU of eight that share its heads, and 70B on one of two.
  EXPECT_EQ(HeadSplitsOf(Params(1, 8192, 4, 1, true)).splits, 4);
  EXPECT_EQ(HeadSplitsOf(Params(1, 8192, 32, 4, true)).splits, 8);
  EXPECT_EQ(HeadSplitsOf(Params(1, 16384, 64, 8, true)).splits, 8);
}

// In a fixed order a block takes one head of 128 channels, or two if it has few queries. It also
// takes two if it does not walk from the first queries, because the head's rows exceed the L2
// cache.
TEST(HeadSplitsTest, BlocksOfAFixedOrderTakeFewHeads) {
  const auto heads_per_block = [](const FlashBackwardParams& params) {
    return 8 / HeadSplitsOf(params).splits;
  };
  FlashBackwardParams params = Params(4, 16384, 64, 8, true);
  EXPECT_EQ(heads_per_block(params), 1);
  EXPECT_TRUE(WalksFromFirstQueries(params));
  params.deterministic = false;
  EXPECT_EQ(heads_per_block(params), 4);
  EXPECT_FALSE(WalksFromFirstQueries(params));
  EXPECT_EQ(heads_per_block(Params(4, 4096, 64, 8, true)), 1);
  EXPECT_EQ(heads_per_block(Params(4, 4095, 64, 8, true)), 2);
  EXPECT_EQ(heads_per_block(Params(4, 65536, 64, 8, true)), 2);
  EXPECT_FALSE(WalksFromFirstQueries(Params(4, 65536, 64, 8, true)));
  FlashBackwardParams documents = Params(4, 65536, 64, 8, true);
  documents.shape.visible.most_queries = 8000;
  EXPECT_EQ(heads_per_block(documents), 1);
  EXPECT_EQ(heads_per_block(Params(4, 16384, 64, 8, true, 64)), 2);
  EXPECT_EQ(heads_per_block(Params(4, 16384, 64, 8, true, 256)), 1);
  EXPECT_FALSE(WalksFromFirstQueries(Params(4, 16384, 64, 8, true, 256)));
  EXPECT_TRUE(WalksFromFirstQueries(Params(4, 4096, 64, 8, true, 96)));
  EXPECT_FALSE(WalksFromFirstQueries(Params(4, 4096, 64, 8, true, {96, 64})));
}

// Short rows under a mask are faster in a fixed order, so they have it even if it is not asked for.
TEST(HeadSplitsTest, ShortRowsHaveAFixedOrder) {
  for (const bool ranges : {false, true}) {
    for (const int64_t tokens : {1024, 4096}) {
      FlashBackwardParams params = Params(1, tokens, 64, 8, ranges);
      EXPECT_TRUE(HasFixedOrder(params));
      params.deterministic = false;
      EXPECT_EQ(HasFixedOrder(params), ranges && tokens == 1024);
      params.shape.visible.most_queries = 100;
      EXPECT_EQ(HasFixedOrder(params), ranges);
    }
  }
}

// The order of the additions depends on the splits, and must not depend on where the sums are.
TEST(HeadSplitsTest, SumsAreTheCallersOrItsOwn) {
  FlashBackwardParams params = Params(1, 16384, 64, 8, true);
  const HeadSplits own = HeadSplitsOf(params);
  EXPECT_EQ(own.sums, 2);  // for eight KV heads, which take turns
  EXPECT_EQ(own.sum_floats, 2 * 2 * 16384 * 128);
  EXPECT_EQ(own.counters, 2 * 2 * 128 * kBackwardWarps);
  // dK and dV have sums of their own widths.
  const HeadSplits of_two = HeadSplitsOf(Params(1, 16384, 64, 8, true, {192, 128}));
  EXPECT_EQ(of_two.sum_floats, of_two.sums * 16384 * (192 + 128));
  float sum = 0;
  params.dk = params.dv = AddsTo({&sum});
  const HeadSplits given = HeadSplitsOf(params);
  EXPECT_EQ(given.splits, own.splits);
  EXPECT_EQ(given.sums, 0);
  EXPECT_EQ(given.sum_floats, 0);
  EXPECT_EQ(given.counters, 2 * 8 * 128 * kBackwardWarps);
}

TEST(HeadSplitsTest, NothingToDo) {
  FlashBackwardParams params = Params(1, 16384, 64, 8, true);
  params.shape.q_len = 0;
  EXPECT_EQ(HeadSplitsOf(params).splits, 1);
  params = Params(1, 0, 64, 8, false);
  EXPECT_EQ(HeadSplitsOf(params).sum_floats, 0);
}

}  // namespace
}  // namespace sm90
}  // namespace burst
