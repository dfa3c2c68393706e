// Tests activations, gates and Scale on the CPU and, compiled once more, on a GPU: against naive
// loops in double, finite differences, and float against double.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "burst/autograd/tape.h"
#include "burst/tensor/tensor.h"
#include "model/ops/ops.h"
#include "tests/model/ops/ops_checks.h"
#include "tests/testing/gradient_check.h"
#include "tests/testing/test_device.h"

namespace burst {
namespace {

double NaiveSilu(double v) { return v / (1 + std::exp(-v)); }

double NaiveGelu(double v) {
  const double pi = 3.14159265358979323846;
  return 0.5 * v * (1 + std::tanh(std::sqrt(2 / pi) * (v + 0.044715 * v * v * v)));
}

struct Gate {
  const char* name;
  Variable (*apply)(Tape& tape, const Variable& gate_up);
  double (*naive)(double v);  // the activation of the gate's half
};
constexpr Gate kGates[] = {{"SwiGlu", SwiGlu, NaiveSilu}, {"GeGlu", GeGlu, NaiveGelu}};

class GateTest : public testing::TestWithParam<std::tuple<Gate, int /*channels*/>> {};

TEST_P(GateTest, ValuesAndGradients) {
  const auto [gate, n] = GetParam();
  const int64_t rows = 3;
  const Variable gate_up = Leaf(RandomTensor({rows, 2 * n}, 1, 2));
  const Values in = ValuesOf(gate_up);
  Values expected;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      const double* row = in.data() + 2 * i * n;
      expected.push_back(gate.naive(row[j]) * row[n + j]);
    }
  }
  Tape tape(false);
  const Variable y = gate.apply(tape, gate_up);
  EXPECT_EQ(y.shape(), Shape({rows, n}));
  ExpectClose(y.value(), expected, 10 * kEps64);
  CheckGradients({{"gate_up", gate_up}}, [&, apply = gate.apply](Tape& tape) {
    return std::vector<Variable>{apply(tape, gate_up)};
  });
}

INSTANTIATE_TEST_SUITE_P(All, GateTest,
                         testing::Combine(testing::ValuesIn(kGates), testing::Values(7, 10)),
                         [](const auto& info) {
                           return std::get<0>(info.param).name +
                                  std::to_string(std::get<1>(info.param));
                         });

// The factor is rounded to the tensor's dtype.
TEST(Scale, ValuesAndGradients) {
  const double factor = std::sqrt(3072.0);  // 55.4256; 55.5 in bfloat16
  const Variable x = Leaf(RandomTensor({5, 7}, 1, 2));
  Values expected = ValuesOf(x);
  for (double& value : expected) value *= factor;
  Tape tape(false);
  ExpectClose(Scale(tape, x, factor).value(), expected, kEps64);
  CheckGradients({{"x", x}},
                 [&](Tape& tape) -> std::vector<Variable> { return {Scale(tape, x, factor)}; });
  const Variable one(Tensor::FromVector<float>({1}, {1}, kTestDevice));
  EXPECT_EQ(ValuesOf(Scale(tape, one, factor))[0], static_cast<float>(factor));
  if (kTestDevice == DeviceType::kCpu) return;
  const Variable half(one.value().To(DType::kBFloat16));
  EXPECT_EQ(ValuesOf(Scale(tape, half, factor))[0], 55.5);
}

TEST(Gelu, ValuesAndGradients) {
  const Variable x = Leaf(RandomTensor({5, 7}, 1, 2));
  Values expected;
  for (const double v : ValuesOf(x)) expected.push_back(NaiveGelu(v));
  Tape tape(false);
  ExpectClose(Gelu(tape, x).value(), expected, 10 * kEps64);
  CheckGradients({{"x", x}}, [&](Tape& tape) -> std::vector<Variable> { return {Gelu(tape, x)}; });
}

TEST(Activations, FiniteFarOut) {
  const Tensor far = Tensor::FromVector<float>({-1e4f, -200, -90, 90, 200, 1e4f}, {6});
  const Variable x = Leaf(far);
  Tape tape;
  const Variable gelu = Gelu(tape, x);
  const std::vector<float> y = gelu.value().ToVector<float>();
  for (int i = 0; i < 3; ++i) EXPECT_NEAR(y[i], 0, 1e-30);
  for (int i = 3; i < 6; ++i) EXPECT_EQ(y[i], far.data<float>()[i]);
  const Tensor ones = Tensor::Empty({6}, DType::kFloat32, kTestDevice);
  ones.Fill(1);
  ASSERT_TRUE(tape.Backward(std::vector<Variable>{gelu}, {ones}).ok());
  for (float g : x.grad().ToVector<float>()) EXPECT_TRUE(std::isfinite(g));

  const Variable gate_up = Leaf(Tensor::FromVector<float>({-1e4f, -90, 90, 2, 2, 2}, {6}));
  const Variable swiglu = SwiGlu(tape, gate_up);
  EXPECT_EQ(swiglu.value().ToVector<float>()[2], 180);
  ASSERT_TRUE(tape.Backward(std::vector<Variable>{swiglu}, {ones.Slice(0, 0, 3)}).ok());
  for (float g : gate_up.grad().ToVector<float>()) EXPECT_TRUE(std::isfinite(g));
}

TEST(Activations, FloatAgreesWithDouble) {
  // The error is a few ulp of exp, multiplied at most by its argument, which is below 20 here.
  ExpectFloatAgrees(
      {RandomTensor({3000}, 1, 3)},
      [](Tape& tape, const std::vector<Variable>& in) { return Gelu(tape, in[0]); }, 30 * kEps32);
  ExpectFloatAgrees(
      {RandomTensor({3, 2000}, 1, 3)},
      [](Tape& tape, const std::vector<Variable>& in) { return SwiGlu(tape, in[0]); }, 30 * kEps32);
  ExpectFloatAgrees(
      {RandomTensor({3, 2000}, 1, 3)},
      [](Tape& tape, const std::vector<Variable>& in) { return GeGlu(tape, in[0]); }, 30 * kEps32);
}

}  // namespace
}  // namespace burst
