#include "burst/attention/attention_call.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "burst/base/status.h"

namespace burst {
namespace {

// InvalidArgument unless the tensor has this shape, dtype and device, and stride 1 along its last
// axis.
absl::Status CheckTensor(const char* name, const Tensor& tensor, const Shape& shape, DType dtype,
                         DeviceType device) {
  if (tensor.null()) return absl::InvalidArgumentError(absl::StrCat(name, ": must not be null"));
  if (tensor.shape() == shape && tensor.dtype() == dtype && tensor.device() == device &&
      (tensor.stride(-1) == 1 || tensor.dim(-1) <= 1)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      name, ": must be a ", Name(dtype), " tensor ", ToString(shape), " on ", Name(device),
      " with innermost stride 1; got ", Name(tensor.dtype()), " ", ToString(tensor.shape()), " on ",
      Name(tensor.device()), " with innermost stride ", tensor.stride(-1)));
}

absl::Status CheckLike(const char* name, const Tensor& tensor, const Tensor& other) {
  return CheckTensor(name, tensor, other.shape(), other.dtype(), other.device());
}

absl::Status CheckOut(const char* name, const Tensor& out, const AttentionCall& call) {
  return CheckTensor(name, out, call.OutShape(), call.q.dtype(), call.q.device());
}

absl::Status CheckLse(const char* name, const Tensor& lse, const Tensor& q) {
  return CheckTensor(name, lse, LseShape(q), SumDType(q.dtype()), q.device());
}

}  // namespace

absl::Status AttentionCall::Check(const AttentionKernels& kernels) const {
  if (q.ndim() != 4) {
    return absl::InvalidArgumentError(
        absl::StrCat("q: must be [batch, length, heads, head_dim]; got ", ToString(q.shape())));
  }
  if (k.ndim() != 4) {
    return absl::InvalidArgumentError(
        absl::StrCat("k: must be [batch, length, KV heads, head_dim]; got ", ToString(k.shape())));
  }
  if (v.ndim() != 4) {
    return absl::InvalidArgumentError(
        absl::StrCat("v: must be [batch, length, KV heads, value_dim]; got ", ToString(v.shape())));
  }
  const Shape like_q = {q.dim(0), k.dim(1), k.dim(2), q.dim(3)};
  const Shape like_k = {q.dim(0), k.dim(1), k.dim(2), v.dim(3)};
  BURST_RETURN_IF_ERROR(CheckLike("q", q, q));
  BURST_RETURN_IF_ERROR(CheckTensor("k", k, like_q, q.dtype(), q.device()));
  BURST_RETURN_IF_ERROR(CheckTensor("v", v, like_k, q.dtype(), q.device()));
  BURST_RETURN_IF_ERROR(kernels.Check(q.device(), q.dtype(), widths()));
  if (k.dim(2) == 0 || q.dim(2) % k.dim(2) != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "k: must have a number of heads that divides the ", q.dim(2), " of q; got ", k.dim(2)));
  }
  if (sinks.null()) return absl::OkStatus();
  return CheckTensor("sinks", sinks, {q.dim(2)}, SumDType(q.dtype()), q.device());
}

absl::Status AttentionCall::CheckLengths(int64_t q_length, int64_t k_length) const {
  if (q.dim(1) != q_length) {
    return absl::InvalidArgumentError(absl::StrCat("q: must have this rank's ", q_length,
                                                   " tokens of the schedule; got ", q.dim(1)));
  }
  if (k.dim(1) != k_length) {
    return absl::InvalidArgumentError(absl::StrCat("k: must have this rank's ", k_length,
                                                   " keys of the schedule; got ", k.dim(1)));
  }
  const int64_t rows = schedule->rows();
  if (rows > 1 && rows != q.dim(0)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "q: must have the ", rows, " batch rows of documents, spans or slices; got ", q.dim(0)));
  }
  return absl::OkStatus();
}

absl::Status AttentionResult::Check(const AttentionCall& call) const {
  BURST_RETURN_IF_ERROR(CheckOut("out", out, call));
  BURST_RETURN_IF_ERROR(CheckLse("lse", lse, call.q));
  if (!lse.is_contiguous()) return absl::InvalidArgumentError("lse: must be contiguous");
  return absl::OkStatus();
}

absl::Status AttentionResult::Prepare(const AttentionCall& call, bool with_lse) {
  const Tensor& q = call.q;
  exchanged = {};
  if (out.null()) out = Tensor::Empty(call.OutShape(), q.dtype(), q.device());
  if (lse.null() && with_lse) {
    lse = Tensor::Empty(LseShape(q), SumDType(q.dtype()), q.device());
  }
  BURST_RETURN_IF_ERROR(with_lse ? Check(call) : CheckOut("out", out, call));
  if (!call.wants_max_logits) return absl::OkStatus();
  const Shape shape = {q.dim(0), q.dim(2)};
  if (max_logits.null()) max_logits = Tensor::Empty(shape, DType::kFloat32);
  return CheckTensor("max_logits", max_logits, shape, DType::kFloat32, DeviceType::kCpu);
}

absl::Status AttentionGradients::Prepare(const AttentionCall& call) {
  BURST_RETURN_IF_ERROR(CheckOut("dout", dout, call));
  if (!dlse.null()) BURST_RETURN_IF_ERROR(CheckLse("dlse", dlse, call.q));
  if (dq.null()) dq = Tensor::EmptyLike(call.q);
  if (dk.null()) dk = Tensor::EmptyLike(call.k);
  if (dv.null()) dv = Tensor::EmptyLike(call.v);
  BURST_RETURN_IF_ERROR(CheckLike("dq", dq, call.q));
  BURST_RETURN_IF_ERROR(CheckLike("dk", dk, call.k));
  return CheckLike("dv", dv, call.v);
}

FlashAttentionShape KernelShape(double softmax_scale, const Tensor& q, const Tensor& k,
                                const Tensor& v) {
  FlashAttentionShape shape;
  shape.batch = q.dim(0);
  shape.q_len = q.dim(1);
  shape.k_len = k.dim(1);
  shape.num_heads = q.dim(2);
  shape.num_kv_heads = k.dim(2);
  shape.head_dim = q.dim(3);
  shape.value_dim = v.dim(3);
  shape.softmax_scale =
      softmax_scale != 0 ? softmax_scale : 1 / std::sqrt(static_cast<double>(q.dim(3)));
  shape.dtype = q.dtype();
  return shape;
}

}  // namespace burst
