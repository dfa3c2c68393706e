// BurstAttention's backward: which way blocks go, and what a round adds to which gradient.
#include <cstdint>
#include <initializer_list>
#include <vector>

#include "burst/attention/burst_attention.h"
#include "burst/attention/head_calls.h"
#include "burst/attention/kernel_calls.h"
#include "burst/base/status.h"

namespace burst {
namespace {

// Adds to those rows of a block.
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

// The heads of one part of a block's work: whole groups of query heads that share a KV head. If
// there is one KV head, they are some of its query heads (their gradients add up). A division by
// tokens would cost more: every key tile would be loaded, and its gradients stored, twice.
struct Heads {
  int64_t first, count, first_kv, kv_count;

  HeadRange queries() const { return {first, first + count}; }
  HeadRange keys() const { return {first_kv, count == 0 ? first_kv : first_kv + kv_count}; }

  Tensor OfQueries(const Tensor& t) const { return t.Slice(kHeadAxis, first, count); }
  Tensor OfKeys(const Tensor& t) const { return t.Slice(kHeadAxis, first_kv, kv_count); }
  // The rows of lse or delta. The kernels read them contiguous; they are small.
  Tensor OfRows(const Tensor& t) const { return t.Slice(kLseHeadAxis, first, count).Contiguous(); }
};

// In a flat ring the two parts are equal. Between nodes the last transfer of the gradients takes
// longer. The second part, which runs at the same time, is therefore three quarters.
Heads HeadsOf(Ring::Part part, bool flat, int64_t num_heads, int64_t num_kv_heads) {
  if (part == Ring::Part::kWhole) return {0, num_heads, 0, num_kv_heads};
  const int64_t groups = num_kv_heads > 1 ? num_kv_heads : num_heads;
  const int64_t cut = groups / (flat ? 2 : 4);
  const int64_t first = part == Ring::Part::kFirst ? 0 : cut;
  const int64_t count = part == Ring::Part::kFirst ? cut : groups - cut;
  const int64_t heads = num_heads / groups;
  if (num_kv_heads == 1) return {first, count, 0, 1};
  return {first * heads, count * heads, first, count};
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

absl::Status BurstAttention::Backward(const RingSchedule& schedule, const Saved& saved, Tensor* dq,
                                      Tensor* dk, Tensor* dv, Tensor* dsinks) {
  const Tensor& q = saved.q;
  const DType sum_dtype = SumDType(q.dtype());
  BURST_RETURN_IF_ERROR(CheckInputs(schedule, q, saved.k, saved.v));
  BURST_RETURN_IF_ERROR(CheckSaved(saved));
  BURST_RETURN_IF_ERROR(EnsureOutput("dq", q.shape(), q.dtype(), q.device(), dq));
  BURST_RETURN_IF_ERROR(EnsureOutput("dk", saved.k.shape(), q.dtype(), q.device(), dk));
  BURST_RETURN_IF_ERROR(EnsureOutput("dv", saved.v.shape(), q.dtype(), q.device(), dv));

  // delta = rowsum(dO * O) - dlse, once, so that O need not be sent.
  const Tensor delta = Tensor::Empty(LseShape(q), sum_dtype, q.device());
  const Tensor dlse = saved.dlse.null() ? Tensor() : saved.dlse.Contiguous();
  FlashDeltaParams delta_params;
  delta_params.shape = KernelShape(options_.softmax_scale, q, saved.k);
  delta_params.out = Operand(saved.out);
  delta_params.dout = Operand(saved.dout);
  delta_params.dlse = dlse.null() ? nullptr : dlse.raw_data();
  delta_params.delta = delta.raw_data();
  const AttentionKernels& kernels = KernelsFor(q);
  const bool takes_blocks = TakesBlocks(q);
  kernels.Delta(delta_params);
  if (dsinks != nullptr) {
    BURST_RETURN_IF_ERROR(CheckSinks(saved.sinks, q, /*needed=*/true));
    *dsinks = Tensor::Empty({1, q.dim(2)}, sum_dtype, q.device());
    FlashSinkGrads(saved.lse.Contiguous(), delta, saved.sinks, dsinks->View({q.dim(2)}));
  }

  const int64_t num_heads = q.dim(kHeadAxis), num_kv_heads = saved.k.dim(kHeadAxis);
  const bool burst = Direction(schedule, num_heads, num_kv_heads, q.dim(3), q.dtype()) ==
                     BackwardDirection::kBurst;
  const RingRoute& route = burst ? schedule.query_route() : schedule.kv_route();
  const int rank = schedule.shard().group_index(), groups = schedule.shard().num_groups();
  const auto parts_of = [&](int source) {
    return PartsOf(burst ? schedule.for_queries_of(source) : schedule.for_keys_of(source),
                   takes_blocks);
  };
  const auto heads_of = [&](Ring::Part part) {
    return HeadsOf(part, schedule.ranks_per_node() == groups, num_heads, num_kv_heads);
  };
  // If a rank sends only some rows of its block, the ring returns gradients for those rows only.
  // They are added to the full gradient at the end.
  const std::vector<BlockRows>* const rows = burst ? schedule.query_rows() : schedule.key_rows();

  // One rank and one part: one call that assigns the gradients where they belong. Else they are
  // accumulated over the calls, in place where dtype and strides allow.
  const bool assign = groups == 1 && parts_of(rank).size() == 1;
  const auto sum_of = [&](const Tensor& gradient) {
    const bool in_place = assign || (gradient.dtype() == sum_dtype && gradient.is_contiguous());
    return in_place ? gradient : Tensor::Empty(gradient.shape(), sum_dtype, gradient.device());
  };
  const Tensor dq_sum = sum_of(*dq), dk_sum = sum_of(*dk), dv_sum = sum_of(*dv);
  // The calls that add to the sums. The sums of the block that goes around get only the calls of
  // its own rounds.
  HeadCalls q_calls(num_heads), kv_calls(num_kv_heads);
  const auto announce = [&](Ring::Part part, int source) {
    const Heads heads = heads_of(part);
    const auto calls = static_cast<int64_t>(parts_of(source).size());
    if (source == rank || !burst) q_calls.Announce(heads.queries(), calls);
    if (source == rank || burst) kv_calls.Announce(heads.keys(), calls);
  };
  if (groups == 1) {
    announce(Ring::Part::kWhole, rank);
  } else {
    announce(Ring::Part::kFirst, rank);
    announce(Ring::Part::kSecond, rank);
    for (size_t i = 1; i < route.rounds.size(); ++i) {
      if (route.rounds[i].compute) announce(Ring::Part::kWhole, route.rounds[i].source);
    }
  }
  // The last call for some heads writes results, where sums are of another dtype.
  const auto takes_results = [](const Tensor& gradient) {
    return Is16Bit(gradient.dtype()) && gradient.is_contiguous() &&
           reinterpret_cast<uintptr_t>(gradient.raw_data()) % 16 == 0;
  };
  const bool last_converts =
      burst && !assign && kv_calls.ForAllHeads() && takes_results(*dk) && takes_results(*dv);
  const auto prepare = [&](std::initializer_list<Tensor> sums, bool goes_around, HeadCalls* calls) {
    const bool early = goes_around && rows == nullptr && OwnGradientReturnsEarly(route);
    if (assign || (calls->ForAllHeads() && !early)) return;
    for (const Tensor& sum : sums) sum.Fill(0);
    calls->OnlyAdd();
  };
  prepare({dq_sum}, burst, &q_calls);
  prepare({dk_sum, dv_sum}, !burst, &kv_calls);

  RankScores scores(options_.scores, saved.dropout, group_, num_heads, q.device());
  using Positions = std::vector<int32_t>;
  const auto kernel = [&](int source, Ring::Part part, const Positions& q_positions,
                          const Positions& k_positions, const Ring::Tensors& queries,
                          const Ring::Tensors& keys, const Tensor& dq_sum, const Tensor& dk_sum,
                          const Tensor& dv_sum, HeadCalls* calls_of_q, HeadCalls* calls_of_kv) {
    const Heads heads = heads_of(part);
    if (heads.count == 0) return;
    const Tensor their_q = heads.OfQueries(queries[0]), their_k = heads.OfKeys(keys[0]);
    const Tensor lse = heads.OfRows(queries[2]), delta = heads.OfRows(queries[3]);
    FlashBackwardParams params;
    params.q = Operand(their_q);
    params.dout = Operand(heads.OfQueries(queries[1]));
    params.lse = lse.raw_data();
    params.delta = delta.raw_data();
    params.k = Operand(their_k);
    params.v = Operand(heads.OfKeys(keys[1]));
    params.dq = Operand(heads.OfQueries(dq_sum));
    params.dk = Operand(heads.OfKeys(dk_sum));
    params.dv = Operand(heads.OfKeys(dv_sum));
    params.dk_out = Operand(heads.OfKeys(*dk));
    params.dv_out = Operand(heads.OfKeys(*dv));
    params.assign = assign;
    params.deterministic = options_.deterministic;
    params.shape = KernelShape(options_.softmax_scale, their_q, their_k);
    params.shape.scores = scores.For(q_positions, k_positions, heads.first);
    for (const MaskPart& visible : parts_of(source)) {
      SetMask(visible, q.device(), &params.shape);
      if (!assign) {
        const HeadCalls::Ends of_kv = calls_of_kv->Next(heads.keys());
        params.first_dq = calls_of_q->Next(heads.queries()).first;
        params.first_dkv = of_kv.first;
        if (last_converts) params.last_dkv = of_kv.last;
      }
      kernels.Backward(params);
    }
  };
  // The calls that add to the gradient of another rank's block.
  const auto calls_of = [&](int source, int64_t heads, const Ring::Sums& sums) {
    HeadCalls calls(heads);
    calls.Announce({0, heads}, static_cast<int64_t>(parts_of(source).size()));
    if (!sums.first) calls.OnlyAdd();
    if (!calls.ForAllHeads()) {
      for (const Tensor& sum : sums.tensors) sum.Fill(0);
    }
    return calls;
  };
  Ring::BlockGradients gradients;
  gradients.in_transit = RingGradDTypeOf(q.dtype());
  Ring::Block own_sums;
  if (burst) {
    own_sums = {{dq_sum, kSeqAxis}};
  } else {
    own_sums = {{dk_sum, kSeqAxis}, {dv_sum, kSeqAxis}};
  }
  gradients.own = own_sums;
  if (rows != nullptr) {
    for (Ring::BlockTensor& own : gradients.own) {
      Shape shape = own.tensor.shape();
      shape[kSeqAxis] = route.lengths[rank];
      own.tensor = Tensor::Zeros(shape, own.tensor.dtype(), own.tensor.device());
    }
  }
  const auto is_own = [&](int source) { return rows != nullptr && source == rank; };
  const Positions& own_q_positions = schedule.shard().group_positions(rank);
  const Positions& own_k_positions = schedule.key_shard().group_positions(rank);
  const Tensor row_lse = saved.lse.Contiguous();
  if (burst) {
    // K, V, dK, dV stay. Q, dO, lse, delta visit the ranks, and dQ follows them.
    const Ring::Tensors own_keys = {saved.k, saved.v};
    const Ring::Tensors own_queries = {q, saved.dout, row_lse, delta};
    const Ring::Block block = ForSending(
        {{q, kSeqAxis}, {saved.dout, kSeqAxis}, {row_lse, kLseSeqAxis}, {delta, kLseSeqAxis}},
        rows);
    BURST_RETURN_IF_ERROR(ring_->Run(
        route, block, &gradients,
        [&](int source, Ring::Part part, const Ring::Tensors& visiting, const Ring::Sums& dq) {
          const bool own = is_own(source);
          HeadCalls calls = calls_of(source, num_heads, dq);
          kernel(source, part, own ? own_q_positions : schedule.queries_sent_by(source),
                 own_k_positions, own ? own_queries : visiting, own_keys,
                 own ? dq_sum : dq.tensors[0], dk_sum, dv_sum, source == rank ? &q_calls : &calls,
                 &kv_calls);
        },
        &stats_.backward));
  } else {
    // Q, dO, lse, delta, dQ stay. K and V visit the ranks, and dK and dV follow them.
    const Ring::Tensors own_queries = {q, saved.dout, row_lse, delta};
    const Ring::Tensors own_keys = {saved.k, saved.v};
    const Ring::Block block = ForSending({{saved.k, kSeqAxis}, {saved.v, kSeqAxis}}, rows);
    BURST_RETURN_IF_ERROR(ring_->Run(
        route, block, &gradients,
        [&](int source, Ring::Part part, const Ring::Tensors& visiting, const Ring::Sums& dkv) {
          const bool own = is_own(source);
          HeadCalls calls = calls_of(source, num_kv_heads, dkv);
          kernel(source, part, own_q_positions,
                 own ? own_k_positions : schedule.keys_sent_by(source), own_queries,
                 own ? own_keys : visiting, dq_sum, own ? dk_sum : dkv.tensors[0],
                 own ? dv_sum : dkv.tensors[1], &q_calls, source == rank ? &kv_calls : &calls);
        },
        &stats_.backward));
  }
  if (rows != nullptr) {
    for (size_t i = 0; i < own_sums.size(); ++i) {
      const Tensor& returned = gradients.own[i].tensor;
      if (!gradients.last.empty()) returned.Add(gradients.last[i]);
      if (returned.numel() > 0) AddToRows(returned, own_sums[i].tensor, kSeqAxis, *rows);
    }
    gradients.last.clear();
  }
  const auto finish = [](const Tensor& sum, const Tensor& gradient, const Tensor& last) {
    if (sum.raw_data() != gradient.raw_data()) {
      FlashConvert(sum, gradient, last);
    } else if (!last.null()) {
      sum.Add(last);
    }
  };
  const Ring::Tensors& last = gradients.last;  // of dQ, or of dK and dV; or empty
  const bool arrived = !last.empty();
  finish(dq_sum, *dq, arrived && burst ? last[0] : Tensor());
  if (last_converts) return absl::OkStatus();
  finish(dk_sum, *dk, arrived && !burst ? last[0] : Tensor());
  finish(dv_sum, *dv, arrived && !burst ? last[1] : Tensor());
  return absl::OkStatus();
}

}  // namespace burst
