// Compares linear layers in float8 on a GPU with products in double.
//
// The test rounds x, W and dy to float8 itself, with the scales that ops.h promises, and multiplies
// them in double. The GPU may differ from that by its sums alone. A tensor core's instruction
// aligns 32 products and a sum to the largest of these, and truncates each 13 bits after its
// leading bit. So a sum of k products is off by at most 33/32 k 2^-13 of the largest product or sum
// on the way. The bias and the residual are added in fp32. A result in bfloat16 is rounded once
// more, by at most 2^-8 relative.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "burst/autograd/tape.h"
#include "burst/tensor/tensor.h"
#include "model/ops/ops.h"
#include "tests/testing/gradient_check.h"

namespace burst {
namespace {

using Values = std::vector<double>;

constexpr double kRounding = 0x1p-8;  // the rounding of a result in bfloat16

// A float8 format has bits of mantissa, the exponent of the smallest normal number, and the largest
// number.
struct Format {
  int mantissa;
  int least_exponent;
  double largest;
};
constexpr Format kE4M3 = {3, -6, 448};
constexpr Format kE5M2 = {2, -14, 57344};

// Rounds to nearest, ties to even, with saturation.
double RoundTo(const Format& format, double value) {
  if (value == 0) return 0;
  const int exponent = std::max(std::ilogb(value), format.least_exponent);
  const double unit = std::ldexp(1, exponent - format.mantissa);
  const double rounded = std::nearbyint(value / unit) * unit;
  return std::clamp(rounded, -format.largest, format.largest);
}

// Returns the values as float8 numbers times their scale, the smallest power of two that fits them.
Values Rounded(const Format& format, const Values& values) {
  double amax = 0;
  for (const double value : values) amax = std::max(amax, std::abs(value));
  double scale = 1;
  while (amax / scale > format.largest) scale *= 2;
  while (amax > 0 && amax / (scale / 2) <= format.largest) scale /= 2;
  Values result(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    result[i] = RoundTo(format, values[i] / scale) * scale;
  }
  return result;
}

// c[i, j] = sum over l of a(i, l) b(l, j), and the largest magnitude of a product or a sum on the
// way.
struct Product {
  Values sum, largest;
};
template <typename A, typename B>
Product Multiply(int64_t m, int64_t k, int64_t n, const A& a, const B& b) {
  Product p{Values(m * n), Values(m * n)};
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t l = 0; l < k; ++l) {
        const double term = a(i, l) * b(l, j);
        p.sum[i * n + j] += term;
        double& largest = p.largest[i * n + j];
        largest = std::max({largest, std::abs(term), std::abs(p.sum[i * n + j])});
      }
    }
  }
  return p;
}

// Compares a result with its products. `added` is what the GEMM adds to its products, and its
// largest magnitude.
void ExpectClose(const Tensor& actual, const Product& expected, int64_t k, const Product& added,
                 double rounding, const char* what) {
  const Values values = actual.ToVector<double>();
  ASSERT_EQ(values.size(), expected.sum.size());
  for (size_t i = 0; i < values.size(); ++i) {
    const double want = expected.sum[i] + added.sum[i];
    const double bound = 33.0 / 32 * static_cast<double>(k) * 0x1p-13 * expected.largest[i] +
                         rounding * std::abs(want) + 0x1p-22 * added.largest[i];
    ASSERT_NEAR(values[i], want, bound) << what << " " << i;
  }
}

struct Case {
  int64_t rows, in, out;
  double x_scale = 1, dy_scale = 1;
  bool outliers = false;  // one channel of x is a thousand times as large
};

void Check(const Case& c) {
  SCOPED_TRACE(testing::Message() << c.rows << " x " << c.in << " x " << c.out);
  const auto input = [](const Shape& shape, int seed, double scale) {
    return RandomTensor(shape, seed, scale).To(DType::kBFloat16);
  };
  Tensor x_host = input({c.rows, c.in}, 1, c.x_scale);
  if (c.outliers) {
    Tensor wide = x_host.To(DType::kFloat32);
    for (int64_t i = 0; i < c.rows; ++i) wide.data<float>()[i * c.in + 3] *= 1000;
    x_host = wide.To(DType::kBFloat16);
  }
  const Tensor w_host = input({c.out, c.in}, 2, 0.05),
               dy_host = input({c.rows, c.out}, 3, c.dy_scale);
  const Tensor bias_host = input({c.out}, 4, 1), residual_host = input({c.rows, c.out}, 5, 1);
  const Tensor dw_before = RandomTensor({c.out, c.in}, 6, c.dy_scale).To(DType::kFloat32);

  const Variable x(x_host.To(DeviceType::kCuda), /*requires_grad=*/true);
  const Variable weight(w_host.To(DeviceType::kCuda), dw_before.To(DeviceType::kCuda));
  const Variable bias(bias_host.To(DeviceType::kCuda),
                      Tensor::Zeros({c.out}, DType::kFloat32).To(DeviceType::kCuda));
  const Variable residual(residual_host.To(DeviceType::kCuda), /*requires_grad=*/true);
  Tape tape;
  const Variable y =
      Linear(tape, x, weight, bias, residual, nullptr, ResultUse::kRead, LinearPrecision::kFloat8);
  ASSERT_TRUE(tape.Backward(std::vector<Variable>{y}, {dy_host.To(DeviceType::kCuda)}).ok());

  const Values xv = Rounded(kE4M3, x_host.ToVector<double>());
  const Values wv = Rounded(kE4M3, w_host.ToVector<double>());
  const Values dv = Rounded(kE5M2, dy_host.ToVector<double>());
  const auto x_at = [&](int64_t i, int64_t l) { return xv[i * c.in + l]; };
  const auto w_at = [&](int64_t i, int64_t l) { return wv[i * c.in + l]; };
  const auto d_at = [&](int64_t i, int64_t l) { return dv[i * c.out + l]; };
  const Values bias_values = bias_host.ToVector<double>();
  Product added{residual_host.ToVector<double>(), Values(c.rows * c.out)};
  for (size_t i = 0; i < added.sum.size(); ++i) {
    added.largest[i] = std::abs(added.sum[i]) + std::abs(bias_values[i % c.out]);
    added.sum[i] += bias_values[i % c.out];
  }
  const Product nothing{Values(c.rows * c.in), Values(c.rows * c.in)};
  Product before{dw_before.ToVector<double>(), Values(c.out * c.in)};
  for (size_t i = 0; i < before.sum.size(); ++i) before.largest[i] = std::abs(before.sum[i]);
  ExpectClose(y.value(),
              Multiply(c.rows, c.in, c.out, x_at, [&](int64_t l, int64_t j) { return w_at(j, l); }),
              c.in, added, kRounding, "y");
  ExpectClose(x.grad(), Multiply(c.rows, c.out, c.in, d_at, w_at), c.out, nothing, kRounding, "dx");
  ExpectClose(weight.grad(),
              Multiply(
                  c.out, c.rows, c.in, [&](int64_t i, int64_t l) { return d_at(l, i); }, x_at),
              c.rows, before, 0, "dw");
  EXPECT_EQ(residual.grad().ToVector<double>(), dy_host.ToVector<double>());
}

TEST(LinearFloat8, EqualsProductsOfRoundedFactors) {
  Check({128, 64, 48});
  Check({1, 16, 16});
  Check({37, 272, 144});   // rows that 16 does not divide
  Check({300, 128, 400});  // several tiles, the last ones in part
}

TEST(LinearFloat8, ScalesFitEveryMagnitude) {
  Check({64, 64, 64, 1e-6, 1e-9});
  Check({64, 64, 64, 1e4, 1e3});
  Check({64, 128, 64, 1, 1, /*outliers=*/true});
}

TEST(LinearFloat8, ZerosAndNoRows) {
  Check({64, 64, 64, 0, 0});
  Check({0, 64, 64});
}

// A value that is not finite must reach the loss, so that the step is skipped.
TEST(LinearFloat8, NotFiniteIsNotHidden) {
  for (const float bad : {INFINITY, NAN}) {
    Tensor x = RandomTensor({32, 64}, 1).To(DType::kFloat32);
    x.data<float>()[5] = bad;
    const Variable input(x.To(DType::kBFloat16).To(DeviceType::kCuda), /*requires_grad=*/false);
    const Variable weight(RandomTensor({48, 64}, 2).To(DType::kBFloat16).To(DeviceType::kCuda),
                          /*requires_grad=*/false);
    Tape tape(/*recording=*/false);
    const Variable y =
        Linear(tape, input, weight, {}, {}, nullptr, ResultUse::kRead, LinearPrecision::kFloat8);
    EXPECT_TRUE(std::isnan(y.value().ToVector<double>()[0]));
  }
}

TEST(LinearFloat8, EveryRunGivesTheSameBits) {
  const auto run = [] {
    const Variable x(RandomTensor({513, 256}, 1).To(DType::kBFloat16).To(DeviceType::kCuda),
                     /*requires_grad=*/true);
    const Variable weight(RandomTensor({512, 256}, 2).To(DType::kBFloat16).To(DeviceType::kCuda),
                          Tensor::Zeros({512, 256}, DType::kFloat32).To(DeviceType::kCuda));
    Tape tape;
    const Variable y =
        Linear(tape, x, weight, {}, {}, nullptr, ResultUse::kRead, LinearPrecision::kFloat8);
    EXPECT_TRUE(tape.Backward(std::vector<Variable>{y}, {y.value()}).ok());
    std::vector<Values> all = {y.value().ToVector<double>(), x.grad().ToVector<double>(),
                               weight.grad().ToVector<double>()};
    return all;
  };
  const std::vector<Values> first = run();
  for (int i = 0; i < 5; ++i) EXPECT_EQ(run(), first);
}

}  // namespace
}  // namespace burst
