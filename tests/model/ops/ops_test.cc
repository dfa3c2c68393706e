// Tests every op without GEMMs on the CPU and, compiled once more, on a GPU. Values are compared
// with a naive loop in double, gradients with finite differences, and float with double. See
// dense_ops_test.cc for the ops with GEMMs, activations_test.cc, and ops_bf16_test.cc for bfloat16.
#include "model/ops/ops.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "burst/autograd/tape.h"
#include "burst/base/parallel.h"
#include "burst/tensor/tensor.h"
#include "tests/model/ops/ops_checks.h"
#include "tests/testing/gradient_check.h"
#include "tests/testing/test_device.h"

namespace burst {
namespace {

// --- normalization ---------------------------------------------------------------------------

// The widths are those that a GPU reads element by element, in vectors by one warp, and by several.
class NormalizationTest : public testing::TestWithParam<int> {};

TEST_P(NormalizationTest, RmsNormValuesAndGradients) {
  // There are more rows than one block of the weight's sum takes.
  const int64_t width = GetParam(), rows = (1200 / width + 2) / 2 * 2;
  const Variable x = Leaf(RandomTensor({2, rows / 2, width}, 1, 2.0));
  const Variable weight = Leaf(RandomTensor({width}, 2));
  const Values in = ValuesOf(x), w = ValuesOf(weight);
  Values expected(rows * width);
  for (int64_t i = 0; i < rows; ++i) {
    const double* row = in.data() + i * width;
    double square = 0;
    for (int64_t j = 0; j < width; ++j) square += row[j] * row[j];
    for (int64_t j = 0; j < width; ++j) {
      expected[i * width + j] = row[j] / std::sqrt(square / width + 1e-2) * w[j];
    }
  }
  Tape tape(false);
  ExpectClose(RmsNorm(tape, x, weight, 1e-2).value(), expected, 10 * kEps64);
  CheckGradients({{"x", x}, {"weight", weight}}, [&](Tape& tape) -> std::vector<Variable> {
    return {RmsNorm(tape, x, weight, 1e-2)};
  });
}

// The weight is 1 + the stored one, as in Gemma.
TEST_P(NormalizationTest, RmsNormOfAnOffsetWeight) {
  const int64_t width = GetParam(), rows = (600 / width + 2) / 2 * 2;
  const Variable x = Leaf(RandomTensor({2, rows / 2, width}, 1, 2.0));
  const Variable weight = Leaf(RandomTensor({width}, 2));
  const Values w = ValuesOf(weight);
  Values one_more;
  for (const double stored : w) one_more.push_back(1 + stored);
  const Variable whole(Tensor::FromVector(one_more, {width}, kTestDevice));
  const auto forward = [&](Tape& tape) {
    return RmsNorm(tape, x, weight, 1e-2, LinearPrecision::kTensors, /*offset=*/1);
  };
  Tape tape(false);
  ExpectClose(forward(tape).value(), ValuesOf(RmsNorm(tape, x, whole, 1e-2)), 10 * kEps64);
  CheckGradients({{"x", x}, {"weight", weight}},
                 [&](Tape& tape) -> std::vector<Variable> { return {forward(tape)}; });
}

TEST_P(NormalizationTest, LayerNormValuesAndGradients) {
  const int64_t width = GetParam(), rows = (1200 / width + 2) / 2 * 2;
  const Variable x = Leaf(RandomTensor({2, rows / 2, width}, 1, 2.0));
  const Variable weight = Leaf(RandomTensor({width}, 2)), bias = Leaf(RandomTensor({width}, 3));
  const Values in = ValuesOf(x), w = ValuesOf(weight), b = ValuesOf(bias);
  Values expected(rows * width);
  for (int64_t i = 0; i < rows; ++i) {
    const double* row = in.data() + i * width;
    double mean = 0, variance = 0;
    for (int64_t j = 0; j < width; ++j) mean += row[j] / width;
    for (int64_t j = 0; j < width; ++j) variance += std::pow(row[j] - mean, 2) / width;
    for (int64_t j = 0; j < width; ++j) {
      expected[i * width + j] = (row[j] - mean) / std::sqrt(variance + 1e-2) * w[j] + b[j];
    }
  }
  Tape tape(false);
  ExpectClose(LayerNorm(tape, x, weight, bias, 1e-2).value(), expected, 20 * kEps64);
  CheckGradients({{"x", x}, {"weight", weight}, {"bias", bias}},
                 [&](Tape& tape) -> std::vector<Variable> {
                   return {LayerNorm(tape, x, weight, bias, 1e-2)};
                 });
}

INSTANTIATE_TEST_SUITE_P(Widths, NormalizationTest, testing::Values(9, 10, 66, 280));

// The gradient that is on the input already, from a residual branch, is kept.
TEST(Normalization, GradientsAddUpWithTheResidual) {
  const Variable x = Leaf(RandomTensor({5, 12}, 1)), weight = Leaf(RandomTensor({12}, 2));
  const Variable bias = Leaf(RandomTensor({12}, 3));
  CheckGradients({{"x", x}, {"weight", weight}, {"bias", bias}},
                 [&](Tape& tape) -> std::vector<Variable> {
                   const Variable h = Add(tape, x, x);
                   const Variable y = Add(tape, h, RmsNorm(tape, h, weight, 1e-2));
                   return {Add(tape, y, LayerNorm(tape, y, weight, bias, 1e-2))};
                 });
}

TEST(Normalization, InputsWithoutGradient) {
  const Tensor x = RandomTensor({5, 12}, 1).To(kTestDevice);
  const Variable weight = Leaf(RandomTensor({12}, 2)), bias = Leaf(RandomTensor({12}, 3));
  CheckGradients({{"weight", weight}, {"bias", bias}}, [&](Tape& tape) -> std::vector<Variable> {
    return {RmsNorm(tape, Variable(x), weight, 1e-2),
            LayerNorm(tape, Variable(x), weight, bias, 1e-2)};
  });
  const Variable input = Leaf(RandomTensor({5, 12}, 1));
  CheckGradients({{"x", input}}, [&](Tape& tape) -> std::vector<Variable> {
    return {RmsNorm(tape, input, Variable(weight.value()), 1e-2),
            LayerNorm(tape, input, Variable(weight.value()), Variable(bias.value()), 1e-2)};
  });
}

TEST(Normalization, FloatAgreesWithDouble) {
  // The error is a few sums over at most `width` or `rows` = 128 terms.
  ExpectFloatAgrees(
      {RandomTensor({128, 96}, 1), RandomTensor({96}, 2)},
      [](Tape& tape, const std::vector<Variable>& in) { return RmsNorm(tape, in[0], in[1], 1e-5); },
      128 * kEps32);
  ExpectFloatAgrees(
      {RandomTensor({128, 96}, 1), RandomTensor({96}, 2), RandomTensor({96}, 3)},
      [](Tape& tape, const std::vector<Variable>& in) {
        return LayerNorm(tape, in[0], in[1], in[2], 1e-5);
      },
      128 * kEps32);
}

// The sums over rows are taken in the same order in every run, for any number of threads.
TEST(Normalization, SameBitsForAnyNumberOfThreads) {
  std::vector<std::vector<float>> gradients;
  for (const int threads : {1, 2, 3}) {
    ScopedThreadPool pool(threads);
    const Variable x = Leaf(RandomTensor({500, 64}, 1, 1, DType::kFloat32));
    const Variable weight = Leaf(RandomTensor({64}, 2, 1, DType::kFloat32));
    const Variable bias = Leaf(RandomTensor({64}, 3, 1, DType::kFloat32));
    Tape tape;
    const Variable y = LayerNorm(tape, x, weight, bias, 1e-5);
    ASSERT_TRUE(tape.Backward(std::vector<Variable>{y},
                              {RandomTensor(y.shape(), 4, 1, DType::kFloat32).To(kTestDevice)})
                    .ok());
    gradients.push_back(weight.grad().ToVector<float>());
  }
  EXPECT_EQ(gradients[0], gradients[1]);
  EXPECT_EQ(gradients[0], gradients[2]);
}

// --- rope -------------------------------------------------------------------------------------

// The parameters are a head's channels, and how many of them turn.
class RopeTest : public testing::TestWithParam<std::pair<int, int>> {};

TEST_P(RopeTest, ValuesAndGradients) {
  const int64_t heads = 3, head_dim = GetParam().first, channels = GetParam().second;
  const std::vector<int32_t> positions = {0, 1, 5, 6, 0, 70000};
  const Variable x = Leaf(RandomTensor({2, 3, heads, head_dim}, 1));
  const auto table =
      MakeRopeTable(Ints(positions, {2, 3}), MakeRopeAngles(channels, 10000), DType::kFloat64);
  const Values in = ValuesOf(x);
  Values expected = in;
  const int64_t rotated = 2;  // the third head is copied
  for (int64_t t = 0; t < 6; ++t) {
    for (int64_t h = 0; h < rotated; ++h) {
      for (int64_t i = 0; i < channels / 2; ++i) {
        const double angle = positions[t] * std::pow(10000.0, -2.0 * i / channels);
        const int64_t first = (t * heads + h) * head_dim + i, second = first + channels / 2;
        const double a = in[first], b = in[second];
        expected[first] = a * std::cos(angle) - b * std::sin(angle);
        expected[second] = b * std::cos(angle) + a * std::sin(angle);
      }
    }
  }
  Tape tape(false);
  ExpectClose(Rope(tape, x, table, rotated).value(), expected, 4 * kEps64);
  CheckGradients({{"x", x}}, [&](Tape& tape) -> std::vector<Variable> {
    return {Rope(tape, x, table, rotated)};
  });
  CheckGradients({{"x", x}},
                 [&](Tape& tape) -> std::vector<Variable> { return {Rope(tape, x, table)}; });
}

// Vectors have 2 numbers of float64.
INSTANTIATE_TEST_SUITE_P(HeadDims, RopeTest,
                         testing::Values(std::pair(6, 6), std::pair(8, 8), std::pair(8, 6),
                                         std::pair(16, 4), std::pair(16, 12), std::pair(6, 4)));

// With theta 100, the six channel pairs of a head of 12 make 64 / (2 pi) 100^(-i / 6) turns in 64
// tokens: 10.2, 4.7, 2.2, 1.02, 0.47 and 0.22.
TEST(Rope, ScaledFrequencies) {
  RopeScaling scaling;
  scaling.factor = 8;
  scaling.first_context = 64;
  const auto ratios = [&](RopeScaling::Kind kind) {
    scaling.kind = kind;
    const RopeAngles plain = MakeRopeAngles(12, 100), scaled = MakeRopeAngles(12, 100, scaling);
    Values ratios;
    for (int i = 0; i < 6; ++i) ratios.push_back(scaled.frequencies[i] / plain.frequencies[i]);
    return ratios;
  };
  EXPECT_EQ(ratios(RopeScaling::Kind::kLinear), Values(6, 0.125));
  // llama3 keeps channels that turn 4 times, and divides those that turn once. Channel 3 turns
  // 1.0186 times, which is (1.0186 - 1) / 3 = 0.0062 of the way.
  const Values llama = ratios(RopeScaling::Kind::kLlama3);
  EXPECT_EQ(llama[0], 1);
  EXPECT_EQ(llama[1], 1);
  EXPECT_NEAR(llama[2], 0.125 + 0.875 * (2.19449 - 1) / 3, 1e-5);
  EXPECT_NEAR(llama[3], 0.125 + 0.875 * 0.00620, 1e-4);
  EXPECT_EQ(llama[4], 0.125);
  EXPECT_EQ(llama[5], 0.125);
  // With yarn, a channel before the first makes 32 turns, and channel 3.02 makes 1 turn. So the
  // ramp goes from 0 to 4.
  const Values yarn = ratios(RopeScaling::Kind::kYarn);
  for (int i = 0; i < 6; ++i) {
    EXPECT_NEAR(yarn[i], std::max(0.125, 1 - 0.875 * i / 4), 1e-15) << i;
  }
  EXPECT_EQ(MakeRopeAngles(12, 100, scaling).amplitude, 0.1 * std::log(8.0) + 1);
  scaling.amplitude = 1.5;
  EXPECT_EQ(MakeRopeAngles(12, 100, scaling).amplitude, 1.5);
}

TEST(Rope, AmplitudeScalesQueriesAndKeys) {
  RopeAngles angles = MakeRopeAngles(8, 100);
  const Variable x = Leaf(RandomTensor({1, 3, 2, 8}, 1));
  const Tensor positions = Ints({0, 3, 7}, {1, 3});
  Tape tape(false);
  const Values plain =
      ValuesOf(Rope(tape, x, MakeRopeTable(positions, angles, DType::kFloat64), 1));
  angles.amplitude = 1.25;
  const auto table = MakeRopeTable(positions, angles, DType::kFloat64);
  Values expected = plain;
  for (int64_t t = 0; t < 3; ++t) {
    for (int64_t i = 0; i < 8; ++i) expected[t * 16 + i] *= 1.25;  // the other head is copied
  }
  ExpectClose(Rope(tape, x, table, 1).value(), expected, 4 * kEps64);
  CheckGradients({{"x", x}},
                 [&](Tape& tape) -> std::vector<Variable> { return {Rope(tape, x, table, 1)}; });
}

// --- normalization of heads -------------------------------------------------------------------

TEST(RmsNormHeads, IsRmsNormOfEveryHead) {
  const int64_t d = 6;
  const Variable x = Leaf(RandomTensor({2, 3, 7, d}, 1));
  const Variable wq = Leaf(RandomTensor({d}, 2)), wk = Leaf(RandomTensor({d}, 3));
  const Values in = ValuesOf(x), q = ValuesOf(wq), k = ValuesOf(wk);
  Values expected = in;
  for (int64_t row = 0; row < 6 * 7; ++row) {
    const int64_t head = row % 7;
    if (head >= 5) continue;  // 4 queries, 1 key, then values
    double square = 0;
    for (int64_t i = 0; i < d; ++i) square += in[row * d + i] * in[row * d + i] / d;
    for (int64_t i = 0; i < d; ++i) {
      expected[row * d + i] *= (head < 4 ? q : k)[i] / std::sqrt(square + 1e-3);
    }
  }
  const auto forward = [&](Tape& tape) { return RmsNormHeads(tape, x, {wq, 4}, {wk, 1}, 1e-3); };
  Tape tape(false);
  ExpectClose(forward(tape).value(), expected, 10 * kEps64);
  CheckGradients({{"x", x}, {"wq", wq}, {"wk", wk}},
                 [&](Tape& tape) -> std::vector<Variable> { return {forward(tape)}; });
}

TEST(RmsNormHeads, OffsetWeights) {
  const int64_t d = 6;
  const Variable x = Leaf(RandomTensor({2, 3, 7, d}, 1));
  const Variable wq = Leaf(RandomTensor({d}, 2)), wk = Leaf(RandomTensor({d}, 3));
  const auto one_more = [&](const Variable& stored) {
    Values values = ValuesOf(stored);
    for (double& value : values) value += 1;
    return Variable(Tensor::FromVector(values, {d}, kTestDevice));
  };
  const auto forward = [&](Tape& tape) {
    return RmsNormHeads(tape, x, {wq, 4}, {wk, 1}, 1e-3, /*offset=*/1);
  };
  Tape tape(false);
  ExpectClose(forward(tape).value(),
              ValuesOf(RmsNormHeads(tape, x, {one_more(wq), 4}, {one_more(wk), 1}, 1e-3)),
              10 * kEps64);
  CheckGradients({{"x", x}, {"wq", wq}, {"wk", wk}},
                 [&](Tape& tape) -> std::vector<Variable> { return {forward(tape)}; });
}

TEST(RmsNormHeads, IsRmsNormOfAllHeadsTogether) {
  const int64_t d = 6, heads = 6, queries = 3, keys = 2;
  const Variable x = Leaf(RandomTensor({2, 3, heads, d}, 1));
  const Variable wq = Leaf(RandomTensor({queries * d}, 2)), wk = Leaf(RandomTensor({keys * d}, 3));
  const Values in = ValuesOf(x), q = ValuesOf(wq), k = ValuesOf(wk);
  Values expected = in;
  for (int64_t t = 0; t < 6; ++t) {
    for (const bool is_key : {false, true}) {
      const int64_t first = (t * heads + (is_key ? queries : 0)) * d;
      const Values& w = is_key ? k : q;
      double square = 0;
      for (size_t i = 0; i < w.size(); ++i) square += in[first + i] * in[first + i] / w.size();
      for (size_t i = 0; i < w.size(); ++i) {
        expected[first + i] *= w[i] / std::sqrt(square + 1e-3);
      }
    }
  }
  const auto forward = [&](Tape& tape) {
    return RmsNormHeads(tape, x, {wq, queries}, {wk, keys}, 1e-3);
  };
  Tape tape(false);
  ExpectClose(forward(tape).value(), expected, 10 * kEps64);
  CheckGradients({{"x", x}, {"wq", wq}, {"wk", wk}},
                 [&](Tape& tape) -> std::vector<Variable> { return {forward(tape)}; });
}

// Ranks with equal heads normalize them as one rank does. Different heads are in
// tensor_parallel_test. A row fits vectors or not, and several blocks of rows or columns.
TEST(RmsNormHeads, RanksShareTheirHeads) {
  for (const auto& [d, queries, tokens] :
       {std::tuple(6, 3, 5), std::tuple(8, 2, 70), std::tuple(64, 7, 33)}) {
    const int64_t keys = 2, heads = queries + 2 * keys;
    const Variable x = Leaf(RandomTensor({1, tokens, heads, d}, 1));
    const Variable wq = Leaf(RandomTensor({queries * d}, 2)),
                   wk = Leaf(RandomTensor({keys * d}, 3));
    int calls = 0;
    const HeadRanks ranks = {3, [&](const Tensor& numbers) {
                               EXPECT_EQ(numbers.shape(), Shape({2, tokens}));
                               numbers.Scale(3);
                               ++calls;
                             }};
    std::vector<Values> expected;  // of one rank: y, and the gradients of x and of the weights
    for (const HeadRanks& some : {HeadRanks(), ranks}) {
      for (const Variable& leaf : {x, wq, wk}) leaf.MutableGrad().Fill(0);
      Tape tape;
      const Variable y = RmsNormHeads(tape, x, {wq, queries}, {wk, keys}, 1e-3, 0.5, some);
      const Tensor dy = RandomTensor(y.shape(), 4).To(kTestDevice);
      ASSERT_TRUE(tape.Backward(std::vector<Variable>{y}, {dy}).ok());
      const std::vector<Tensor> results = {y.value(), x.grad(), wq.grad(), wk.grad()};
      for (size_t i = 0; i < results.size(); ++i) {
        if (calls == 0) expected.push_back(results[i].ToVector<double>());
        // Sums of a row's or of all tokens' products, in two orders.
        ExpectClose(results[i], expected[i], (tokens + queries * d) * kEps64);
      }
    }
    EXPECT_EQ(calls, 2);
  }
}

TEST(Rope, FarPositionsKeepTheirPhase) {
  const std::vector<int32_t> positions = {0, 1000003, 77, 123456, 77};
  const int64_t half = 32, n = static_cast<int64_t>(positions.size()) * half;
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16}) {
    const auto table =
        MakeRopeTable(Ints(positions, {1, 5}), MakeRopeAngles(2 * half, 10000), dtype);
    EXPECT_EQ(table->cos.dtype(), dtype == DType::kFloat64 ? dtype : DType::kFloat32);
    const Values cos = table->cos.ToVector<double>(), sin = table->sin.ToVector<double>();
    const double tolerance = dtype == DType::kFloat64 ? 2 * kEps64 : kEps32;
    for (int64_t i = 0; i < n; ++i) {
      const double angle = positions[i / half] * std::pow(10000.0, -1.0 * (i % half) / half);
      EXPECT_NEAR(cos[i], std::cos(angle), tolerance);
      EXPECT_NEAR(sin[i], std::sin(angle), tolerance);
    }
  }
}

// --- embedding, add -----------------------------------------------------------------------------

// Rows that two results share get both gradients. A bfloat16 parameter's gradient is in float32.
TEST(SelectRows, ValuesAndGradients) {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kBFloat16}) {
    if (dtype == DType::kBFloat16 && kTestDevice == DeviceType::kCpu) continue;
    const Tensor value = Tensor::FromVector<float>({1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, {5, 2})
                             .To(dtype)
                             .To(kTestDevice);
    const Tensor grad = Tensor::Zeros({5, 2}, SumDType(dtype), kTestDevice);
    grad.Fill(100);
    const Variable weight(value, grad);
    Tape tape;
    const Variable a = SelectRows(tape, weight, {{3, 2}, {0, 1}});
    const Variable b = SelectRows(tape, weight, {{4, 1}});
    EXPECT_EQ(ValuesOf(a), (Values{7, 8, 9, 10, 1, 2}));
    EXPECT_EQ(ValuesOf(b), (Values{9, 10}));
    const auto ones = [&](const Variable& y) {
      const Tensor dy = Tensor::Empty(y.shape(), SumDType(dtype), kTestDevice);
      dy.Fill(1);
      return dy;
    };
    a.MutableGrad().Add(ones(a));
    b.MutableGrad().Add(ones(b));
    b.MutableGrad().Add(ones(b));
    const Variable scalar(Tensor::Zeros({1}, DType::kFloat64, kTestDevice), true);
    ASSERT_TRUE(tape.Backward(scalar).ok());
    EXPECT_EQ(grad.ToVector<double>(), (Values{101, 101, 100, 100, 100, 100, 101, 101, 103, 103}));
  }
}

TEST(Embedding, ValuesAndGradients) {
  const Tensor ids = Ints({3, 0, 3, 1, 4, 3}, {2, 3});
  const Variable table = Leaf(RandomTensor({5, 70}, 1));
  const Values rows = ValuesOf(table);
  Tape tape(false);
  const Variable y = Embedding(tape, ids, table);
  EXPECT_EQ(y.shape(), Shape({2, 3, 70}));
  Values expected;
  for (const int32_t id : ids.ToVector<int32_t>()) {
    for (int64_t j = 0; j < 70; ++j) expected.push_back(rows[id * 70 + j]);
  }
  ExpectClose(y.value(), expected, 0);
  CheckGradients({{"table", table}}, [&](Tape& tape) -> std::vector<Variable> {
    return {Embedding(tape, ids, table)};
  });
}

TEST(Embedding, TokensAndPositions) {
  const std::vector<int32_t> id = {3, 0, 3, 1, 4, 3}, position = {0, 1, 2, 0, 0, 1};
  const Tensor ids = Ints(id, {2, 3}), positions = Ints(position, {2, 3});
  const Variable table = Leaf(RandomTensor({5, 70}, 1)), places = Leaf(RandomTensor({4, 70}, 2));
  const Values rows = ValuesOf(table), position_rows = ValuesOf(places);
  Values expected;
  for (int64_t t = 0; t < 6; ++t) {
    for (int64_t j = 0; j < 70; ++j) {
      expected.push_back(rows[id[t] * 70 + j] + position_rows[position[t] * 70 + j]);
    }
  }
  Tape tape(false);
  ExpectClose(Embedding(tape, ids, table, positions, places).value(), expected, 0);
  CheckGradients({{"table", table}, {"positions", places}},
                 [&](Tape& tape) -> std::vector<Variable> {
                   return {Embedding(tape, ids, table, positions, places)};
                 });
}

// Ids have runs within, across and over many of the chunks that a GPU sums at once.
TEST(Embedding, GradientIsTheSumOverEachIdsTokens) {
  const int64_t vocab = 40, tokens = 1500;
  for (const int64_t width : {3, 20}) {
    std::vector<int32_t> ids(tokens);
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t r = Philox(1, 2, t)[0];
      ids[t] = static_cast<int32_t>(r % 3 == 0 ? 7 : r % 5 == 0 ? 39 : r % 7 == 0 ? 0 : r / 3 % 30);
    }
    const Variable table = Leaf(RandomTensor({vocab, width}, 1));
    const Tensor before = RandomTensor({vocab, width}, 3), dy = RandomTensor({tokens, width}, 2);
    table.MutableGrad().CopyFrom(before);
    Values expected = before.ToVector<double>();
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t j = 0; j < width; ++j) {
        expected[ids[t] * width + j] += dy.data<double>()[t * width + j];
      }
    }
    Tape tape;
    const Variable y = Embedding(tape, Ints(ids, {tokens}), table);
    ASSERT_TRUE(tape.Backward(std::vector<Variable>{y}, {dy.To(kTestDevice)}).ok());
    ExpectClose(table.grad(), expected, tokens * kEps64);
  }
}

TEST(Embedding, NoTokens) {
  const Variable table = Leaf(RandomTensor({5, 4}, 1));
  Tape tape;
  const Variable y = Embedding(tape, Ints({}, {2, 0}), table);
  EXPECT_EQ(y.shape(), Shape({2, 0, 4}));
  ASSERT_TRUE(tape.Backward(std::vector<Variable>{y}, {Tensor::EmptyLike(y.value())}).ok());
  EXPECT_EQ(table.grad().ToVector<double>(), Values(20, 0));
}

TEST(EmbeddingDeathTest, IdOutOfRange) {
  if (kTestDevice == DeviceType::kCuda) {
    GTEST_SKIP() << "on a GPU, ids are validated where the data is read";
  }
  const Variable table = Leaf(RandomTensor({5, 2}, 1));
  Tape tape(false);
  EXPECT_DEATH(Embedding(tape, Tensor::FromVector<int32_t>({5}, {1}), table), "table of 5 rows");
  EXPECT_DEATH(Embedding(tape, Tensor::FromVector<int32_t>({-1}, {1}), table), "table of 5 rows");
}

TEST(Add, Gradients) {
  const Variable a = Leaf(RandomTensor({3, 4}, 1)), b = Leaf(RandomTensor({3, 4}, 2));
  CheckGradients({{"a", a}, {"b", b}}, [&](Tape& tape) -> std::vector<Variable> {
    return {Add(tape, Add(tape, a, b), a)};
  });
}

}  // namespace
}  // namespace burst
