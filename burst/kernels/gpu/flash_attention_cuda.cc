#include "burst/kernels/gpu/flash_attention_cuda.h"

#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "burst/device/cuda.h"
#include "burst/kernels/gpu/simt/flash_attention_simt.h"
#include "burst/kernels/gpu/sm80/flash_attention_sm80.h"
#include "burst/kernels/gpu/sm90/flash_attention_sm90.h"
#include "burst/tensor/tensor.h"

namespace burst {
namespace cuda {
namespace {

constexpr DType kBf16 = DType::kBFloat16;
constexpr DType kFloat = DType::kFloat32;

// The tensor-core kernels read 16 bytes at a time. The stride of a dimension of one is never used.
void CheckOperand(const char* name, const AttentionOperand& operand, DType dtype, int64_t batch,
                  int64_t seqlen, int64_t heads) {
  const int64_t elements = 16 / SizeOf(dtype);
  const auto fits = [=](int64_t size, int64_t stride) {
    return size <= 1 || stride % elements == 0;
  };
  BURST_CHECK(reinterpret_cast<uintptr_t>(operand.data) % 16 == 0 &&
              fits(batch, operand.batch_stride) && fits(seqlen, operand.seq_stride) &&
              fits(heads, operand.head_stride))
      << name << ": the rows of " << Name(dtype)
      << " tensors must begin at multiples of 16 bytes in bfloat16 attention";
}

void CheckShape(const FlashAttentionShape& shape) {
  BURST_CHECK(shape.softmax_scale > 0) << "bfloat16 attention needs a positive softmax_scale";
  BURST_CHECK(shape.num_kv_heads > 0 && shape.num_heads % shape.num_kv_heads == 0)
      << shape.num_kv_heads << " key heads do not divide " << shape.num_heads << " query heads";
}

void CheckTensorCores(const FlashForwardParams& params) {
  const FlashAttentionShape& s = params.shape;
  CheckShape(s);
  CheckOperand("q", params.q, kBf16, s.batch, s.q_len, s.num_heads);
  CheckOperand("k", params.k, kBf16, s.batch, s.k_len, s.num_kv_heads);
  CheckOperand("v", params.v, kBf16, s.batch, s.k_len, s.num_kv_heads);
  CheckOperand("out", params.out, params.out_dtype, s.batch, s.q_len, s.num_heads);
  if (!params.merge) return;
  if (params.sum.data != nullptr) {
    CheckOperand("sum", params.sum, kFloat, s.batch, s.q_len, s.num_heads);
  } else {
    BURST_CHECK(params.out_dtype == kFloat) << "merging needs a float32 sum";
  }
}

void CheckTensorCores(const FlashBackwardParams& params) {
  const FlashAttentionShape& s = params.shape;
  const DType dtype = params.assign ? kBf16 : kFloat;
  CheckShape(s);
  CheckOperand("q", params.q, kBf16, s.batch, s.q_len, s.num_heads);
  CheckOperand("k", params.k, kBf16, s.batch, s.k_len, s.num_kv_heads);
  CheckOperand("v", params.v, kBf16, s.batch, s.k_len, s.num_kv_heads);
  CheckOperand("dout", params.dout, kBf16, s.batch, s.q_len, s.num_heads);
  CheckOperand("dq", params.dq, dtype, s.batch, s.q_len, s.num_heads);
  CheckOperand("dk", params.dk, dtype, s.batch, s.k_len, s.num_kv_heads);
  CheckOperand("dv", params.dv, dtype, s.batch, s.k_len, s.num_kv_heads);
}

sm90::Shape Sm90Shape(const FlashAttentionShape& shape) {
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

sm90::Operand Sm90Operand(const AttentionOperand& operand) {
  return {operand.data, operand.batch_stride, operand.seq_stride, operand.head_stride};
}

void ForwardSm90(const FlashForwardParams& params) {
  sm90::ForwardParams launch;
  launch.shape = Sm90Shape(params.shape);
  launch.q = Sm90Operand(params.q);
  launch.k = Sm90Operand(params.k);
  launch.v = Sm90Operand(params.v);
  launch.out = Sm90Operand(params.out);
  launch.out_is_float = params.out_dtype == kFloat;
  if (params.merge) {
    launch.sum = params.sum.data == nullptr ? launch.out : Sm90Operand(params.sum);
  }
  launch.non_persistent = params.non_persistent;
  launch.lse = static_cast<float*>(params.lse);
  const int64_t words = (sm90::ForwardWorkspaceBytes(launch.shape) + 3) / 4;
  const Tensor workspace = Tensor::Zeros({words}, kFloat, DeviceType::kCuda);
  launch.workspace = workspace.raw_data();
  BURST_CUDA_CHECK(sm90::LaunchForward(launch, CurrentStream()));
}

// dQ is added to, in float32.
void BackwardSm90(const FlashBackwardParams& params, const AttentionOperand& dq) {
  sm90::BackwardParams launch;
  launch.shape = Sm90Shape(params.shape);
  launch.q = Sm90Operand(params.q);
  launch.k = Sm90Operand(params.k);
  launch.v = Sm90Operand(params.v);
  launch.dout = Sm90Operand(params.dout);
  launch.lse = static_cast<const float*>(params.lse);
  launch.delta = static_cast<const float*>(params.delta);
  launch.dq = Sm90Operand(dq);
  launch.dk = Sm90Operand(params.dk);
  launch.dv = Sm90Operand(params.dv);
  launch.add = !params.assign;
  launch.deterministic = params.deterministic;
  const int64_t words = (sm90::BackwardWorkspaceBytes(launch.shape, launch.deterministic) + 3) / 4;
  const Tensor workspace = Tensor::Empty({words}, kFloat, DeviceType::kCuda);
  launch.workspace = workspace.raw_data();
  BURST_CUDA_CHECK(sm90::LaunchBackward(launch, CurrentStream()));
}

void BackwardSm80(FlashBackwardParams params, const AttentionOperand& dq) {
  params.dq = dq;
  sm80::Backward(params);
}

}  // namespace

Kernels KernelsFor(DType dtype, int64_t head_dim) {
  if (dtype == DType::kFloat32 || dtype == DType::kFloat64) {
    return head_dim <= simt::kMaxHeadDim ? Kernels::kSimt : Kernels::kNone;
  }
  if (dtype != kBf16 || head_dim % 8 != 0) return Kernels::kNone;
  const int capability = CurrentContext().compute_capability;
  if (capability == 90 && head_dim <= 128) return Kernels::kSm90;
  if (capability >= 80 && head_dim <= sm80::kMaxHeadDim) return Kernels::kSm80;
  return Kernels::kNone;
}

void Forward(Kernels kernels, const FlashForwardParams& params) {
  if (kernels == Kernels::kSimt) return simt::Forward(params);
  CheckTensorCores(params);
  kernels == Kernels::kSm90 ? ForwardSm90(params) : sm80::Forward(params);
}

void Backward(Kernels kernels, const FlashBackwardParams& params) {
  if (kernels == Kernels::kSimt) return simt::Backward(params);
  CheckTensorCores(params);
  const auto run = [&](const AttentionOperand& dq) {
    kernels == Kernels::kSm90 ? BackwardSm90(params, dq) : BackwardSm80(params, dq);
  };
  if (!params.assign) return run(params.dq);
  // dQ is always summed over the blocks of keys, in float32.
  const FlashAttentionShape& s = params.shape;
  const Tensor sum =
      Tensor::Zeros({s.batch, s.q_len, s.num_heads, s.head_dim}, kFloat, DeviceType::kCuda);
  run(Operand(sum));
  simt::Convert(sum, /*addend=*/{}, params.dq);
}

namespace {

class Gpu : public AttentionKernels {
 public:
  absl::Status Check(DeviceType device, DType dtype, int64_t head_dim) const override {
    if (device != DeviceType::kCuda) {
      return absl::InvalidArgumentError("the GPU's attention kernels serve tensors on a GPU only");
    }
    if (head_dim < 1) return absl::InvalidArgumentError("attention needs a head_dim of 1 or more");
    if (KernelsFor(dtype, head_dim) != Kernels::kNone) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "no attention kernel for ", Name(dtype), " with head_dim ", head_dim,
        " on a GPU of compute capability ", CurrentContext().compute_capability / 10.0,
        ": float32 and float64 go up to 256; bfloat16 needs a multiple of 8 up to 256 and 8.0"));
  }
  void Forward(const FlashForwardParams& params) const override {
    BURST_CHECK(params.sum.data == nullptr || params.shape.dtype == kBf16)
        << "sums of " << Name(params.shape.dtype) << " are merged in place";
    cuda::Forward(ServedBy(params.shape), params);
  }
  void Delta(const FlashDeltaParams& params) const override {
    ServedBy(params.shape);
    simt::Delta(params);
  }
  void Backward(const FlashBackwardParams& params) const override {
    cuda::Backward(ServedBy(params.shape), params);
  }

 private:
  Kernels ServedBy(const FlashAttentionShape& shape) const {
    const absl::Status status = Check(DeviceType::kCuda, shape.dtype, shape.head_dim);
    BURST_CHECK(status.ok()) << status.message();
    return KernelsFor(shape.dtype, shape.head_dim);
  }
};

}  // namespace

const AttentionKernels* GpuKernels() {
  static const Gpu kernels;
  return &kernels;
}

void FlashConvert(const Tensor& from, const Tensor& to, const Tensor& addend) {
  if (from.dtype() == to.dtype()) {
    if (!addend.null()) from.Add(addend);
    return to.CopyFrom(from);
  }
  BURST_CHECK(from.dtype() == kFloat && to.dtype() == kBf16)
      << Name(from.dtype()) << " to " << Name(to.dtype());
  simt::Convert(from, addend, Operand(to));
}

}  // namespace cuda
}  // namespace burst
