#include "burst/attention/sequence_parallel_attention.h"

#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "burst/attention/check_tensors.h"
#include "burst/base/check.h"
#include "burst/base/progress.h"
#include "burst/base/status.h"
#include "burst/kernels/flash_attention.h"

namespace burst {
namespace {

using Saved = SequenceParallelAttention::Saved;

// Runs Forward for the tape. It reports a failure to the tape, and the results are then zeros.
void ForwardOnTape(Tape& tape, SequenceParallelAttention& attention,
                   const AttentionSchedule& schedule, const Tensor& q, const Tensor& k,
                   const Tensor& v, Tensor* out, Tensor* lse, Saved* saved) {
  ReachOp(CurrentLayer(), "attention", /*on_device=*/true);
  const absl::Status status = attention.Forward(schedule, q, k, v, out, lse, saved);
  if (status.ok()) return;
  tape.Fail(status);
  *out = Tensor::Zeros(q.shape(), q.dtype(), q.device());
  if (lse != nullptr) *lse = Tensor::Zeros(LseShape(q), SumDType(q.dtype()), q.device());
}

// Returns a copy of the sinks' values for Forward, because a parameter's memory need not last until
// Backward.
Tensor ValuesOf(const AttentionSinks& sinks) {
  if (!sinks.logits.defined()) return Tensor();
  const Tensor& logits = sinks.logits.value();
  const DType dtype = SumDType(logits.dtype());
  return logits.dtype() == dtype ? logits.Clone() : logits.To(dtype);
}

// Runs Backward for the tape. It also adds to the gradient of the sinks.
absl::Status BackwardOnTape(SequenceParallelAttention& attention, const AttentionSchedule& schedule,
                            const Saved& saved, const AttentionSinks& sinks, Tensor* dq, Tensor* dk,
                            Tensor* dv) {
  ReachOp(CurrentLayer(), "attention", /*on_device=*/true);
  if (!sinks.logits.defined() || !sinks.logits.requires_grad()) {
    return attention.Backward(schedule, saved, dq, dk, dv);
  }
  Tensor dsinks;
  BURST_RETURN_IF_ERROR(attention.Backward(schedule, saved, dq, dk, dv, &dsinks));
  for (int64_t part = 0; part < dsinks.dim(0); ++part) {
    const Tensor& sum = sinks.logits.MutableGrad();
    sum.Add(dsinks.Slice(0, part, 1).View(sum.shape()).To(sum.dtype()));
    if (sinks.part_done != nullptr) sinks.part_done();
  }
  return absl::OkStatus();
}

void Keep(const Tensor& out, const Saved& saved, const HeadGroup& group, KeptAttention* kept) {
  kept->saved.resize(group.count);
  Saved& own = kept->saved[group.index];
  own = saved;
  own.q = own.k = own.v = Tensor();
  if (!own.out.null() && own.out.raw_data() == out.raw_data()) own.out = Tensor();
  if (group.count == 1) kept->out = out;
}

std::pair<Tensor, Saved> TakeKept(KeptAttention* kept, int64_t num_heads, const HeadGroup& group) {
  const Tensor out =
      group.count == 1 ? kept->out : kept->out.Slice(2, group.index * num_heads, num_heads);
  Saved saved = std::exchange(kept->saved[group.index], {});
  if (saved.out.null()) saved.out = out;
  if (group.index + 1 == group.count) kept->out = Tensor();
  return {out, std::move(saved)};
}

// Returns the number of q's tokens that belong to `part`. The strategy has the tokens of a rank or
// of its group.
int64_t TokensOf(const AttentionSchedule& part, const AttentionSchedule& all, const Tensor& q) {
  return q.dim(1) == all.shard().local_length() ? part.shard().local_length()
                                                : part.shard().group_length();
}

// Makes the first of two runs. It copies the end of the result, so that the rest is free.
Tensor ForwardAndKeepEnd(Tape& tape, SequenceParallelAttention& attention,
                         const AttentionSchedule& schedule, const Tensor& q, const Tensor& k,
                         const Tensor& v, KeptAttention* kept) {
  Tensor out, lse;
  ForwardOnTape(tape, attention, schedule, q, k, v, &out, &lse, /*saved=*/nullptr);
  const int64_t begin = TokensOf(*kept->again, schedule, q), count = q.dim(1) - begin;
  kept->out = out.Slice(1, begin, count).Clone();
  kept->saved.resize(1);
  kept->saved[0].lse = lse.Slice(2, begin, count).Clone();
  return out;
}

// Makes the second run. It computes the begin of the result, and appends the kept end.
Tensor ForwardAgain(Tape& tape, SequenceParallelAttention& attention,
                    const AttentionSchedule& schedule, const Tensor& q, const Tensor& k,
                    const Tensor& v, KeptAttention* kept, Saved* saved) {
  const int64_t begin = TokensOf(*kept->again, schedule, q), count = q.dim(1) - begin;
  const auto first = [begin](const Tensor& all) { return all.Slice(1, 0, begin); };
  const Tensor out = Tensor::Empty(q.shape(), q.dtype(), q.device());
  const Tensor lse = Tensor::Empty(LseShape(q), SumDType(q.dtype()), q.device());
  Tensor first_out = first(out), first_lse;
  ForwardOnTape(tape, attention, *kept->again, first(q), first(k), first(v), &first_out, &first_lse,
                /*saved=*/nullptr);
  lse.Slice(2, 0, begin).CopyFrom(first_lse);
  out.Slice(1, begin, count).CopyFrom(std::exchange(kept->out, {}));
  lse.Slice(2, begin, count).CopyFrom(std::exchange(kept->saved[0].lse, {}));
  const absl::Status status = attention.Rebuild(schedule, q, k, v, out, lse, saved);
  if (!status.ok()) tape.Fail(status);
  return out;
}

}  // namespace

Variable AttentionOp(Tape& tape, SequenceParallelAttention& attention,
                     std::shared_ptr<const AttentionSchedule> schedule, const Variable& q,
                     const Variable& k, const Variable& v, Variable* lse,
                     const AttentionSinks& sinks) {
  const bool needs_grad = tape.NeedsGrad({q, k, v, sinks.logits});
  attention.SetSinks(ValuesOf(sinks));
  Tensor out_value, lse_value;
  Saved saved;
  ForwardOnTape(tape, attention, *schedule, q.value(), k.value(), v.value(), &out_value,
                lse != nullptr ? &lse_value : nullptr, needs_grad ? &saved : nullptr);
  const Variable out = tape.Output(out_value, {q, k, v, sinks.logits});
  std::vector<Variable> outputs = {out};
  if (lse != nullptr) {
    *lse = tape.Output(lse_value, {q, k, v, sinks.logits});
    outputs.push_back(*lse);
  }
  if (!needs_grad) return out;

  tape.Record("attention", outputs, [&tape, &attention, schedule, q, k, v, outputs, saved, sinks] {
    const Variable& out = outputs[0];
    Saved given = saved;
    given.dout = out.grad().null() ? Tensor::ZerosLike(out.value()) : out.grad();
    if (outputs.size() > 1) given.dlse = outputs[1].grad();
    Tensor dq, dk, dv;
    const absl::Status status = BackwardOnTape(attention, *schedule, given, sinks, &dq, &dk, &dv);
    if (!status.ok()) return tape.Fail(status);
    q.AddGrad(dq);
    k.AddGrad(dk);
    v.AddGrad(dv);
  });
  return out;
}

Variable AttentionOp(Tape& tape, SequenceParallelAttention& attention,
                     std::shared_ptr<const AttentionSchedule> schedule, const Variable& qkv,
                     int64_t num_heads, int64_t num_kv_heads, KeptAttention* kept,
                     const HeadGroup& group, const AttentionSinks& sinks) {
  BURST_CHECK(qkv.value().ndim() == 4 && qkv.value().dim(2) == num_heads + 2 * num_kv_heads)
      << "qkv " << ToString(qkv.shape()) << " for " << num_heads << " heads and " << num_kv_heads
      << " KV heads";
  const auto heads = [=](const Tensor& packed, int part) {  // 0: query, 1: key, 2: value
    if (part == 0) return packed.Slice(2, 0, num_heads);
    return packed.Slice(2, num_heads + (part - 1) * num_kv_heads, num_kv_heads);
  };
  const bool needs_grad = tape.NeedsGrad({qkv, sinks.logits});
  attention.SetSinks(ValuesOf(sinks));
  const Tensor q = heads(qkv.value(), 0), k = heads(qkv.value(), 1), v = heads(qkv.value(), 2);
  Tensor out_value;
  Saved saved;
  const bool is_kept = kept != nullptr && !kept->out.null();
  if (kept != nullptr && kept->again != nullptr) {
    BURST_CHECK_EQ(group.count, 1);
    out_value = is_kept ? ForwardAgain(tape, attention, *schedule, q, k, v, kept, &saved)
                        : ForwardAndKeepEnd(tape, attention, *schedule, q, k, v, kept);
  } else if (is_kept) {
    std::tie(out_value, saved) = TakeKept(kept, num_heads, group);
    const absl::Status status = attention.Restore(*schedule, q, k, v, &saved);
    if (!status.ok()) tape.Fail(status);
  } else {
    ForwardOnTape(tape, attention, *schedule, q, k, v, &out_value, /*lse=*/nullptr,
                  needs_grad || kept != nullptr ? &saved : nullptr);
    if (kept != nullptr) Keep(out_value, saved, group, kept);
  }
  const Variable out = tape.Output(out_value, {qkv, sinks.logits});
  if (!needs_grad) return out;

  tape.Record("attention", {out}, [&tape, &attention, schedule, qkv, heads, out, saved, sinks] {
    const Tensor dqkv = Tensor::EmptyLike(qkv.value());
    Tensor dq = heads(dqkv, 0), dk = heads(dqkv, 1), dv = heads(dqkv, 2);
    Saved given = saved;
    given.dout = out.grad();
    const absl::Status status = BackwardOnTape(attention, *schedule, given, sinks, &dq, &dk, &dv);
    if (!status.ok()) return tape.Fail(status);
    qkv.AddGrad(dqkv);
  });
  return out;
}

absl::Status SequenceParallelAttention::Restore(const AttentionSchedule&, const Tensor& q,
                                                const Tensor& k, const Tensor& v, Saved* saved) {
  saved->q = q;
  saved->k = k;
  saved->v = v;
  return absl::OkStatus();
}

absl::Status CheckAttentionInputs(const Tensor& q, const Tensor& k, const Tensor& v) {
  if (q.ndim() != 4) {
    return absl::InvalidArgumentError(
        absl::StrCat("q: must be [batch, length, heads, head_dim]; got ", ToString(q.shape())));
  }
  if (k.ndim() != 4) {
    return absl::InvalidArgumentError(
        absl::StrCat("k: must be [batch, length, KV heads, head_dim]; got ", ToString(k.shape())));
  }
  const Shape like_q = {q.dim(0), k.dim(1), k.dim(2), q.dim(3)};
  BURST_RETURN_IF_ERROR(CheckTensor("q", q, q.shape(), q.dtype(), q.device()));
  BURST_RETURN_IF_ERROR(CheckTensor("k", k, like_q, q.dtype(), q.device()));
  BURST_RETURN_IF_ERROR(CheckTensor("v", v, like_q, q.dtype(), q.device()));
  BURST_RETURN_IF_ERROR(KernelsOf(q.device()).Check(q.device(), q.dtype(), q.dim(3)));
  if (k.dim(2) == 0 || q.dim(2) % k.dim(2) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("k: its heads must divide the ", q.dim(2), " of q; got ", k.dim(2)));
  }
  return absl::OkStatus();
}

absl::Status CheckFitsSchedule(const Tensor& q, const Tensor& k, int64_t q_length, int64_t k_length,
                               int64_t rows) {
  if (q.dim(1) != q_length) {
    return absl::InvalidArgumentError(absl::StrCat("q: must have this rank's ", q_length,
                                                   " tokens of the schedule; got ", q.dim(1)));
  }
  if (k.dim(1) != k_length) {
    return absl::InvalidArgumentError(absl::StrCat("k: must have this rank's ", k_length,
                                                   " keys of the schedule; got ", k.dim(1)));
  }
  if (rows > 1 && rows != q.dim(0)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "q: must have the ", rows, " batch rows of documents, spans or slices; got ", q.dim(0)));
  }
  return absl::OkStatus();
}

absl::Status CheckSinks(const Tensor& sinks, const Tensor& q, bool needed) {
  if (needed && sinks.null()) {
    return absl::InvalidArgumentError("dsinks of an attention without sinks");
  }
  const DType dtype = SumDType(q.dtype());
  if (sinks.null() || (sinks.shape() == Shape{q.dim(2)} && sinks.dtype() == dtype &&
                       sinks.device() == q.device() && sinks.is_contiguous())) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "sinks must be a ", Name(dtype), " tensor ", ToString({q.dim(2)}), " on ", Name(q.device()),
      ", not ", Name(sinks.dtype()), " ", ToString(sinks.shape()), " on ", Name(sinks.device())));
}

absl::Status EnsureOutput(const char* name, const Shape& shape, DType dtype, DeviceType device,
                          Tensor* output) {
  if (output->null()) *output = Tensor::Empty(shape, dtype, device);
  return CheckTensor(name, *output, shape, dtype, device);
}

absl::Status EnsureGradients(const SequenceParallelAttention::Saved& saved, Tensor* dq, Tensor* dk,
                             Tensor* dv) {
  const Tensor &q = saved.q, &k = saved.k;
  BURST_RETURN_IF_ERROR(EnsureOutput("dq", q.shape(), q.dtype(), q.device(), dq));
  BURST_RETURN_IF_ERROR(EnsureOutput("dk", k.shape(), q.dtype(), q.device(), dk));
  return EnsureOutput("dv", k.shape(), q.dtype(), q.device(), dv);
}

}  // namespace burst
