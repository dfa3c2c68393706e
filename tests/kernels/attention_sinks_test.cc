// Compares attention sinks with naive attention in double precision, which has one more key: a
// logit of every head whose value is zero.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "burst/kernels/flash_attention.h"
#include "burst/tensor/tensor.h"
#include "tests/kernels/attention_problem.h"
#include "tests/kernels/no_worse.h"
#include "tests/testing/attention_reference.h"
#include "tests/testing/test_device.h"
#ifdef BURST_TEST_CUDA
#include "burst/kernels/gpu/flash_attention_gpu.h"
#else
#include "benchmarks/study/study.h"
#endif

namespace burst {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The device's forward kernels, and others that may serve a call. The backward is always the
// device's.
struct Forwards {
  const char* name;
  const AttentionKernels* kernels;
};
std::vector<Forwards> AllForwards() {
#ifdef BURST_TEST_CUDA
  return {{"chosen", &KernelsOf(kTestDevice)},
          {"sm80", cuda::GpuKernels(cuda::KernelFamily::kSm80)},
          {"decode", cuda::GpuKernels(cuda::KernelFamily::kDecode)}};
#else
  return {{"chosen", &KernelsOf(kTestDevice)}, {"naive", &NaiveKernels()}};
#endif
}

// Returns the sinks of `heads` heads: without weight, ordinary ones, and ones that take nearly all
// weight.
std::vector<double> SinksOf(int64_t heads, int first) {
  const double all[] = {0.5, -kInfinity, 12, -3, 0, 100, -200};
  std::vector<double> sinks;
  for (int64_t h = 0; h < heads; ++h) sinks.push_back(all[(first + h) % 7]);
  return sinks;
}

Tensor OnDevice(const std::vector<double>& sinks, DType dtype) {
  return Tensor::FromVector(sinks, {static_cast<int64_t>(sinks.size())}, DeviceType::kCpu)
      .To(SumDType(dtype))
      .To(kTestDevice);
}

struct Outcome {
  AttentionResults results;
  Tensor dsinks;
};

Outcome RunWith(const AttentionKernels& forward, const Problem& problem, const Tensor& sinks) {
  const Outcome run = {UnfilledResults(problem), Poisoned(sinks)};
  const AttentionResults& result = run.results;
  FlashForwardParams params = ForwardParams(problem, result);
  params.sinks = sinks.raw_data();
  forward.Forward(params);
  const AttentionKernels& kernels = KernelsOf(kTestDevice);
  const Tensor delta = DeltaOf(problem, result.out, kernels);
  kernels.Backward(BackwardParams(problem, result, delta));
  FlashSinkGrads(result.lse, delta, sinks, run.dsinks);
  return run;
}

class AttentionSinksTest : public testing::TestWithParam<MaskKind> {};

TEST_P(AttentionSinksTest, EqualNaiveAttention) {
  const struct {
    int64_t q_len, k_len, heads, kv_heads, d;
  } cases[] = {{1, 1, 1, 1, 16},     {7, 129, 3, 1, 8},    {70, 33, 4, 2, 24},
               {131, 300, 2, 2, 64}, {300, 300, 2, 1, 8},  {5, 0, 2, 2, 16},
               {3, 1600, 8, 1, 64},  {131, 200, 2, 1, 96}, {131, 131, 2, 2, 128},
               {70, 200, 3, 1, 192}, {131, 131, 2, 1, 256}};
  int first = 0;
  for (const auto& c : cases) {
    const std::vector<double> values = SinksOf(c.heads, first++);
    for (DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
      if (!KernelsOf(kTestDevice).Check(kTestDevice, dtype, c.d).ok()) continue;
      const Problem problem(c.d < 96 ? 2 : 1, c.q_len, c.k_len, c.heads, c.kv_heads, c.d,
                            GetParam(), dtype, /*magnitude=*/Is16Bit(dtype) ? 1.5 : 1);
      NaiveScores naive;
      naive.sinks = values;
      std::vector<double> dsinks, terms;
      naive.dsinks = &dsinks;
      naive.dsinks_terms = &terms;
      const AttentionResults expected = problem.Reference(DType::kFloat64, naive);
      naive.dsinks = naive.dsinks_terms = nullptr;
      const AttentionResults rounded = problem.Reference(dtype, naive);
      for (const Forwards& forward : AllForwards()) {
        if (!forward.kernels->Check(kTestDevice, dtype, c.d).ok() ||
            (GetParam() == MaskKind::kBlocks && !forward.kernels->TakesBlocks(dtype, c.d))) {
          continue;
        }
        SCOPED_TRACE(testing::Message() << c.q_len << "x" << c.k_len << " d" << c.d << " "
                                        << Name(dtype) << " " << forward.name);
        const Outcome run = RunWith(*forward.kernels, problem, OnDevice(values, dtype));
        // A sink of 100 makes lse 100, whose last place is larger by the same factor.
        const double tolerance = 4 * Tolerance(dtype);
        if (Is16Bit(dtype)) {
          ExpectNoWorse(run.results, rounded, expected, tolerance, /*rows=*/0,
                        OffByDelta(problem, expected, problem.k),
                        OffByDelta(problem, expected, problem.q));
        } else {
          ExpectClose(run.results, expected, tolerance);
        }
        // With 16 bits, out is rounded before delta is computed from it.
        const double u = dtype == DType::kBFloat16  ? 0x1p-8
                         : dtype == DType::kFloat16 ? 0x1p-11
                                                    : 0;
        // A sink of -200 has a weight below the least number of float32.
        const double least = dtype == DType::kFloat64 ? 0 : std::numeric_limits<float>::min();
        const std::vector<double> actual = run.dsinks.To(DeviceType::kCpu).ToVector<double>();
        for (int64_t h = 0; h < c.heads; ++h) {
          EXPECT_NEAR(actual[h], dsinks[h], (u + tolerance) * terms[h] + least) << "head " << h;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Masks, AttentionSinksTest, kAllMasks, NameOf);

// A ring's first call has the sinks, and the others merge with it. Together they equal one call.
TEST(AttentionSinksTest, CountOnceOverCalls) {
  for (DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
    for (int64_t d : {64, 128, 256}) {
      for (const Forwards& forward : AllForwards()) {
        if (!forward.kernels->Check(kTestDevice, dtype, d).ok()) continue;
        SCOPED_TRACE(testing::Message() << Name(dtype) << " d" << d << " " << forward.name);
        const Problem problem(1, 140, 300, 4, 2, d, MaskKind::kCausal, dtype);
        const std::vector<double> values = SinksOf(4, /*first=*/0);
        const Tensor sinks = OnDevice(values, dtype);
        const AttentionResults once = RunWith(*forward.kernels, problem, sinks).results;
        const Tensor sum = Tensor::Empty(problem.q.shape(), SumDType(dtype), kTestDevice);
        const Tensor lse = Poisoned(once.lse);
        for (int64_t begin : {0, 100, 200}) {
          const KeyBlock block(problem, begin, begin + 100);
          FlashForwardParams params = {block.shape(),       Operand(problem.q), block.Of(problem.k),
                                       block.Of(problem.v), Operand(sum),       lse.raw_data(),
                                       /*merge=*/begin > 0, sum.dtype()};
          if (begin == 0) params.sinks = sinks.raw_data();
          forward.kernels->Forward(params);
        }
        NaiveScores naive;
        naive.sinks = values;
        const AttentionResults expected = problem.Reference(DType::kFloat64, naive);
        EXPECT_LE(RelativeError(lse, expected.lse), 4 * Tolerance(dtype));
        if (!Is16Bit(dtype)) {
          EXPECT_LE(RelativeError(sum, expected.out), 4 * Tolerance(dtype));
          continue;
        }
        ExpectNoWorse("out", sum, problem.Reference(dtype, naive).out, expected.out);
      }
    }
  }
}

// In fp8, the result is the one without sinks, less the share of the sinks.
TEST(AttentionSinksTest, TakeTheirShareInFp8) {
  const AttentionKernels& kernels = KernelsOf(kTestDevice);
  if (!kernels.CheckFp8(kTestDevice, DType::kBFloat16, 128).ok()) {
    GTEST_SKIP() << "attention in fp8 needs a Hopper GPU";
  }
  for (MaskKind mask : {MaskKind::kFull, MaskKind::kCausal, MaskKind::kRandom}) {
    const Problem problem(1, 300, 500, 7, 7, 128, mask, DType::kBFloat16);
    const std::vector<double> values = SinksOf(7, /*first=*/0);
    const Tensor sinks = OnDevice(values, DType::kBFloat16);
    std::vector<double> out[2], lse[2];
    for (int with : {0, 1}) {
      const AttentionResults result = {Poisoned(problem.q), Poisoned(problem.dlse), {}, {}, {}};
      FlashForwardParams params = ForwardParams(problem, result);
      params.fp8 = true;
      if (with == 1) params.sinks = sinks.raw_data();
      kernels.Forward(params);
      out[with] = result.out.ToVector<double>();
      lse[with] = result.lse.ToVector<double>();
    }
    for (int64_t i = 0; i < 300; ++i) {
      for (int64_t h = 0; h < 7; ++h) {
        const double before = lse[0][h * 300 + i], sink = values[h];
        const double top = std::max(before, sink);
        const double after =
            top == -kInfinity ? top : top + std::log(std::exp(before - top) + std::exp(sink - top));
        if (std::isinf(after)) {
          ASSERT_EQ(lse[1][h * 300 + i], after);
        } else {
          ASSERT_NEAR(lse[1][h * 300 + i], after, 1e-5 * (1 + std::abs(after)));
        }
        const double share = std::isinf(before) ? 0 : std::exp(before - after);
        for (int64_t c = 0; c < 128; ++c) {
          const int64_t at = (i * 7 + h) * 128 + c;
          // Both are rounded to bf16, which has the least number of float32.
          ASSERT_NEAR(out[1][at], share * out[0][at],
                      0x1p-7 * share * std::abs(out[0][at]) + std::numeric_limits<float>::min());
        }
      }
    }
  }
}

// The gradients of L = sum(dout out) + sum(dlse lse) are central differences of it. Their error is
// h^2 times a third derivative, and eps |L| / h.
TEST(AttentionSinksTest, GradientsAreCentralDifferences) {
  if (kTestDevice != DeviceType::kCpu) GTEST_SKIP() << "the inputs are changed in place";
  constexpr double kStep = 1e-5;
  const Problem problem(2, 6, 9, 2, 1, 3, MaskKind::kRandom, DType::kFloat64);
  const Tensor sinks = OnDevice({0.3, -1.2}, DType::kFloat64);
  const auto run = [&] { return RunWith(KernelsOf(kTestDevice), problem, sinks); };
  const auto loss = [&] {
    const AttentionResults results = run().results;
    double sum = 0;
    for (int64_t i = 0; i < problem.dout.numel(); ++i) {
      sum += problem.dout.data<double>()[i] * results.out.data<double>()[i];
    }
    for (int64_t i = 0; i < problem.dlse.numel(); ++i) {
      sum += problem.dlse.data<double>()[i] * results.lse.data<double>()[i];
    }
    return sum;
  };
  const Outcome outcome = run();
  const auto check = [&](const Tensor& input, const Tensor& gradient) {
    for (int64_t i = 0; i < input.numel(); ++i) {
      double& x = input.data<double>()[i];
      const double before = x;
      x = before + kStep;
      const double above = loss();
      x = before - kStep;
      const double below = loss();
      x = before;
      ASSERT_NEAR(gradient.data<double>()[i], (above - below) / (2 * kStep), 1e-8) << i;
    }
  };
  check(problem.q, outcome.results.dq);
  check(problem.k, outcome.results.dk);
  check(problem.v, outcome.results.dv);
  check(sinks, outcome.dsinks);
}

// In the last step of attention over ranks, parts are merged, and the sinks count once.
TEST(AttentionSinksTest, CountOnceInAMerge) {
  const int64_t q_len = 3, heads = 7, d = 16, rows = q_len * heads;
  for (DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16}) {
    const AttentionKernels& kernels = KernelsOf(kTestDevice);
    if (!kernels.Check(kTestDevice, dtype, d).ok()) continue;
    const DType sum_dtype = SumDType(dtype);
    const Problem problem(1, q_len, 90, heads, heads, d, MaskKind::kCausal, dtype);
    const std::vector<double> values = SinksOf(heads, /*first=*/0);
    const Tensor sinks = OnDevice(values, dtype);
    constexpr int64_t kAlign = 32;  // alignment of the kernels' rows
    const int64_t count = (rows * (d + 1) + kAlign - 1) / kAlign * kAlign;
    const Tensor parts = Tensor::Empty({3, count}, sum_dtype, kTestDevice);
    for (int64_t part = 0; part < 3; ++part) {
      const Tensor own = parts.Slice(0, part, 1).View({-1});
      const KeyBlock block(problem, 30 * part, 30 * part + 30);
      kernels.Forward({block.shape(), Operand(problem.q), block.Of(problem.k), block.Of(problem.v),
                       Operand(own.Slice(0, 0, rows * d).View(problem.q.shape())),
                       own.Slice(0, rows * d, rows).raw_data(), /*merge=*/false, sum_dtype});
    }
    const Tensor out = Poisoned(problem.q);
    FlashMerge(parts, out, sinks);
    NaiveScores naive;
    naive.sinks = values;
    const AttentionResults expected = problem.Reference(DType::kFloat64, naive);
    const double u = Is16Bit(dtype) ? 0x1p-8 : 0;  // rounding of P and of out
    EXPECT_LE(RelativeError(out, expected.out), u + 4 * Tolerance(dtype)) << Name(dtype);
  }
}

}  // namespace
}  // namespace burst
