// Compares linear layers in float8 on a GPU with products in double.
//
// The test rounds x, W and dy to float8 itself, with the scales that ops.h promises, and multiplies
// them in double. The GPU may differ from that by its sums alone. A tensor core's instruction
// aligns 32 products and a sum to the largest of these, and truncates each 13 bits after its
// leading bit. So a sum of k products is off by at most 33/32 k 2^-13 of the largest product or sum
// on the way. The bias and the residual are added in fp32. A result in bfloat16 is rounded once
// more, by at most 2^-8 relative.
//
// The tests of a feed-forward and of a normalization choose weights with one element a row, so that
// a result has few terms. The reference carries a bound of the error along with each value.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
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

// ---- Float8 results of other ops.

// Half the distance of two neighboring numbers of the format, times the scale: the error of
// rounding a value that is itself off by `error`.
double RoundingError(const Format& format, double scale, double value, double error) {
  const double normal = std::ldexp(std::abs(value) + error, -format.mantissa - 1);
  return error + std::max(normal, std::ldexp(scale, format.least_exponent - format.mantissa - 1));
}

// The smallest power of two that fits a bound.
double ScaleFor(const Format& format, double bound) {
  return bound == 0 ? 1 : std::exp2(std::ceil(std::log2(bound / format.largest)));
}

double Largest(const Values& values) {
  double largest = 0;
  for (const double value : values) largest = std::max(largest, std::abs(value));
  return largest;
}

Tensor OnGpu(const Values& values, const Shape& shape) {
  return Tensor::FromVector(values, shape).To(DType::kBFloat16).To(DeviceType::kCuda);
}

void ExpectWithin(const Tensor& actual, const Values& expected, const Values& errors,
                  double rounding, const char* what) {
  const Values values = actual.ToVector<double>();
  ASSERT_EQ(values.size(), expected.size());
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_NEAR(values[i], expected[i],
                (1 + rounding) * errors[i] + rounding * std::abs(expected[i]))
        << what << " " << i;
  }
}

// A feed-forward [rows, width] -> [rows, width]. Output c of gate_up reads input c % width with a
// factor of a power of two; output c of down reads h[c] with another. So gate_up is known exactly.
void CheckFeedForward(int64_t rows, int64_t width, int64_t ffn, double x_scale) {
  SCOPED_TRACE(testing::Message() << rows << " x " << width << " x " << ffn);
  const auto factor = [](int64_t c) { return std::ldexp(1, static_cast<int>(c % 3) - 1); };
  Values up_weight(2 * ffn * width), down_weight(width * ffn);
  for (int64_t c = 0; c < 2 * ffn; ++c) up_weight[c * width + c % width] = factor(c);
  for (int64_t c = 0; c < width; ++c) down_weight[c * ffn + c] = factor(c + 1);
  const Tensor x_host = RandomTensor({rows, width}, 1, x_scale).To(DType::kBFloat16);
  const Tensor dy_host = RandomTensor({rows, width}, 2).To(DType::kBFloat16);
  const Tensor residual_host = RandomTensor({rows, width}, 3).To(DType::kBFloat16);

  const Variable x(x_host.To(DeviceType::kCuda), /*requires_grad=*/true);
  const auto parameter = [](const Values& values, const Shape& shape) {
    return Variable(OnGpu(values, shape),
                    Tensor::Zeros(shape, DType::kFloat32).To(DeviceType::kCuda));
  };
  const Variable gate_up = parameter(up_weight, {2 * ffn, width});
  const Variable down = parameter(down_weight, {width, ffn});
  const Variable residual(residual_host.To(DeviceType::kCuda), /*requires_grad=*/true);
  Tape tape;
  const Variable y = SwiGluMlp(tape, x, gate_up, {}, down, {}, residual, nullptr, ResultUse::kRead,
                               LinearPrecision::kFloat8);
  ASSERT_TRUE(tape.Backward(std::vector<Variable>{y}, {dy_host.To(DeviceType::kCuda)}).ok());

  // h and the gradients of gate and up, with their errors.
  constexpr double kExp = 0x1p-18;  // of the fast exponential and division, relative
  const Values xv = Rounded(kE4M3, x_host.ToVector<double>());
  const Values dv = Rounded(kE5M2, dy_host.ToVector<double>());
  Values h(rows * ffn), silu(rows * ffn), up(rows * ffn), dh(rows * ffn);
  Values d_pre(rows * 2 * ffn);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < ffn; ++j) {
      const int64_t at = i * ffn + j;
      const double gate = xv[i * width + j % width] * factor(j);
      up[at] = xv[i * width + (ffn + j) % width] * factor(ffn + j);
      const double s = 1 / (1 + std::exp(-gate));
      silu[at] = gate * s;
      h[at] = silu[at] * up[at];
      dh[at] = j < width ? dv[i * width + j] * factor(j + 1) : 0;
      d_pre[i * 2 * ffn + j] = dh[at] * up[at] * s * (1 + gate * (1 - s));
      d_pre[i * 2 * ffn + ffn + j] = dh[at] * silu[at];
    }
  }
  const double h_scale = ScaleFor(kE4M3, Largest(h));
  const double d_scale = ScaleFor(kE5M2, Largest(dh) * std::max(1.1 * Largest(up), Largest(silu)));
  const auto h_error = [&](int64_t at) {  // twice the scale, if the bound is just below a power
    return RoundingError(kE4M3, 2 * h_scale, h[at], kExp * std::abs(h[at]));
  };
  const auto d_error = [&](int64_t at) {
    return RoundingError(kE5M2, 2 * d_scale, d_pre[at], 4 * kExp * std::abs(d_pre[at]));
  };

  Values expected(rows * width), errors(rows * width);
  const Values residual_values = residual_host.ToVector<double>();
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t c = 0; c < width; ++c) {
      const int64_t to = i * width + c;
      expected[to] = h[i * ffn + c] * factor(c + 1) + residual_values[to];
      errors[to] = h_error(i * ffn + c) * factor(c + 1) + 0x1p-22 * std::abs(residual_values[to]);
    }
  }
  ExpectWithin(y.value(), expected, errors, kRounding, "y");

  std::fill(expected.begin(), expected.end(), 0);
  std::fill(errors.begin(), errors.end(), 0);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t c = 0; c < 2 * ffn; ++c) {
      const int64_t to = i * width + c % width, from = i * 2 * ffn + c;
      expected[to] += d_pre[from] * factor(c);
      errors[to] += (d_error(from) + 0x1p-9 * std::abs(d_pre[from])) * factor(c);
    }
  }
  ExpectWithin(x.grad(), expected, errors, kRounding, "dx");

  // Sums over the rows are off by the errors of their terms, and by those of the tensor cores.
  const double sum_error = 33.0 / 32 * static_cast<double>(rows) * 0x1p-13;
  expected.assign(width * ffn, 0);
  errors.assign(width * ffn, 0);
  for (int64_t c = 0; c < width; ++c) {
    for (int64_t j = 0; j < ffn; ++j) {
      double most = 0;
      for (int64_t i = 0; i < rows; ++i) {
        const double d = dv[i * width + c], term = d * h[i * ffn + j];
        expected[c * ffn + j] += term;
        errors[c * ffn + j] += std::abs(d) * h_error(i * ffn + j);
        most = std::max({most, 1.1 * std::abs(term), std::abs(expected[c * ffn + j])});
      }
      errors[c * ffn + j] += sum_error * (most + errors[c * ffn + j]);
    }
  }
  ExpectWithin(down.grad(), expected, errors, 0, "ddown");

  expected.assign(2 * ffn * width, 0);
  errors.assign(2 * ffn * width, 0);
  for (int64_t c = 0; c < 2 * ffn; ++c) {
    for (int64_t j = 0; j < width; ++j) {
      const int64_t to = c * width + j;
      double most = 0;
      for (int64_t i = 0; i < rows; ++i) {
        const double in = xv[i * width + j], term = in * d_pre[i * 2 * ffn + c];
        expected[to] += term;
        errors[to] += std::abs(in) * d_error(i * 2 * ffn + c);
        most = std::max({most, 1.2 * std::abs(term), std::abs(expected[to])});
      }
      errors[to] += sum_error * (most + errors[to]);
    }
  }
  ExpectWithin(gate_up.grad(), expected, errors, 0, "dgate_up");
  EXPECT_EQ(residual.grad().ToVector<double>(), dy_host.ToVector<double>());
}

TEST(SwiGluMlpFloat8, FollowsTheEquations) {
  CheckFeedForward(128, 64, 128, 1);
  CheckFeedForward(1, 16, 16, 1);
  CheckFeedForward(37, 48, 144, 3);  // rows that 16 does not divide
  CheckFeedForward(300, 128, 400, 1);
  CheckFeedForward(64, 64, 128, 40);  // silu from nothing to all of the gate
  CheckFeedForward(64, 64, 128, 1e-4);
  CheckFeedForward(16, 32, 64, 0);
}

TEST(SwiGluMlpFloat8, NotFiniteIsNotHidden) {
  for (const double bad : {INFINITY, -INFINITY, NAN}) {
    Values x = RandomTensor({32, 64}, 1).ToVector<double>();
    x[5] = bad;
    const Variable gate_up(OnGpu(RandomTensor({256, 64}, 2).ToVector<double>(), {256, 64}));
    const Variable down(OnGpu(RandomTensor({64, 128}, 3).ToVector<double>(), {64, 128}));
    Tape tape(/*recording=*/false);
    const Variable y = SwiGluMlp(tape, Variable(OnGpu(x, {32, 64})), gate_up, {}, down, {}, {},
                                 nullptr, ResultUse::kRead, LinearPrecision::kFloat8);
    EXPECT_TRUE(std::isnan(y.value().ToVector<double>()[0])) << bad;
  }
}

TEST(SwiGluMlpFloat8, EveryRunGivesTheSameBits) {
  const auto run = [] {
    const auto parameter = [](const Shape& shape, int seed) {
      return Variable(RandomTensor(shape, seed, 0.1).To(DType::kBFloat16).To(DeviceType::kCuda),
                      Tensor::Zeros(shape, DType::kFloat32).To(DeviceType::kCuda));
    };
    const Variable x(RandomTensor({513, 256}, 1).To(DType::kBFloat16).To(DeviceType::kCuda),
                     /*requires_grad=*/true);
    const Variable gate_up = parameter({1024, 256}, 2), down = parameter({256, 512}, 3);
    Tape tape;
    const Variable y = SwiGluMlp(tape, x, gate_up, {}, down, {}, {}, nullptr, ResultUse::kRead,
                                 LinearPrecision::kFloat8);
    EXPECT_TRUE(tape.Backward(std::vector<Variable>{y}, {y.value()}).ok());
    return std::vector<Values>{y.value().ToVector<double>(), x.grad().ToVector<double>(),
                               gate_up.grad().ToVector<double>(), down.grad().ToVector<double>()};
  };
  const std::vector<Values> first = run();
  for (int i = 0; i < 5; ++i) EXPECT_EQ(run(), first);
}

// The largest magnitude that comes with a gradient is the gradient's.
void ExpectAmax(const Variable& x) {
  const double largest = Largest(x.grad().ToVector<double>());
  EXPECT_GT(largest, 0);
  ASSERT_FALSE(x.grad_amax().null());
  EXPECT_EQ(x.grad_amax().ToVector<double>()[0], largest);
}

// Normalizes x and selects up to 64 channels by a product, which shows their float8 numbers.
void CheckNormalization(int64_t rows, int64_t width, bool layer_norm, double x_scale) {
  SCOPED_TRACE(testing::Message() << rows << " x " << width << (layer_norm ? " layer" : " rms"));
  const Tensor x_host = RandomTensor({rows, width}, 1, x_scale).To(DType::kBFloat16);
  const Tensor w_host = RandomTensor({width}, 2).To(DType::kBFloat16);
  const Tensor b_host = RandomTensor({width}, 3, layer_norm ? 2 : 0).To(DType::kBFloat16);
  const int64_t out = std::min<int64_t>(64, width / 16 * 16), step = width / out;
  const Tensor dy_host = RandomTensor({rows, out}, 4).To(DType::kBFloat16);
  Values selection(out * width);
  for (int64_t c = 0; c < out; ++c) selection[c * width + c * step] = 1;

  const Variable x(x_host.To(DeviceType::kCuda), /*requires_grad=*/true);
  const Variable w(w_host.To(DeviceType::kCuda)), b(b_host.To(DeviceType::kCuda));
  const Variable linear(OnGpu(selection, {out, width}),
                        Tensor::Zeros({out, width}, DType::kFloat32).To(DeviceType::kCuda));
  Tape tape;
  const Variable normalized = layer_norm ? LayerNorm(tape, x, w, b, 1e-5, LinearPrecision::kFloat8)
                                         : RmsNorm(tape, x, w, 1e-5, LinearPrecision::kFloat8);
  const Variable y =
      Linear(tape, normalized, linear, {}, {}, nullptr, ResultUse::kRead, LinearPrecision::kFloat8);
  ASSERT_TRUE(tape.Backward(std::vector<Variable>{y}, {dy_host.To(DeviceType::kCuda)}).ok());

  const Values xv = x_host.ToVector<double>(), wv = w_host.ToVector<double>(),
               bv = b_host.ToVector<double>();
  const double n = static_cast<double>(width);
  const double scale = ScaleFor(kE4M3, std::sqrt(n) * Largest(wv) + Largest(bv));
  EXPECT_EQ(normalized.scale().ToVector<double>()[0], scale);
  Values expected(rows * out), errors(rows * out);
  for (int64_t i = 0; i < rows; ++i) {
    double mean = 0, square = 0;
    for (int64_t j = 0; layer_norm && j < width; ++j) mean += xv[i * width + j] / n;
    for (int64_t j = 0; j < width; ++j) square += std::pow(xv[i * width + j] - mean, 2) / n;
    for (int64_t c = 0; c < out; ++c) {
      const int64_t at = i * out + c, j = c * step;
      const double scaled = (xv[i * width + j] - mean) / std::sqrt(square + 1e-5) * wv[j];
      expected[at] = scaled + bv[j];
      // The sum over a row is off by less than width 2^-24 relative.
      const double error =
          n * 0x1p-24 * (std::abs(scaled) + std::abs(bv[j]) + std::abs(mean) * std::abs(wv[j]));
      errors[at] = RoundingError(kE4M3, scale, expected[at], error);
    }
  }
  ExpectWithin(y.value(), expected, errors, 0, "normalized");

  // The columns of dW that the selection reads are dy^T (its result), so the transpose of the
  // normalized numbers has them in their places.
  const Values nv = y.value().ToVector<double>(), dv = Rounded(kE5M2, dy_host.ToVector<double>());
  const Values dw = linear.grad().ToVector<double>();
  Values selected(out * out);
  for (int64_t i = 0; i < out * out; ++i) selected[i] = dw[i / out * width + i % out * step];
  const Product nothing{Values(out * out), Values(out * out)};
  ExpectClose(Tensor::FromVector(selected, {out, out}),
              Multiply(
                  out, rows, out, [&](int64_t i, int64_t l) { return dv[l * out + i]; },
                  [&](int64_t l, int64_t j) { return nv[l * out + j]; }),
              rows, nothing, 0, "dw");
  EXPECT_EQ(x.grad().dtype(), DType::kBFloat16);
  ExpectAmax(x);
}

TEST(NormalizationFloat8, RoundsByTheBoundOfItsWeights) {
  for (const bool layer_norm : {false, true}) {
    CheckNormalization(64, 128, layer_norm, 1);
    CheckNormalization(37, 48, layer_norm, 1e3);
    CheckNormalization(5, 1040, layer_norm, 1e-3);
    CheckNormalization(3, 17424, layer_norm, 1);  // rows that no block keeps in registers
  }
}

// The gradients of a normalization and of RoPE come with their largest magnitudes, until something
// is added to them.
TEST(GradientAmax, IsTheGradientsOrNull) {
  const Shape shape = {2, 75, 5, 16};
  auto table = std::make_shared<RopeTable>();
  table->cos = RandomTensor({150, 8}, 1).To(DType::kFloat32).To(DeviceType::kCuda);
  table->sin = RandomTensor({150, 8}, 2).To(DType::kFloat32).To(DeviceType::kCuda);
  const Tensor value = RandomTensor(shape, 3).To(DType::kBFloat16).To(DeviceType::kCuda);
  const Tensor dy = RandomTensor(shape, 4).To(DType::kBFloat16).To(DeviceType::kCuda);
  for (const LinearPrecision maker : {LinearPrecision::kFloat8, LinearPrecision::kTensors}) {
    const Variable x(value, /*requires_grad=*/true);
    Tape tape;
    const Variable y = Rope(tape, x, table, 4, maker);
    ASSERT_TRUE(tape.Backward(std::vector<Variable>{y}, {dy}).ok());
    if (maker == LinearPrecision::kTensors) {
      EXPECT_TRUE(x.grad_amax().null());
    } else {
      ExpectAmax(x);
      x.AddGrad(dy);
      EXPECT_TRUE(x.grad_amax().null());
    }
  }
}

// One row that is not finite makes its own products NaN.
TEST(NormalizationFloat8, NotFiniteIsNotHidden) {
  for (const double bad : {INFINITY, NAN}) {
    Values x = RandomTensor({32, 64}, 1).ToVector<double>();
    x[5] = bad;
    Tape tape(/*recording=*/false);
    const Variable w(OnGpu(Values(64, 1), {64}));
    const Variable linear(OnGpu(RandomTensor({64, 64}, 2).ToVector<double>(), {64, 64}));
    const Variable normalized =
        RmsNorm(tape, Variable(OnGpu(x, {32, 64})), w, 1e-5, LinearPrecision::kFloat8);
    const Values y = Linear(tape, normalized, linear, {}, {}, nullptr, ResultUse::kRead,
                            LinearPrecision::kFloat8)
                         .value()
                         .ToVector<double>();
    EXPECT_TRUE(std::isnan(y[0]));
    EXPECT_TRUE(std::isfinite(y[64]));
  }
}

}  // namespace
}  // namespace burst
