// Tests softcap, ALiBi and dropout over ranks as threads. The reference is naive attention in
// double precision over the undivided sequence. Heads and positions are global on any rank.

#include "burst/attention/score_options.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "benchmarks/study/study.h"
#include "burst/attention/burst_attention.h"
#include "burst/attention/strategy.h"
#include "burst/base/philox.h"
#include "burst/base/status.h"
#include "burst/kernels/scores.h"
#include "tests/attention/sequence_problem.h"
#include "tests/testing/attention_reference.h"

namespace burst {
namespace {

constexpr uint64_t kSeed = 77;

NaiveScores Naive(const ScoreOptions& options) {
  NaiveScores naive;
  naive.softcap = options.softcap;
  if (!options.alibi_slopes.empty()) {
    naive.bias = [slopes = options.alibi_slopes](int64_t h, int64_t i, int64_t j) {
      return -double{slopes[h]} * std::abs(i - j);
    };
  }
  if (options.dropout != 0) {
    naive.weight = [dropout = options.dropout](int64_t b, int64_t h, int64_t i, int64_t j) {
      const auto word = [](int64_t n) { return static_cast<uint32_t>(n); };
      const PhiloxCounter words = Philox(kSeed, {word(j / 4), word(i), word(h), word(b)});
      return words[j % 4] * 0x1p-32 < dropout ? 0 : 1 / (1 - dropout);
    };
  }
  return naive;
}

AttentionResults Expected(const Inputs& inputs, const ScoreOptions& scores,
                          const std::function<bool(int64_t b, int64_t i, int64_t j)>& visible) {
  return NaiveAttention(inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse, 0.25, visible,
                        DType::kFloat64, Naive(scores));
}

// Returns the largest score of each head, [batch, heads], by its definition.
std::vector<double> LargestScores(
    const Inputs& inputs, const ScoreOptions& options,
    const std::function<bool(int64_t b, int64_t i, int64_t j)>& visible) {
  const int64_t length = inputs.q.dim(1), heads = inputs.q.dim(2), kv_heads = inputs.k.dim(2);
  const int64_t d = inputs.q.dim(3);
  std::vector<double> largest;
  for (int64_t b = 0; b < inputs.q.dim(0); ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      double max = -HUGE_VAL;
      for (int64_t i = 0; i < length; ++i) {
        for (int64_t j = 0; j < length; ++j) {
          if (!visible(b, i, j)) continue;
          const int64_t kv_head = h / (heads / kv_heads);
          const double* const q = inputs.q.data<double>() + ((b * length + i) * heads + h) * d;
          const double* const k =
              inputs.k.data<double>() + ((b * length + j) * kv_heads + kv_head) * d;
          double score = std::inner_product(q, q + d, k, 0.0);
          score *= 0.25;
          if (options.softcap != 0) score = options.softcap * std::tanh(score / options.softcap);
          if (!options.alibi_slopes.empty()) score -= options.alibi_slopes[h] * std::abs(i - j);
          max = std::max(max, score);
        }
      }
      largest.push_back(max);
    }
  }
  return largest;
}

// Returns the rounding of a sum over the keys, plus 4 eps times the bias, whose slope is at most
// 1/2 (tests/kernels/changed_scores_test.cc).
double Tolerance(int64_t seqlen) {
  return (1e-13 + 4 * 0.5 * std::numeric_limits<double>::epsilon()) * seqlen;
}

// The part of a rank: with tensor parallelism its heads of all tokens, otherwise all heads of its
// tokens.
struct Part {
  std::vector<int32_t> positions;
  int rank = 0, ranks = 1;  // ranks that divide the heads

  Tensor Heads(const Tensor& tensor, int axis) const {
    const int64_t count = tensor.dim(axis) / ranks;
    return tensor.Slice(axis, rank * count, count);
  }
  Tensor Take(const Tensor& tensor) const { return TakeRows(Heads(tensor, 2), positions); }
  void Put(const Tensor& own, const Tensor& all) const { PutRows(own, positions, Heads(all, 2)); }
};

// With kSingle several ranks are a group of tensor parallelism, each with its heads of all tokens.
absl::Status RunRank(Strategy strategy, const BurstAttentionOptions& options, int group_size,
                     const Inputs& inputs, const Mask& mask, const AttentionResults& results,
                     const std::vector<double>* largest, Communicator& comm) {
  const bool tensor = strategy == Strategy::kSingle && comm.world_size() > 1;
  BURST_ASSIGN_OR_RETURN(
      const auto attention,
      CreateAttention(strategy, options, group_size, tensor ? nullptr : &comm,
                      tensor ? RankGroup{comm.world_size(), comm.rank()} : RankGroup{}));
  const int64_t seqlen = inputs.q.dim(1);
  BURST_ASSIGN_OR_RETURN(const AttentionSchedule schedule, attention->Schedule(seqlen, mask));
  Part part = {schedule.shard().local_positions()};
  if (tensor) {
    part = {schedule.shard().group_positions(0), comm.rank(), comm.world_size()};
  }
  AttentionCall call = {&schedule, part.Take(inputs.q), part.Take(inputs.k), part.Take(inputs.v)};
  call.dropout = {kSeed};
  call.wants_max_logits = largest != nullptr;
  AttentionResult result;
  BURST_RETURN_IF_ERROR(attention->Forward(call, &result));
  if (largest != nullptr) {
    const Tensor& own = result.max_logits;
    const int64_t heads = inputs.q.dim(2), count = heads / part.ranks;
    EXPECT_EQ(own.shape(), (Shape{inputs.q.dim(0), count}));
    for (int64_t i = 0; i < own.numel(); ++i) {
      const int64_t head = i / count * heads + part.rank * count + i % count;
      EXPECT_NEAR(own.data<float>()[i], (*largest)[head], 1e-6 * (1 + std::abs((*largest)[head])));
    }
  }
  AttentionGradients gradients = {part.Take(inputs.dout),
                                  TakeColumns(part.Heads(inputs.dlse, 1), part.positions)};
  BURST_RETURN_IF_ERROR(attention->Backward(call, result, &gradients));
  part.Put(result.out, results.out);
  PutColumns(result.lse, part.positions, part.Heads(results.lse, 1));
  part.Put(gradients.dq, results.dq);
  part.Put(gradients.dk, results.dk);
  part.Put(gradients.dv, results.dv);
  return absl::OkStatus();
}

AttentionResults RunRanksOf(Strategy strategy, const BurstAttentionOptions& options, int ranks,
                            int group_size, const Inputs& inputs, const Mask& mask,
                            const std::vector<double>* largest = nullptr) {
  const AttentionResults results = EmptyResults(inputs);
  const absl::Status status = RunTestRanks(ranks, [&](Communicator& comm) {
    return RunRank(strategy, options, group_size, inputs, mask, results, largest, comm);
  });
  EXPECT_TRUE(status.ok()) << status;
  return results;
}

struct Changes {
  const char* name;
  double softcap;
  bool alibi;
  double dropout;

  ScoreOptions For(int64_t num_heads) const {
    return {softcap, alibi ? AlibiSlopes(num_heads) : std::vector<float>(), dropout};
  }
};

class ScoreOptionsTest : public testing::TestWithParam<Changes> {};

// The cases are ranks x strategies x layouts x masks x directions of the backward, with two batch
// rows and grouped heads.
TEST_P(ScoreOptionsTest, DoNotDependOnTheRanks) {
  constexpr int64_t kSeqlen = 61;
  for (int64_t kv_heads : {4, 2}) {
    const Inputs inputs = RandomInputs(2, kSeqlen, 4, kv_heads, 16, DType::kFloat64, 3);
    for (const NamedMask& named : kMasks) {
      IntervalMask mask = named.Of(kSeqlen);
      if (mask.window != 0) mask.window = 9;  // so rings send the edges only
      BurstAttentionOptions options;
      options.softmax_scale = 0.25;
      options.scores = GetParam().For(4);
      const auto visible = [&](int64_t b, int64_t i, int64_t j) { return Visible(mask, b, i, j); };
      const AttentionResults expected = Expected(inputs, options.scores, visible);
      const std::vector<double> largest = LargestScores(inputs, options.scores, visible);
      const auto check = [&](Strategy strategy, int ranks, int group_size) {
        SCOPED_TRACE(testing::Message()
                     << named.name << " " << kv_heads << " KV heads " << Name(strategy) << " "
                     << Name(options.layout) << " " << ranks << " ranks in groups of " << group_size
                     << ", " << Name(options.backward));
        ExpectClose(
            RunRanksOf(strategy, options, ranks, group_size, inputs, MaskOf(mask), &largest),
            expected, Tolerance(kSeqlen));
      };
      for (Layout layout : kLayouts) {
        options.layout = layout;
        for (BackwardDirection direction : {BackwardDirection::kBurst, BackwardDirection::kRing}) {
          options.backward = direction;
          for (int ranks : {1, 2, 3, 4}) check(Strategy::kBurst, ranks, 1);
          check(Strategy::kBurstUlysses, 4, 2);
        }
        options.backward = BackwardDirection::kAuto;
        check(Strategy::kRing, 3, 1);
        check(Strategy::kUlysses, 4, 1);
        check(Strategy::kSingle, 2, 1);
      }
    }
  }
}

// The mask has several parts, some of them lists of blocks.
TEST_P(ScoreOptionsTest, WithSlices) {
  constexpr int32_t kSeqlen = 600;
  const Inputs inputs = RandomInputs(1, kSeqlen, 2, 1, 8, DType::kFloat64, 4);
  const MaskSlices slices = {{{0, kSeqlen, 0, 100, SliceKind::kFull},
                              {100, 500, 130, 470, SliceKind::kCausal},
                              {256, 512, 384, 600, SliceKind::kFull}}};
  BurstAttentionOptions options;
  options.softmax_scale = 0.25;
  options.scores = GetParam().For(2);
  const AttentionResults expected =
      Expected(inputs, options.scores,
               [&](int64_t b, int64_t i, int64_t j) { return Visible(slices, b, i, j); });
  for (Layout layout : {Layout::kContiguous, Layout::kZigzag}) {
    options.layout = layout;
    for (int ranks : {1, 2}) {
      SCOPED_TRACE(testing::Message() << Name(layout) << " " << ranks << " ranks");
      ExpectClose(RunRanksOf(Strategy::kBurst, options, ranks, 1, inputs, Mask::Slices(slices)),
                  expected, Tolerance(kSeqlen));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, ScoreOptionsTest,
                         testing::Values(Changes{"Softcap", 1.5, false, 0},
                                         Changes{"Alibi", 0, true, 0},
                                         Changes{"Dropout", 0, false, 0.3},
                                         Changes{"Together", 2.5, true, 0.1},
                                         Changes{"MaxLogitsAlone", 0, false, 0}),
                         [](const auto& info) { return std::string(info.param.name); });

// Rows and heads are counted from the numbers that a caller gives. In a separate call, some of them
// drop the same weights as among all.
TEST(DropoutTest, CountsFromTheFirstRowAndHead) {
  const Inputs inputs = RandomInputs(3, 21, 4, 4, 8, DType::kFloat64, 6);
  BurstAttentionOptions options;
  options.scores.dropout = 0.4;
  const auto attention = *BurstAttention::Create(options, nullptr);
  const AttentionSchedule schedule = *attention->Schedule(21, Mask::Causal());
  struct Run {
    Tensor out, dq, dk, dv;
  };
  const auto run = [&](const WeightDropout& dropout, int64_t row, int64_t head) {
    const auto part = [&](const Tensor& t) {
      return t.Slice(0, row, 3 - row).Slice(2, head, 4 - head).Contiguous();
    };
    AttentionCall call = {&schedule, part(inputs.q), part(inputs.k), part(inputs.v)};
    call.dropout = dropout;
    AttentionResult result;
    EXPECT_TRUE(attention->Forward(call, &result).ok());
    AttentionGradients gradients = {part(inputs.dout)};
    EXPECT_TRUE(attention->Backward(call, result, &gradients).ok());
    return Run{result.out, gradients.dq, gradients.dk, gradients.dv};
  };
  const Run all = run({kSeed}, 0, 0), some = run({kSeed, /*first_row=*/1, /*first_head=*/2}, 1, 2);
  for (const auto& [whole, part] : {std::pair(all.out, some.out), std::pair(all.dq, some.dq),
                                    std::pair(all.dk, some.dk), std::pair(all.dv, some.dv)}) {
    const std::vector<double> expected =
        whole.Slice(0, 1, 2).Slice(2, 2, 2).Contiguous().ToVector<double>();
    const std::vector<double> actual = part.ToVector<double>();
    ASSERT_EQ(actual.size(), expected.size());
    for (size_t i = 0; i < actual.size(); ++i) EXPECT_NEAR(actual[i], expected[i], 1e-13) << i;
  }
  // Dropout that is not enabled drops nothing.
  const Run none = run({kSeed, 0, 0, /*enabled=*/false}, 0, 0);
  const auto plain = *BurstAttention::Create({}, nullptr);
  AttentionResult result;
  ASSERT_TRUE(plain->Forward({&schedule, inputs.q, inputs.k, inputs.v}, &result).ok());
  EXPECT_EQ(none.out.ToVector<double>(), result.out.ToVector<double>());
  EXPECT_NE(all.out.ToVector<double>(), result.out.ToVector<double>());
}

// ---- Refused options.

void ExpectRefused(const absl::Status& status, const std::string& reason) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find(reason), std::string::npos) << status;
}

TEST(ScoreOptionsErrorsTest, OptionsOutOfRange) {
  const auto create = [](const ScoreOptions& scores) {
    BurstAttentionOptions options;
    options.scores = scores;
    return BurstAttention::Create(options, nullptr).status();
  };
  ExpectRefused(create({-1, {}, 0}), "softcap: must be 0, or from 1e-30 to 1e30; got -1");
  ExpectRefused(create({1e31, {}, 0}), "softcap: must be 0, or from 1e-30 to 1e30; got 1e+31");
  ExpectRefused(create({std::nan(""), {}, 0}), "got nan");
  ExpectRefused(create({0, {}, 1}), "dropout: must be in [0, 1); got 1");
  ExpectRefused(create({0, {}, -0.5}), "got -0.5");
  ExpectRefused(create({0, {std::numeric_limits<float>::infinity()}, 0}), "alibi_slopes");
}

absl::Status RunOneRank(const BurstAttentionOptions& options, bool cross,
                        bool wants_max_logits = false) {
  BURST_ASSIGN_OR_RETURN(const auto attention, BurstAttention::Create(options, nullptr));
  BURST_ASSIGN_OR_RETURN(
      const AttentionSchedule schedule,
      attention->Schedule(cross ? Sequences::Cross(8, 8) : Sequences(8), Mask::Full()));
  const Inputs inputs = RandomInputs(1, 8, 4, 4, 8, DType::kFloat32, 1);
  AttentionCall call = {&schedule, inputs.q, inputs.k, inputs.v};
  call.wants_max_logits = wants_max_logits;
  AttentionResult result;
  return attention->Forward(call, &result);
}

TEST(ScoreOptionsErrorsTest, WhatDoesNotFitACall) {
  BurstAttentionOptions options;
  options.scores.alibi_slopes = AlibiSlopes(3);
  ExpectRefused(RunOneRank(options, false), "alibi_slopes: 3 slopes for 4 query heads");
  options.scores.alibi_slopes = AlibiSlopes(4);
  EXPECT_TRUE(RunOneRank(options, false).ok());
  ExpectRefused(RunOneRank(options, true), "alibi_slopes: the queries and keys of cross-attention");
  options.scores = {/*softcap=*/0, {}, /*dropout=*/0.5};
  EXPECT_TRUE(RunOneRank(options, true).ok());
}

TEST(ScoreOptionsErrorsTest, EightBits) {
  BurstAttentionOptions options;
  options.fp8_forward = true;
  options.scores = {/*softcap=*/3, {}, 0};
  ExpectRefused(RunOneRank(options, false), "fp8_forward: must be off with softcap");
  options.scores = {};
  ExpectRefused(RunOneRank(options, false, /*wants_max_logits=*/true),
                "fp8_forward: must be off with max_logits");
}

TEST(ScoreOptionsErrorsTest, KernelsThatDoNotChangeScores) {
  BurstAttentionOptions options;
  options.kernels = &TiledKernels(64);
  EXPECT_TRUE(RunOneRank(options, false).ok());
  options.scores = {/*softcap=*/3, {}, 0};
  ExpectRefused(RunOneRank(options, false), "softcap: these attention kernels do not");
  options.scores = {0, AlibiSlopes(4), 0};
  ExpectRefused(RunOneRank(options, false), "alibi_slopes: these attention kernels do not");
  options.scores = {0, {}, 0.5};
  ExpectRefused(RunOneRank(options, false), "dropout: these attention kernels do not");
  options.scores = {};
  ExpectRefused(RunOneRank(options, false, /*wants_max_logits=*/true),
                "max_logits: these attention kernels do not");
}

}  // namespace
}  // namespace burst
