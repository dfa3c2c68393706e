// Tests GEMMs by cuBLASLt. Every orientation, dtype and epilogue is compared with loops in double
// over the numbers that the GPU saw.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "burst/tensor/tensor.h"
#include "model/ops/cuda/matmul.h"
#include "tests/testing/gradient_check.h"

namespace burst {
namespace {

using Values = std::vector<double>;

// Returns half an ulp, the relative error of rounding to the dtype.
double Rounding(DType dtype) {
  if (dtype == DType::kBFloat16) return 0x1p-8;
  return dtype == DType::kFloat64 ? 0x1p-53 : 0x1p-24;
}

// A random matrix on the GPU in memory whose rows are `pad` elements longer, and its values [rows,
// cols]. If `transposed`, it is stored as its transpose.
struct TestMatrix {
  TestMatrix(int64_t rows, int64_t cols, bool transposed, int64_t pad, DType dtype, uint64_t seed) {
    const int64_t r = transposed ? cols : rows, c = transposed ? rows : cols;
    memory = RandomTensor({r, c + pad}, seed).To(dtype).To(DeviceType::kCuda);
    view = {memory.raw_data(), dtype, r, c, c + pad, false};
    if (transposed) view = view.Transposed();
    const Values stored = memory.ToVector<double>();
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) {
        values.push_back(transposed ? stored[j * (c + pad) + i] : stored[i * (c + pad) + j]);
      }
    }
  }
  Tensor memory;
  cuda::Matrix view;
  Values values;
};

Values Gemm(const TestMatrix& a, const TestMatrix& b) {
  const int64_t m = a.view.rows, n = b.view.cols, k = a.view.cols;
  Values c(m * n, 0);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t p = 0; p < k; ++p) {
      for (int64_t j = 0; j < n; ++j) c[i * n + j] += a.values[i * k + p] * b.values[p * n + j];
    }
  }
  return c;
}

// Expects that |actual - expected| is within two roundings to the result's dtype: of the GEMM, and
// of its sum with the addend. The accumulator's sums of `terms` terms of order one add to that.
// Their sum of magnitudes is about `terms`.
void ExpectClose(const Values& actual, const Values& expected, const Values& gemm, DType result,
                 DType accumulator, int64_t terms) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    const double tolerance = Rounding(result) * (std::abs(expected[i]) + std::abs(gemm[i])) +
                             Rounding(accumulator) * terms * 4;
    ASSERT_NEAR(actual[i], expected[i], tolerance) << "element " << i;
  }
}

DType AccumulatorOf(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

struct Case {
  DType in, out;
};

class CudaMatMulTest : public testing::TestWithParam<Case> {};

TEST_P(CudaMatMulTest, EveryOrientation) {
  const auto [in, out] = GetParam();
  struct Size {
    int64_t m, n, k;
  };
  for (const Size s :
       {Size{1, 1, 1}, {3, 5, 7}, {64, 1, 33}, {40, 65, 160}, {136, 72, 128}, {4, 3, 0}}) {
    for (const bool a_transposed : {false, true}) {
      for (const bool b_transposed : {false, true}) {
        for (const bool accumulate : {false, true}) {
          const int64_t pad = s.k % 8 == 0 ? 8 : 3;
          const TestMatrix a(s.m, s.k, a_transposed, pad, in, 1);
          const TestMatrix b(s.k, s.n, b_transposed, pad, in, 2);
          const TestMatrix c(s.m, s.n, false, 0, out, 3);
          const Values gemm = Gemm(a, b);
          Values expected = gemm;
          for (size_t i = 0; i < expected.size(); ++i) expected[i] += accumulate ? c.values[i] : 0;
          cuda::MatMulParams params{a.view, b.view, c.view};
          if (accumulate) params.addend = c.view.data;
          cuda::MatMul(params);
          ExpectClose(c.memory.ToVector<double>(), expected, gemm, out, AccumulatorOf(in), s.k + 1);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, CudaMatMulTest,
                         testing::Values(Case{DType::kFloat32, DType::kFloat32},
                                         Case{DType::kFloat64, DType::kFloat64},
                                         Case{DType::kBFloat16, DType::kBFloat16},
                                         Case{DType::kBFloat16, DType::kFloat32}),
                         [](const auto& info) {
                           return std::string(Name(info.param.in)) + "_to_" + Name(info.param.out);
                         });

constexpr DType kBf16 = DType::kBFloat16;
constexpr int64_t kM = 256, kN = 192, kK = 64;  // tokens, out, in

double Gelu(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}
double GeluDerivative(double x) {
  const double c = std::sqrt(2 / M_PI), t = std::tanh(c * (x + 0.044715 * x * x * x));
  return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x);
}

TEST(CudaMatMulEpilogues, BiasAndResidual) {
  const TestMatrix x(kM, kK, false, 0, kBf16, 1), w(kK, kN, true, 0, kBf16, 2);
  const TestMatrix residual(kM, kN, false, 0, kBf16, 3), y(kM, kN, false, 0, kBf16, 4);
  const TestMatrix bias(1, kN, false, 0, kBf16, 5);
  cuda::MatMulParams params{x.view, w.view, y.view};
  params.addend = residual.view.data;
  params.epilogue = cuda::Epilogue::kBias;
  params.vector = bias.view.data;
  cuda::MatMul(params);
  const Values gemm = Gemm(x, w);
  Values expected = gemm;
  for (int64_t i = 0; i < kM * kN; ++i) expected[i] += residual.values[i] + bias.values[i % kN];
  ExpectClose(y.memory.ToVector<double>(), expected, gemm, kBf16, DType::kFloat32, kK + 2);
}

TEST(CudaMatMulEpilogues, GeluForwardAndBackward) {
  const TestMatrix x(kM, kK, false, 0, kBf16, 1), w(kK, kN, true, 0, kBf16, 2);
  const TestMatrix y(kM, kN, false, 0, kBf16, 3), pre(kM, kN, false, 0, kBf16, 4);
  const TestMatrix bias(1, kN, false, 0, kBf16, 5);
  cuda::MatMulParams params{x.view, w.view, y.view};
  params.epilogue = cuda::Epilogue::kGelu;
  params.vector = bias.view.data;
  params.pre = pre.view.data;
  cuda::MatMul(params);
  Values expected = Gemm(x, w);
  for (int64_t i = 0; i < kM * kN; ++i) expected[i] += bias.values[i % kN];
  ExpectClose(pre.memory.ToVector<double>(), expected, expected, kBf16, DType::kFloat32, kK + 1);
  for (double& v : expected) v = Gelu(v);
  // The hardware's tanh has an error of about 2^-11.
  const Values actual = y.memory.ToVector<double>();
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_NEAR(actual[i], expected[i], 0x1p-7 * std::abs(expected[i]) + 0x1p-9);
  }

  // dpre = (dy W) gelu'(pre)
  const TestMatrix dy(kM, kK, false, 0, kBf16, 6), down(kK, kN, false, 0, kBf16, 7);
  const TestMatrix dpre(kM, kN, false, 0, kBf16, 8);
  cuda::MatMulParams backward{dy.view, down.view, dpre.view};
  backward.epilogue = cuda::Epilogue::kGeluBackward;
  backward.pre = pre.view.data;
  cuda::MatMul(backward);
  expected = Gemm(dy, down);
  const Values saved = pre.memory.ToVector<double>(), gradient = dpre.memory.ToVector<double>();
  for (int64_t i = 0; i < kM * kN; ++i) {
    // The error is the rounding of the result, whose derivative is at most 1.13, and the hardware's
    // tanh, which the derivative multiplies by at most 4.
    const double tolerance = (0x1p-7 + 0x1p-9) * std::abs(expected[i]) + 0x1p-9;
    ASSERT_NEAR(gradient[i], expected[i] * GeluDerivative(saved[i]), tolerance) << i;
  }
}

// GEMMs repeat to the bit, so that training does.
TEST(CudaMatMul, SameBitsEveryTime) {
  const TestMatrix a(512, 4096, false, 0, kBf16, 1), b(4096, 256, false, 0, kBf16, 2);
  std::vector<Values> results;
  for (int run = 0; run < 5; ++run) {
    const TestMatrix c(512, 256, false, 0, DType::kFloat32, 3);
    cuda::MatMul({a.view, b.view, c.view});
    results.push_back(c.memory.ToVector<double>());
  }
  for (int run = 1; run < 5; ++run) EXPECT_EQ(results[run], results[0]);
}

}  // namespace
}  // namespace burst
