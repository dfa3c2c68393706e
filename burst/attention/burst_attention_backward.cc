// BurstAttention's backward. It follows the paper: one side travels around the ring, followed by
// its gradients, and meets the side that stays.
#include <cstdint>
#include <vector>

#include "burst/attention/backward_sides.h"
#include "burst/attention/burst_attention.h"
#include "burst/attention/kernel_calls.h"
#include "burst/base/check.h"
#include "burst/base/status.h"

namespace burst {
namespace {

Tensor HeadsOf(const Tensor& tensor, int head_axis, const HeadRange& heads) {
  const int64_t count = heads.end - heads.begin;
  if (count == tensor.dim(head_axis)) return tensor;
  return tensor.Slice(head_axis, heads.begin, count);
}

// Returns some heads of [batch, seqlen, heads, columns] as an operand.
AttentionOperand OperandOf(const Tensor& tensor, const HeadRange& heads) {
  return Operand(HeadsOf(tensor, kHeadAxis, heads));
}

// Returns where a call leaves the n-th gradient of a side.
GradientTarget TargetOf(const SideOfStep& side, size_t n, const HeadRange& heads,
                        const HeadCalls::Ends& planned) {
  GradientTarget target;
  if (!side.results[n].null()) target.result = OperandOf(side.results[n], heads);
  if (side.sums[n].null()) return target;
  target.sum = OperandOf(side.sums[n], heads);
  if (side.begins) target.first = planned.first;
  if (!side.results[n].null()) target.last = planned.last;
  return target;
}

// Returns some heads of lse or delta, [batch, heads, seqlen], contiguous, as kernels read them.
Tensor RowsOf(const Tensor& rows, const HeadRange& heads) {
  return HeadsOf(rows, kLseHeadAxis, heads).Contiguous();
}

}  // namespace

DType BurstAttention::RingGradDTypeOf(DType dtype) const {
  return options_.ring_grad_dtype == RingGradDType::kBf16 ? DType::kBFloat16 : SumDType(dtype);
}

BackwardDirection BurstAttention::Direction(const RingSchedule& schedule, int64_t num_heads,
                                            int64_t num_kv_heads, const HeadWidths& widths,
                                            DType dtype) const {
  if (options_.backward != BackwardDirection::kAuto) return options_.backward;
  const int64_t row_bytes = num_heads * SizeOf(SumDType(dtype));  // lse, or delta
  const int64_t size = SizeOf(dtype), gradient_size = SizeOf(RingGradDTypeOf(dtype));
  const int64_t both_widths = widths.head_dim + widths.value_dim;
  const RingRoute& queries = schedule.query_route();
  const RingRoute& keys = schedule.kv_route();
  // Q, dO, lse, delta; dQ
  const int64_t burst =
      queries.block_tokens.total() * (num_heads * both_widths * size + 2 * row_bytes) +
      queries.gradient_tokens.total() * num_heads * widths.head_dim * gradient_size;
  // K, V; dK, dV
  const int64_t ring = keys.block_tokens.total() * num_kv_heads * both_widths * size +
                       keys.gradient_tokens.total() * num_kv_heads * both_widths * gradient_size;
  return burst <= ring ? BackwardDirection::kBurst : BackwardDirection::kRing;
}

// Computes delta = rowsum(dO * O) - dlse once, so that O need not be sent.
Tensor BurstAttention::DeltaAndSinkGradients(const AttentionCall& call,
                                             const AttentionResult& result,
                                             AttentionGradients* gradients) const {
  const Tensor& q = call.q;
  const Tensor delta = Tensor::EmptyLike(result.lse);
  const Tensor dlse = gradients->dlse.null() ? Tensor() : gradients->dlse.Contiguous();
  FlashDeltaParams params;
  params.shape = KernelShape(options_.softmax_scale, q, call.k, call.v);
  params.out = Operand(result.out);
  params.dout = Operand(gradients->dout);
  params.dlse = dlse.null() ? nullptr : dlse.raw_data();
  params.delta = delta.raw_data();
  KernelsFor(q).Delta(params);
  if (!call.sinks.null()) {
    gradients->dsinks = Tensor::Empty({1, q.dim(2)}, delta.dtype(), q.device());
    FlashSinkGrads(result.lse, delta, call.sinks, gradients->dsinks.View({q.dim(2)}));
  }
  return delta;
}

void BurstAttention::BackwardOfStep(const AttentionCall& call, const PlannedStep& step,
                                    const KernelMask& mask, const SideOfStep& queries,
                                    const SideOfStep& keys) const {
  if (step.calls.empty()) return;
  const Tensor &q = queries.inputs[0], &k = keys.inputs[0], &v = keys.inputs[1];
  const Tensor lse = RowsOf(queries.inputs[2], step.queries);
  const Tensor delta = RowsOf(queries.inputs[3], step.queries);
  FlashBackwardParams params;
  params.q = OperandOf(q, step.queries);
  params.dout = OperandOf(queries.inputs[1], step.queries);
  params.lse = lse.raw_data();
  params.delta = delta.raw_data();
  params.k = OperandOf(k, step.keys);
  params.v = OperandOf(v, step.keys);
  params.deterministic = options_.deterministic;
  params.shape = KernelShape(options_.softmax_scale, q, k, v);
  params.shape.num_heads = step.queries.end - step.queries.begin;
  params.shape.num_kv_heads = step.keys.end - step.keys.begin;
  params.shape.scores = ScoresOf(call, queries.source, keys.source, step.queries.begin);
  for (const PlannedCall& planned : step.calls) {
    SetMask(planned.part, mask, q.device(), &params.shape);
    params.dq = TargetOf(queries, 0, step.queries, planned.queries);
    params.dk = TargetOf(keys, 0, step.keys, planned.keys);
    params.dv = TargetOf(keys, 1, step.keys, planned.keys);
    KernelsFor(q).Backward(params);
  }
}

absl::Status BurstAttention::Backward(const AttentionCall& call, const AttentionResult& result,
                                      AttentionGradients* gradients) {
  BURST_RETURN_IF_ERROR(Check(call));
  BURST_RETURN_IF_ERROR(result.Check(call));
  BURST_RETURN_IF_ERROR(gradients->Prepare(call));
  const RingSchedule& schedule = *call.schedule->ring();
  const Tensor &q = call.q, &k = call.k, &lse = result.lse;
  const Tensor delta = DeltaAndSinkGradients(call, result, gradients);
  const int64_t num_heads = q.dim(kHeadAxis), num_kv_heads = k.dim(kHeadAxis);
  const bool burst = Direction(schedule, num_heads, num_kv_heads, call.widths(), q.dtype()) ==
                     BackwardDirection::kBurst;
  const CallPlan& plan = schedule.calls({burst ? RingPass::kBurstBackward : RingPass::kRingBackward,
                                         TakesBlocks(call), num_heads, num_kv_heads});

  const int rank = schedule.shard().group_index();
  BackwardSide queries(
      rank, {{q, kSeqAxis}, {gradients->dout, kSeqAxis}, {lse, kLseSeqAxis}, {delta, kLseSeqAxis}},
      {gradients->dq}, plan.one_call, plan.clears_queries);
  BackwardSide keys(rank, {{k, kSeqAxis}, {call.v, kSeqAxis}}, {gradients->dk, gradients->dv},
                    plan.one_call, plan.clears_keys);
  if (plan.last_converts) keys.LetKernelsConvert();

  const RingRoute& route = burst ? schedule.query_route() : schedule.kv_route();
  TravelingSide traveling(burst ? &queries : &keys, route,
                          burst ? schedule.query_rows() : schedule.key_rows(),
                          RingGradDTypeOf(q.dtype()));
  const BackwardSide& staying = burst ? keys : queries;
  const SideOfStep stays = staying.OfStep();
  auto step = plan.steps.begin();
  BURST_RETURN_IF_ERROR(ring_->Run(
      route, traveling.sent(), traveling.gradients(),
      [&](int source, Ring::Part, const Ring::Tensors& block, const Ring::Sums& sums) {
        BURST_CHECK_EQ(source, step->source);
        const SideOfStep visits = traveling.OfStep(source, block, sums);
        if (burst) {
          BackwardOfStep(call, *step, schedule.for_queries_of(source), visits, stays);
        } else {
          BackwardOfStep(call, *step, schedule.for_keys_of(source), stays, visits);
        }
        ++step;
      },
      &stats_.backward));
  traveling.Finish();
  staying.Finish(/*arrived=*/{});
  return absl::OkStatus();
}

}  // namespace burst
