// The Hopper attention kernels against double precision: every mask, head grouping, length around
// the tiles' edges, the ring's merging and accumulation, determinism, and four million tokens.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "burst/kernels/gpu/sm90/flash_attention_sm90.h"
#include "tests/kernels/sm90_attention_problem.cuh"
#include "tests/kernels/sm90_attention_reference.cuh"

namespace burst {
namespace sm90 {
namespace {

template <class T>
std::vector<double> ToDouble(const Buffer<T>& buffer) {
  std::vector<double> values;
  values.reserve(buffer.size());
  for (T x : buffer.ToHost()) values.push_back(static_cast<double>(static_cast<float>(x)));
  return values;
}

// [batch, length, heads, dim] -> [batch, heads, length, dim], as the reference's.
std::vector<double> HeadsFirst(const std::vector<double>& x, const Shape& shape, int64_t length,
                               int64_t heads) {
  std::vector<double> y(x.size());
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t i = 0; i < length; ++i) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t c = 0; c < shape.head_dim; ++c) {
          y[((b * heads + h) * length + i) * shape.head_dim + c] =
              x[((b * length + i) * heads + h) * shape.head_dim + c];
        }
      }
    }
  }
  return y;
}

double MaxAbs(const std::vector<double>& x) {
  double top = 0;
  for (double value : x) {
    if (std::isfinite(value)) top = std::max(top, std::abs(value));
  }
  return top;
}

double MaxError(const std::vector<double>& x, const std::vector<double>& truth) {
  double error = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    if (x[i] == truth[i]) continue;  // also both -inf
    const double e = std::abs(x[i] - truth[i]);
    if (!(e < std::numeric_limits<double>::infinity())) return e;  // inf or nan
    error = std::max(error, e);
  }
  return error;
}

// At most twice the error of the naive run with the same roundings, plus a rounding of the largest
// value: where the naive run happens to be exact ours may still round. With a single key, dS is the
// difference of two equal sums of head_dim products of about 9; what is left of them in fp32, times
// a key of at most 12 and the scale, is the last term.
void ExpectClose(const char* name, const std::vector<double>& ours,
                 const std::vector<double>& naive, const std::vector<double>& truth) {
  ASSERT_EQ(ours.size(), truth.size());
  const double bound =
      2 * MaxError(naive, truth) + MaxAbs(truth) * 0x1p-8 + kMaxHeadDim * 0x1p-24 * 9 * 12;
  EXPECT_LE(MaxError(ours, truth), bound) << name;
  EXPECT_TRUE(std::isfinite(MaxError(ours, truth))) << name;
}

// fp32 statistics of exact products of bf16: a few roundings of the largest exponent.
void ExpectLseClose(const std::vector<double>& ours, const std::vector<double>& truth) {
  EXPECT_LE(MaxError(ours, truth), 1e-6 * MaxAbs(truth) + 1e-5);
}

struct Results {
  std::vector<double> out, lse, dq, dk, dv;
};

template <bool kRounding>
Results Reference(const Problem& p, const float* dlse) {
  const Shape& shape = p.shape;
  const int64_t rows = shape.batch * shape.num_heads * shape.q_len;
  const int64_t keys = shape.batch * shape.num_kv_heads * shape.k_len;
  Buffer<double> out(p.QSize()), lse(rows), delta(rows), dq(p.QSize()), dk(p.KSize()),
      dv(p.KSize());
  const RowSet all_rows{0, 1, shape.q_len}, all_keys{0, 1, shape.k_len};
  ReferenceForward<kRounding>
      <<<Grid(rows), 64>>>(shape, p.q, p.k, p.v, all_rows, out.data(), lse.data());
  ReferenceDelta<<<Grid(rows), 64>>>(shape, p.dout, out.data(), dlse, all_rows, delta.data());
  ReferenceDq<kRounding><<<Grid(rows), 64>>>(shape, p.q, p.k, p.v, p.dout, lse.data(), delta.data(),
                                             all_rows, dq.data());
  ReferenceDkDv<kRounding><<<Grid(keys), 64>>>(shape, p.q, p.k, p.v, p.dout, lse.data(),
                                               delta.data(), all_keys, 0, shape.q_len, dk.data(),
                                               dv.data());
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  return {out.ToHost(), lse.ToHost(), dq.ToHost(), dk.ToHost(), dv.ToHost()};
}

// Forward, delta, backward, conversion; every output poisoned before.
Results RunBf16(Problem& p, const float* dlse, bool deterministic) {
  Buffer<bf16> out(p.QSize()), dq(p.QSize()), dk(p.KSize()), dv(p.KSize());
  Buffer<float> dq_sum(p.QSize());
  dq_sum.Fill(0);
  const Shape& shape = p.shape;
  ForwardParams forward{shape, p.q, p.k,          p.v,   p.LikeQ(out.data()),
                        false, {},  p.lse.data(), false, p.workspace.data()};
  EXPECT_EQ(LaunchForward(forward, nullptr), cudaSuccess);
  EXPECT_EQ(LaunchDelta({shape, forward.out, p.dout, false, dlse, p.delta.data()}, nullptr),
            cudaSuccess);
  BackwardParams backward{shape,
                          p.q,
                          p.k,
                          p.v,
                          p.dout,
                          p.lse.data(),
                          p.delta.data(),
                          p.LikeQ(dq_sum.data()),
                          p.LikeK(dk.data()),
                          p.LikeK(dv.data()),
                          /*add=*/false,
                          deterministic,
                          p.backward_workspace.data()};
  EXPECT_EQ(LaunchBackward(backward, nullptr), cudaSuccess);
  EXPECT_EQ(LaunchConvert({shape.batch, shape.q_len, shape.num_heads, shape.head_dim, backward.dq,
                           p.LikeQ(dq.data())},
                          nullptr),
            cudaSuccess);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  return {HeadsFirst(ToDouble(out), shape, shape.q_len, shape.num_heads), ToDouble(p.lse),
          HeadsFirst(ToDouble(dq), shape, shape.q_len, shape.num_heads),
          HeadsFirst(ToDouble(dk), shape, shape.k_len, shape.num_kv_heads),
          HeadsFirst(ToDouble(dv), shape, shape.k_len, shape.num_kv_heads)};
}

void ExpectAllClose(const Results& ours, const Results& naive, const Results& truth) {
  ExpectClose("out", ours.out, naive.out, truth.out);
  ExpectLseClose(ours.lse, truth.lse);
  ExpectClose("dq", ours.dq, naive.dq, truth.dq);
  ExpectClose("dk", ours.dk, naive.dk, truth.dk);
  ExpectClose("dv", ours.dv, naive.dv, truth.dv);
}

void Check(Problem p, bool deterministic = false) {
  const Shape& s = p.shape;
  SCOPED_TRACE("batch " + std::to_string(s.batch) + " q " + std::to_string(s.q_len) + " k " +
               std::to_string(s.k_len) + " heads " + std::to_string(s.num_heads) + "/" +
               std::to_string(s.num_kv_heads) + " dim " + std::to_string(s.head_dim));
  ExpectAllClose(RunBf16(p, nullptr, deterministic), Reference<true>(p, nullptr),
                 Reference<false>(p, nullptr));
}

class FlashAttentionSm90Test : public testing::TestWithParam<int> {};  // the head dimension
INSTANTIATE_TEST_SUITE_P(HeadDim, FlashAttentionSm90Test, testing::Values(64, 128));

TEST_P(FlashAttentionSm90Test, Lengths1To300) {
  for (int length = 1; length <= 300; ++length) {
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
  // Nobody sees anything.
  Check(Problem(1, 200, 300, 1, 1, dim,
                {std::vector<int32_t>(200, 150), std::vector<int32_t>(200, 150)}));
}

TEST_P(FlashAttentionSm90Test, GroupedHeads) {
  for (int kv_heads : {1, 2, 4, 8}) {
    Check(Problem(2, 333, 333, 8, kv_heads, GetParam()));
    Check(Problem(1, 400, 400, 8, kv_heads, GetParam(), Causal(400, 400)), kv_heads == 2);
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

TEST_P(FlashAttentionSm90Test, GradientThroughLse) {
  Problem p(2, 300, 300, 2, 1, GetParam(), Causal(300, 300));
  std::vector<float> dlse(p.lse.size());
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0, 3);
  for (float& x : dlse) x = normal(random);
  const Buffer<float> device(dlse);
  ExpectAllClose(RunBf16(p, device.data(), false), Reference<true>(p, device.data()),
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

// A ring's view: the keys come in hops; outputs merge in the kernel, gradients add up in fp32.
TEST_P(FlashAttentionSm90Test, HopsMergeAndAccumulate) {
  constexpr int64_t kLength = 600, kHops = 3, kHop = kLength / kHops, kHeads = 4, kKvHeads = 2;
  const int dim = GetParam();
  Problem p(2, kLength, kLength, kHeads, kKvHeads, dim, Causal(kLength, kLength));
  Buffer<float> out(p.QSize()), dq(p.QSize()), dk(p.KSize()), dv(p.KSize());
  dq.Fill(0);
  dk.Fill(0);
  dv.Fill(0);
  std::vector<Buffer<int32_t>> masks;
  std::vector<Shape> shapes;
  for (int64_t hop = 0; hop < kHops; ++hop) {
    Mask mask = Causal(kLength, kLength);
    for (int32_t& x : mask.end)
      x = static_cast<int32_t>(std::clamp<int64_t>(x - hop * kHop, 0, kHop));
    masks.emplace_back(mask.begin);
    masks.emplace_back(mask.end);
    Shape shape = p.shape;
    shape.k_len = kHop;
    shape.begin = masks[2 * hop].data();
    shape.end = masks[2 * hop + 1].data();
    shapes.push_back(shape);
  }
  const auto at_hop = [&](const Operand& x, int64_t hop, size_t element) {
    Operand part = x;
    part.data = static_cast<char*>(x.data) + hop * kHop * x.seq_stride * element;
    return part;
  };
  const auto forward = [&](int64_t hop, bool merge) {
    const Operand sum = p.LikeQ(out.data());
    return LaunchForward(
        {shapes[hop], p.q, at_hop(p.k, hop, 2), at_hop(p.v, hop, 2), sum, /*out_is_float=*/true,
         merge ? sum : Operand(), p.lse.data(), /*non_persistent=*/hop == 1, p.workspace.data()},
        nullptr);
  };
  // The last hop first, so that the first one assigned leaves rows that have seen nothing.
  ASSERT_EQ(forward(2, false), cudaSuccess);
  ASSERT_EQ(forward(0, true), cudaSuccess);
  ASSERT_EQ(forward(1, true), cudaSuccess);
  ASSERT_EQ(
      LaunchDelta({p.shape, p.LikeQ(out.data()), p.dout, true, nullptr, p.delta.data()}, nullptr),
      cudaSuccess);
  for (int64_t hop = 0; hop < kHops; ++hop) {
    ASSERT_EQ(
        LaunchBackward({shapes[hop], p.q, at_hop(p.k, hop, 2), at_hop(p.v, hop, 2), p.dout,
                        p.lse.data(), p.delta.data(), p.LikeQ(dq.data()),
                        at_hop(p.LikeK(dk.data()), hop, 4), at_hop(p.LikeK(dv.data()), hop, 4),
                        /*add=*/true, hop == 1, p.backward_workspace.data()},
                       nullptr),
        cudaSuccess);
  }
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const Results ours{HeadsFirst(ToDouble(out), p.shape, kLength, kHeads), ToDouble(p.lse),
                     HeadsFirst(ToDouble(dq), p.shape, kLength, kHeads),
                     HeadsFirst(ToDouble(dk), p.shape, kLength, kKvHeads),
                     HeadsFirst(ToDouble(dv), p.shape, kLength, kKvHeads)};
  ExpectAllClose(ours, Reference<true>(p, nullptr), Reference<false>(p, nullptr));
}

// Enough blocks to fill the chip several times, so that their order differs from run to run.
TEST_P(FlashAttentionSm90Test, RepeatedRunsAreBitwiseEqual) {
  for (const Mask& mask : {Mask(), Causal(3000, 3000), Window(3000, 3000, 700)}) {
    Problem p(2, 3000, 3000, 8, 4, GetParam(), mask);
    const Results first = RunBf16(p, nullptr, true);
    for (int run = 0; run < 3; ++run) {
      const Results again = RunBf16(p, nullptr, true);
      EXPECT_EQ(again.out, first.out);
      EXPECT_EQ(again.lse, first.lse);
      EXPECT_EQ(again.dq, first.dq);
      EXPECT_EQ(again.dk, first.dk);
      EXPECT_EQ(again.dv, first.dv);
    }
    const Results unordered = RunBf16(p, nullptr, false);
    EXPECT_EQ(unordered.dk, first.dk);  // never summed across blocks
    EXPECT_EQ(unordered.dv, first.dv);
  }
}

TEST(FlashAttentionSm90ArgumentsTest, RefusesWhatItDoesNotServe) {
  Problem p(1, 64, 64, 2, 1, 64);
  Buffer<bf16> out(p.QSize());
  const auto launch = [&](const Shape& shape, const Operand& q) {
    return LaunchForward({shape,
                          q,
                          p.k,
                          p.v,
                          p.LikeQ(out.data()),
                          false,
                          {},
                          p.lse.data(),
                          false,
                          p.workspace.data()},
                         nullptr);
  };
  EXPECT_EQ(launch(p.shape, p.q), cudaSuccess);
  Shape shape = p.shape;
  shape.head_dim = 136;
  EXPECT_EQ(launch(shape, p.q), cudaErrorInvalidValue);
  shape = p.shape;
  shape.num_kv_heads = 3;
  EXPECT_EQ(launch(shape, p.q), cudaErrorInvalidValue);
  Operand misaligned = p.q;
  misaligned.data = static_cast<bf16*>(p.q.data) + 1;
  EXPECT_EQ(launch(p.shape, misaligned), cudaErrorInvalidValue);
}

// 4M tokens, more than 2^31 elements a tensor: some rows and keys from all over.
TEST(FlashAttentionSm90LongTest, FourMillionTokens) {
  constexpr int64_t kLength = 4 << 20, kWindow = 500, kHeads = 5, kDim = 128;
  Problem p(1, kLength, kLength, kHeads, kHeads, kDim, Window(kLength, kLength, kWindow));
  Buffer<bf16> out(p.QSize()), dk(p.KSize()), dv(p.KSize());
  Buffer<float> dq(p.QSize());
  dq.Fill(0);
  ForwardParams forward{p.shape, p.q, p.k,          p.v,   p.LikeQ(out.data()),
                        false,   {},  p.lse.data(), false, p.workspace.data()};
  ASSERT_EQ(LaunchForward(forward, nullptr), cudaSuccess);
  ASSERT_EQ(LaunchDelta({p.shape, forward.out, p.dout, false, nullptr, p.delta.data()}, nullptr),
            cudaSuccess);
  ASSERT_EQ(LaunchBackward(
                {p.shape, p.q, p.k, p.v, p.dout, p.lse.data(), p.delta.data(), p.LikeQ(dq.data()),
                 p.LikeK(dk.data()), p.LikeK(dv.data()), /*add=*/false, false, nullptr},
                nullptr),
            cudaSuccess);
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
      bf16 o[kDim];
      float g[kDim], l;
      cudaMemcpy(o, out.data() + (row * kHeads + h) * kDim, sizeof(o), cudaMemcpyDeviceToHost);
      cudaMemcpy(g, dq.data() + (row * kHeads + h) * kDim, sizeof(g), cudaMemcpyDeviceToHost);
      cudaMemcpy(&l, p.lse.data() + h * kLength + row, sizeof(l), cudaMemcpyDeviceToHost);
      for (bf16 x : o) ours.out.push_back(static_cast<double>(__bfloat162float(x)));
      ours.dq.insert(ours.dq.end(), g, g + kDim);
      ours.lse.push_back(l);
    }
  }
  ExpectClose("out", ours.out, reference[0].out, reference[1].out);
  ExpectLseClose(ours.lse, reference[1].lse);
  ExpectClose("dq", ours.dq, reference[0].dq, reference[1].dq);

  // The last keys, from the queries that see them.
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
  ExpectClose("dk", last.dk, key_reference[0].dk, key_reference[1].dk);
  ExpectClose("dv", last.dv, key_reference[0].dv, key_reference[1].dv);
}

}  // namespace
}  // namespace sm90
}  // namespace burst
