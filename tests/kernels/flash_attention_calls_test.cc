// Calls of the attention kernels: how they merge and add up, strided operands, empty rows, large
// scores, NaN. Each is compared with naive attention in double precision.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/study/study.h"
#include "burst/kernels/flash_attention.h"
#include "burst/tensor/tensor.h"
#include "tests/kernels/attention_problem.h"
#include "tests/testing/attention_reference.h"
#include "tests/testing/test_device.h"

namespace burst {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

const AttentionKernels& Kernels() { return KernelsOf(kTestDevice); }

class DTypeTest : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(All, DTypeTest, testing::Values(DType::kFloat32, DType::kFloat64),
                         [](const auto& info) { return std::string(Name(info.param)); });

TEST_P(DTypeTest, EmptyRowsHoldZeroAndMinusInfinity) {
  // The mask is causal with more queries than keys, so the first 60 see nothing.
  const Problem problem(1, 100, 40, 2, 1, 16, MaskKind::kCausal, GetParam());
  const AttentionResults result = RunAttention(problem);
  const Tensor out = result.out.Slice(1, 0, 60), dq = result.dq.Slice(1, 0, 60);
  for (double x : out.ToVector<double>()) ASSERT_EQ(x, 0);
  for (double x : dq.ToVector<double>()) ASSERT_EQ(x, 0);
  for (double x : result.lse.Slice(2, 0, 60).ToVector<double>()) ASSERT_EQ(x, -kInfinity);
  ExpectClose(result, problem.Reference(), Tolerance(GetParam()));
}

// Operands that are slices of fused tensors give the same bits, and nothing else is written.
TEST_P(DTypeTest, StridedOperands) {
  constexpr int64_t kBatch = 2, kSeqlen = 150, kHeads = 4, kKvHeads = 2, kDim = 20;
  constexpr int64_t kFused = kHeads + 2 * kKvHeads;
  const Problem contiguous(kBatch, kSeqlen, kSeqlen, kHeads, kKvHeads, kDim, MaskKind::kCausal,
                           GetParam());
  const AttentionResults expected = RunAttention(contiguous);

  const auto split = [](const Tensor& fused) {
    return std::array<Tensor, 3>{fused.Slice(2, 0, kHeads), fused.Slice(2, kHeads, kKvHeads),
                                 fused.Slice(2, kHeads + kKvHeads, kKvHeads)};
  };
  const Tensor qkv = Tensor::Empty({kBatch, kSeqlen, kFused, kDim}, GetParam(), kTestDevice);
  const Tensor dqkv = Tensor::Zeros({kBatch, kSeqlen, kFused, kDim}, GetParam(), kTestDevice);
  const auto [q, k, v] = split(qkv);
  const auto [dq, dk, dv] = split(dqkv);
  q.CopyFrom(contiguous.q);
  k.CopyFrom(contiguous.k);
  v.CopyFrom(contiguous.v);
  // out lies in the middle of a tensor that is one larger on every side.
  const Tensor frame =
      Tensor::Empty({kBatch, kSeqlen + 2, kHeads + 2, kDim + 2}, GetParam(), kTestDevice);
  frame.Fill(42);
  const Tensor out = frame.Slice(1, 1, kSeqlen).Slice(2, 1, kHeads).Slice(3, 1, kDim);
  const Tensor lse = Poisoned(contiguous.dlse), delta = Poisoned(contiguous.dlse);

  const FlashAttentionShape shape = contiguous.shape();
  Kernels().Forward(
      {shape, Operand(q), Operand(k), Operand(v), Operand(out), lse.raw_data(), false});
  Kernels().Delta({shape, Operand(out), Operand(contiguous.dout), contiguous.dlse.raw_data(),
                   delta.raw_data()});
  Kernels().Backward({shape, Operand(q), Operand(k), Operand(v), Operand(contiguous.dout),
                      lse.raw_data(), delta.raw_data(), AddsTo(Operand(dq)), AddsTo(Operand(dk)),
                      AddsTo(Operand(dv))});
  ExpectBitwiseEqual({out, lse, dq, dk, dv}, expected);
  out.CopyFrom(Tensor::ZerosLike(out));
  double sum = 0;
  for (double x : frame.ToVector<double>()) sum += x;
  EXPECT_EQ(sum, 42.0 * (frame.numel() - out.numel()));
}

// Blocks of keys in any order, merged, are the attention over all keys, forward and backward.
TEST_P(DTypeTest, BlocksOfKeysMerge) {
  for (MaskKind kind : {MaskKind::kFull, MaskKind::kCausal, MaskKind::kWindow, MaskKind::kRandom}) {
    SCOPED_TRACE(testing::Message() << kind);
    const Problem problem(2, kBlockedKeys, kBlockedKeys, 4, 2, 24, kind, GetParam());
    const AttentionResults result = UnfilledResults(problem);
    bool merge = false;
    for (const auto& [begin, end] : kKeyBlocks) {
      const KeyBlock block(problem, begin, end);
      FlashForwardParams params = ForwardParams(problem, result);
      params.shape = block.shape();
      params.k = block.Of(problem.k);
      params.v = block.Of(problem.v);
      params.merge = merge;
      Kernels().Forward(params);
      merge = true;
    }
    const Tensor delta = DeltaOf(problem, result.out, Kernels());
    BackwardOverKeys(problem, result, delta,
                     [&](const FlashBackwardParams& params) { Kernels().Backward(params); });
    ExpectClose(result, problem.Reference(), Tolerance(GetParam()));
  }
}

TEST_P(DTypeTest, GradientsAccumulate) {
  const Problem problem(1, 90, 90, 2, 1, 16, MaskKind::kCausal, GetParam());
  const AttentionResults once = RunAttention(problem);
  const Tensor delta = DeltaOf(problem, once.out, Kernels());
  const Tensor dq = once.dq.Clone(), dk = once.dk.Clone(), dv = once.dv.Clone();
  Kernels().Backward(BackwardParams(problem, {once.out, once.lse, dq, dk, dv}, delta));
  once.dq.Scale(2);
  once.dk.Scale(2);
  once.dv.Scale(2);
  EXPECT_LE(RelativeError(dq, once.dq), Tolerance(GetParam()));
  EXPECT_LE(RelativeError(dk, once.dk), Tolerance(GetParam()));
  EXPECT_LE(RelativeError(dv, once.dv), Tolerance(GetParam()));
}

// The first call for a head assigns its gradients over any content.
TEST_P(DTypeTest, HeadsBeginInDifferentCalls) {
  for (int64_t d : {16, 40}) {
    Problem problem(2, 150, 110, 8, 4, d, MaskKind::kFull, GetParam());
    const BackwardInParts parts(&problem);
    const AttentionResults once = RunAttention(problem);
    const Tensor delta = DeltaOf(problem, once.out, Kernels());
    for (const AttentionKernels* kernels : {&Kernels(), &NaiveKernels()}) {
      if (!kernels->Check(kTestDevice, GetParam(), d).ok()) continue;
      const AttentionResults sums = {once.out, once.lse, Poisoned(problem.q), Poisoned(problem.k),
                                     Poisoned(problem.v)};
      parts.Run(sums, once.lse, delta, Tensor(), Tensor(), /*deterministic=*/true,
                [&](const FlashBackwardParams& params) { kernels->Backward(params); });
      ExpectClose(sums, problem.Reference(), Tolerance(GetParam()));
    }
  }
}

// Assigned gradients have the bits of gradients that are added to zeros, in any memory, and
// strided.
TEST_P(DTypeTest, GradientsAreAssigned) {
  for (const auto& [q_len, k_len] :
       {std::pair(90, 90), std::pair(0, 9), std::pair(9, 0), std::pair(300, 40)}) {
    const Problem problem(2, q_len, k_len, 4, 2, 16, MaskKind::kCausal, GetParam());
    const AttentionResults expected = RunAttention(problem);
    const Tensor delta = DeltaOf(problem, expected.out, Kernels());
    const auto strided = [](const Tensor& like) {
      Shape shape = like.shape();
      shape[2] += 3;
      const Tensor frame = Tensor::Empty(shape, like.dtype(), like.device());
      frame.Fill(kNaN);
      return frame.Slice(2, 1, like.dim(2));
    };
    const Tensor dq = strided(problem.q), dk = strided(problem.k), dv = strided(problem.v);
    const AttentionResults result = {expected.out, expected.lse, dq, dk, dv};
    FlashBackwardParams params = BackwardParams(problem, result, delta);
    params.dq = Assigns(Operand(dq));
    params.dk = Assigns(Operand(dk));
    params.dv = Assigns(Operand(dv));
    Kernels().Backward(params);
    ExpectBitwiseEqual(result, expected);
  }
}

// A query whose lse is -inf has no probabilities, even if the mask shows it keys.
TEST_P(DTypeTest, RowsOfMinusInfinityHaveNoGradient) {
  const Problem problem(1, 40, 40, 1, 1, 16, MaskKind::kFull, GetParam());
  const Tensor lse = Tensor::EmptyLike(problem.dlse), delta = Tensor::ZerosLike(problem.dlse);
  lse.Fill(-kInfinity);
  const Tensor dq = Tensor::ZerosLike(problem.q), dk = Tensor::ZerosLike(problem.k);
  const Tensor dv = Tensor::ZerosLike(problem.v);
  Kernels().Backward(BackwardParams(problem, {Tensor(), lse, dq, dk, dv}, delta));
  for (const Tensor& gradient : {dq, dk, dv}) {
    for (double x : gradient.ToVector<double>()) ASSERT_EQ(x, 0);
  }
}

TEST_P(DTypeTest, NoDlseIsZeroDlse) {
  const Problem problem(1, 40, 40, 1, 1, 16, MaskKind::kFull, GetParam());
  const Tensor zero = Tensor::ZerosLike(problem.dlse);
  const Tensor with = Poisoned(zero), without = Poisoned(zero);
  Kernels().Delta({problem.shape(), Operand(problem.q), Operand(problem.dout), zero.raw_data(),
                   with.raw_data()});
  Kernels().Delta(
      {problem.shape(), Operand(problem.q), Operand(problem.dout), nullptr, without.raw_data()});
  EXPECT_EQ(with.ToVector<double>(), without.ToVector<double>());
}

// Scores are far too large for exp. A score s carries an error of about eps |s|, which becomes the
// relative error of its probability.
TEST_P(DTypeTest, LargeScores) {
  const double epsilon = GetParam() == DType::kFloat32 ? 0x1p-23 : 0x1p-52;
  for (double magnitude : {3.0, 10.0, 100.0}) {
    const Problem problem(1, 200, 200, 2, 2, 64, MaskKind::kCausal, GetParam(), magnitude);
    const AttentionResults reference = problem.Reference();
    double largest = 0;
    for (double lse : reference.lse.ToVector<double>()) largest = std::max(largest, std::abs(lse));
    ExpectClose(RunAttention(problem), reference, 4 * epsilon * (8 + largest));
  }
}

// Errors of a plain softmax in float32, for one head without a mask. It takes one sum of products
// per score, scaled, less the largest score of the row.
struct NaiveErrors {
  double out = 0, lse = 0;  // sums of squares
};
NaiveErrors ErrorsOfNaiveFloat32(const Problem& problem, const AttentionResults& reference) {
  const std::vector<float> q = problem.q.ToVector<float>(), k = problem.k.ToVector<float>(),
                           v = problem.v.ToVector<float>();
  const std::vector<double> out = reference.out.ToVector<double>(),
                            lse = reference.lse.ToVector<double>();
  const int64_t d = problem.q.dim(3), keys = problem.k.dim(1);
  NaiveErrors errors;
  std::vector<float> p(keys);
  for (int64_t i = 0; i < problem.q.dim(1); ++i) {
    for (int64_t j = 0; j < keys; ++j) {
      float sum = 0;
      for (int64_t c = 0; c < d; ++c) sum = std::fma(q[i * d + c], k[j * d + c], sum);
      p[j] = sum * static_cast<float>(problem.softmax_scale);
    }
    const float largest = *std::max_element(p.begin(), p.end());
    float total = 0;
    for (float& x : p) total += x = std::exp(x - largest);
    errors.lse += std::pow(largest + std::log(total) - lse[i], 2);
    for (int64_t c = 0; c < d; ++c) {
      float sum = 0;
      for (int64_t j = 0; j < keys; ++j) sum += p[j] / total * v[j * d + c];
      errors.out += std::pow(sum - out[i * d + c], 2);
    }
  }
  return errors;
}

double SquaredDifference(const Tensor& a, const Tensor& b) {
  const std::vector<double> x = a.ToVector<double>(), y = b.ToVector<double>();
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += std::pow(x[i] - y[i], 2);
  return sum;
}

// Scores of nine million, where neighbors in float32 are 1 apart. The kernels must be about as
// exact as a plain softmax. The test compares root mean squares, because a single row is off by
// chance.
TEST(HugeScoresTest, NoWorseThanNaiveFloat32) {
  for (const float sign : {-1.f, 1.f}) {
    Problem problem(1, 400, 400, 1, 1, 128, MaskKind::kFull, DType::kFloat32);
    problem.softmax_scale = 1 / std::sqrt(128.0);
    const auto shifted = [](const Tensor& t, float scale, float shift) {
      std::vector<float> values = t.ToVector<float>();
      for (float& x : values) x = scale * (x + shift);
      return Tensor::FromVector(values, t.shape(), kTestDevice);
    };
    problem.q = shifted(problem.q, 1, 448);
    problem.k = shifted(problem.k, sign, 1880);
    const AttentionResults reference = problem.Reference(), result = RunAttention(problem);
    const NaiveErrors naive = ErrorsOfNaiveFloat32(problem, reference);
    EXPECT_LE(std::sqrt(SquaredDifference(result.lse, reference.lse)), 1.2 * std::sqrt(naive.lse));
    EXPECT_LE(std::sqrt(SquaredDifference(result.out, reference.out)), 1.5 * std::sqrt(naive.out));
  }
}

// A mask never hides a NaN from a query that sees its key, which gets NaN. Other queries do not
// change.
TEST_P(DTypeTest, NaNReachesThoseWhoSeeIt) {
  constexpr int64_t kLength = 200, kBad = 120;
  const Problem problem(1, kLength, kLength, 1, 1, 16, MaskKind::kCausal, GetParam());
  problem.k.Slice(1, kBad, 1).Fill(kNaN);
  const AttentionResults result = RunAttention(problem);
  const std::vector<double> lse = result.lse.ToVector<double>();
  const std::vector<double> out = result.out.ToVector<double>();
  for (int64_t i = 0; i < kLength; ++i) {
    EXPECT_EQ(std::isnan(lse[i]), i >= kBad) << i;
    EXPECT_EQ(std::isnan(out[i * 16]), i >= kBad) << i;
  }
}

}  // namespace
}  // namespace burst
