// Compares ops that round their own results to float8 on a GPU with double (float8_reference.h).
//
// The tests choose weights with one element a row, so that a result has few terms. The reference
// carries a bound of the error along with each value.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "burst/autograd/tape.h"
#include "burst/tensor/tensor.h"
#include "model/ops/ops.h"
#include "tests/model/ops/float8_reference.h"
#include "tests/testing/gradient_check.h"

namespace burst {
namespace {

// A feed-forward [rows, width] -> [rows, width]. Output c of gate_up reads input c % width with a
// factor of at most three bits; output c of down reads h[c] with another. So gate_up is known
// exactly.
void CheckFeedForward(int64_t rows, int64_t width, int64_t ffn, double x_scale) {
  SCOPED_TRACE(testing::Message() << rows << " x " << width << " x " << ffn);
  const auto factor = [](int64_t c) { return std::vector<double>{0.5, 1.25, 1.75}[c % 3]; };
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

  // h, the h of the backward, whose gate and up were rounded, and the gradients of gate and up.
  constexpr double kExp = 0x1p-18;  // of the fast exponential and division, relative
  const Values xv = Rounded(kE4M3, x_host.ToVector<double>());
  const Values dv = Rounded(kE5M2, dy_host.ToVector<double>());
  const auto sigmoid = [](double g) { return 1 / (1 + std::exp(-g)); };
  Values gate(rows * ffn), up(rows * ffn), silu(rows * ffn), h(rows * ffn), dh(rows * ffn);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < ffn; ++j) {
      const int64_t at = i * ffn + j;
      gate[at] = xv[i * width + j % width] * factor(j);
      up[at] = xv[i * width + (ffn + j) % width] * factor(ffn + j);
      silu[at] = gate[at] * sigmoid(gate[at]);
      h[at] = silu[at] * up[at];
      dh[at] = j < width ? dv[i * width + j] * factor(j + 1) : 0;
    }
  }
  const Values kept_gate = Rounded(kE4M3, gate), kept_up = Rounded(kE4M3, up);
  Values kept_h(rows * ffn), d_pre(rows * 2 * ffn);
  const double h_scale = ScaleFor(kE4M3, Largest(h));
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < ffn; ++j) {
      const int64_t at = i * ffn + j;
      const double g = kept_gate[at], s = sigmoid(g);
      kept_h[at] = g * s * kept_up[at];
      d_pre[i * 2 * ffn + j] = dh[at] * kept_up[at] * s * (1 + g * (1 - s));
      d_pre[i * 2 * ffn + ffn + j] = dh[at] * g * s;
    }
  }
  const double most_silu = Largest(silu) + 1.1 / 16 * Largest(gate);
  const double d_scale =
      ScaleFor(kE5M2, Largest(dh) * std::max(1.1 * 17 / 16 * Largest(up), most_silu));
  const auto h_error = [&](int64_t at) {  // twice the scale, if the bound is just below a power
    return RoundingError(kE4M3, 2 * h_scale, h[at], kExp * std::abs(h[at]));
  };
  const double room = 1.125 * 1.0625 * Largest(h);  // what exceeds it is saturated
  const auto kept_h_error = [&](int64_t at) {
    return RoundingError(kE4M3, 4 * h_scale, kept_h[at], kExp * std::abs(kept_h[at])) +
           std::max(0.0, std::abs(kept_h[at]) - room);
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
        const double d = dv[i * width + c], term = d * kept_h[i * ffn + j];
        expected[c * ffn + j] += term;
        errors[c * ffn + j] += std::abs(d) * kept_h_error(i * ffn + j);
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

// Normalizes x and selects up to 64 channels by a product, which shows their float8 numbers. The
// weights of an RMSNorm are the stored ones plus `offset`.
void CheckNormalization(int64_t rows, int64_t width, bool layer_norm, double x_scale,
                        double offset = 0) {
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
  const Variable normalized = layer_norm
                                  ? LayerNorm(tape, x, w, b, 1e-5, LinearPrecision::kFloat8)
                                  : RmsNorm(tape, x, w, 1e-5, LinearPrecision::kFloat8, offset);
  const Variable y =
      Linear(tape, normalized, linear, {}, {}, nullptr, ResultUse::kRead, LinearPrecision::kFloat8);
  ASSERT_TRUE(tape.Backward(std::vector<Variable>{y}, {dy_host.To(DeviceType::kCuda)}).ok());

  const Values xv = x_host.ToVector<double>(), bv = b_host.ToVector<double>();
  Values wv = w_host.ToVector<double>();
  for (double& weight : wv) weight = static_cast<float>(offset + weight);
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
  CheckNormalization(64, 128, /*layer_norm=*/false, 1, /*offset=*/1);
  CheckNormalization(3, 17424, /*layer_norm=*/false, 1, /*offset=*/1);
}

// The gradients of a normalization and of RoPE come with their largest magnitudes, until something
// is added to them.
// 8 frequencies turn 16 channels of a head.
class GradientAmax : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(HeadDims, GradientAmax, testing::Values(16, 24));

TEST_P(GradientAmax, IsTheGradientsOrNull) {
  const Shape shape = {2, 75, 5, GetParam()};
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
