#include "burst/kernels/cuda/flash_attention_cuda.h"

#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "burst/device/cuda.h"
#include "burst/kernels/simt/flash_attention_simt.h"
#include "burst/kernels/sm90/flash_attention_sm90.h"
#include "burst/tensor/tensor.h"

namespace burst {
namespace cuda {
namespace {

// Which kernels serve a call: the one place that decides.
enum class Kernels { kNone, kSimt, kSm90 };

Kernels KernelsFor(DType dtype, int64_t head_dim) {
  if (dtype == DType::kFloat32 || dtype == DType::kFloat64) {
    return head_dim <= simt::kMaxHeadDim ? Kernels::kSimt : Kernels::kNone;
  }
  if (dtype != DType::kBFloat16) return Kernels::kNone;
  const bool hopper = CurrentContext().compute_capability == 90;
  if (hopper && head_dim % 8 == 0 && head_dim <= 128) return Kernels::kSm90;
  return Kernels::kNone;
}

Kernels KernelsFor(const FlashAttentionShape& shape) {
  const absl::Status status = CheckFlashAttention(shape.dtype, shape.head_dim);
  BURST_CHECK(status.ok()) << status.message();
  return KernelsFor(shape.dtype, shape.head_dim);
}

// The tensor-core kernels read 16 bytes at a time.
void CheckAligned(const char* name, const AttentionOperand& operand, DType dtype) {
  const int64_t elements = 16 / SizeOf(dtype);
  BURST_CHECK(reinterpret_cast<uintptr_t>(operand.data) % 16 == 0 &&
              operand.batch_stride % elements == 0 && operand.seq_stride % elements == 0 &&
              operand.head_stride % elements == 0)
      << name << ": rows of bfloat16 attention must begin at multiples of 16 bytes";
}

sm90::Shape Sm90Shape(const FlashAttentionShape& shape) {
  BURST_CHECK(shape.softmax_scale > 0) << "bfloat16 attention needs a positive softmax_scale";
  return {shape.batch,
          shape.q_len,
          shape.k_len,
          shape.num_heads,
          shape.num_kv_heads,
          shape.head_dim,
          static_cast<float>(shape.softmax_scale),
          shape.visible.begin,
          shape.visible.end,
          shape.visible.batch_stride};
}

sm90::Operand Sm90Operand(const char* name, const AttentionOperand& operand, DType dtype) {
  CheckAligned(name, operand, dtype);
  return {operand.data, operand.batch_stride, operand.seq_stride, operand.head_stride};
}

constexpr DType kBf16 = DType::kBFloat16;
constexpr DType kFloat = DType::kFloat32;

void ForwardSm90(const FlashForwardParams& params) {
  BURST_CHECK(params.out_dtype == kFloat || !params.merge) << "merging needs float32 results";
  sm90::ForwardParams launch;
  launch.shape = Sm90Shape(params.shape);
  launch.q = Sm90Operand("q", params.q, kBf16);
  launch.k = Sm90Operand("k", params.k, kBf16);
  launch.v = Sm90Operand("v", params.v, kBf16);
  launch.out = Sm90Operand("out", params.out, params.out_dtype);
  launch.store = params.merge                 ? sm90::Store::kFloatAccumulate
                 : params.out_dtype == kFloat ? sm90::Store::kFloat
                                              : sm90::Store::kBf16;
  launch.lse = static_cast<float*>(params.lse);
  const int64_t words = (sm90::ForwardWorkspaceBytes(launch.shape) + 3) / 4;
  const Tensor workspace = Tensor::Zeros({words}, kFloat, DeviceType::kCuda);
  launch.workspace = workspace.raw_data();
  BURST_CUDA_CHECK(sm90::LaunchForward(launch, CurrentStream()));
}

void DeltaSm90(const FlashDeltaParams& params) {
  sm90::DeltaParams launch;
  launch.shape = Sm90Shape(params.shape);
  launch.out = Sm90Operand("out", params.out, kBf16);
  launch.dout = Sm90Operand("dout", params.dout, kBf16);
  launch.dlse = static_cast<const float*>(params.dlse);
  launch.delta = static_cast<float*>(params.delta);
  BURST_CUDA_CHECK(sm90::LaunchDelta(launch, CurrentStream()));
}

void BackwardSm90(const FlashBackwardParams& params) {
  const FlashAttentionShape& shape = params.shape;
  sm90::BackwardParams launch;
  launch.shape = Sm90Shape(shape);
  launch.q = Sm90Operand("q", params.q, kBf16);
  launch.k = Sm90Operand("k", params.k, kBf16);
  launch.v = Sm90Operand("v", params.v, kBf16);
  launch.dout = Sm90Operand("dout", params.dout, kBf16);
  launch.lse = static_cast<const float*>(params.lse);
  launch.delta = static_cast<const float*>(params.delta);
  launch.dk = Sm90Operand("dk", params.dk, params.assign ? kBf16 : kFloat);
  launch.dv = Sm90Operand("dv", params.dv, params.assign ? kBf16 : kFloat);
  launch.store = params.assign ? sm90::Store::kBf16 : sm90::Store::kFloatAccumulate;
  launch.deterministic = params.deterministic;
  const int64_t words = (sm90::BackwardWorkspaceBytes(launch.shape, launch.deterministic) + 3) / 4;
  const Tensor workspace = Tensor::Empty({words}, kFloat, DeviceType::kCuda);
  launch.workspace = workspace.raw_data();

  // dQ is always summed over the blocks of keys, in float32.
  Tensor dq_sum;
  if (params.assign) {
    dq_sum = Tensor::Zeros({shape.batch, shape.q_len, shape.num_heads, shape.head_dim}, kFloat,
                           DeviceType::kCuda);
    launch.dq = Sm90Operand("dq", Operand(dq_sum), kFloat);
  } else {
    launch.dq = Sm90Operand("dq", params.dq, kFloat);
  }
  BURST_CUDA_CHECK(sm90::LaunchBackward(launch, CurrentStream()));
  if (!params.assign) return;
  const sm90::ConvertParams convert = {shape.batch,     shape.q_len,
                                       shape.num_heads, shape.head_dim,
                                       launch.dq,       Sm90Operand("dq", params.dq, kBf16)};
  BURST_CUDA_CHECK(sm90::LaunchConvert(convert, CurrentStream()));
}

}  // namespace

absl::Status CheckFlashAttention(DType dtype, int64_t head_dim) {
  if (KernelsFor(dtype, head_dim) != Kernels::kNone) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("no attention kernel for ", Name(dtype),
                                                 " with head_dim ", head_dim, " on this GPU"));
}

void FlashForward(const FlashForwardParams& params) {
  if (KernelsFor(params.shape) == Kernels::kSimt) return simt::Forward(params);
  ForwardSm90(params);
}

void FlashDelta(const FlashDeltaParams& params) {
  if (KernelsFor(params.shape) == Kernels::kSimt) return simt::Delta(params);
  DeltaSm90(params);
}

void FlashBackward(const FlashBackwardParams& params) {
  if (KernelsFor(params.shape) == Kernels::kSimt) return simt::Backward(params);
  BackwardSm90(params);
}

void FlashConvert(const Tensor& from, const Tensor& to) {
  if (from.dtype() == to.dtype()) return to.CopyFrom(from);
  BURST_CHECK(from.dtype() == kFloat && to.dtype() == kBf16)
      << Name(from.dtype()) << " to " << Name(to.dtype());
  simt::Convert(from, to);
}

}  // namespace cuda
}  // namespace burst
