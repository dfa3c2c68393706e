#include "burst/kernels/cpu/flash_attention_cpu.h"

#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "burst/base/parallel.h"
#include "burst/kernels/cpu/tile.h"

namespace burst {
namespace cpu {
namespace {

constexpr int64_t kGrain = 256;  // the fewest rows of a thread

// delta = rowsum(dO * O) - dlse
template <typename Element>
void DeltaOf(const FlashDeltaParams& params) {
  const FlashAttentionShape& shape = params.shape;
  using T = Computed<Element>;
  const T* dlse = static_cast<const T*>(params.dlse);
  T* delta = static_cast<T*>(params.delta);
  ParallelFor(shape.batch * shape.num_heads * shape.q_len, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const int64_t i = index % shape.q_len;
      const int64_t h = index / shape.q_len % shape.num_heads;
      const int64_t b = index / shape.q_len / shape.num_heads;
      const Element* out = Head<Element>(params.out, b, h).row(i);
      const Element* dout = Head<Element>(params.dout, b, h).row(i);
      delta[index] = Dot(shape.value_dim, out, dout) - (dlse == nullptr ? T{0} : dlse[index]);
    }
  });
}

}  // namespace

void Delta(const FlashDeltaParams& params) {
  BURST_CHECK_GT(params.shape.value_dim, 0);
  DispatchElement(params.shape.dtype, [&](auto zero) { DeltaOf<decltype(zero)>(params); });
}

}  // namespace cpu

absl::Status CpuAttentionKernels::Check(DeviceType device, DType dtype,
                                        const HeadWidths& widths) const {
  if (device != DeviceType::kCpu) {
    return absl::InvalidArgumentError("the CPU's attention kernels serve tensors on the CPU only");
  }
  if (widths.head_dim < 1 || widths.value_dim < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("attention needs heads of 1 or more columns; got ", ToString(widths)));
  }
  if (dtype != DType::kFloat32 && dtype != DType::kFloat64 && !Is16Bit(dtype)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "attention on the CPU needs float32, float64, bfloat16 or float16; got ", Name(dtype)));
  }
  return absl::OkStatus();
}

}  // namespace burst
