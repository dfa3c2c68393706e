#include "burst/kernels/gpu/flash_attention_gpu.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "burst/base/status.h"
#include "burst/kernels/gpu/calls.h"
#include "burst/kernels/gpu/common/elementwise.h"
#include "burst/kernels/limits.h"

namespace burst {
namespace cuda {
namespace {

class Kernels : public AttentionKernels {
 public:
  explicit Kernels(MaybeFamily only) : only_(only) {}

  absl::Status Check(DeviceType device, DType dtype, const HeadWidths& widths) const override {
    if (device != DeviceType::kCuda) {
      return absl::InvalidArgumentError("the GPU's attention kernels serve tensors on a GPU only");
    }
    if (FamilyFor(only_, dtype, widths)) return absl::OkStatus();
    return absl::InvalidArgumentError(NotServed(dtype, widths));
  }
  bool TakesBlocks(DType dtype, const HeadWidths& widths) const override {
    return cuda::TakesBlocks(only_, dtype, widths);
  }
  absl::Status CheckFp8(DeviceType device, DType dtype, const HeadWidths& widths) const override {
    BURST_RETURN_IF_ERROR(Check(device, dtype, widths));
    if (TakesFp8(only_, dtype, widths)) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "attention in fp8 is for bfloat16 and float16 with a head_dim from ", kFp8HeadDims.least,
        " to ", kFp8HeadDims.most, ", of q, k and v, on a Hopper GPU, not for ", Name(dtype),
        " with ", ToString(widths)));
  }
  bool ChangesScores(DType dtype, const HeadWidths& widths) const override {
    return cuda::ChangesScores(only_, dtype, widths);
  }
  void Forward(const FlashForwardParams& params) const override { cuda::Forward(only_, params); }
  void Delta(const FlashDeltaParams& params) const override { cuda::Delta(params); }
  void Backward(const FlashBackwardParams& params) const override { cuda::Backward(only_, params); }

 private:
  const MaybeFamily only_;
};

}  // namespace

const AttentionKernels* GpuKernels() {
  static const Kernels kernels({});
  return &kernels;
}

const AttentionKernels* GpuKernels(KernelFamily family) {
  static const Kernels simt(KernelFamily::kSimt), sm80(KernelFamily::kSm80),
      sm90(KernelFamily::kSm90), decode(KernelFamily::kDecode);
  switch (family) {
    case KernelFamily::kSimt:
      return &simt;
    case KernelFamily::kSm80:
      return &sm80;
    case KernelFamily::kSm90:
      return &sm90;
    case KernelFamily::kDecode:
      return &decode;
  }
  return nullptr;
}

void FlashConvert(const Tensor& from, const Tensor& to, const Tensor& addend) {
  if (from.dtype() == to.dtype()) {
    if (!addend.null()) from.Add(addend);
    return to.CopyFrom(from);
  }
  BURST_CHECK(from.dtype() == DType::kFloat32 && Is16Bit(to.dtype()))
      << Name(from.dtype()) << " to " << Name(to.dtype());
  Convert(from, addend, Operand(to), to.dtype());
}

void FlashMerge(const Tensor& parts, const Tensor& out, const Tensor& sinks) {
  MergeParts(parts, out, sinks);
}

void FlashSinkGrads(const Tensor& lse, const Tensor& delta, const Tensor& sinks,
                    const Tensor& dsinks) {
  SinkGrads(lse, delta, sinks, dsinks);
}

}  // namespace cuda
}  // namespace burst
