// Tests the ops that consist of GEMMs. ops_test.cc tests the others.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "burst/autograd/tape.h"
#include "burst/base/parallel.h"
#include "burst/tensor/tensor.h"
#include "model/ops/ops.h"
#include "tests/model/ops/ops_checks.h"
#include "tests/testing/gradient_check.h"

namespace burst {
namespace {

// --- linear -----------------------------------------------------------------------------------

TEST(Linear, GradientsWithBiasAndResidual) {
  const Variable x = Leaf(RandomTensor({2, 3, 4}, 1)), weight = Leaf(RandomTensor({5, 4}, 2));
  const Variable bias = Leaf(RandomTensor({5}, 3)), residual = Leaf(RandomTensor({2, 3, 5}, 4));
  CheckGradients({{"x", x}, {"weight", weight}, {"bias", bias}, {"residual", residual}},
                 [&](Tape& tape) -> std::vector<Variable> {
                   return {Linear(tape, x, weight, bias, residual)};
                 });
  CheckGradients({{"x", x}, {"weight", weight}},
                 [&](Tape& tape) -> std::vector<Variable> { return {Linear(tape, x, weight)}; });
  CheckGradients({{"bias", bias}, {"weight", weight}}, [&](Tape& tape) -> std::vector<Variable> {
    return {Linear(tape, Variable(x.value()), weight, bias)};
  });
}

TEST(Linear, InputOverSeveralTrailingAxes) {
  const Variable x = Leaf(RandomTensor({2, 3, 2, 3}, 1)), weight = Leaf(RandomTensor({5, 6}, 2));
  Tape tape(false);
  const Variable y = Linear(tape, x, weight);
  EXPECT_EQ(y.shape(), Shape({2, 3, 5}));
  CheckGradients({{"x", x}, {"weight", weight}},
                 [&](Tape& tape) -> std::vector<Variable> { return {Linear(tape, x, weight)}; });
}

TEST(Linear, SharedResidualAndInput) {  // x + W x, so both contributions reach x
  const Variable x = Leaf(RandomTensor({3, 4}, 1)), weight = Leaf(RandomTensor({4, 4}, 2));
  CheckGradients({{"x", x}, {"weight", weight}}, [&](Tape& tape) -> std::vector<Variable> {
    const Variable h = Add(tape, x, x);
    return {Linear(tape, h, weight, {}, h)};
  });
}

TEST(Linear, GradientsAddUpOverUses) {
  const Variable x = Leaf(RandomTensor({3, 4}, 1)), weight = Leaf(RandomTensor({4, 4}, 2));
  CheckGradients({{"x", x}, {"weight", weight}}, [&](Tape& tape) -> std::vector<Variable> {
    const Variable h = Linear(tape, x, weight);
    return {Add(tape, Linear(tape, h, weight), Linear(tape, h, weight))};
  });
}

TEST(Linear, FloatAgreesWithDouble) {
  // Dot products have at most 200 terms. Their error is below length * eps of their size.
  ExpectFloatAgrees(
      {RandomTensor({200, 96}, 1), RandomTensor({130, 96}, 2), RandomTensor({130}, 3)},
      [](Tape& tape, const std::vector<Variable>& in) { return Linear(tape, in[0], in[1], in[2]); },
      200 * kEps32);
}

// --- cross-entropy
// --------------------------------------------------------------------------------

struct LossCase {
  Variable x = Leaf(RandomTensor({2, 5, 6}, 1));
  Variable weight = Leaf(RandomTensor({11, 6}, 2));
  std::vector<int32_t> target = {3, -1, 0, 10, 5, 5, -1, 2, 7, 10};
  Tensor targets = Ints(target, {2, 5});
};

double NaiveLoss(const LossCase& c, const LossTerms& terms = 1) {
  const Values x = ValuesOf(c.x), weight = ValuesOf(c.weight);
  double loss = 0;
  for (int64_t t = 0; t < 10; ++t) {
    const int32_t target = c.target[t];
    if (target < 0) continue;
    double sum = 0, picked = 0;
    for (int64_t v = 0; v < 11; ++v) {
      double logit = 0;
      for (int64_t j = 0; j < 6; ++j) logit += x[t * 6 + j] * weight[v * 6 + j];
      if (terms.softcap > 0) logit = terms.softcap * std::tanh(logit / terms.softcap);
      sum += std::exp(logit);
      if (v == target) picked = logit;
    }
    loss += std::log(sum) - picked + terms.z * std::pow(std::log(sum), 2);
  }
  return terms.scale * loss;
}

TEST(CrossEntropy, ValuesAndGradientsForAnyChunk) {
  const LossCase c;
  const double expected = 0.125 * NaiveLoss(c);
  for (const int64_t chunk : {0, 1, 3, 10, 64}) {
    Tape tape(false);
    const Variable loss = LinearCrossEntropy(tape, c.x, c.weight, c.targets, 0.125, chunk);
    EXPECT_NEAR(loss.value().ToVector<double>()[0], expected, 100 * kEps64 * expected);
    CheckGradients({{"x", c.x}, {"weight", c.weight}}, [&](Tape& tape) -> std::vector<Variable> {
      return {LinearCrossEntropy(tape, c.x, c.weight, c.targets, 0.125, chunk)};
    });
  }
}

TEST(CrossEntropy, SquaredLogsumexpAndSoftcap) {
  const LossCase c;
  for (const LossTerms& terms :
       {LossTerms(0.125, 0.3), LossTerms(0.125, 0, 1.5), LossTerms(0.125, 0.3, 1.5)}) {
    for (const int64_t chunk : {0, 3}) {
      Tape tape(false);
      const Variable loss = LinearCrossEntropy(tape, c.x, c.weight, c.targets, terms, chunk);
      const double expected = NaiveLoss(c, terms);
      EXPECT_NEAR(loss.value().ToVector<double>()[0], expected, 100 * kEps64 * expected);
      CheckGradients({{"x", c.x}, {"weight", c.weight}}, [&](Tape& tape) -> std::vector<Variable> {
        return {LinearCrossEntropy(tape, c.x, c.weight, c.targets, terms, chunk)};
      });
    }
  }
}

TEST(SoftCap, ValuesAndGradients) {
  const Variable x = Leaf(RandomTensor({3, 700}, 1, 4));
  Tape tape(false);
  const Values in = ValuesOf(x), out = ValuesOf(SoftCap(tape, x, 2.5));
  for (size_t i = 0; i < in.size(); ++i) {
    EXPECT_NEAR(out[i], 2.5 * std::tanh(in[i] / 2.5), 10 * kEps64);
  }
  const Variable small = Leaf(RandomTensor({2, 5}, 2, 3));
  CheckGradients({{"x", small}},
                 [&](Tape& tape) -> std::vector<Variable> { return {SoftCap(tape, small, 2.5)}; });
}

TEST(CrossEntropy, IgnoredTokensGetNoGradient) {
  const LossCase c;
  Tape tape;
  const Variable loss = LinearCrossEntropy(tape, c.x, c.weight, c.targets, 1, 3);
  ASSERT_TRUE(tape.Backward(loss).ok());
  const Values dx = c.x.grad().ToVector<double>();
  for (int64_t t = 0; t < 10; ++t) {
    double size = 0;
    for (int64_t j = 0; j < 6; ++j) size += std::abs(dx[t * 6 + j]);
    EXPECT_EQ(size == 0, c.target[t] == -1);
  }
}

TEST(CrossEntropy, UniformLogitsGiveLogVocab) {
  LossCase c;
  c.x.value().Fill(0);
  Tape tape(false);
  const Variable loss = LinearCrossEntropy(tape, c.x, c.weight, c.targets, 1.0 / 8);
  EXPECT_NEAR(loss.value().ToVector<double>()[0], std::log(11.0), 10 * kEps64);
}

TEST(CrossEntropy, LargeLogits) {
  // Logits are (0, 1e4, -1e4). The losses are 1e4, 0 and 2e4, and nothing overflows.
  const Variable x = Leaf(Tensor::FromVector<float>({1, 1, 1}, {3, 1}));
  const Variable weight = Leaf(Tensor::FromVector<float>({0, 1e4f, -1e4f}, {3, 1}));
  const Tensor targets = Ints({0, 1, 2}, {3});
  Tape tape;
  const Variable loss = LinearCrossEntropy(tape, x, weight, targets, 1);
  EXPECT_EQ(loss.value().ToVector<double>()[0], 3e4);
  ASSERT_TRUE(tape.Backward(loss).ok());
  EXPECT_EQ(weight.grad().ToVector<float>(), std::vector<float>({-1, 2, -1}));
}

TEST(CrossEntropy, NoTokensNoLoss) {
  const Variable x = Leaf(Tensor::Zeros({1, 0, 4}, DType::kFloat32));
  const Variable weight = Leaf(RandomTensor({3, 4}, 1, 1, DType::kFloat32));
  Tape tape;
  const Variable loss = LinearCrossEntropy(tape, x, weight, Ints({}, {1, 0}), 1);
  EXPECT_EQ(loss.value().ToVector<double>()[0], 0);
  ASSERT_TRUE(tape.Backward(loss).ok());
  EXPECT_EQ(weight.grad().ToVector<float>(), std::vector<float>(12, 0));
}

TEST(CrossEntropy, FloatAgreesWithDouble) {
  std::vector<int32_t> target(200);
  for (int i = 0; i < 200; ++i) target[i] = i * 7 % 100 - 1;
  const Tensor targets = Ints(target, {200});
  ScopedThreadPool pool(2);
  // Logits and gradients are sums of at most 200 terms.
  ExpectFloatAgrees(
      {RandomTensor({200, 32}, 1), RandomTensor({100, 32}, 2)},
      [&](Tape& tape, const std::vector<Variable>& in) {
        return LinearCrossEntropy(tape, in[0], in[1], targets, 0.01, 64);
      },
      200 * kEps32);
}

// GPUs have another kernel for long rows. Logits are of order 3, their logsumexp of order 10.
TEST(CrossEntropy, FloatAgreesWithDoubleInLongRows) {
  constexpr int64_t kVocab = 20003;
  const Tensor targets = Ints({0, 1, -1, 20002, 9999}, {5});
  ScopedThreadPool pool(2);
  for (const LossTerms& terms :
       {LossTerms(0.01), LossTerms(0.01, 0.05), LossTerms(0.01, 0.05, 4)}) {
    ExpectFloatAgrees(
        {RandomTensor({5, 8}, 1), RandomTensor({kVocab, 8}, 2)},
        [&](Tape& tape, const std::vector<Variable>& in) {
          return LinearCrossEntropy(tape, in[0], in[1], targets, terms);
        },
        200 * kEps32);
  }
}

}  // namespace
}  // namespace burst
