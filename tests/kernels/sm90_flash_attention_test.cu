// Tests the Hopper attention kernels against double precision: masks, head grouping, lengths around
// the tiles' edges, the ring's merging and accumulation, determinism, four million tokens.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>
#include <utility>
#include <vector>

#include "burst/kernels/flash_attention.h"
#include "tests/kernels/sm90_attention_check.cuh"
#include "tests/kernels/sm90_attention_problem.cuh"
#include "tests/kernels/sm90_attention_reference.cuh"

namespace burst {
namespace sm90 {
namespace {

class FlashAttentionSm90Test : public testing::TestWithParam<int> {};  // the head dimension
INSTANTIATE_TEST_SUITE_P(HeadDim, FlashAttentionSm90Test, testing::Values(64, 96, 128, 192, 256));

TEST_P(FlashAttentionSm90Test, Lengths1To300) {
  // The references of wide heads take longer, so a third of the lengths is tested, with edges.
  for (int length = 1; length <= 300; length += GetParam() <= 128 ? 1 : 3) {
    Check(Problem(1, length, length, 1, 1, GetParam(), Causal(length, length)));
    Check(Problem(1, length, 301 - length, 1, 1, GetParam()));
    if (HasFailure()) break;
  }
}

TEST_P(FlashAttentionSm90Test, RandomLengths) {
  std::mt19937 random(7);
  for (int i = 0; i < 12; ++i) {
    const int q_len = 1 + static_cast<int>(random() % 1200);
    const int k_len = 1 + static_cast<int>(random() % 1200);
    Check(Problem(2, q_len, k_len, 2, 1, GetParam()));
    Check(Problem(1, q_len, k_len, 2, 2, GetParam(), Causal(q_len, k_len)));
  }
}

TEST_P(FlashAttentionSm90Test, Masks) {
  const int dim = GetParam();
  for (int window : {1, 37, 128, 300})
    Check(Problem(1, 700, 700, 2, 2, dim, Window(700, 700, window)));
  Check(Problem(2, 650, 650, 2, 1, dim, Documents({1, 100, 28, 300, 127, 94})));
  for (int offset : {-300, -128, 64, 200}) {
    Check(Problem(1, 500, 500 + offset, 2, 2, dim, Causal(500, 500 + offset)));
  }
  for (uint32_t seed = 0; seed < 6; ++seed) {
    const int64_t q_len = 150 + 97 * seed, k_len = 900 - 113 * seed;
    Check(Problem(3, q_len, k_len, 2, 1, dim, RandomRanges(3, q_len, k_len, seed)), seed % 2 == 1);
  }
  // These are more keys than the variants for few keys serve.
  Check(Problem(1, 1500, 1500, 2, 1, dim, Window(1500, 1500, 300)));
  Check(Problem(1, 1749, 1749, 2, 2, dim, Documents({1, 600, 28, 1000, 120})));
  Check(Problem(2, 700, 2100, 2, 1, dim, RandomRanges(2, 700, 2100, 9)), true);
  // Only some documents have keys here, and those begin and end within a tile of keys.
  Mask parts;
  for (const auto [queries, begin, end] : std::vector<std::array<int, 3>>{{90, 0, 0},
                                                                          {300, 0, 70},
                                                                          {500, 70, 70},
                                                                          {200, 70, 190},
                                                                          {610, 190, 190},
                                                                          {100, 190, 230},
                                                                          {40, 230, 230}}) {
    parts.begin.insert(parts.begin.end(), queries, begin);
    parts.end.insert(parts.end.end(), queries, end);
  }
  for (const bool deterministic : {false, true}) {
    Check(Problem(2, 1840, 230, 4, 4, dim, parts), deterministic);
    Check(Problem(1, 1840, 400, 4, 1, dim, parts), deterministic);
  }
  // No query sees any key.
  Check(Problem(1, 200, 300, 1, 1, dim,
                {std::vector<int32_t>(200, 150), std::vector<int32_t>(200, 150)}));
}

// Tests the variants for more keys, around the edges of their tiles. At a head_dim of 128 these
// have 128, 160 and 176 keys, which steps of 11 meet at every place. Problem leaves
// KeyRanges::most_queries unknown, so the number of keys alone chooses the variant.
TEST_P(FlashAttentionSm90Test, ManyKeys) {
  const int dim = GetParam();
  const int step = dim == 128 ? 11 : 110;
  for (int k_len = 1025; k_len < 1400; k_len += step) Check(Problem(1, 130, k_len, 1, 1, dim));
  for (int k_len : {1120, 1280, 4096, 4097, 5280}) Check(Problem(1, 130, k_len, 1, 1, dim));
  for (int k_len : {8192, 8203, 8320, 8321}) {
    Check(Problem(1, 130, k_len, 1, 1, dim, Causal(130, k_len)));
  }
  if (dim != 128) return;
  Mask last = Documents({8000, 1, 300, 159, 140});  // the queries see the last ones
  last.begin.erase(last.begin.begin(), last.begin.end() - 700);
  last.end.erase(last.end.begin(), last.end.end() - 700);
  Check(Problem(1, 700, 8600, 2, 1, dim, last));
  Check(Problem(1, 300, 8320, 2, 2, dim, Window(300, 8320, 500)));
  Check(Problem(2, 260, 8269, 2, 1, dim, RandomRanges(2, 260, 8269, 1)));
  Check(Problem(2, 260, 8346, 2, 1, dim, RandomRanges(2, 260, 8346, 2)), true);
}

// Tests more queries than the backward's variants for a fixed order and short sequences serve.
TEST_P(FlashAttentionSm90Test, ManyQueries) {
  const int dim = GetParam();
  for (int q_len : {2049, 8193}) {
    for (int kv_heads : {1, 2}) {
      Check(Problem(1, q_len, 300, 2, kv_heads, dim), true);
      Check(Problem(1, q_len, 300, 2, kv_heads, dim, Causal(q_len, 300)), true);
    }
  }
}

TEST_P(FlashAttentionSm90Test, GroupedHeads) {
  for (int kv_heads : {1, 2, 4, 8}) {
    Check(Problem(2, 333, 333, 8, kv_heads, GetParam()));
    Check(Problem(1, 400, 400, 8, kv_heads, GetParam(), Causal(400, 400)), kv_heads == 2);
    Check(Problem(1, 1400, 1400, 8, kv_heads, GetParam(), Causal(1400, 1400)), kv_heads > 2);
  }
}

// Tests heads split among blocks, and more KV heads than sums of dK and dV (head_splits.h).
TEST_P(FlashAttentionSm90Test, KvHeadsTakeTurnsAtSums) {
  for (const bool deterministic : {false, true}) {
    Check(Problem(1, 100, 9000, 64, 8, GetParam(), Causal(100, 9000)), deterministic);
  }
}

TEST_P(FlashAttentionSm90Test, StridesAndOtherHeadDims) {
  const int dim = GetParam();
  Check(Problem(2, 200, 300, 2, 2, dim, {}, 24));
  for (int smaller : {8, 24, 40, 56}) {
    Check(Problem(1, 257, 199, 3, 1, dim - 64 + smaller));
    Check(Problem(1, 257, 257, 2, 2, dim - 64 + smaller, Causal(257, 257)));
  }
}

// Tests more tiles than places in shared memory, so that a thread block uses every place again.
// This is for racecheck.
TEST_P(FlashAttentionSm90Test, ManyTilesABlock) {
  for (const bool deterministic : {false, true}) {
    for (const int kv_heads : {2, 40}) {  // 2 are split among blocks, 40 are not
      Check(Problem(8, 300, 300, 40, kv_heads, GetParam(), Causal(300, 300)), deterministic);
      Check(Problem(8, 300, 300, 40, kv_heads, GetParam()), deterministic);
    }
  }
}

TEST_P(FlashAttentionSm90Test, GradientThroughLse) {
  Problem p(2, 300, 300, 2, 1, GetParam(), Causal(300, 300));
  std::vector<float> dlse(p.lse.size());
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0, 3);
  for (float& x : dlse) x = normal(random);
  const Buffer<float> device(dlse);
  ExpectAllClose(GetParam(), RunBf16(p, device.data(), false), Reference<true>(p, device.data()),
                 Reference<false>(p, device.data()));
}

TEST_P(FlashAttentionSm90Test, NoKeysOrNoQueries) {
  Problem no_keys(1, 100, 0, 2, 2, GetParam());
  const Results a = RunBf16(no_keys, nullptr, false);
  for (double x : a.out) ASSERT_EQ(x, 0);
  for (double x : a.lse) ASSERT_EQ(x, -INFINITY);
  for (double x : a.dq) ASSERT_EQ(x, 0);
  Problem no_queries(1, 0, 100, 2, 2, GetParam());
  const Results b = RunBf16(no_queries, nullptr, true);
  for (double x : b.dk) ASSERT_EQ(x, 0);
  for (double x : b.dv) ASSERT_EQ(x, 0);
}

// Gives the keys in blocks, as in a ring. Outputs merge in the kernel, the last one in bfloat16,
// and gradients add up in float32.
void CheckBlocksOfKeys(int64_t q_len, int64_t k_len, int dim) {
  constexpr int64_t kBlocks = 3, kHeads = 4, kKvHeads = 2;
  const int64_t block_length = k_len / kBlocks;
  Problem p(2, q_len, k_len, kHeads, kKvHeads, dim, Causal(q_len, k_len));
  Buffer<float> sum(p.QSize()), dq(p.QSize()), dk(p.KSize()), dv(p.KSize());
  Buffer<bf16> out(p.QSize());
  dq.Fill(0);
  dk.Fill(0);
  dv.Fill(0);
  std::vector<Buffer<int32_t>> masks;
  std::vector<FlashAttentionShape> shapes;
  for (int64_t block = 0; block < kBlocks; ++block) {
    Mask mask = Causal(q_len, k_len);
    for (int32_t& x : mask.end) {
      x = static_cast<int32_t>(std::clamp<int64_t>(x - block * block_length, 0, block_length));
    }
    masks.emplace_back(mask.begin);
    masks.emplace_back(mask.end);
    FlashAttentionShape shape = p.shape;
    shape.k_len = block_length;
    shape.visible.begin = masks[2 * block].data();
    shape.visible.end = masks[2 * block + 1].data();
    shapes.push_back(shape);
  }
  const auto part = [&](const AttentionOperand& x, int64_t block, size_t element) {
    AttentionOperand result = x;
    result.data = static_cast<char*>(x.data) + block * block_length * x.seq_stride * element;
    return result;
  };
  const auto forward = [&](int64_t block, void* result, DType dtype, bool merge) {
    FlashForwardParams params = ForwardParams(p, result);
    params.shape = shapes[block];
    params.k = part(p.k, block, 2);
    params.v = part(p.v, block, 2);
    params.out_dtype = dtype;
    params.merge = merge;
    if (merge) params.sum = p.LikeQ(sum.data());
    params.non_persistent = block == 1;
    Kernels().Forward(params);
  };
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  // The last block comes first, so that the first call leaves rows that have seen nothing.
  forward(2, sum.data(), DType::kFloat32, false);
  forward(0, sum.data(), DType::kFloat32, true);
  forward(1, out.data(), DType::kBFloat16, true);
  Kernels().Delta({p.shape, p.LikeQ(out.data()), p.dout, nullptr, p.delta.data()});
  for (int64_t block = 0; block < kBlocks; ++block) {
    FlashBackwardParams params = BackwardParams(p, dq.data(), nullptr, nullptr);
    params.shape = shapes[block];
    params.k = part(p.k, block, 2);
    params.v = part(p.v, block, 2);
    params.dq = AddsTo(p.LikeQ(dq.data()));
    params.dk = AddsTo(part(p.LikeK(dk.data()), block, 4));
    params.dv = AddsTo(part(p.LikeK(dv.data()), block, 4));
    SetOrder(/*deterministic=*/block == 1, &params);
    Kernels().Backward(params);
  }
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const Results ours{HeadsFirst(ToDouble(out), p.shape, q_len, kHeads), ToDouble(p.lse),
                     HeadsFirst(ToDouble(dq), p.shape, q_len, kHeads),
                     HeadsFirst(ToDouble(dk), p.shape, k_len, kKvHeads),
                     HeadsFirst(ToDouble(dv), p.shape, k_len, kKvHeads)};
  ExpectAllClose(dim, ours, Reference<true>(p, nullptr), Reference<false>(p, nullptr));
}

TEST_P(FlashAttentionSm90Test, BlocksOfKeysMergeAndAccumulate) {
  CheckBlocksOfKeys(600, 600, GetParam());
  // These are more keys a block than the variants for few keys serve.
  CheckBlocksOfKeys(3600, 3600, GetParam());
  if (GetParam() == 128) CheckBlocksOfKeys(300, 25200, GetParam());
}

// Runs enough blocks to fill the chip several times, so that their order differs in each run.
TEST_P(FlashAttentionSm90Test, RepeatedRunsAreBitwiseEqual) {
  const Mask causal = Causal(3000, 3000), window = Window(3000, 3000, 700);
  const std::vector<std::pair<Mask, int>> cases = {// and the KV heads
                                                   {{}, 4},
                                                   {causal, 4},
                                                   {window, 4},
                                                   {{}, 8},
                                                   {causal, 8}};
  for (const auto& [mask, kv_heads] : cases) {
    Problem p(2, 3000, 3000, 8, kv_heads, GetParam(), mask);
    const Results first = RunBf16(p, nullptr, true);
    for (int run = 0; run < 3; ++run) {
      const Results again = RunBf16(p, nullptr, true);
      EXPECT_EQ(again.out, first.out);
      EXPECT_EQ(again.lse, first.lse);
      EXPECT_EQ(again.dq, first.dq);
      EXPECT_EQ(again.dk, first.dk);
      EXPECT_EQ(again.dv, first.dv);
    }
    // dK and dV of the same keys are always added in a fixed order. But with grouped heads, a fixed
    // order of dQ takes the query tiles in another order.
    const Results unordered = RunBf16(p, nullptr, false),
                  unordered_again = RunBf16(p, nullptr, false);
    EXPECT_EQ(unordered_again.dk, unordered.dk);
    EXPECT_EQ(unordered_again.dv, unordered.dv);
  }
}

TEST(FlashAttentionSm90DeathTest, RefusesWhatItDoesNotServe) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_TRUE(Kernels().Check(DeviceType::kCuda, DType::kBFloat16, 128).ok());
  EXPECT_FALSE(Kernels().Check(DeviceType::kCuda, DType::kBFloat16, 264).ok());
  EXPECT_FALSE(Kernels().Check(DeviceType::kCuda, DType::kBFloat16, 20).ok());
  EXPECT_FALSE(Kernels().Check(DeviceType::kCuda, DType::kFloat32, 128).ok());
  const Problem p(1, 64, 64, 2, 1, 64);
  const Buffer<bf16> out(p.QSize());
  FlashForwardParams params = ForwardParams(p, out.data());
  params.shape.head_dim = 264;
  EXPECT_DEATH(Kernels().Forward(params), "no attention kernel for bfloat16 with head_dim 264");
  params = ForwardParams(p, out.data());
  params.shape.num_kv_heads = 3;
  EXPECT_DEATH(Kernels().Forward(params), "3 KV heads do not divide 2 query heads");
  params = ForwardParams(p, out.data());
  params.q.data = static_cast<bf16*>(p.q.data) + 1;
  EXPECT_DEATH(Kernels().Forward(params),
               "q: the rows of bfloat16 tensors must begin at multiples");
  params = ForwardParams(p, out.data());
  params.shape.softmax_scale = 0;
  EXPECT_DEATH(Kernels().Forward(params), "needs a positive softmax_scale");
}

// Tests 4M tokens, more than 2^31 elements a tensor, on a few rows and keys of every part.
TEST(FlashAttentionSm90LongTest, FourMillionTokens) {
  constexpr int64_t kLength = 4 << 20, kWindow = 500, kHeads = 5, kDim = 128;
  Problem p(1, kLength, kLength, kHeads, kHeads, kDim, Window(kLength, kLength, kWindow));
  Buffer<bf16> out(p.QSize()), dq(p.QSize()), dk(p.KSize()), dv(p.KSize());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  Kernels().Forward(ForwardParams(p, out.data()));
  Kernels().Delta({p.shape, p.LikeQ(out.data()), p.dout, nullptr, p.delta.data()});
  Kernels().Backward(BackwardParams(p, dq.data(), dk.data(), dv.data()));
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const RowSet rows{5, (kLength - 1000) / 96, 97};
  const int64_t items = kHeads * rows.count;
  std::vector<Results> reference;
  for (bool rounding : {true, false}) {
    Buffer<double> o(items * kDim), l(items), d(items), g(items * kDim);
    (rounding ? ReferenceForward<true> : ReferenceForward<false>)<<<Grid(items), 64>>>(
        p.shape, p.q, p.k, p.v, rows, o.data(), l.data());
    ReferenceDelta<<<Grid(items), 64>>>(p.shape, p.dout, o.data(), nullptr, rows, d.data());
    (rounding ? ReferenceDq<true> : ReferenceDq<false>)<<<Grid(items), 64>>>(
        p.shape, p.q, p.k, p.v, p.dout, l.data(), d.data(), rows, g.data());
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    reference.push_back({o.ToHost(), l.ToHost(), g.ToHost(), {}, {}});
  }
  Results ours;
  for (int64_t h = 0; h < kHeads; ++h) {
    for (int64_t i = 0; i < rows.count; ++i) {
      const int64_t row = rows.first + i * rows.step;
      bf16 o[kDim], g[kDim];
      float l;
      cudaMemcpy(o, out.data() + (row * kHeads + h) * kDim, sizeof(o), cudaMemcpyDeviceToHost);
      cudaMemcpy(g, dq.data() + (row * kHeads + h) * kDim, sizeof(g), cudaMemcpyDeviceToHost);
      cudaMemcpy(&l, p.lse.data() + h * kLength + row, sizeof(l), cudaMemcpyDeviceToHost);
      for (bf16 x : o) ours.out.push_back(static_cast<double>(__bfloat162float(x)));
      for (bf16 x : g) ours.dq.push_back(static_cast<double>(__bfloat162float(x)));
      ours.lse.push_back(l);
    }
  }
  ExpectClose("out", kDim, ours.out, reference[0].out, reference[1].out);
  ExpectLseClose(ours.lse, reference[1].lse);
  ExpectClose("dq", kDim, ours.dq, reference[0].dq, reference[1].dq);

  // Checks the last keys, with the queries that see them.
  const RowSet keys{kLength - 40, 1, 40};
  const RowSet seeing{kLength - 40, 1, 40};
  std::vector<Results> key_reference;
  for (bool rounding : {true, false}) {
    const int64_t count = kHeads * 40;
    Buffer<double> o(count * kDim), l(count), d(count), gk(count * kDim), gv(count * kDim);
    (rounding ? ReferenceForward<true> : ReferenceForward<false>)<<<Grid(count), 64>>>(
        p.shape, p.q, p.k, p.v, seeing, o.data(), l.data());
    ReferenceDelta<<<Grid(count), 64>>>(p.shape, p.dout, o.data(), nullptr, seeing, d.data());
    (rounding ? ReferenceDkDv<true> : ReferenceDkDv<false>)<<<Grid(count), 64>>>(
        p.shape, p.q, p.k, p.v, p.dout, l.data(), d.data(), keys, kLength - 40, kLength, gk.data(),
        gv.data());
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    key_reference.push_back({{}, {}, {}, gk.ToHost(), gv.ToHost()});
  }
  Results last;
  for (int64_t h = 0; h < kHeads; ++h) {
    for (int64_t i = 0; i < keys.count; ++i) {
      bf16 row[kDim];
      const int64_t offset = ((keys.first + i) * kHeads + h) * kDim;
      cudaMemcpy(row, dk.data() + offset, sizeof(row), cudaMemcpyDeviceToHost);
      for (bf16 x : row) last.dk.push_back(static_cast<double>(__bfloat162float(x)));
      cudaMemcpy(row, dv.data() + offset, sizeof(row), cudaMemcpyDeviceToHost);
      for (bf16 x : row) last.dv.push_back(static_cast<double>(__bfloat162float(x)));
    }
  }
  ExpectClose("dk", kDim, last.dk, key_reference[0].dk, key_reference[1].dk);
  ExpectClose("dv", kDim, last.dv, key_reference[0].dv, key_reference[1].dv);
}

}  // namespace
}  // namespace sm90
}  // namespace burst
