// AttentionOp, the attention of all ranks as an op on the tape, against naive attention in double
// precision.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "burst/attention/burst_attention.h"
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

// The part of a tensor [batch, length, kHeads + 2 kKvHeads, head_dim] that holds the heads of Q
// (0), K (1) or V (2).
Tensor Part(const Tensor& packed, int i) {
  return i == 0 ? packed.Slice(2, 0, kHeads)
                : packed.Slice(2, kHeads + (i - 1) * kKvHeads, kKvHeads);
}

// This rank's tokens of q, k and v in one tensor.
Tensor Pack(const Inputs& inputs, const std::vector<int32_t>& positions) {
  const Tensor packed = Tensor::Empty(
      {inputs.q.dim(0), static_cast<int64_t>(positions.size()), kHeads + 2 * kKvHeads, kHeadDim},
      inputs.q.dtype(), kTestDevice);
  Part(packed, 0).CopyFrom(TakeRows(inputs.q, positions));
  Part(packed, 1).CopyFrom(TakeRows(inputs.k, positions));
  Part(packed, 2).CopyFrom(TakeRows(inputs.v, positions));
  return packed;
}

// q, k, v as slices of one tensor, and a loss that depends on lse too.
TEST(AttentionOpTest, StridedInputsAndLse) {
  const int64_t batch = 2, seqlen = 20;
  const Inputs inputs = RandomInputs(batch, seqlen, kHeads, kKvHeads, kHeadDim, DType::kFloat64, 8);
  const auto attention = *BurstAttention::Create({}, nullptr);
  const auto schedule = std::make_shared<const RingSchedule>(*attention->Schedule(seqlen));
  const Tensor packed = Pack(inputs, schedule->shard().local_positions());
  Tape tape;
  const Variable q(Part(packed, 0), true), k(Part(packed, 1), true), v(Part(packed, 2), true);
  Variable lse;
  const Variable out = AttentionOp(tape, *attention, schedule, q, k, v, &lse);
  ASSERT_TRUE(
      tape.Backward({out, lse}, {inputs.dout.To(kTestDevice), inputs.dlse.To(kTestDevice)}).ok());
  ExpectClose({out.value(), lse.value(), q.grad(), k.grad(), v.grad()},
              Reference(inputs, {true, 0}, {}, 1 / std::sqrt(8.0)), 1e-12);
}

// The packed op on several ranks: slices of one tensor in, slices of one gradient out.
TEST(AttentionOpTest, Packed) {
  const int64_t batch = 2, seqlen = 37;
  Inputs inputs = RandomInputs(batch, seqlen, kHeads, kKvHeads, kHeadDim, DType::kFloat64, 8);
  inputs.dlse = Tensor::ZerosLike(inputs.dlse);  // this op does not return lse
  const AttentionResults expected = Reference(inputs, {true, 0}, {}, 1 / std::sqrt(8.0));
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
          BURST_ASSIGN_OR_RETURN(RingSchedule made, attention->Schedule(seqlen));
          const auto schedule = std::make_shared<const RingSchedule>(std::move(made));
          const std::vector<int32_t>& positions = schedule->shard().local_positions();
          Tape tape;
          const Variable qkv(Pack(inputs, positions), true);
          const Variable out = AttentionOp(tape, *attention, schedule, qkv, kHeads, kKvHeads);
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

}  // namespace
}  // namespace burst
