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

// Returns some heads of [batch, seqlen, heads, head_dim] as an operand.
AttentionOperand OperandOf(const Tensor& tensor, const HeadRange& heads) {
  return Operand(HeadsOf(tensor, kHeadAxis, heads));
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
                                            int64_t num_kv_heads, int64_t head_dim,
                                            DType dtype) const {
  if (options_.backward != BackwardDirection::kAuto) return options_.backward;
  const int64_t q_bytes = num_heads * head_dim * SizeOf(dtype);
  const int64_t k_bytes = num_kv_heads * head_dim * SizeOf(dtype);
  const int64_t row_bytes = num_heads * SizeOf(SumDType(dtype));  // lse, or delta
  const int64_t gradient_size = SizeOf(RingGradDTypeOf(dtype));
  const int64_t dq_bytes = num_heads * head_dim * gradient_size;
  const int64_t dk_bytes = num_kv_heads * head_dim * gradient_size;
  const RingRoute& queries = schedule.query_route();
  const RingRoute& keys = schedule.kv_route();
  const int64_t burst = queries.block_tokens.total() * (2 * q_bytes + 2 * row_bytes) +
                        queries.gradient_tokens.total() * dq_bytes;  // Q, dO, lse, delta; dQ
  const int64_t ring = keys.block_tokens.total() * 2 * k_bytes +
                       keys.gradient_tokens.total() * 2 * dk_bytes;  // K, V; dK, dV
  return burst <= ring ? BackwardDirection::kBurst : BackwardDirection::kRing;
}

// Computes delta = rowsum(dO * O) - dlse once, so that O need not be sent.
absl::StatusOr<Tensor> BurstAttention::DeltaAndSinkGradients(const Saved& saved, const Tensor& lse,
                                                             Tensor* dsinks) const {
  const Tensor& q = saved.q;
  const Tensor delta = Tensor::Empty(LseShape(q), SumDType(q.dtype()), q.device());
  const Tensor dlse = saved.dlse.null() ? Tensor() : saved.dlse.Contiguous();
  FlashDeltaParams params;
  params.shape = KernelShape(options_.softmax_scale, q, saved.k);
  params.out = Operand(saved.out);
  params.dout = Operand(saved.dout);
  params.dlse = dlse.null() ? nullptr : dlse.raw_data();
  params.delta = delta.raw_data();
  KernelsFor(q).Delta(params);
  if (dsinks != nullptr) {
    BURST_RETURN_IF_ERROR(CheckSinks(saved.sinks, q, /*needed=*/true));
    *dsinks = Tensor::Empty({1, q.dim(2)}, delta.dtype(), q.device());
    FlashSinkGrads(lse, delta, saved.sinks, dsinks->View({q.dim(2)}));
  }
  return delta;
}

void BurstAttention::BackwardOfStep(const PlannedStep& step, const KernelMask& mask,
                                    const SideOfStep& queries, const SideOfStep& keys,
                                    RankScores* scores) const {
  if (step.calls.empty()) return;
  const Tensor &q = queries.inputs[0], &k = keys.inputs[0];
  const Tensor lse = RowsOf(queries.inputs[2], step.queries);
  const Tensor delta = RowsOf(queries.inputs[3], step.queries);
  const bool assign = queries.sums[0].null();
  const Ring::Tensors& of_queries = assign ? queries.results : queries.sums;
  const Ring::Tensors& of_keys = assign ? keys.results : keys.sums;
  const bool converts = !assign && !keys.results[0].null();
  FlashBackwardParams params;
  params.q = OperandOf(q, step.queries);
  params.dout = OperandOf(queries.inputs[1], step.queries);
  params.lse = lse.raw_data();
  params.delta = delta.raw_data();
  params.k = OperandOf(k, step.keys);
  params.v = OperandOf(keys.inputs[1], step.keys);
  params.dq = OperandOf(of_queries[0], step.queries);
  params.dk = OperandOf(of_keys[0], step.keys);
  params.dv = OperandOf(of_keys[1], step.keys);
  if (converts) params.dk_out = OperandOf(keys.results[0], step.keys);
  if (converts) params.dv_out = OperandOf(keys.results[1], step.keys);
  params.assign = assign;
  params.deterministic = options_.deterministic;
  params.shape = KernelShape(options_.softmax_scale, q, k);
  params.shape.num_heads = step.queries.end - step.queries.begin;
  params.shape.num_kv_heads = step.keys.end - step.keys.begin;
  params.shape.scores = scores->For(queries.positions, keys.positions, step.queries.begin);
  for (const PlannedCall& call : step.calls) {
    SetMask(call.part, mask, q.device(), &params.shape);
    if (!assign) {
      params.first_dq = queries.begins ? call.queries.first : HeadRange();
      params.first_dkv = keys.begins ? call.keys.first : HeadRange();
      params.last_dkv = converts ? call.keys.last : HeadRange();
    }
    KernelsFor(q).Backward(params);
  }
}

absl::Status BurstAttention::Backward(const RingSchedule& schedule, const Saved& saved, Tensor* dq,
                                      Tensor* dk, Tensor* dv, Tensor* dsinks) {
  const Tensor &q = saved.q, &k = saved.k;
  BURST_RETURN_IF_ERROR(CheckInputs(schedule, q, k, saved.v));
  BURST_RETURN_IF_ERROR(CheckSaved(saved));
  BURST_RETURN_IF_ERROR(EnsureGradients(saved, dq, dk, dv));
  const Tensor lse = saved.lse.Contiguous();
  BURST_ASSIGN_OR_RETURN(const Tensor delta, DeltaAndSinkGradients(saved, lse, dsinks));
  const int64_t num_heads = q.dim(kHeadAxis), num_kv_heads = k.dim(kHeadAxis);
  const bool burst = Direction(schedule, num_heads, num_kv_heads, q.dim(3), q.dtype()) ==
                     BackwardDirection::kBurst;
  const CallPlan& plan = schedule.calls({burst ? RingPass::kBurstBackward : RingPass::kRingBackward,
                                         TakesBlocks(q), num_heads, num_kv_heads});

  const int rank = schedule.shard().group_index();
  BackwardSide queries(
      schedule.shard().group_positions(rank),
      {{q, kSeqAxis}, {saved.dout, kSeqAxis}, {lse, kLseSeqAxis}, {delta, kLseSeqAxis}}, {*dq},
      plan.one_call, plan.clears_queries);
  BackwardSide keys(schedule.key_shard().group_positions(rank),
                    {{k, kSeqAxis}, {saved.v, kSeqAxis}}, {*dk, *dv}, plan.one_call,
                    plan.clears_keys);
  if (plan.last_converts) keys.LetKernelsConvert();

  const RingRoute& route = burst ? schedule.query_route() : schedule.kv_route();
  TravelingSide traveling(burst ? &queries : &keys, route,
                          burst ? schedule.query_rows() : schedule.key_rows(),
                          RingGradDTypeOf(q.dtype()));
  const BackwardSide& staying = burst ? keys : queries;
  const SideOfStep stays = staying.OfStep();
  RankScores scores(options_.scores, saved.dropout, group_, num_heads, q.device());
  auto step = plan.steps.begin();
  BURST_RETURN_IF_ERROR(ring_->Run(
      route, traveling.sent(), traveling.gradients(),
      [&](int source, Ring::Part, const Ring::Tensors& block, const Ring::Sums& sums) {
        BURST_CHECK_EQ(source, step->source);
        if (burst) {
          const SideOfStep visits =
              traveling.OfStep(source, schedule.queries_sent_by(source), block, sums);
          BackwardOfStep(*step, schedule.for_queries_of(source), visits, stays, &scores);
        } else {
          const SideOfStep visits =
              traveling.OfStep(source, schedule.keys_sent_by(source), block, sums);
          BackwardOfStep(*step, schedule.for_keys_of(source), stays, visits, &scores);
        }
        ++step;
      },
      &stats_.backward));
  traveling.Finish();
  staying.Finish(/*arrived=*/{});
  return absl::OkStatus();
}

}  // namespace burst
