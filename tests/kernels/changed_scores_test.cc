// Compares softcap, ALiBi, dropout and the largest scores with naive attention in double precision.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "burst/base/parallel.h"
#include "burst/base/philox.h"
#include "burst/kernels/flash_attention.h"
#include "burst/kernels/scores.h"
#include "burst/tensor/tensor.h"
#include "tests/kernels/attention_problem.h"
#include "tests/kernels/no_worse.h"
#include "tests/testing/attention_reference.h"
#include "tests/testing/test_device.h"

namespace burst {
namespace {

constexpr uint64_t kSeed = 0x123456789;

const AttentionKernels& Kernels() { return KernelsOf(kTestDevice); }

// The changes of a call, and the arrays that they point to.
struct Changes {
  const char* name;
  double softcap = 0;
  bool alibi = false;
  double dropout = 0;
  int64_t first_head = 0;
  // Positions are `step` i + `first`. With step 0 none are given, which means 0, 1, ...
  int32_t step = 0, first = 0;

  std::vector<float> slopes = {};
  Tensor on_device[3] = {};  // slopes and positions of For's last call

  int32_t Position(int64_t i) const {
    return static_cast<int32_t>(step == 0 ? i : step * i + first);
  }

  ScoreChanges For(const FlashAttentionShape& shape) {
    slopes = AlibiSlopes(shape.num_heads);
    std::vector<int32_t> positions[2];
    for (int64_t i = 0; i < shape.q_len; ++i) positions[0].push_back(Position(i));
    for (int64_t j = 0; j < shape.k_len; ++j) positions[1].push_back(Position(j));
    on_device[0] = Tensor::FromVector(slopes, {shape.num_heads}, kTestDevice);
    on_device[1] = Tensor::FromVector(positions[0], {shape.q_len}, kTestDevice);
    on_device[2] = Tensor::FromVector(positions[1], {shape.k_len}, kTestDevice);
    ScoreChanges changes;
    changes.softcap = softcap;
    if (alibi) {
      changes.alibi_slopes = static_cast<const float*>(on_device[0].raw_data());
    }
    changes.dropout = dropout;
    changes.seed = kSeed;
    changes.first_head = first_head;
    if (step != 0) {
      changes.q_positions = static_cast<const int32_t*>(on_device[1].raw_data());
      changes.k_positions = static_cast<const int32_t*>(on_device[2].raw_data());
    }
    return changes;
  }

  NaiveScores Naive() const {
    NaiveScores naive;
    naive.softcap = softcap;
    if (alibi) {
      naive.bias = [this](int64_t h, int64_t i, int64_t j) {
        return -double{slopes[h]} * std::abs(Position(i) - Position(j));
      };
    }
    if (dropout != 0) {
      naive.weight = [this](int64_t b, int64_t h, int64_t i, int64_t j) {
        const auto j_position = static_cast<uint32_t>(Position(j));
        const PhiloxCounter words =
            Philox(kSeed, {j_position / 4, static_cast<uint32_t>(Position(i)),
                           static_cast<uint32_t>(first_head + h), static_cast<uint32_t>(b)});
        return words[j_position % 4] * 0x1p-32 < dropout ? 0 : 1 / (1 - dropout);
      };
    }
    return naive;
  }
};

const Changes kChanges[] = {
    {"softcap", /*softcap=*/1.5},
    {"alibi", 0, /*alibi=*/true},
    {"dropout", 0, false, /*dropout=*/0.3},
    {"all", 2.5, true, 0.1, /*first_head=*/5, /*step=*/3, /*first=*/7},
};

struct Outcome {
  AttentionResults results;
  std::vector<float> max_logits;
};

Outcome RunKernels(const Problem& problem, Changes changes) {
  const ScoreChanges scores = changes.For(problem.shape());
  Outcome run = {UnfilledResults(problem), {}};
  const AttentionResults& result = run.results;
  const Tensor max_logits =
      Tensor::Empty({problem.dlse.dim(0) * problem.dlse.dim(1)}, DType::kFloat32, kTestDevice);
  max_logits.Fill(-std::numeric_limits<double>::infinity());
  FlashForwardParams forward = ForwardParams(problem, result);
  forward.shape.scores = scores;
  forward.max_logits = static_cast<float*>(max_logits.raw_data());
  Kernels().Forward(forward);
  const Tensor delta = DeltaOf(problem, result.out, Kernels());
  FlashBackwardParams backward = BackwardParams(problem, result, delta);
  backward.shape.scores = scores;
  Kernels().Backward(backward);
  run.max_logits = max_logits.ToVector<float>();
  return run;
}

// Scores of ordinary size as in flash_attention_test. A bias x is rounded in the slope, the product
// and the sum, and the backward does so again: a weight's relative error is 4 eps x at most. With
// 16 bits, this holds for the float32 results, lse and the largest scores.
double Tolerance(DType dtype, double largest_bias) {
  const bool is_float = dtype != DType::kFloat64;
  const double eps =
      is_float ? std::numeric_limits<float>::epsilon() : std::numeric_limits<double>::epsilon();
  return (is_float ? 1e-5 : 1e-13) + 4 * eps * largest_bias;
}

class ChangedScoresTest : public testing::TestWithParam<MaskKind> {};

TEST_P(ChangedScoresTest, EqualNaiveAttention) {
  const struct {
    int64_t q_len, k_len, heads, kv_heads, d;
  } cases[] = {{1, 1, 1, 1, 16},     {7, 129, 3, 1, 7},    {70, 33, 4, 2, 20},
               {131, 300, 2, 2, 64}, {300, 300, 2, 1, 8},  {5, 0, 2, 2, 16},
               {3, 600, 4, 1, 32},   {131, 200, 2, 1, 96}, {131, 131, 2, 2, 128},
               {70, 200, 3, 1, 192}, {131, 131, 2, 1, 256}};
  if (GetParam() == MaskKind::kBlocks && !Kernels().ChangesScoresOfBlocks()) {
    GTEST_SKIP() << "the CPU's change scores under lists of blocks";
  }
  for (const auto& c : cases) {
    for (DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
      if (!Kernels().Check(kTestDevice, dtype, c.d).ok()) continue;
      const Problem problem(c.d < 96 ? 2 : 1, c.q_len, c.k_len, c.heads, c.kv_heads, c.d,
                            GetParam(), dtype, /*magnitude=*/Is16Bit(dtype) ? 1.5 : 1);
      for (Changes changes : kChanges) {
        SCOPED_TRACE(testing::Message() << c.q_len << "x" << c.k_len << " d" << c.d << " "
                                        << Name(dtype) << " " << changes.name);
        const Outcome run = RunKernels(problem, changes);
        changes.For(problem.shape());
        NaiveScores naive = changes.Naive();
        std::vector<double> max_logits;
        naive.max_logits = &max_logits;
        const AttentionResults expected = problem.Reference(DType::kFloat64, naive);
        const int64_t length = std::max<int64_t>(1, std::max(c.q_len, c.k_len));
        const double largest = changes.alibi ? 0.5 * changes.Position(length) : 0;
        if (Is16Bit(dtype)) {
          naive.max_logits = nullptr;
          ExpectNoWorse(run.results, problem.Reference(dtype, naive), expected,
                        Tolerance(dtype, largest), changes.alibi ? problem.q.dim(0) * c.q_len : 0,
                        changes.alibi ? OffByDelta(problem, expected, problem.k) : 0);
        } else {
          ExpectClose(run.results, expected, Tolerance(dtype, largest));
        }
        for (size_t i = 0; i < max_logits.size(); ++i) {
          if (std::isinf(max_logits[i])) {
            EXPECT_EQ(run.max_logits[i], max_logits[i]);
          } else {  // float32 for any inputs
            EXPECT_NEAR(run.max_logits[i], max_logits[i],
                        Tolerance(DType::kFloat32, largest) * (1 + std::abs(max_logits[i])));
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Masks, ChangedScoresTest, kAllMasks, NameOf);

// The gradients of L = sum(dout out) + sum(dlse lse) are central differences of it. Their error is
// h^2 times a third derivative, and eps |L| / h.
TEST(ChangedScoresTest, GradientsAreCentralDifferences) {
  if (kTestDevice != DeviceType::kCpu) GTEST_SKIP() << "the inputs are changed in place";
  constexpr double kStep = 1e-5;
  const Problem problem(2, 6, 9, 2, 1, 3, MaskKind::kCausal, DType::kFloat64);
  const Changes changes = {"", /*softcap=*/0.7, /*alibi=*/true, /*dropout=*/0.25};
  const auto loss = [&] {
    const AttentionResults results = RunKernels(problem, changes).results;
    double sum = 0;
    for (int64_t i = 0; i < problem.dout.numel(); ++i) {
      sum += problem.dout.data<double>()[i] * results.out.data<double>()[i];
    }
    for (int64_t i = 0; i < problem.dlse.numel(); ++i) {
      sum += problem.dlse.data<double>()[i] * results.lse.data<double>()[i];
    }
    return sum;
  };
  const AttentionResults results = RunKernels(problem, changes).results;
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
  check(problem.q, results.dq);
  check(problem.k, results.dk);
  check(problem.v, results.dv);
}

// With equal weights, and the unit matrix as V and dO, out and dV show which weights are dropped,
// on any device and in any dtype.
TEST(ChangedScoresTest, DropThoseOfKeepsWeight) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (int64_t d : {32, 64, 96, 128, 192, 256}) {
      if (!Kernels().Check(kTestDevice, dtype, d).ok()) continue;
      const int64_t n = d - 3;  // queries and keys
      Problem problem(2, n, n, 3, 3, d, MaskKind::kFull, dtype);
      problem.q.Fill(0);
      std::vector<float> unit(2 * n * 3 * d);
      for (int64_t i = 0; i < 2 * n * 3; ++i) unit[i * d + i / 3 % n] = 1;
      problem.v = problem.dout =
          Tensor::FromVector(unit, {2, n, 3, d}, DeviceType::kCpu).To(dtype).To(kTestDevice);
      for (int32_t first : {0, 7, (1 << 24) + 1}) {
        SCOPED_TRACE(testing::Message() << Name(dtype) << " d" << d << " " << first);
        const Changes changes = {"",         0,    false, /*dropout=*/0.3, /*first_head=*/5,
                                 /*step=*/1, first};
        const AttentionResults results = RunKernels(problem, changes).results;
        const std::vector<double> out = results.out.To(DeviceType::kCpu).ToVector<double>(),
                                  dv = results.dv.To(DeviceType::kCpu).ToVector<double>();
        int64_t wrong = 0;
        for (int64_t b = 0; b < 2; ++b) {
          for (int64_t h = 0; h < 3; ++h) {
            for (int64_t i = 0; i < n; ++i) {
              for (int64_t j = 0; j < n; ++j) {
                const bool kept =
                    KeepsWeight(kSeed, DropoutThreshold(0.3), b, changes.first_head + h,
                                static_cast<int32_t>(i) + first, static_cast<int32_t>(j) + first);
                wrong += (out[((b * n + i) * 3 + h) * d + j] != 0) != kept;
                wrong += (dv[((b * n + j) * 3 + h) * d + i] != 0) != kept;
              }
            }
          }
        }
        EXPECT_EQ(wrong, 0);
      }
    }
  }
}

TEST(ChangedScoresTest, ThreadsChangeNoBit) {
  if (kTestDevice != DeviceType::kCpu) GTEST_SKIP() << "threads are the CPU's";
  const Problem problem(1, 600, 700, 3, 1, 16, MaskKind::kCausal, DType::kFloat32);
  Outcome one;
  for (int threads : {1, 2, 5}) {
    const ScopedThreadPool pool(threads);
    const Outcome run = RunKernels(problem, kChanges[3]);
    if (threads == 1) one = run;
    ExpectBitwiseEqual(run.results, one.results);
    EXPECT_EQ(run.max_logits, one.max_logits);
  }
}

// A call raises the largest scores and never lowers them, so they are the largest ones of all
// calls. -0 is above negative numbers.
TEST(MaxLogitsTest, AreRaised) {
  for (DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
    if (!Kernels().Check(kTestDevice, dtype, 8).ok()) continue;
    Problem problem(1, 5, 5, 1, 1, 8, MaskKind::kFull, dtype);
    const auto raised = [&](float q, float k, float before) {
      problem.q.Fill(q);
      problem.k.Fill(k);
      const Tensor out = Poisoned(problem.q), lse = Poisoned(problem.dlse);
      FlashForwardParams params = {problem.shape(),    Operand(problem.q),
                                   Operand(problem.k), Operand(problem.v),
                                   Operand(out),       lse.raw_data(),
                                   /*merge=*/false,    dtype};
      const Tensor max = Tensor::FromVector(std::vector<float>{before}, {1}, kTestDevice);
      params.max_logits = static_cast<float*>(max.raw_data());
      Kernels().Forward(params);
      return max.ToVector<float>()[0];
    };
    const auto score = static_cast<float>(8 * problem.softmax_scale);
    EXPECT_EQ(raised(1, 1, 1000), 1000);
    EXPECT_FLOAT_EQ(raised(1, 1, -1000), score);
    EXPECT_FLOAT_EQ(raised(1, -1, -1000), -score);
    EXPECT_FLOAT_EQ(raised(1, -1, -HUGE_VALF), -score);
    EXPECT_EQ(raised(1, -1, 2), 2);
    EXPECT_EQ(raised(0, -1, -2), 0);
    EXPECT_EQ(raised(0, -1, 2), 2);
  }
}

// Dropout drops p n of n weights, within 5 standard deviations. Two heads, rows, queries or seeds
// agree as often as if they were independent.
TEST(DropoutTest, KeepsAsManyAsItShould) {
  constexpr int64_t kQueries = 300, kKeys = 301, kPairs = kQueries * kKeys;
  const auto near = [](int64_t count, double probability) {
    const double deviation = std::sqrt(kPairs * probability * (1 - probability));
    EXPECT_NEAR(count, kPairs * probability, 5 * deviation + 1e-9) << probability;
  };
  for (double dropout : {0.001, 0.1, 0.5, 0.9}) {
    const uint32_t threshold = DropoutThreshold(dropout);
    int64_t dropped = 0, same_head = 0, same_row = 0, same_query = 0, same_seed = 0;
    for (int32_t i = 0; i < kQueries; ++i) {
      for (int32_t j = 0; j < kKeys; ++j) {
        const bool kept = KeepsWeight(kSeed, threshold, 1, 2, i, j);
        dropped += !kept;
        same_head += kept == KeepsWeight(kSeed, threshold, 1, 3, i, j);
        same_row += kept == KeepsWeight(kSeed, threshold, 2, 2, i, j);
        same_query += kept == KeepsWeight(kSeed, threshold, 1, 2, i + kQueries, j);
        same_seed += kept == KeepsWeight(kSeed + 1, threshold, 1, 2, i, j);
      }
    }
    near(dropped, dropout);
    const double agree = dropout * dropout + (1 - dropout) * (1 - dropout);
    for (int64_t same : {same_head, same_row, same_query, same_seed}) near(same, agree);
  }
}

TEST(AlibiSlopesTest, AreThoseOfThePaper) {
  EXPECT_EQ(AlibiSlopes(1), std::vector<float>({0x1p-8f}));
  EXPECT_EQ(AlibiSlopes(8), std::vector<float>({0x1p-1f, 0x1p-2f, 0x1p-3f, 0x1p-4f, 0x1p-5f,
                                                0x1p-6f, 0x1p-7f, 0x1p-8f}));
  // The slopes are those for 8 heads, then every second one of the slopes for 16 heads: 2^-0.5,
  // 2^-1.5, ...
  const std::vector<float> twelve = AlibiSlopes(12);
  ASSERT_EQ(twelve.size(), 12);
  EXPECT_EQ(std::vector<float>(twelve.begin(), twelve.begin() + 8), AlibiSlopes(8));
  for (int m = 0; m < 4; ++m) EXPECT_EQ(twelve[8 + m], AlibiSlopes(16)[2 * m]);
}

}  // namespace
}  // namespace burst
