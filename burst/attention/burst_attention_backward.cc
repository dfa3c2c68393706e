// BurstAttention's backward. It follows the paper: one side travels around the ring, followed by
// its gradients, and meets the side that stays.
//
//   queries  q, dO, lse, delta | dQ
//   keys     K, V              | dK, dV
#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "burst/attention/burst_attention.h"
#include "burst/base/check.h"
#include "burst/base/status.h"

namespace burst {

// The sum of one gradient over the calls of a backward on this rank, and its result.
class GradientSum {
 public:
  // The sum is in `result` itself, if its dtype and strides allow it or if one call makes it.
  GradientSum(const Tensor& result, bool one_call);

  const Tensor& sum() const { return sum_; }
  const Tensor& result() const { return result_; }
  // Whether the kernels' last call can convert the sum into the result.
  bool KernelsConvert() const;
  // Makes the result of the sum and of what arrived after the last call (null: nothing).
  void Finish(const Tensor& arrived) const;
  // Makes the result if only some rows arrived. places: the device's RingSchedule::key_places or
  // query_places.
  void Finish(const Tensor& arrived, const std::vector<BlockRows>& rows,
              const int32_t* places) const;

 private:
  Tensor result_, sum_;
};

// What the calls of a step read and write of one side: of this rank's block or of one that visits.
struct SideOfStep {
  int source;  // the rank whose block it is
  Ring::Tensors inputs;
  // Null sums: one call assigns the results. Null results: the last call converts nothing.
  Ring::Tensors sums, results;
  // The first call for some heads assigns their sums. False: the sums hold something already.
  bool begins = true;
};

// This rank's block of queries or of keys, and the sums of its gradients.
class BackwardSide {
 public:
  // results: of the gradients. one_call, clears: as the plan says.
  BackwardSide(int rank, const Ring::Block& block, std::initializer_list<Tensor> results,
               bool one_call, bool clears);

  const Ring::Block& block() const { return block_; }
  const std::vector<GradientSum>& gradients() const { return gradients_; }
  // The kernels' last call makes the results of the sums, if it can. Finish then does nothing.
  void LetKernelsConvert();
  SideOfStep OfStep() const;
  // Makes the results. `arrived`: what came from other ranks after the last call; empty: nothing.
  void Finish(const Ring::Tensors& arrived) const;

 private:
  const int rank_;
  const Ring::Block block_;
  const bool one_call_;
  std::vector<GradientSum> gradients_;
  bool kernels_convert_ = false;
};

// The side that travels: what the ring sends of its block, and the gradients that come back.
class TravelingSide {
 public:
  // rows: those that this rank sends; null: all. places: of its tokens among them, on the device.
  // All pointers must outlive the object.
  TravelingSide(const BackwardSide* own, const RingRoute& route, const std::vector<BlockRows>* rows,
                const int32_t* places, DType in_transit);

  const Ring::Block& sent() const { return sent_; }
  Ring::BlockGradients* gradients() { return &gradients_; }
  // What a step reads and writes where the block of `source` is.
  SideOfStep OfStep(int source, const Ring::Tensors& visiting, const Ring::Sums& sums) const;
  // Adds what has come back, and makes the results.
  void Finish();

 private:
  const BackwardSide& own_;
  const int rank_;
  const std::vector<BlockRows>* const rows_;
  const int32_t* const places_;
  const bool returns_early_;  // what has come back is in gradients_.own, and not only in last
  Ring::Block sent_;
  Ring::BlockGradients gradients_;
};

namespace {

// Adds `addend` to the given rows of a block.
void AddToRows(const Tensor& addend, const Tensor& block, int axis,
               const std::vector<BlockRows>& rows) {
  const Tensor sum = TakeRows(block, axis, rows);
  sum.Add(addend);
  std::vector<TensorCopy> copies;
  int64_t at = 0;
  for (const BlockRows& range : rows) {
    copies.push_back(
        {sum.Slice(axis, at, range.count), block.Slice(axis, range.begin, range.count)});
    at += range.count;
  }
  CopyAll(copies);
}

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

GradientSum::GradientSum(const Tensor& result, bool one_call) : result_(result) {
  const DType sum_dtype = SumDType(result.dtype());
  const bool in_place = one_call || (result.dtype() == sum_dtype && result.is_contiguous());
  sum_ = in_place ? result : Tensor::Empty(result.shape(), sum_dtype, result.device());
}

bool GradientSum::KernelsConvert() const {
  return Is16Bit(result_.dtype()) && result_.is_contiguous() &&
         reinterpret_cast<uintptr_t>(result_.raw_data()) % 16 == 0;
}

void GradientSum::Finish(const Tensor& arrived, const std::vector<BlockRows>& rows,
                         const int32_t* places) const {
  const bool in_place = sum_.raw_data() == result_.raw_data();
  if (!in_place && result_.device() != DeviceType::kCpu) {
    return FlashConvert(sum_, result_, arrived, places);
  }
  AddToRows(arrived, sum_, kSeqAxis, rows);
  Finish(/*arrived=*/Tensor());
}

void GradientSum::Finish(const Tensor& arrived) const {
  if (sum_.raw_data() != result_.raw_data()) {
    FlashConvert(sum_, result_, arrived);
  } else if (!arrived.null()) {
    sum_.Add(arrived);
  }
}

BackwardSide::BackwardSide(int rank, const Ring::Block& block,
                           std::initializer_list<Tensor> results, bool one_call, bool clears)
    : rank_(rank), block_(block), one_call_(one_call) {
  for (const Tensor& result : results) gradients_.emplace_back(result, one_call);
  if (!clears) return;
  for (const GradientSum& gradient : gradients_) gradient.sum().Fill(0);
}

void BackwardSide::LetKernelsConvert() {
  kernels_convert_ =
      std::all_of(gradients_.begin(), gradients_.end(),
                  [](const GradientSum& gradient) { return gradient.KernelsConvert(); });
}

SideOfStep BackwardSide::OfStep() const {
  SideOfStep side = {rank_, {}, {}, {}};
  for (const Ring::BlockTensor& input : block_) side.inputs.push_back(input.tensor);
  for (const GradientSum& gradient : gradients_) {
    side.sums.push_back(one_call_ ? Tensor() : gradient.sum());
    side.results.push_back(one_call_ || kernels_convert_ ? gradient.result() : Tensor());
  }
  return side;
}

void BackwardSide::Finish(const Ring::Tensors& arrived) const {
  if (kernels_convert_) return;
  for (size_t i = 0; i < gradients_.size(); ++i) {
    gradients_[i].Finish(arrived.empty() ? Tensor() : arrived[i]);
  }
}

TravelingSide::TravelingSide(const BackwardSide* own, const RingRoute& route,
                             const std::vector<BlockRows>* rows, const int32_t* places,
                             DType in_transit)
    : own_(*own),
      rank_(route.rank),
      rows_(rows),
      places_(places),
      returns_early_(OwnGradientReturnsEarly(route)),
      sent_(own->block()) {
  if (route.lengths.size() > 1) sent_ = BlockForSending(sent_, rows);
  gradients_.in_transit = in_transit;
  for (const GradientSum& gradient : own->gradients()) {
    Tensor returning = gradient.sum();
    if (rows != nullptr) {
      Shape shape = returning.shape();
      shape[kSeqAxis] = route.lengths[rank_];
      returning = Tensor::Empty(shape, returning.dtype(), returning.device());
      if (returns_early_) returning.Fill(0);
    }
    gradients_.own.push_back({returning, kSeqAxis});
  }
}

SideOfStep TravelingSide::OfStep(int source, const Ring::Tensors& visiting,
                                 const Ring::Sums& sums) const {
  if (source != rank_) {
    return {source, visiting, sums.tensors, Ring::Tensors(sums.tensors.size()), sums.first};
  }
  SideOfStep side = own_.OfStep();
  if (rows_ == nullptr) side.inputs = visiting;  // contiguous
  return side;
}

// If the ring returns gradients of some rows only, they are added to the full gradients at the end.
void TravelingSide::Finish() {
  if (rows_ == nullptr) return own_.Finish(gradients_.last);
  const bool has_last = !gradients_.last.empty();
  if (rows_->empty() || (!has_last && !returns_early_)) return own_.Finish(/*arrived=*/{});
  for (size_t i = 0; i < gradients_.own.size(); ++i) {
    const Tensor& early = gradients_.own[i].tensor;
    if (returns_early_ && has_last) early.Add(gradients_.last[i]);
    own_.gradients()[i].Finish(returns_early_ ? early : gradients_.last[i], *rows_, places_);
  }
}

// ---- The backward.

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
  // Where packed documents are dealt by the work of their queries, the owners of keys may have
  // more.
  constexpr double kMuch = 1.05;
  const auto by_queries = static_cast<double>(schedule.busiest_by_queries());
  const auto by_keys = static_cast<double>(schedule.busiest_by_keys());
  if (by_keys > kMuch * by_queries) return BackwardDirection::kRing;
  if (by_queries > kMuch * by_keys) return BackwardDirection::kBurst;
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
    planned.part.SetMask(mask, q.device(), &params.shape);
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
  const auto* const rows = burst ? schedule.query_rows() : schedule.key_rows();
  const int32_t* places = nullptr;
  if (rows != nullptr) {
    places = burst ? schedule.query_places(q.device()) : schedule.key_places(q.device());
  }
  TravelingSide traveling(burst ? &queries : &keys, route, rows, places,
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
