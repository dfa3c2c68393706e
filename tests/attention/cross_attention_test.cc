// Tests cross-attention over ranks, as an op on the tape. Queries of one sequence see keys and
// values of another, and each sequence has its own layout. The reference is naive attention in
// double precision.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "burst/attention/burst_attention.h"
#include "burst/attention/sequence_parallel_attention.h"
#include "burst/attention/strategy.h"
#include "burst/autograd/tape.h"
#include "burst/base/status.h"
#include "burst/comm/communicator.h"
#include "tests/attention/sequence_problem.h"
#include "tests/testing/attention_reference.h"
#include "tests/testing/test_device.h"

namespace burst {
namespace {

constexpr int64_t kBatch = 2, kHeads = 4, kKvHeads = 2, kHeadDim = 8;

Inputs CrossInputs(int64_t q_len, int64_t k_len) {
  const auto of = [&](int64_t length) {
    return RandomInputs(kBatch, length, kHeads, kKvHeads, kHeadDim, DType::kFloat64, length);
  };
  Inputs inputs = of(q_len);
  const Inputs keys = of(k_len);
  inputs.k = keys.k;
  inputs.v = keys.v;
  return inputs;
}

struct How {
  Strategy strategy = Strategy::kBurst;
  int ranks = 1;
  int group_size = 1;
  int ranks_per_node = 0;
  Layout q_layout = Layout::kZigzag;
  std::optional<Layout> k_layout = std::nullopt;
  BackwardDirection backward = BackwardDirection::kAuto;

  std::string Text() const {
    return absl::StrCat(Name(strategy), ", ", ranks, " ranks, groups of ", group_size,
                        ", nodes of ", ranks_per_node, ", ", Name(q_layout), ", backward ",
                        Name(backward));
  }
};

// Returns the bytes that all ranks together send.
struct Bytes {
  int64_t forward = 0, backward = 0;
};

void ExpectMatches(const How& how, const Inputs& inputs, Bytes* bytes = nullptr,
                   const MaskSlices& slices = {}) {
  SCOPED_TRACE(testing::Message() << how.Text() << ", " << inputs.q.dim(1) << " queries, "
                                  << inputs.k.dim(1) << " keys");
  BurstAttentionOptions options;
  options.layout = how.q_layout;
  options.backward = how.backward;
  options.ranks_per_node = how.ranks_per_node;
  const AttentionResults actual = EmptyResults(inputs);
  std::vector<SequenceParallelAttention::BytesSent> sent(how.ranks);
  const absl::Status status = RunTestRanks(how.ranks, [&](Communicator& comm) -> absl::Status {
    BURST_ASSIGN_OR_RETURN(const auto attention,
                           CreateAttention(how.strategy, options, how.group_size, &comm));
    BURST_ASSIGN_OR_RETURN(
        AttentionSchedule made,
        attention->Schedule(Sequences::Cross(inputs.q.dim(1), inputs.k.dim(1), how.k_layout),
                            slices.empty() ? Mask::Full() : Mask::Slices(slices)));
    const auto schedule = std::make_shared<const AttentionSchedule>(std::move(made));
    const std::vector<int32_t>& queries = schedule->shard().local_positions();
    const std::vector<int32_t>& keys = schedule->key_shard().local_positions();
    Tape tape;
    const Variable q(TakeRows(inputs.q, queries), true), k(TakeRows(inputs.k, keys), true),
        v(TakeRows(inputs.v, keys), true);
    Variable lse;
    const Variable out = AttentionOp(tape, {*attention, schedule}, q, k, v, &lse);
    BURST_RETURN_IF_ERROR(tape.Backward(
        {out, lse}, {TakeRows(inputs.dout, queries), TakeColumns(inputs.dlse, queries)}));
    PutRows(out.value(), queries, actual.out);
    PutColumns(lse.value(), queries, actual.lse);
    PutRows(q.grad(), queries, actual.dq);
    PutRows(k.grad(), keys, actual.dk);
    PutRows(v.grad(), keys, actual.dv);
    sent[comm.rank()] = attention->bytes_sent();
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
  const AttentionResults expected = NaiveAttention(
      inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse, 1 / std::sqrt(double{kHeadDim}),
      [&](int64_t b, int64_t i, int64_t j) { return slices.empty() || Visible(slices, b, i, j); });
  ExpectClose(actual, expected, 1e-12);
  for (const auto& rank : sent) {
    if (bytes == nullptr) break;
    bytes->forward += rank.forward;
    bytes->backward += rank.backward;
  }
}

// The lengths have fewer tokens than ranks on either side, or are not divisible by a number of
// ranks.
constexpr std::pair<int64_t, int64_t> kLengths[] = {{1, 7}, {5, 3}, {61, 20}, {20, 61}, {40, 40}};

TEST(CrossAttentionTest, RingsOfEveryLayout) {
  for (const auto& [q_len, k_len] : kLengths) {
    const Inputs inputs = CrossInputs(q_len, k_len);
    for (int ranks : {1, 2, 3, 4, 8}) {
      for (Layout q_layout : kLayouts) {
        for (Layout k_layout : kLayouts) {
          for (BackwardDirection backward : {BackwardDirection::kBurst, BackwardDirection::kRing}) {
            How how;
            how.ranks = ranks;
            how.q_layout = q_layout;
            how.k_layout = k_layout;
            how.backward = backward;
            ExpectMatches(how, inputs);
          }
        }
      }
    }
  }
}

// Slices say which queries of one sequence see which keys of the other, in any shape.
TEST(CrossAttentionTest, SlicesOfTwoSequences) {
  const MaskSlices slices = {{{0, 9, 0, 30, SliceKind::kFull},
                              {3, 20, 5, 22, SliceKind::kCausal},
                              {15, 20, 40, 41, SliceKind::kFull}}};
  const Inputs inputs = CrossInputs(20, 41);
  for (const BackwardDirection backward : {BackwardDirection::kBurst, BackwardDirection::kRing}) {
    How how{Strategy::kBurst, 3};
    how.backward = backward;
    ExpectMatches(how, inputs, nullptr, slices);
  }
  ExpectMatches({Strategy::kBurstUlysses, 4, 2}, inputs, nullptr, slices);
}

TEST(CrossAttentionTest, OtherStrategiesAndADoubleRing) {
  for (const auto& [q_len, k_len] : kLengths) {
    const Inputs inputs = CrossInputs(q_len, k_len);
    ExpectMatches({Strategy::kRing, 3}, inputs);
    ExpectMatches({Strategy::kUlysses, 4, 4}, inputs);
    ExpectMatches({Strategy::kBurstUlysses, 4, 2}, inputs);
    ExpectMatches({Strategy::kBurst, 4, 1, /*ranks_per_node=*/2}, inputs);
    How striped{Strategy::kBurstUlysses, 4, 2};
    striped.k_layout = Layout::kStriped;
    ExpectMatches(striped, inputs);
  }
}

// A block visits every other rank, and its gradient comes back by as many transfers. The backward
// takes the direction of fewer bytes: it sends keys around if they are few, and queries if they are
// few.
TEST(CrossAttentionTest, BytesEqualTheFormulas) {
  constexpr int64_t kSize = sizeof(double), kG = 4;
  constexpr int64_t kOfQuery = kSize * kHeads * (3 * kHeadDim + 2);  // Q, dO, dQ; lse, delta
  constexpr int64_t kOfKey = kSize * kKvHeads * 4 * kHeadDim;        // K, V, dK, dV
  for (const auto& [q_len, k_len] : {std::pair<int64_t, int64_t>{128, 16}, {16, 128}}) {
    How how;
    how.ranks = kG;
    Bytes bytes;
    ExpectMatches(how, CrossInputs(q_len, k_len), &bytes);
    EXPECT_EQ(bytes.forward, kBatch * (kG - 1) * k_len * kOfKey / 2);
    EXPECT_EQ(bytes.backward,
              kBatch * (kG - 1) * (q_len < k_len ? q_len * kOfQuery : k_len * kOfKey));
  }
}

TEST(CrossAttentionTest, ErrorsNameWhatDoesNotFit) {
  const auto attention = *BurstAttention::Create({}, nullptr);
  const auto cross = [&](int64_t k_len, const Mask& mask) {
    return attention->Schedule(Sequences::Cross(4, k_len), mask);
  };
  EXPECT_TRUE(absl::StrContains(cross(4, Mask::Causal()).status().message(), "causal"));
  EXPECT_FALSE(cross(-1, Mask::Full()).ok());
  const AttentionSchedule schedule = *cross(6, Mask::Full());
  const Inputs fits = CrossInputs(4, 6), other = CrossInputs(4, 5);
  const auto forward = [&](const AttentionSchedule& of, const Inputs& inputs) {
    AttentionResult result;
    return attention->Forward(
        {&of, inputs.q.To(kTestDevice), inputs.k.To(kTestDevice), inputs.v.To(kTestDevice)},
        &result);
  };
  EXPECT_TRUE(forward(schedule, fits).ok());
  EXPECT_TRUE(
      absl::StrContains(forward(schedule, other).message(), "k: must have this rank's 6 keys"));
  EXPECT_TRUE(absl::StrContains(forward(*attention->Schedule(4, Mask::Full()), fits).message(),
                                "k: must have this rank's 4 keys of the schedule; got 6"));

  const auto shard = [](int rank, int ranks) {
    return *TokenShard::Create(rank, ranks, Layout::kZigzag, /*seqlen=*/8);
  };
  EXPECT_FALSE(RingSchedule::Create(shard(0, 2), shard(1, 2), Mask::Full()).ok());
  EXPECT_FALSE(RingSchedule::Create(shard(0, 2), shard(0, 3), Mask::Full()).ok());
}

}  // namespace
}  // namespace burst
