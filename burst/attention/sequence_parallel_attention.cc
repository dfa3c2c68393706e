#include "burst/attention/sequence_parallel_attention.h"

#include <utility>
#include <vector>

#include "burst/base/check.h"
#include "burst/base/progress.h"
#include "burst/base/status.h"

namespace burst {
namespace {

// Returns the call of an op. It has a copy of the sinks' values, because a parameter's memory need
// not last until the backward.
AttentionCall CallOf(const TapeAttention& with, const Tensor& q, const Tensor& k, const Tensor& v) {
  AttentionCall call = {with.schedule.get(), q, k, v, {}, with.dropout};
  if (with.sinks.defined()) {
    const Tensor& logits = with.sinks.value();
    const DType dtype = SumDType(logits.dtype());
    call.sinks = logits.dtype() == dtype ? logits.Clone() : logits.To(dtype);
  }
  return call;
}

// Runs Forward for the tape. It reports a failure to the tape, and the results are then zeros.
void ForwardOnTape(Tape& tape, SequenceParallelAttention& attention, const AttentionCall& call,
                   AttentionResult* result) {
  ReachOp(CurrentLayer(), "attention", /*on_device=*/true);
  const absl::Status status = attention.Forward(call, result);
  if (status.ok()) return;
  tape.Fail(status);
  const Tensor& q = call.q;
  result->out = Tensor::Zeros(call.OutShape(), q.dtype(), q.device());
  result->lse = Tensor::Zeros(LseShape(q), SumDType(q.dtype()), q.device());
}

// Runs Backward for the tape. It also adds to the gradient of the sinks. Returns false if it
// failed.
bool BackwardOnTape(Tape& tape, const TapeAttention& with, const AttentionCall& call,
                    const AttentionResult& result, AttentionGradients* gradients) {
  ReachOp(CurrentLayer(), "attention", /*on_device=*/true);
  const absl::Status status = with.attention.Backward(call, result, gradients);
  if (!status.ok()) tape.Fail(status);
  if (!status.ok() || !with.sinks.defined() || !with.sinks.requires_grad()) return status.ok();
  for (int64_t part = 0; part < gradients->dsinks.dim(0); ++part) {
    const Tensor& sum = with.sinks.MutableGrad();
    sum.Add(gradients->dsinks.Slice(0, part, 1).View(sum.shape()).To(sum.dtype()));
    if (with.sinks_part_done != nullptr) with.sinks_part_done();
  }
  return true;
}

void Keep(const AttentionResult& result, const HeadGroup& group, KeptAttention* kept) {
  kept->results.resize(group.count);
  AttentionResult& own = kept->results[group.index];
  own = result;
  own.out = own.exchanged.q = own.exchanged.k = own.exchanged.v = Tensor();
  if (group.count == 1) kept->out = result.out;
}

AttentionResult TakeKept(KeptAttention* kept, int64_t num_heads, const HeadGroup& group) {
  AttentionResult result = std::exchange(kept->results[group.index], {});
  result.out =
      group.count == 1 ? kept->out : kept->out.Slice(2, group.index * num_heads, num_heads);
  if (group.index + 1 == group.count) kept->out = Tensor();
  return result;
}

// Returns the number of q's tokens that belong to `part`. The strategy has the tokens of a rank or
// of its group.
int64_t TokensOf(const AttentionSchedule& part, const AttentionCall& call) {
  return call.q.dim(1) == call.schedule->shard().local_length() ? part.shard().local_length()
                                                                : part.shard().group_length();
}

// Makes the first of two runs. It copies the end of the result, so that the rest is free.
AttentionResult ForwardAndKeepEnd(Tape& tape, SequenceParallelAttention& attention,
                                  const AttentionCall& call, KeptAttention* kept) {
  AttentionResult result;
  ForwardOnTape(tape, attention, call, &result);
  result.exchanged = {};
  const int64_t begin = TokensOf(*kept->again, call), count = call.q.dim(1) - begin;
  kept->out = result.out.Slice(1, begin, count).Clone();
  kept->results.resize(1);
  kept->results[0].lse = result.lse.Slice(2, begin, count).Clone();
  return result;
}

// Makes the second run. It computes the begin of the result, and appends the kept end.
AttentionResult ForwardAgain(Tape& tape, SequenceParallelAttention& attention,
                             const AttentionCall& call, KeptAttention* kept) {
  const Tensor& q = call.q;
  const int64_t begin = TokensOf(*kept->again, call), count = q.dim(1) - begin;
  AttentionCall again = call;
  again.schedule = kept->again.get();
  for (Tensor* tensor : {&again.q, &again.k, &again.v}) *tensor = tensor->Slice(1, 0, begin);
  const AttentionResult result = {Tensor::Empty(call.OutShape(), q.dtype(), q.device()),
                                  Tensor::Empty(LseShape(q), SumDType(q.dtype()), q.device())};
  AttentionResult first = {result.out.Slice(1, 0, begin)};
  ForwardOnTape(tape, attention, again, &first);
  result.lse.Slice(2, 0, begin).CopyFrom(first.lse);
  result.out.Slice(1, begin, count).CopyFrom(std::exchange(kept->out, {}));
  result.lse.Slice(2, begin, count).CopyFrom(std::exchange(kept->results[0].lse, {}));
  return result;
}

}  // namespace

Variable AttentionOp(Tape& tape, const TapeAttention& with, const Variable& q, const Variable& k,
                     const Variable& v, Variable* lse) {
  AttentionCall call = CallOf(with, q.value(), k.value(), v.value());
  call.wants_lse = lse != nullptr;
  AttentionResult result;
  ForwardOnTape(tape, with.attention, call, &result);
  const Variable out = tape.Output(result.out, {q, k, v, with.sinks});
  std::vector<Variable> outputs = {out};
  if (lse != nullptr) {
    *lse = tape.Output(result.lse, {q, k, v, with.sinks});
    outputs.push_back(*lse);
  }
  if (!tape.NeedsGrad({q, k, v, with.sinks})) return out;

  tape.Record("attention", outputs, [&tape, with, q, k, v, outputs, call, result] {
    const Variable& out = outputs[0];
    AttentionGradients gradients = {out.grad()};
    if (gradients.dout.null()) gradients.dout = Tensor::ZerosLike(out.value());
    if (outputs.size() > 1) gradients.dlse = outputs[1].grad();
    if (!BackwardOnTape(tape, with, call, result, &gradients)) return;
    q.AddGrad(gradients.dq);
    k.AddGrad(gradients.dk);
    v.AddGrad(gradients.dv);
  });
  return out;
}

Variable AttentionOp(Tape& tape, const TapeAttention& with, const Variable& qkv, int64_t num_heads,
                     int64_t num_kv_heads, KeptAttention* kept, const HeadGroup& group) {
  BURST_CHECK(qkv.value().ndim() == 4 && qkv.value().dim(2) == num_heads + 2 * num_kv_heads)
      << "qkv " << ToString(qkv.shape()) << " for " << num_heads << " heads and " << num_kv_heads
      << " KV heads";
  const auto heads = [=](const Tensor& packed, int part) {  // 0: query, 1: key, 2: value
    if (part == 0) return packed.Slice(2, 0, num_heads);
    return packed.Slice(2, num_heads + (part - 1) * num_kv_heads, num_kv_heads);
  };
  AttentionCall call =
      CallOf(with, heads(qkv.value(), 0), heads(qkv.value(), 1), heads(qkv.value(), 2));
  AttentionResult result;
  const bool is_kept = kept != nullptr && !kept->out.null();
  if (kept != nullptr && kept->again != nullptr) {
    BURST_CHECK_EQ(group.count, 1);
    result = is_kept ? ForwardAgain(tape, with.attention, call, kept)
                     : ForwardAndKeepEnd(tape, with.attention, call, kept);
  } else if (is_kept) {
    result = TakeKept(kept, num_heads, group);
  } else {
    call.wants_lse = false;
    ForwardOnTape(tape, with.attention, call, &result);
    if (kept != nullptr) Keep(result, group, kept);
  }
  const Variable out = tape.Output(result.out, {qkv, with.sinks});
  if (!tape.NeedsGrad({qkv, with.sinks})) return out;

  tape.Record("attention", {out}, [&tape, with, qkv, heads, out, call, result] {
    const Tensor dqkv = Tensor::EmptyLike(qkv.value());
    AttentionGradients gradients = {out.grad()};
    gradients.dq = heads(dqkv, 0), gradients.dk = heads(dqkv, 1), gradients.dv = heads(dqkv, 2);
    if (BackwardOnTape(tape, with, call, result, &gradients)) qkv.AddGrad(dqkv);
  });
  return out;
}

}  // namespace burst
