#include "burst/kernels/flash_attention.h"

#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "burst/kernels/gpu/flash_attention_cuda.h"

namespace burst {

DType SumDType(DType dtype) { return dtype == DType::kBFloat16 ? DType::kFloat32 : dtype; }

AttentionOperand Operand(const Tensor& tensor) {
  BURST_CHECK(tensor.ndim() == 4 && (tensor.stride(3) == 1 || tensor.dim(3) <= 1))
      << "expected [batch, seqlen, heads, head_dim] with head_dim innermost, got "
      << ToString(tensor.shape());
  return {tensor.raw_data(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

absl::Status CheckFlashAttention(DeviceType device, DType dtype, int64_t head_dim) {
  if (head_dim < 1) return absl::InvalidArgumentError("attention needs a head_dim of 1 or more");
  if (device == DeviceType::kCuda) {
    return BURST_CUDA_CALL(cuda::CheckFlashAttention(dtype, head_dim));
  }
  if (dtype != DType::kFloat32 && dtype != DType::kFloat64) {
    return absl::InvalidArgumentError(
        absl::StrCat("attention on the CPU computes in float32 or float64, not ", Name(dtype)));
  }
  return absl::OkStatus();
}

absl::Status CheckTileKeys(DeviceType device, int64_t tile_keys) {
  if (tile_keys < 0) {
    return absl::InvalidArgumentError(absl::StrCat("tiles of ", tile_keys, " keys"));
  }
  if (tile_keys == 0 || device == DeviceType::kCpu) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "a choice is there on the CPU only; GPU kernels are compiled for their tiles: in bfloat16 of "
      "128, 176 or 192 keys on Hopper and of 64 or 128 elsewhere, in float32 of 32 or 64, in "
      "float64 of 16 or 32");
}

void FlashForward(DeviceType device, const FlashForwardParams& params) {
  BURST_CHECK(params.sum.data == nullptr || params.shape.dtype == DType::kBFloat16)
      << "sums of " << Name(params.shape.dtype) << " are merged in place";
  if (!params.shape.tiles) {
    BURST_CHECK(device == DeviceType::kCpu) << "attention without tiles on " << Name(device);
    return NaiveForwardCpu(params);
  }
  if (device == DeviceType::kCpu) return FlashForwardCpu(params);
  BURST_CHECK_EQ(params.shape.tile_keys, 0) << "on " << Name(device);
  BURST_CUDA_CALL(cuda::FlashForward(params));
}

void FlashDelta(DeviceType device, const FlashDeltaParams& params) {
  if (device == DeviceType::kCpu) return FlashDeltaCpu(params);
  BURST_CUDA_CALL(cuda::FlashDelta(params));
}

void FlashBackward(DeviceType device, const FlashBackwardParams& params) {
  if (!params.shape.tiles) {
    BURST_CHECK(device == DeviceType::kCpu) << "attention without tiles on " << Name(device);
    return NaiveBackwardCpu(params);
  }
  if (device == DeviceType::kCpu) return FlashBackwardCpu(params);
  BURST_CHECK_EQ(params.shape.tile_keys, 0) << "on " << Name(device);
  BURST_CUDA_CALL(cuda::FlashBackward(params));
}

void FlashConvert(const Tensor& from, const Tensor& to, const Tensor& addend) {
  BURST_CHECK(from.shape() == to.shape() && from.device() == to.device())
      << ToString(from.shape()) << " to " << ToString(to.shape());
  if (from.device() == DeviceType::kCpu) {
    if (!addend.null()) from.Add(addend);
    return to.CopyFrom(from.To(to.dtype()));
  }
  BURST_CUDA_CALL(cuda::FlashConvert(from, to, addend));
}

}  // namespace burst
