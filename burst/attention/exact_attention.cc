#include "burst/attention/exact_attention.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "burst/attention/exact_schedule.h"
#include "burst/base/status.h"
#include "burst/kernels/flash_attention.h"

namespace burst {
namespace {

// Axes of [K and V, batch, tokens, kv_heads, head_dim].
constexpr int kPartAxis = 0, kTokenAxis = 2;

// Returns the shape of K and V of some tokens, one after the other.
Shape KeysShape(const Tensor& k, int64_t tokens) {
  return {2, k.dim(0), tokens, k.dim(2), k.dim(3)};
}

// The direction of a copy between the sequence's order of tokens and the ranks' order, where each
// rank's tokens follow those of the rank before.
enum class Direction { kToSequence, kToRanks };
void Reorder(const TokenShard& shard, Direction direction, const Tensor& by_rank,
             const Tensor& in_order) {
  std::vector<TensorCopy> copies;
  int64_t at = 0;
  for (int rank = 0; rank < shard.num_groups(); ++rank) {
    const std::vector<int32_t>& positions = shard.group_positions(rank);
    const auto length = static_cast<int64_t>(positions.size());
    Shape shape = in_order.shape();
    shape[kTokenAxis] = length;
    const int64_t numel = std::accumulate(shape.begin(), shape.end(), int64_t{1},
                                          [](int64_t a, int64_t b) { return a * b; });
    const Tensor own = by_rank.Slice(0, at, numel).View(shape);
    at += numel;
    for (int64_t begin = 0, end = 0; begin < length; begin = end) {
      while (end < length && positions[end] == positions[begin] + (end - begin)) ++end;
      const Tensor part = own.Slice(kTokenAxis, begin, end - begin);
      const Tensor place = in_order.Slice(kTokenAxis, positions[begin], end - begin);
      direction == Direction::kToSequence ? copies.push_back({part, place})
                                          : copies.push_back({place, part});
    }
  }
  CopyAll(copies);
}

// Returns the number of elements in every rank's part.
std::vector<int64_t> Counts(const TokenShard& shard, int64_t per_token) {
  std::vector<int64_t> counts;
  for (int rank = 0; rank < shard.num_groups(); ++rank) {
    counts.push_back(shard.group_length(rank) * per_token);
  }
  return counts;
}

// A chunk of queries, and the keys that it sees. Its functions return its part of tensors whose
// axes are batch rows and tokens, or rows, heads and tokens:
struct Call {
  int64_t row, rows;      // rows of the batch
  int64_t begin, length;  // range of the queries
  ExactSchedule::Keys keys;
  FlashAttentionShape shape;

  Tensor Queries(const Tensor& all) const {
    return all.Slice(0, row, rows).Slice(1, begin, length);
  }
  Tensor Keys(const Tensor& all) const {
    return all.Slice(0, row, rows).Slice(1, keys.begin, keys.length);
  }
  Tensor Statistics(const Tensor& all) const {
    return all.Slice(0, row, rows).Slice(2, begin, length);
  }
};

template <typename Visit>
void ForEachCall(const ExactSchedule& schedule, const ExactAttentionOptions& options,
                 const Tensor& q, const Tensor& k, const Tensor& v, Visit visit) {
  FlashAttentionShape shape = KernelShape(options.softmax_scale, q, k, v);
  shape.q_len = schedule.chunk();
  for (int64_t row = 0; row < q.dim(0); row += options.rows) {
    shape.batch = std::min(options.rows, q.dim(0) - row);
    for (int64_t i = 0; i < schedule.count(); ++i) {
      const ExactSchedule::Keys keys = schedule.KeysOf(row, i);
      shape.k_len = keys.length;
      shape.visible = schedule.RangesOf(row, i, q.device());
      visit(Call{row, shape.batch, i * schedule.chunk(), schedule.chunk(), keys, shape});
    }
  }
}

// Returns delta of a call's queries (FlashDeltaParams), in the form of their lse.
Tensor DeltaOf(const Call& call, const AttentionResult& result, const AttentionGradients& gradients,
               const Tensor& lse) {
  const Tensor& all = gradients.dlse;
  const Tensor dlse = all.null() ? Tensor() : call.Statistics(all).Contiguous();
  const Tensor delta = Tensor::EmptyLike(lse);
  FlashDeltaParams params;
  params.shape = call.shape;
  params.out = Operand(call.Queries(result.out));
  params.dout = Operand(call.Queries(gradients.dout));
  params.dlse = dlse.null() ? nullptr : dlse.raw_data();
  params.delta = delta.raw_data();
  KernelsOf(lse.device()).Delta(params);
  return delta;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ExactAttention>> ExactAttention::Create(
    const ExactAttentionOptions& options, Communicator* comm) {
  if (options.chunk < 1 || options.rows < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("a chunk of ", options.chunk, " tokens of ", options.rows, " rows"));
  }
  if (!std::isfinite(options.softmax_scale)) {
    return absl::InvalidArgumentError(
        absl::StrCat("softmax_scale: must be finite; got ", options.softmax_scale));
  }
  return std::unique_ptr<ExactAttention>(new ExactAttention(options, comm));
}

absl::StatusOr<AttentionSchedule> ExactAttention::Schedule(const Sequences& sequences,
                                                           const Mask& mask) const {
  if (sequences.keys.has_value()) {
    return absl::UnimplementedError("exact attention is of one sequence");
  }
  if (mask.intervals() == nullptr) {
    return absl::UnimplementedError("mask: must not be of slices in exact attention");
  }
  const int64_t seqlen = sequences.seqlen;
  std::vector<std::vector<int32_t>> positions;
  if (sequences.positions.has_value()) {
    positions = *sequences.positions;
  } else if (seqlen < 0 || seqlen > INT32_MAX || seqlen % options_.chunk != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("chunks of ", options_.chunk, " tokens do not divide ", seqlen));
  } else {
    const Mask spread = sequences.spread_by.value_or(mask);
    BURST_RETURN_IF_ERROR(spread.CheckForSequence(seqlen));
    positions = ChunkPositions(options_.layout, spread, seqlen, options_.chunk, ranks());
  }
  BURST_ASSIGN_OR_RETURN(TokenShard shard, TokenShard::Create(comm_ == nullptr ? 0 : comm_->rank(),
                                                              ranks(), positions));
  BURST_ASSIGN_OR_RETURN(ExactSchedule made,
                         ExactSchedule::Create(std::move(shard), options_.chunk, mask));
  return AttentionSchedule(std::move(made));
}

absl::Status ExactAttention::Check(const AttentionCall& call) const {
  BURST_RETURN_IF_ERROR(call.Check(KernelsOf(call.q.device())));
  if (!call.widths().equal()) {
    return absl::InvalidArgumentError(
        absl::StrCat("v: must have the head_dim of q in exact attention, ", call.q.dim(3), "; got ",
                     call.v.dim(3)));
  }
  const AttentionSchedule& schedule = *call.schedule;
  const TokenShard& shard = schedule.shard();
  const int rank = comm_ == nullptr ? 0 : comm_->rank();
  if (schedule.exact() == nullptr || schedule.exact()->chunk() != options_.chunk ||
      shard.group_index() != rank || shard.num_groups() != ranks()) {
    return absl::InvalidArgumentError("the schedule is of another attention or another rank");
  }
  if (options_.rows > 1 && shard.seqlen() != options_.chunk) {
    return absl::InvalidArgumentError(absl::StrCat("a chunk of ", options_.rows, " sequences of ",
                                                   options_.chunk, " tokens, these have ",
                                                   shard.seqlen()));
  }
  return call.CheckLengths(shard.local_length(), shard.local_length());
}

absl::Status ExactAttention::GatherKeys(const AttentionCall& call, Tensor* all_k, Tensor* all_v) {
  const TokenShard& shard = call.schedule->shard();
  const Tensor &k = call.k, &v = call.v;
  if (ranks() == 1) {
    *all_k = k;
    *all_v = v;
    return absl::OkStatus();
  }
  const Tensor own = Tensor::Empty(KeysShape(k, k.dim(1)), k.dtype(), k.device());
  CopyAll({{k, own.Slice(kPartAxis, 0, 1).View(k.shape())},
           {v, own.Slice(kPartAxis, 1, 1).View(v.shape())}});
  const Tensor all = Tensor::Empty(KeysShape(k, shard.seqlen()), k.dtype(), k.device());
  const Tensor by_rank = Tensor::Empty({all.numel()}, k.dtype(), k.device());
  BURST_RETURN_IF_ERROR(comm_->PostAllGatherParts(
      own.View({-1}), Counts(shard, 2 * k.dim(0) * k.dim(2) * k.dim(3)), by_rank));
  BURST_RETURN_IF_ERROR(comm_->Wait(Channel::kCollective));
  Reorder(shard, Direction::kToSequence, by_rank, all);
  const Shape shape = {k.dim(0), shard.seqlen(), k.dim(2), k.dim(3)};
  *all_k = all.Slice(kPartAxis, 0, 1).View(shape);
  *all_v = all.Slice(kPartAxis, 1, 1).View(shape);
  return absl::OkStatus();
}

absl::StatusOr<Tensor> ExactAttention::ReduceKeyGrads(const TokenShard& shard, const Tensor& sums) {
  if (ranks() == 1) return sums;
  const Tensor by_rank = Tensor::Empty({sums.numel()}, sums.dtype(), sums.device());
  Reorder(shard, Direction::kToRanks, by_rank, sums);
  Shape shape = sums.shape();
  shape[kTokenAxis] = shard.local_length();
  const Tensor own = Tensor::Empty(shape, sums.dtype(), sums.device());
  BURST_RETURN_IF_ERROR(comm_->PostReduceScatterSum(
      by_rank, Counts(shard, 2 * sums.dim(1) * sums.dim(3) * sums.dim(4)), own.View({-1})));
  BURST_RETURN_IF_ERROR(comm_->Wait(Channel::kCollective));
  return own;
}

absl::Status ExactAttention::Forward(const AttentionCall& call, AttentionResult* result) {
  BURST_RETURN_IF_ERROR(Check(call));
  BURST_RETURN_IF_ERROR(result->Prepare(call));
  Tensor all_k, all_v;
  const int64_t sent = comm_ == nullptr ? 0 : comm_->stats().bytes_sent[2];
  BURST_RETURN_IF_ERROR(GatherKeys(call, &all_k, &all_v));
  if (comm_ != nullptr) sent_.forward += comm_->stats().bytes_sent[2] - sent;

  // The kernels write lse contiguous, chunk by chunk.
  const Tensor& q = call.q;
  const ExactSchedule& chunks = *call.schedule->exact();
  const Tensor chunk_lse = Tensor::Empty({q.dim(0), chunks.count(), q.dim(2), chunks.chunk()},
                                         result->lse.dtype(), q.device());
  std::vector<TensorCopy> copies;
  ForEachCall(chunks, options_, q, call.k, call.v, [&](const Call& chunk) {
    const Tensor part =
        chunk_lse.Slice(0, chunk.row, chunk.rows).Slice(1, chunk.begin / chunks.chunk(), 1);
    FlashForwardParams params;
    params.shape = chunk.shape;
    params.q = Operand(chunk.Queries(q));
    params.k = Operand(chunk.Keys(all_k));
    params.v = Operand(chunk.Keys(all_v));
    params.out = Operand(chunk.Queries(result->out));
    params.out_dtype = q.dtype();
    params.lse = part.raw_data();
    if (!call.sinks.null()) params.sinks = call.sinks.raw_data();
    KernelsOf(q.device()).Forward(params);
    copies.push_back(
        {part.View({chunk.rows, q.dim(2), chunks.chunk()}), chunk.Statistics(result->lse)});
  });
  CopyAll(copies);
  return absl::OkStatus();
}

absl::Status ExactAttention::Backward(const AttentionCall& call, const AttentionResult& result,
                                      AttentionGradients* gradients) {
  BURST_RETURN_IF_ERROR(Check(call));
  BURST_RETURN_IF_ERROR(result.Check(call));
  BURST_RETURN_IF_ERROR(gradients->Prepare(call));
  const Tensor &q = call.q, &k = call.k;
  const DType sum_dtype = SumDType(q.dtype());
  Tensor all_k, all_v;
  const int64_t sent = comm_ == nullptr ? 0 : comm_->stats().bytes_sent[2];
  BURST_RETURN_IF_ERROR(GatherKeys(call, &all_k, &all_v));

  const ExactSchedule& chunks = *call.schedule->exact();
  const TokenShard& shard = chunks.shard();
  const Tensor sums = Tensor::Zeros(KeysShape(k, shard.seqlen()), DType::kFloat64, q.device());
  int64_t part = 0;
  Tensor& dsinks = gradients->dsinks;
  if (!call.sinks.null()) {
    const int64_t calls = (q.dim(0) + options_.rows - 1) / options_.rows * chunks.count();
    dsinks = Tensor::Empty({calls, q.dim(2)}, sum_dtype, q.device());
  }
  ForEachCall(chunks, options_, q, k, call.v, [&](const Call& chunk) {
    const Tensor own_q = chunk.Queries(q), lse = chunk.Statistics(result.lse).Contiguous();
    const Tensor delta = DeltaOf(chunk, result, *gradients, lse);
    if (!call.sinks.null()) {
      FlashSinkGrads(lse, delta, call.sinks, dsinks.Slice(0, part, 1).View({q.dim(2)}));
      ++part;
    }

    const Tensor own_dq = Tensor::Empty(own_q.shape(), sum_dtype, q.device());
    const Shape key_shape = {chunk.rows, chunk.keys.length, k.dim(2), k.dim(3)};
    const Tensor own_dk = Tensor::Empty(key_shape, sum_dtype, q.device());
    const Tensor own_dv = Tensor::Empty(key_shape, sum_dtype, q.device());
    FlashBackwardParams params;
    params.shape = chunk.shape;
    params.q = Operand(own_q);
    params.k = Operand(chunk.Keys(all_k));
    params.v = Operand(chunk.Keys(all_v));
    params.dout = Operand(chunk.Queries(gradients->dout));
    params.lse = lse.raw_data();
    params.delta = delta.raw_data();
    params.dq = AddsTo(Operand(own_dq), {0, q.dim(2)});
    params.dk = AddsTo(Operand(own_dk), {0, k.dim(2)});
    params.dv = AddsTo(Operand(own_dv), {0, k.dim(2)});
    KernelsOf(q.device()).Backward(params);
    FlashConvert(own_dq, chunk.Queries(gradients->dq));
    const auto add = [&](const Tensor& gradient, int part) {
      const Shape all = {k.dim(0), shard.seqlen(), k.dim(2), k.dim(3)};
      AddExactly(gradient, options_.grid, chunk.Keys(sums.Slice(kPartAxis, part, 1).View(all)));
    };
    add(own_dk, 0);
    add(own_dv, 1);
  });
  BURST_ASSIGN_OR_RETURN(const Tensor own, ReduceKeyGrads(shard, sums));
  if (comm_ != nullptr) sent_.backward += comm_->stats().bytes_sent[2] - sent;
  const Tensor converted = own.To(k.dtype());
  gradients->dk.CopyFrom(converted.Slice(kPartAxis, 0, 1).View(k.shape()));
  gradients->dv.CopyFrom(converted.Slice(kPartAxis, 1, 1).View(k.shape()));
  return absl::OkStatus();
}

}  // namespace burst
