// Compares the bytes and messages that ranks count with the formulas of the methods, and the rounds
// that a ring skips with the mask.

#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "burst/attention/burst_attention.h"
#include "burst/attention/ulysses_attention.h"
#include "burst/base/status.h"
#include "tests/attention/ring_runs.h"
#include "tests/attention/sequence_problem.h"
#include "tests/testing/attention_reference.h"

namespace burst {
namespace {

// The method's table gives the bytes, for each transfer and element of the batch. Every rank makes
// G - 1 transfers.
TEST(TrafficTest, RingSendsTheBytesOfTheFormulas) {
  const int64_t batch = 2, seqlen = 96;
  for (const auto& [heads, kv_heads, widths] :
       {std::tuple(4, 4, HeadWidths(16)), std::tuple(4, 1, HeadWidths(16)),
        std::tuple(4, 2, HeadWidths(16, 24))}) {
    const int64_t hq = heads * widths.head_dim, ho = heads * widths.value_dim;
    const int64_t hkv = kv_heads * (widths.head_dim + widths.value_dim);
    const Inputs inputs = RandomInputs(batch, seqlen, heads, kv_heads, widths, DType::kFloat32, 1);
    for (const auto& [world_size, per_node] :
         {std::pair(1, 0), std::pair(2, 0), std::pair(3, 0), std::pair(4, 0), std::pair(4, 2),
          std::pair(6, 3), std::pair(8, 2)}) {
      const int64_t transfers = static_cast<int64_t>(world_size) * (world_size - 1);
      const int64_t between =
          per_node == 0 ? 0 : static_cast<int64_t>(world_size) * (world_size / per_node - 1);
      const int64_t tokens = batch * seqlen / world_size;
      for (BackwardDirection direction : kDirections) {
        BurstAttentionOptions options;
        options.backward = direction;
        options.layout = Layout::kContiguous;
        options.ranks_per_node = per_node;
        AttentionResults results;
        RingTraffic forward, backward;
        ASSERT_TRUE(
            RunRing(world_size, options, inputs, /*mask=*/{}, &results, &forward, &backward).ok());
        EXPECT_EQ(forward.blocks.total().transfers, transfers);
        EXPECT_EQ(forward.blocks.total().bytes, transfers * tokens * hkv * 4);
        EXPECT_EQ(forward.gradients.total().bytes, 0);
        EXPECT_EQ(backward.blocks.total().transfers, transfers);
        EXPECT_EQ(backward.gradients.total().transfers, transfers);
        for (const auto& sent : {forward.blocks, backward.blocks, backward.gradients}) {
          EXPECT_EQ(sent[Link::kInter].transfers, between);
        }
        if (direction == BackwardDirection::kBurst) {
          EXPECT_EQ(backward.blocks.total().bytes, transfers * tokens * (hq + ho + 2 * heads) * 4);
          EXPECT_EQ(backward.gradients.total().bytes, transfers * tokens * hq * 4);
        } else {
          EXPECT_EQ(backward.blocks.total().bytes, transfers * tokens * hkv * 4);
          EXPECT_EQ(backward.gradients.total().bytes, transfers * tokens * hkv * 4);
        }
      }
    }
  }
}

TEST(TrafficTest, AutoTakesTheDirectionOfFewerBytes) {
  const absl::Status status = RunRanks(4, [](Communicator& comm) -> absl::Status {
    BURST_ASSIGN_OR_RETURN(const auto attention, BurstAttention::Create({}, &comm));
    BURST_ASSIGN_OR_RETURN(const AttentionSchedule made, attention->Schedule(1024, Mask::Full()));
    const RingSchedule& schedule = *made.ring();
    // Multi-head attention compares 3 Hq + 2 Z with 4 Hk. Grouped by two, 4 Hk is less.
    EXPECT_EQ(attention->Direction(schedule, 8, 8, 64, DType::kFloat32), BackwardDirection::kBurst);
    EXPECT_EQ(attention->Direction(schedule, 8, 4, 64, DType::kFloat32), BackwardDirection::kRing);
    EXPECT_EQ(attention->Direction(schedule, 8, 1, 64, DType::kFloat32), BackwardDirection::kRing);
    // A head of two widths sends 2 D + E + 2 numbers of the queries, or 2 (D + E) of the keys.
    const auto of_widths = [&](const HeadWidths& widths) {
      return attention->Direction(schedule, 8, 8, widths, DType::kFloat32);
    };
    EXPECT_EQ(of_widths({192, 128}), BackwardDirection::kBurst);
    EXPECT_EQ(of_widths({64, 2}), BackwardDirection::kBurst);
    EXPECT_EQ(of_widths({64, 1}), BackwardDirection::kRing);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(TrafficTest, MaskedRoundsAreSkipped) {
  // 8 ranks have 16 tokens each, in order. A window of 16 reaches into the previous rank only.
  const Inputs inputs = RandomInputs(1, 128, 2, 2, 16, DType::kFloat32, 2);
  BurstAttentionOptions options;
  options.layout = Layout::kContiguous;
  const IntervalMask mask = {/*causal=*/true, /*window=*/16};
  AttentionResults results;
  RingTraffic forward;
  ASSERT_TRUE(RunRing(8, options, inputs, mask, &results, &forward).ok());
  EXPECT_EQ(forward.blocks.total().transfers, 7);
  EXPECT_EQ(forward.rounds_computed, 8 + 7);
  EXPECT_EQ(forward.rounds_skipped, 64 - 15);
  ExpectClose(results, Reference(inputs, mask, 0.25), 1e-5);
}

// The table in ulysses_attention.h gives the bytes. The ring's bytes follow from the test above,
// for a group's tokens and a rank's share of the heads.
TEST(TrafficTest, UlyssesSendsTheBytesOfTheFormulas) {
  const int64_t batch = 2, seqlen = 96, heads = 8;
  for (const auto& [kv_heads, widths] :
       {std::pair<int64_t, HeadWidths>(8, 16), std::pair<int64_t, HeadWidths>(2, 16),
        std::pair<int64_t, HeadWidths>(2, {16, 24})}) {
    const int64_t head_dim = widths.head_dim, value_dim = widths.value_dim;
    const Inputs inputs = RandomInputs(batch, seqlen, heads, kv_heads, widths, DType::kFloat32, 1);
    for (const auto& [ranks, size] : {std::pair(2, 2), std::pair(4, 2), std::pair(4, 4)}) {
      const int64_t l = seqlen / ranks, ring = ranks / size;
      const int64_t replicated = std::max<int64_t>(kv_heads, size);
      const auto exchanged = [&, size = size](int64_t elements_a_token) {
        return batch * l * elements_a_token * 4 * (size - 1) / size;
      };
      const int64_t qkv = head_dim * (heads + replicated) + value_dim * replicated;
      const int64_t out = value_dim * heads;
      const absl::Status status = RunTestRanks(ranks, [&](Communicator& comm) -> absl::Status {
        BurstAttentionOptions options;
        options.backward = BackwardDirection::kRing;
        BURST_ASSIGN_OR_RETURN(const auto attention,
                               UlyssesAttention::Create(options, size, &comm));
        BURST_ASSIGN_OR_RETURN(const AttentionSchedule schedule,
                               attention->Schedule(seqlen, Mask::Full()));
        const auto take = [&](const Tensor& global) {
          return TakeRows(global, schedule.shard().local_positions());
        };
        const int64_t visiting =
            (ring - 1) * batch * l * size * (replicated / size) * (head_dim + value_dim);
        for (bool with_lse : {false, true}) {
          AttentionCall call = {&schedule, take(inputs.q), take(inputs.k), take(inputs.v)};
          call.wants_lse = with_lse;
          AttentionResult result;
          attention->ResetStats();
          BURST_RETURN_IF_ERROR(attention->Forward(call, &result));
          EXPECT_EQ(result.lse.null(), !with_lse);
          AttentionGradients gradients = {take(inputs.dout)};
          if (with_lse) {
            gradients.dlse = TakeColumns(inputs.dlse, schedule.shard().local_positions());
          }
          BURST_RETURN_IF_ERROR(attention->Backward(call, result, &gradients));
          const int64_t rows = with_lse ? heads : 0;
          EXPECT_EQ(attention->stats().forward.bytes, exchanged(qkv + out + rows));
          EXPECT_EQ(attention->stats().backward.bytes, exchanged(qkv + out + rows));
          // q, k and v take one message to a peer. lse shares a message with out if its dtype is
          // the same.
          EXPECT_EQ(attention->stats().forward.messages, 2 * (size - 1));
          EXPECT_EQ(attention->bytes_sent().forward, exchanged(qkv + out + rows) + visiting * 4);
          EXPECT_EQ(attention->bytes_sent().backward, exchanged(qkv + out + rows) + visiting * 8);
        }
        return absl::OkStatus();
      });
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

}  // namespace
}  // namespace burst
