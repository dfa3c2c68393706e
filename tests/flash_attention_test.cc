// The attention kernels of one device against a naive double-precision attention.

#include "burst/kernels/flash_attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "burst/base/parallel.h"
#include "burst/base/philox.h"
#include "burst/kernels/merge.h"
#include "tests/attention_reference.h"

namespace burst {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr DeviceType kDevice = DeviceType::kCpu;

// Ranges owned by the test; empty: all keys.
struct Ranges {
  std::vector<int32_t> begin, end;  // [rows, q_len]
  int64_t rows = 1;

  KeyRanges View(int64_t q_len) const {
    if (begin.empty()) return {};
    return {begin.data(), end.data(), rows == 1 ? 0 : q_len};
  }
  bool Visible(int64_t b, int64_t i, int64_t j, int64_t q_len) const {
    if (begin.empty()) return true;
    const int64_t at = (rows == 1 ? 0 : b * q_len) + i;
    return j >= begin[at] && j < end[at];
  }
};

struct Problem {
  Problem(int64_t batch, int64_t q_len, int64_t k_len, int64_t heads, int64_t kv_heads,
          int64_t head_dim)
      : batch(batch),
        q_len(q_len),
        k_len(k_len),
        heads(heads),
        kv_heads(kv_heads),
        head_dim(head_dim) {}

  int64_t batch, q_len, k_len, heads, kv_heads, head_dim;
  DType dtype = DType::kFloat32;
  double scale = 0.3;
  Ranges ranges;
  double magnitude = 1;  // of q and k
  bool with_dlse = true;

  Tensor q, k, v, dout, dlse;

  void Draw(uint64_t seed) {
    q = RandomNormal({batch, q_len, heads, head_dim}, dtype, seed, 0, magnitude);
    k = RandomNormal({batch, k_len, kv_heads, head_dim}, dtype, seed, 1, magnitude);
    v = RandomNormal({batch, k_len, kv_heads, head_dim}, dtype, seed, 2);
    dout = RandomNormal({batch, q_len, heads, head_dim}, dtype, seed, 3);
    dlse = with_dlse ? RandomNormal({batch, heads, q_len}, dtype, seed, 4)
                     : Tensor::Zeros({batch, heads, q_len}, dtype);
  }

  FlashAttentionShape KernelShape() const {
    FlashAttentionShape shape;
    shape.batch = batch;
    shape.q_len = q_len;
    shape.k_len = k_len;
    shape.num_heads = heads;
    shape.num_kv_heads = kv_heads;
    shape.head_dim = head_dim;
    shape.softmax_scale = scale;
    shape.dtype = dtype;
    shape.visible = ranges.View(q_len);
    return shape;
  }

  AttentionReference Reference() const {
    return NaiveAttention(q, k, v, dout, dlse, scale, [&](int64_t b, int64_t i, int64_t j) {
      return ranges.Visible(b, i, j, q_len);
    });
  }
};

void Forward(const Problem& p, const Tensor& out, const Tensor& lse, bool merge = false) {
  FlashForwardParams params;
  params.shape = p.KernelShape();
  params.q = Operand(p.q);
  params.k = Operand(p.k);
  params.v = Operand(p.v);
  params.out = Operand(out);
  params.lse = lse.raw_data();
  params.merge = merge;
  FlashForward(kDevice, params);
}

Tensor Delta(const Problem& p, const Tensor& out) {
  const Tensor delta = Tensor::Empty(p.dlse.shape(), p.dtype);
  FlashDeltaParams params;
  params.shape = p.KernelShape();
  params.out = Operand(out);
  params.dout = Operand(p.dout);
  params.dlse = p.with_dlse ? p.dlse.raw_data() : nullptr;
  params.delta = delta.raw_data();
  FlashDelta(kDevice, params);
  return delta;
}

// Adds to dq, dk, dv.
void Backward(const Problem& p, const Tensor& lse, const Tensor& delta, const Tensor& dq,
              const Tensor& dk, const Tensor& dv) {
  FlashBackwardParams params;
  params.shape = p.KernelShape();
  params.q = Operand(p.q);
  params.k = Operand(p.k);
  params.v = Operand(p.v);
  params.dout = Operand(p.dout);
  params.lse = lse.raw_data();
  params.delta = delta.raw_data();
  params.dq = Operand(dq);
  params.dk = Operand(dk);
  params.dv = Operand(dv);
  FlashBackward(kDevice, params);
}

AttentionReference RunKernels(const Problem& p) {
  AttentionReference result;
  result.out = Tensor::EmptyLike(p.q);
  result.lse = Tensor::EmptyLike(p.dlse);
  result.out.Fill(std::nan(""));  // what the kernel does not write shows
  result.lse.Fill(std::nan(""));
  Forward(p, result.out, result.lse);
  result.dq = Tensor::ZerosLike(p.q);
  result.dk = Tensor::ZerosLike(p.k);
  result.dv = Tensor::ZerosLike(p.v);
  Backward(p, result.lse, Delta(p, result.out), result.dq, result.dk, result.dv);
  return result;
}

void ExpectClose(const AttentionReference& actual, const AttentionReference& expected,
                 double tolerance) {
  EXPECT_LE(RelativeError(actual.out, expected.out), tolerance) << "out";
  EXPECT_LE(RelativeError(actual.lse, expected.lse), tolerance) << "lse";
  EXPECT_LE(RelativeError(actual.dq, expected.dq), tolerance) << "dq";
  EXPECT_LE(RelativeError(actual.dk, expected.dk), tolerance) << "dk";
  EXPECT_LE(RelativeError(actual.dv, expected.dv), tolerance) << "dv";
}

// Masks by name, for any lengths. Queries are aligned with the last keys.
Ranges MakeRanges(const std::string& name, int64_t batch, int64_t q_len, int64_t k_len) {
  Ranges ranges;
  if (name == "full") return ranges;
  ranges.rows = name == "random" ? batch : 1;
  for (int64_t row = 0; row < ranges.rows; ++row) {
    int64_t begin = 0, end = 0;
    for (int64_t i = 0; i < q_len; ++i) {
      const int64_t position = i + k_len - q_len;
      if (name == "causal") {
        end = std::clamp<int64_t>(position + 1, 0, k_len);
      } else if (name == "window") {
        begin = std::clamp<int64_t>(position - 36, 0, k_len);
        end = std::clamp<int64_t>(position + 1, 0, k_len);
      } else if (name == "documents") {
        begin = std::clamp<int64_t>(position / 50 * 50, 0, k_len);
        end = std::clamp<int64_t>(position + 1, 0, k_len);
      } else {  // any monotone ends, some rows empty, some with begin > end
        const PhiloxCounter bits = Philox(17, row, i);
        begin = std::min<int64_t>(k_len, begin + bits[0] % 5);
        end = std::min<int64_t>(k_len, end + bits[1] % 5);
      }
      ranges.begin.push_back(static_cast<int32_t>(begin));
      ranges.end.push_back(static_cast<int32_t>(end));
    }
  }
  return ranges;
}

// (heads, kv_heads), head_dim, mask
class FlashAttentionSweep
    : public testing::TestWithParam<std::tuple<std::pair<int, int>, int, const char*>> {};

// float32: scores of a few units, sums of up to 300 terms; 1e-5 of the largest element. float64: the
// same in units of its epsilon.
TEST_P(FlashAttentionSweep, MatchesTheReference) {
  const auto [head_counts, head_dim, mask] = GetParam();
  const std::pair<int64_t, int64_t> lengths[] = {{1, 1},    {7, 7},     {129, 129}, {300, 300},
                                                 {5, 0},    {0, 9},     {1, 200},   {64, 257},
                                                 {257, 64}, {128, 128}, {127, 255}};
  for (const auto& [q_len, k_len] : lengths) {
    for (DType dtype : {DType::kFloat32, DType::kFloat64}) {
      SCOPED_TRACE(testing::Message() << q_len << " x " << k_len << " " << Name(dtype));
      Problem p{2, q_len, k_len, head_counts.first, head_counts.second, head_dim};
      p.dtype = dtype;
      p.scale = 1 / std::sqrt(static_cast<double>(head_dim));
      p.ranges = MakeRanges(mask, p.batch, q_len, k_len);
      p.Draw(q_len * 1000 + k_len);
      ExpectClose(RunKernels(p), p.Reference(), dtype == DType::kFloat32 ? 1e-5 : 1e-13);
    }
  }
}

std::string SweepName(const testing::TestParamInfo<FlashAttentionSweep::ParamType>& info) {
  const auto [head_counts, head_dim, mask] = info.param;
  return std::to_string(head_counts.first) + "heads" + std::to_string(head_counts.second) + "kv" +
         std::to_string(head_dim) + "d_" + mask;
}

INSTANTIATE_TEST_SUITE_P(All, FlashAttentionSweep,
                         testing::Combine(testing::Values(std::make_pair(2, 2),
                                                          std::make_pair(4, 2),
                                                          std::make_pair(3, 1)),
                                          testing::Values(7, 16, 64, 80, 128),
                                          testing::Values("full", "causal", "window", "documents",
                                                          "random")),
                         SweepName);

// Every length around the edges of tiles and of vectors.
TEST(FlashAttentionTest, EveryLength) {
  for (int64_t length = 1; length <= 290; ++length) {
    SCOPED_TRACE(length);
    Problem p{1, length, length, 1, 1, 8};
    p.ranges = MakeRanges("causal", 1, length, length);
    p.Draw(length);
    ExpectClose(RunKernels(p), p.Reference(), 1e-5);
  }
}

// Scores of several hundreds: the softmax is one-hot, differences exceed float's exponent range.
// Rounding of a score s is s * eps, and exp turns it into a relative error.
TEST(FlashAttentionTest, LargeScores) {
  Problem p{1, 150, 150, 2, 2, 64};
  p.magnitude = 9;
  p.scale = 1;
  p.Draw(3);
  ExpectClose(RunKernels(p), p.Reference(), 4 * 9 * 9 * 64 * 6e-8);
  p.dtype = DType::kFloat64;
  p.Draw(3);
  ExpectClose(RunKernels(p), p.Reference(), 4 * 9 * 9 * 64 * 1.2e-16);
}

TEST(FlashAttentionTest, RowsThatSeeNothing) {
  Problem p{1, 40, 30, 2, 1, 16};
  p.ranges.begin.assign(40, 0);
  p.ranges.end.assign(40, 0);
  std::fill(p.ranges.end.begin() + 25, p.ranges.end.end(), 30);  // the first 25 see nothing
  p.Draw(1);
  const AttentionReference actual = RunKernels(p);
  ExpectClose(actual, p.Reference(), 1e-5);
  for (int64_t i = 0; i < 25; ++i) {
    EXPECT_EQ(actual.lse.data<float>()[i], -kInfinity);
    for (int64_t c = 0; c < 32; ++c) {
      EXPECT_EQ(actual.out.data<float>()[i * 32 + c], 0);
      EXPECT_EQ(actual.dq.data<float>()[i * 32 + c], 0);
    }
  }
}

// Keys split anywhere, merged in any order, are the same attention. This is what the ring does.
TEST(FlashAttentionTest, MergedBlocksAreTheWhole) {
  for (DType dtype : {DType::kFloat32, DType::kFloat64}) {
    Problem whole{2, 70, 90, 4, 2, 24};
    whole.dtype = dtype;
    whole.ranges = MakeRanges("random", 2, 70, 90);
    whole.Draw(5);
    const AttentionReference expected = whole.Reference();
    for (const std::vector<int64_t>& cuts :
         {std::vector<int64_t>{0, 45, 90}, {0, 0, 1, 33, 90}, {0, 89, 90, 90}}) {
      for (bool reverse : {false, true}) {
        std::vector<std::pair<int64_t, int64_t>> blocks;
        for (size_t i = 0; i + 1 < cuts.size(); ++i) blocks.push_back({cuts[i], cuts[i + 1]});
        if (reverse) std::reverse(blocks.begin(), blocks.end());
        AttentionReference actual = {Tensor::EmptyLike(whole.q), Tensor::EmptyLike(whole.dlse),
                                     Tensor::ZerosLike(whole.q), Tensor::ZerosLike(whole.k),
                                     Tensor::ZerosLike(whole.v)};
        actual.out.Fill(std::nan(""));
        actual.lse.Fill(std::nan(""));
        const auto part = [&](int64_t begin, int64_t end) {
          Problem p = whole;
          p.k_len = end - begin;
          p.k = whole.k.Slice(1, begin, p.k_len);
          p.v = whole.v.Slice(1, begin, p.k_len);
          for (size_t at = 0; at < p.ranges.begin.size(); ++at) {
            const auto clip = [&](int32_t& x) {
              x = static_cast<int32_t>(std::clamp<int64_t>(x - begin, 0, p.k_len));
            };
            clip(p.ranges.begin[at]);
            clip(p.ranges.end[at]);
          }
          return p;
        };
        bool merge = false;
        for (const auto& [begin, end] : blocks) {
          Forward(part(begin, end), actual.out, actual.lse, merge);
          merge = true;
        }
        const Tensor delta = Delta(whole, actual.out);
        for (const auto& [begin, end] : blocks) {
          const int64_t length = end - begin;
          Backward(part(begin, end), actual.lse, delta, actual.dq,
                   actual.dk.Slice(1, begin, length), actual.dv.Slice(1, begin, length));
        }
        ExpectClose(actual, expected, dtype == DType::kFloat32 ? 1e-5 : 1e-13);
      }
    }
  }
}

TEST(FlashAttentionTest, StridedOperands) {
  Problem p{2, 60, 60, 4, 2, 16};
  p.Draw(6);
  const AttentionReference expected = p.Reference();
  // One fused projection [batch, seqlen, heads + 2 kv_heads, head_dim], and gradients likewise.
  const Tensor fused = Tensor::Zeros({2, 60, 8, 16}, p.dtype);
  const auto place = [](const Tensor& to, const Tensor& from) {
    to.CopyFrom(from);
    return to;
  };
  p.q = place(fused.Slice(2, 0, 4), p.q);
  p.k = place(fused.Slice(2, 4, 2), p.k);
  p.v = place(fused.Slice(2, 6, 2), p.v);
  const Tensor out = Tensor::Zeros({2, 60, 9, 16}, p.dtype), grads = Tensor::ZerosLike(fused);
  AttentionReference actual = {out.Slice(2, 1, 4), Tensor::EmptyLike(p.dlse), grads.Slice(2, 0, 4),
                               grads.Slice(2, 4, 2), grads.Slice(2, 6, 2)};
  Forward(p, actual.out, actual.lse);
  Backward(p, actual.lse, Delta(p, actual.out), actual.dq, actual.dk, actual.dv);
  ExpectClose(actual, expected, 1e-5);
}

TEST(FlashAttentionTest, GradientsAccumulate) {
  Problem p{1, 50, 50, 2, 1, 16};
  p.dtype = DType::kFloat64;
  p.Draw(7);
  const AttentionReference expected = p.Reference();
  AttentionReference actual = RunKernels(p);
  Backward(p, actual.lse, Delta(p, actual.out), actual.dq, actual.dk, actual.dv);
  for (const Tensor* twice : {&actual.dq, &actual.dk, &actual.dv}) twice->Scale(0.5);
  ExpectClose(actual, expected, 1e-13);
}

TEST(FlashAttentionTest, WithoutGradientOfLse) {
  Problem p{1, 50, 50, 2, 2, 16};
  p.with_dlse = false;
  p.Draw(8);
  ExpectClose(RunKernels(p), p.Reference(), 1e-5);
}

// Threads: few heads (a head is shared) and many; equal to the reference and from run to run.
TEST(FlashAttentionTest, ThreadsAreReproducible) {
  for (int threads : {1, 2, 3}) {
    ScopedThreadPool pool(threads);
    for (int64_t heads : {1, 2, 5}) {
      SCOPED_TRACE(testing::Message() << threads << " threads, " << heads << " heads");
      Problem p{1, 700, 700, heads, 1, 16};
      p.ranges = MakeRanges("causal", 1, 700, 700);
      p.Draw(9);
      const AttentionReference first = RunKernels(p), second = RunKernels(p);
      ExpectClose(first, p.Reference(), 1e-5);
      EXPECT_EQ(first.out.ToVector<float>(), second.out.ToVector<float>());
      EXPECT_EQ(first.lse.ToVector<float>(), second.lse.ToVector<float>());
      EXPECT_EQ(first.dq.ToVector<float>(), second.dq.ToVector<float>());
      EXPECT_EQ(first.dk.ToVector<float>(), second.dk.ToVector<float>());
      EXPECT_EQ(first.dv.ToVector<float>(), second.dv.ToVector<float>());
    }
  }
}

TEST(MergeTest, SafeForEmptyAndHugeValues) {
  const auto nothing = Merge<float>(-kInfinity, -kInfinity);
  EXPECT_EQ(nothing.lse, -kInfinity);
  EXPECT_EQ(nothing.a, 0);
  EXPECT_EQ(nothing.b, 0);
  const auto left = Merge<float>(3.f, -kInfinity);
  EXPECT_EQ(left.lse, 3);
  EXPECT_EQ(left.a, 1);
  EXPECT_EQ(left.b, 0);
  for (double a : {-1e4, -5.0, 0.0, 88.0, 90.0, 1e4}) {
    for (double b : {-1e4, -5.0, 0.0, 89.0, 1e4}) {
      const auto weights = Merge<float>(static_cast<float>(a), static_cast<float>(b));
      const double m = std::max(a, b), lse = m + std::log(std::exp(a - m) + std::exp(b - m));
      EXPECT_NEAR(weights.lse, lse, 1e-6 * std::max(1.0, std::abs(lse)));
      EXPECT_NEAR(weights.a, std::exp(a - lse), 1e-6);
      EXPECT_NEAR(weights.b, std::exp(b - lse), 1e-6);
    }
  }
}

}  // namespace
}  // namespace burst
