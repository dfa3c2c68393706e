// Compares linear layers in float8 on a GPU with products in double (float8_reference.h).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "burst/autograd/tape.h"
#include "burst/tensor/tensor.h"
#include "model/ops/ops.h"
#include "tests/model/ops/float8_reference.h"
#include "tests/testing/gradient_check.h"

namespace burst {
namespace {

constexpr LinearPrecision kRecipes[] = {LinearPrecision::kFloat8, LinearPrecision::kFloat8Rows,
                                        LinearPrecision::kFloat8Blocks};

// How a product reads a factor [rows, cols]: along its rows, or along its columns.
enum class Along { kRows, kColumns };

// Returns a factor as a product of the recipe reads it (ops.h).
Values Factor(LinearPrecision recipe, const Values& values, int64_t cols, Along along,
              bool is_weight, const Format& tensor_format = kE4M3) {
  const bool rows = along == Along::kRows;
  if (recipe == LinearPrecision::kFloat8) return Rounded(tensor_format, values);
  return Rounded(kE4M3, values, cols, [=](int64_t row, int64_t col) {
    const int64_t outer = rows ? row : col, inner = rows ? col : row;
    constexpr int64_t kMany = int64_t{1} << 32;
    if (recipe == LinearPrecision::kFloat8Rows) return outer;
    return inner / 128 * kMany + (is_weight ? outer / 128 : outer);
  });
}

struct Case {
  int64_t rows, in, out;
  double x_scale = 1, dy_scale = 1;
  bool outliers = false;  // one channel of x is a thousand times as large
};

void Check(const Case& c, LinearPrecision precision) {
  SCOPED_TRACE(testing::Message() << c.rows << " x " << c.in << " x " << c.out << ", recipe "
                                  << static_cast<int>(precision));
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
  const Variable y = Linear(tape, x, weight, bias, residual, nullptr, ResultUse::kRead, precision);
  ASSERT_TRUE(tape.Backward(std::vector<Variable>{y}, {dy_host.To(DeviceType::kCuda)}).ok());

  // Blocks take rows' scales where 4 does not divide the tokens.
  const LinearPrecision recipe = precision == LinearPrecision::kFloat8Blocks && c.rows % 4 != 0
                                     ? LinearPrecision::kFloat8Rows
                                     : precision;
  const auto factor = [recipe](const Tensor& host, int64_t cols, Along along, bool is_weight,
                               const Format& format = kE4M3) {
    return [cols, values = Factor(recipe, host.ToVector<double>(), cols, along, is_weight, format)](
               int64_t i, int64_t l) { return values[i * cols + l]; };
  };
  const auto x_rows = factor(x_host, c.in, Along::kRows, false);
  const auto x_columns = factor(x_host, c.in, Along::kColumns, false);
  const auto w_rows = factor(w_host, c.in, Along::kRows, true);
  const auto w_columns = factor(w_host, c.in, Along::kColumns, true);
  const auto d_rows = factor(dy_host, c.out, Along::kRows, false, kE5M2);
  const auto d_columns = factor(dy_host, c.out, Along::kColumns, false, kE5M2);
  const Values bias_values = bias_host.ToVector<double>();
  Product added{residual_host.ToVector<double>(), Values(c.rows * c.out)};
  for (size_t i = 0; i < added.sum.size(); ++i) {
    added.largest[i] = std::abs(added.sum[i]) + std::abs(bias_values[i % c.out]);
    added.sum[i] += bias_values[i % c.out];
  }
  const Product nothing{Values(c.rows * c.in), Values(c.rows * c.in)};
  Product before{dw_before.ToVector<double>(), Values(c.out * c.in)};
  for (size_t i = 0; i < before.sum.size(); ++i) before.largest[i] = std::abs(before.sum[i]);
  ExpectClose(
      y.value(),
      Multiply(c.rows, c.in, c.out, x_rows, [&](int64_t l, int64_t j) { return w_rows(j, l); }),
      c.in, added, kRounding, "y");
  ExpectClose(x.grad(), Multiply(c.rows, c.out, c.in, d_rows, w_columns), c.out, nothing, kRounding,
              "dx");
  ExpectClose(
      weight.grad(),
      Multiply(
          c.out, c.rows, c.in, [&](int64_t i, int64_t l) { return d_columns(l, i); }, x_columns),
      c.rows, before, 0, "dw");
  EXPECT_EQ(residual.grad().ToVector<double>(), dy_host.ToVector<double>());
}

class LinearFloat8 : public testing::TestWithParam<LinearPrecision> {};
INSTANTIATE_TEST_SUITE_P(Recipes, LinearFloat8, testing::ValuesIn(kRecipes));

TEST_P(LinearFloat8, EqualsProductsOfRoundedFactors) {
  Check({128, 64, 48}, GetParam());
  Check({1, 16, 16}, GetParam());
  Check({37, 272, 144}, GetParam());   // rows that 16 does not divide
  Check({300, 128, 400}, GetParam());  // several tiles, the last ones in part
  Check({132, 400, 272}, GetParam());  // blocks, the last ones in part
}

TEST_P(LinearFloat8, ScalesFitEveryMagnitude) {
  Check({64, 64, 64, 1e-6, 1e-9}, GetParam());
  Check({64, 64, 64, 1e4, 1e3}, GetParam());
  Check({64, 128, 64, 1, 1, /*outliers=*/true}, GetParam());
}

TEST_P(LinearFloat8, ZerosAndNoRows) {
  Check({64, 64, 64, 0, 0}, GetParam());
  Check({0, 64, 64}, GetParam());
}

// Prints the relative errors of each recipe's products to exact products. Scales of parts may not
// do worse than a scale of the tensor where a channel of x is far out.
TEST(LinearFloat8Errors, OfRecipes) {
  constexpr int64_t kRows = 256, kIn = 512, kOut = 384;
  for (const double outlier : {1.0, 100.0, 1e4}) {
    Values x = RandomTensor({kRows, kIn}, 1).ToVector<double>();
    for (int64_t i = 0; i < kRows; ++i) x[i * kIn + 7] *= outlier;
    const Tensor x_host = Tensor::FromVector(x, {kRows, kIn}).To(DType::kBFloat16);
    const Tensor w_host = RandomTensor({kOut, kIn}, 2, 0.05).To(DType::kBFloat16);
    const Tensor dy_host = RandomTensor({kRows, kOut}, 3).To(DType::kBFloat16);
    const Values xv = x_host.ToVector<double>(), wv = w_host.ToVector<double>(),
                 dv = dy_host.ToVector<double>();
    const auto x_at = [&](int64_t i, int64_t l) { return xv[i * kIn + l]; };
    const auto w_at = [&](int64_t i, int64_t l) { return wv[i * kIn + l]; };
    const auto d_at = [&](int64_t i, int64_t l) { return dv[i * kOut + l]; };
    const Values y_exact =
        Multiply(kRows, kIn, kOut, x_at, [&](int64_t l, int64_t j) { return w_at(j, l); }).sum;
    const Values dx_exact = Multiply(kRows, kOut, kIn, d_at, w_at).sum;
    const Values dw_exact =
        Multiply(
            kOut, kRows, kIn, [&](int64_t i, int64_t l) { return d_at(l, i); }, x_at)
            .sum;
    // The median of a column's errors relative to its size: the outlier's own column does not hide
    // the others.
    const auto error = [](const Tensor& actual, const Values& exact, int64_t cols) {
      const Values values = actual.ToVector<double>();
      Values errors(cols);
      for (int64_t j = 0; j < cols; ++j) {
        double off = 0, size = 0;
        for (size_t i = static_cast<size_t>(j); i < exact.size(); i += static_cast<size_t>(cols)) {
          off += std::pow(values[i] - exact[i], 2);
          size += std::pow(exact[i], 2);
        }
        errors[j] = std::sqrt(off / size);
      }
      std::nth_element(errors.begin(), errors.begin() + cols / 2, errors.end());
      return errors[cols / 2];
    };
    double of_tensors = 0;
    for (const LinearPrecision recipe : kRecipes) {
      const Variable input(x_host.To(DeviceType::kCuda), /*requires_grad=*/true);
      const Variable weight(w_host.To(DeviceType::kCuda),
                            Tensor::Zeros({kOut, kIn}, DType::kFloat32).To(DeviceType::kCuda));
      Tape tape;
      const Variable y = Linear(tape, input, weight, {}, {}, nullptr, ResultUse::kRead, recipe);
      ASSERT_TRUE(tape.Backward(std::vector<Variable>{y}, {dy_host.To(DeviceType::kCuda)}).ok());
      const double dw_error = error(weight.grad(), dw_exact, kIn);
      std::printf("ERRORS outlier %g recipe %d y %.5f dx %.5f dw %.5f\n", outlier,
                  static_cast<int>(recipe), error(y.value(), y_exact, kOut),
                  error(input.grad(), dx_exact, kIn), dw_error);
      if (recipe == LinearPrecision::kFloat8) of_tensors = dw_error;
      EXPECT_LE(dw_error, 1.01 * of_tensors);
    }
  }
}

// A value that is not finite must reach the loss, so that the step is skipped.
TEST_P(LinearFloat8, NotFiniteIsNotHidden) {
  for (const float bad : {INFINITY, NAN}) {
    Tensor x = RandomTensor({32, 64}, 1).To(DType::kFloat32);
    x.data<float>()[5] = bad;
    const Variable input(x.To(DType::kBFloat16).To(DeviceType::kCuda), /*requires_grad=*/false);
    const Variable weight(RandomTensor({48, 64}, 2).To(DType::kBFloat16).To(DeviceType::kCuda),
                          /*requires_grad=*/false);
    Tape tape(/*recording=*/false);
    const Variable y = Linear(tape, input, weight, {}, {}, nullptr, ResultUse::kRead, GetParam());
    EXPECT_TRUE(std::isnan(y.value().ToVector<double>()[0]));
  }
}

TEST_P(LinearFloat8, EveryRunGivesTheSameBits) {
  const auto run = [recipe = GetParam()] {
    const Variable x(RandomTensor({513, 256}, 1).To(DType::kBFloat16).To(DeviceType::kCuda),
                     /*requires_grad=*/true);
    const Variable weight(RandomTensor({512, 256}, 2).To(DType::kBFloat16).To(DeviceType::kCuda),
                          Tensor::Zeros({512, 256}, DType::kFloat32).To(DeviceType::kCuda));
    Tape tape;
    const Variable y = Linear(tape, x, weight, {}, {}, nullptr, ResultUse::kRead, recipe);
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
