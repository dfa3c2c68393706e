// Compares AttentionOp, the attention of all ranks as an op on the tape, with naive attention in
// double precision.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "burst/attention/burst_attention.h"
#include "burst/attention/exact_attention.h"
#include "burst/attention/sequence_parallel_attention.h"
#include "burst/attention/strategy.h"
#include "burst/autograd/tape.h"
#include "burst/base/status.h"
#include "burst/comm/communicator.h"
#include "burst/tensor/tensor.h"
#include "tests/attention/sequence_problem.h"
#include "tests/testing/attention_reference.h"
#include "tests/testing/test_device.h"

namespace burst {
namespace {

constexpr int64_t kHeads = 4, kKvHeads = 2, kHeadDim = 8;

// Returns the heads of Q (0), K (1) or V (2) in a tensor [batch, length, kHeads + 2 kKvHeads,
// head_dim].
Tensor Part(const Tensor& packed, int i) {
  return i == 0 ? packed.Slice(2, 0, kHeads)
                : packed.Slice(2, kHeads + (i - 1) * kKvHeads, kKvHeads);
}

// Returns this rank's tokens of q, k and v in one tensor.
Tensor Pack(const Inputs& inputs, const std::vector<int32_t>& positions) {
  const Tensor packed = Tensor::Empty(
      {inputs.q.dim(0), static_cast<int64_t>(positions.size()), kHeads + 2 * kKvHeads, kHeadDim},
      inputs.q.dtype(), kTestDevice);
  Part(packed, 0).CopyFrom(TakeRows(inputs.q, positions));
  Part(packed, 1).CopyFrom(TakeRows(inputs.k, positions));
  Part(packed, 2).CopyFrom(TakeRows(inputs.v, positions));
  return packed;
}

// q, k and v are slices of one tensor, and the loss depends on lse, too.
TEST(AttentionOpTest, StridedInputsAndLse) {
  const int64_t batch = 2, seqlen = 20;
  const Inputs inputs = RandomInputs(batch, seqlen, kHeads, kKvHeads, kHeadDim, DType::kFloat64, 8);
  const auto attention = *BurstAttention::Create({}, nullptr);
  const auto schedule =
      std::make_shared<const AttentionSchedule>(*attention->Schedule(seqlen, Mask::Causal()));
  const Tensor packed = Pack(inputs, schedule->shard().local_positions());
  Tape tape;
  const Variable q(Part(packed, 0), true), k(Part(packed, 1), true), v(Part(packed, 2), true);
  Variable lse;
  const Variable out = AttentionOp(tape, {*attention, schedule}, q, k, v, &lse);
  ASSERT_TRUE(
      tape.Backward({out, lse}, {inputs.dout.To(kTestDevice), inputs.dlse.To(kTestDevice)}).ok());
  ExpectClose({out.value(), lse.value(), q.grad(), k.grad(), v.grad()},
              Reference(inputs, {true, 0}, 1 / std::sqrt(8.0)), 1e-12);
}

// The packed op on several ranks takes slices of one tensor and returns slices of one gradient.
TEST(AttentionOpTest, Packed) {
  const int64_t batch = 2, seqlen = 37;
  Inputs inputs = RandomInputs(batch, seqlen, kHeads, kKvHeads, kHeadDim, DType::kFloat64, 8);
  inputs.dlse = Tensor::ZerosLike(inputs.dlse);  // this op does not return lse
  const AttentionResults expected = Reference(inputs, {true, 0}, 1 / std::sqrt(8.0));
  for (const auto& [strategy, ranks, group_size] :
       {std::tuple(Strategy::kBurst, 1, 1), std::tuple(Strategy::kBurst, 3, 1),
        std::tuple(Strategy::kRing, 3, 1), std::tuple(Strategy::kBurstUlysses, 4, 2),
        std::tuple(Strategy::kBurstUlysses, 4, 4)}) {
    SCOPED_TRACE(testing::Message()
                 << Name(strategy) << ", " << ranks << " ranks, groups of " << group_size);
    BurstAttentionOptions options;
    if (strategy == Strategy::kBurst) options.backward = BackwardDirection::kBurst;
    const AttentionResults actual = EmptyResults(inputs);
    actual.lse.CopyFrom(expected.lse);
    const absl::Status status = RunTestRanks(
        ranks,
        [&, strategy = strategy, group_size = group_size](Communicator& comm) -> absl::Status {
          BURST_ASSIGN_OR_RETURN(const auto attention,
                                 CreateAttention(strategy, options, group_size, &comm));
          BURST_ASSIGN_OR_RETURN(AttentionSchedule made,
                                 attention->Schedule(seqlen, Mask::Causal()));
          const auto schedule = std::make_shared<const AttentionSchedule>(std::move(made));
          const std::vector<int32_t>& positions = schedule->shard().local_positions();
          Tape tape;
          const Variable qkv(Pack(inputs, positions), true);
          const Variable out = AttentionOp(tape, {*attention, schedule}, qkv, kHeads, kKvHeads);
          BURST_RETURN_IF_ERROR(tape.Backward({out}, {TakeRows(inputs.dout, positions)}));
          PutRows(out.value(), positions, actual.out);
          PutRows(Part(qkv.grad(), 0), positions, actual.dq);
          PutRows(Part(qkv.grad(), 1), positions, actual.dk);
          PutRows(Part(qkv.grad(), 2), positions, actual.dv);
          return absl::OkStatus();
        });
    ASSERT_TRUE(status.ok()) << status;
    ExpectClose(actual, expected, 1e-12);
  }
}

// ---- Sinks. On any ranks they equal those of naive attention, with one more key without a value.

struct WithSinks {
  AttentionResults results;
  std::vector<double> dsinks;
};

WithSinks NaiveWithSinks(const Inputs& inputs, const std::vector<double>& sinks,
                         const std::function<bool(int64_t b, int64_t i, int64_t j)>& visible) {
  WithSinks naive;
  NaiveScores scores;
  scores.sinks = sinks;
  scores.dsinks = &naive.dsinks;
  naive.results = NaiveAttention(inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse,
                                 1 / std::sqrt(static_cast<double>(kHeadDim)), visible,
                                 DType::kFloat64, scores);
  return naive;
}

using MakeAttention =
    std::function<absl::StatusOr<std::unique_ptr<SequenceParallelAttention>>(Communicator& comm)>;
using MakeSchedule =
    std::function<absl::StatusOr<AttentionSchedule>(const SequenceParallelAttention& attention)>;

// Runs the op with lse on all ranks, and adds up the sinks' gradient over the ranks.
WithSinks RunWithSinks(int ranks, const Inputs& inputs, const std::vector<double>& sinks,
                       const MakeAttention& make_attention, const MakeSchedule& make_schedule) {
  WithSinks run = {EmptyResults(inputs), std::vector<double>(sinks.size(), 0)};
  std::mutex mutex;
  const absl::Status status = RunTestRanks(ranks, [&](Communicator& comm) -> absl::Status {
    BURST_ASSIGN_OR_RETURN(const auto attention, make_attention(comm));
    BURST_ASSIGN_OR_RETURN(AttentionSchedule made, make_schedule(*attention));
    const auto schedule = std::make_shared<const AttentionSchedule>(std::move(made));
    const std::vector<int32_t>& positions = schedule->shard().local_positions();
    const auto take = [&](const Tensor& all) { return Variable(TakeRows(all, positions), true); };
    const Variable q = take(inputs.q), k = take(inputs.k), v = take(inputs.v);
    const Variable logits(Tensor::FromVector(sinks, {kHeads}, DeviceType::kCpu).To(kTestDevice),
                          true);
    int64_t parts = 0;
    Tape tape;
    Variable lse;
    const TapeAttention with = {*attention, schedule, /*dropout=*/{}, logits, [&] { ++parts; }};
    const Variable out = AttentionOp(tape, with, q, k, v, &lse);
    BURST_RETURN_IF_ERROR(tape.Backward(
        {out, lse}, {TakeRows(inputs.dout, positions), TakeColumns(inputs.dlse, positions)}));
    EXPECT_GE(parts, 1);
    PutRows(out.value(), positions, run.results.out);
    PutColumns(lse.value(), positions, run.results.lse);
    PutRows(q.grad(), positions, run.results.dq);
    PutRows(k.grad(), positions, run.results.dk);
    PutRows(v.grad(), positions, run.results.dv);
    const std::vector<double> own = logits.grad().To(DeviceType::kCpu).ToVector<double>();
    const std::lock_guard<std::mutex> lock(mutex);
    for (size_t h = 0; h < own.size(); ++h) run.dsinks[h] += own[h];
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  return run;
}

void ExpectClose(const WithSinks& actual, const WithSinks& expected, double tolerance) {
  ExpectClose(actual.results, expected.results, tolerance);
  for (size_t h = 0; h < expected.dsinks.size(); ++h) {
    EXPECT_NEAR(actual.dsinks[h], expected.dsinks[h],
                tolerance * (1 + std::abs(expected.dsinks[h])))
        << "head " << h;
  }
}

constexpr double kSinks[] = {0.7, -1.5, 9, 0};

TEST(AttentionSinksTest, OnAnyRanksAreThoseOfOne) {
  const int64_t seqlen = 37;
  const std::vector<double> sinks(std::begin(kSinks), std::end(kSinks));
  const Inputs inputs = RandomInputs(2, seqlen, kHeads, kKvHeads, kHeadDim, DType::kFloat64, 8);
  for (const NamedMask& named : kMasks) {
    const IntervalMask mask = named.Of(seqlen);
    const WithSinks expected = NaiveWithSinks(
        inputs, sinks, [&](int64_t b, int64_t i, int64_t j) { return Visible(mask, b, i, j); });
    for (const auto& [strategy, ranks, group_size] :
         {std::tuple(Strategy::kSingle, 1, 1), std::tuple(Strategy::kBurst, 3, 1),
          std::tuple(Strategy::kRing, 3, 1), std::tuple(Strategy::kUlysses, 2, 1),
          std::tuple(Strategy::kBurstUlysses, 4, 2), std::tuple(Strategy::kBurstUlysses, 4, 4)}) {
      for (const Layout layout : kLayouts) {
        SCOPED_TRACE(testing::Message() << named.name << " " << Name(strategy) << " "
                                        << Name(layout) << " ranks " << ranks);
        BurstAttentionOptions options;
        options.layout = layout;
        if (strategy == Strategy::kBurst) options.backward = BackwardDirection::kBurst;
        const auto make = [&, strategy = strategy, group_size = group_size](Communicator& comm) {
          return CreateAttention(strategy, options, group_size, &comm);
        };
        ExpectClose(RunWithSinks(ranks, inputs, sinks, make,
                                 [&](const SequenceParallelAttention& attention) {
                                   return attention.Schedule(seqlen, MaskOf(mask));
                                 }),
                    expected, 1e-12);
      }
    }
  }
}

// Slices take several calls of a kernel in a round. Some rows see no key.
TEST(AttentionSinksTest, CountOnceUnderSlices) {
  const int64_t seqlen = 60;
  const std::vector<double> sinks(std::begin(kSinks), std::end(kSinks));
  const Inputs inputs = RandomInputs(1, seqlen, kHeads, kKvHeads, kHeadDim, DType::kFloat64, 9);
  const MaskSlices slices = {{{0, 20, 40, 60}, {10, 50, 3, 9}, {10, 50, 20, 35}, {15, 30, 50, 60}}};
  const WithSinks expected = NaiveWithSinks(
      inputs, sinks, [&](int64_t b, int64_t i, int64_t j) { return Visible(slices, b, i, j); });
  for (int ranks : {1, 3}) {
    BurstAttentionOptions options;
    ExpectClose(RunWithSinks(
                    ranks, inputs, sinks,
                    [&](Communicator& comm) {
                      return CreateAttention(Strategy::kBurst, options, 1, &comm);
                    },
                    [&](const SequenceParallelAttention& attention) {
                      return attention.Schedule(seqlen, Mask::Slices(slices));
                    }),
                expected, 1e-12);
  }
}

// Exact attention computes the gradients in parts, one for each chunk.
TEST(AttentionSinksTest, OfExactAttention) {
  const int64_t seqlen = 48;
  const std::vector<double> sinks(std::begin(kSinks), std::end(kSinks));
  const Inputs inputs = RandomInputs(2, seqlen, kHeads, kKvHeads, kHeadDim, DType::kFloat64, 9);
  const WithSinks expected =
      NaiveWithSinks(inputs, sinks, [](int64_t, int64_t i, int64_t j) { return j <= i; });
  for (int ranks : {1, 3}) {
    ExactAttentionOptions options;
    options.chunk = 8;
    options.grid = ExactGrid::For(0x1p-44, 2 * seqlen / options.chunk);
    ExpectClose(
        RunWithSinks(
            ranks, inputs, sinks,
            [&](Communicator& comm) -> absl::StatusOr<std::unique_ptr<SequenceParallelAttention>> {
              return ExactAttention::Create(options, &comm);
            },
            [&](const SequenceParallelAttention& attention) {
              return attention.Schedule(seqlen, Mask::Causal());
            }),
        expected, 1e-11);
  }
}

TEST(AttentionSinksTest, ThatDoNotFitAreRefused) {
  const int64_t seqlen = 5;
  const auto attention = *BurstAttention::Create({}, nullptr);
  const AttentionSchedule schedule = *attention->Schedule(seqlen, Mask::Causal());
  const Tensor q = Tensor::Zeros({1, seqlen, kHeads, kHeadDim}, DType::kFloat32, kTestDevice);
  AttentionCall call = {&schedule, q, q, q};
  AttentionResult result;
  for (const Tensor& sinks : {Tensor::Zeros({kHeads + 1}, DType::kFloat32, kTestDevice),
                              Tensor::Zeros({kHeads}, DType::kFloat64, kTestDevice)}) {
    call.sinks = sinks;
    const absl::Status status = attention->Forward(call, &result);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("sinks: must be a float32 tensor [4]"), std::string::npos)
        << status;
  }
}

}  // namespace
}  // namespace burst
