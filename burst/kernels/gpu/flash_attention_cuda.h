// What flash_attention.cc calls for tensors on a GPU; flash_attention_cuda.cc chooses the kernels.
#pragma once

#include "burst/kernels/flash_attention.h"

namespace burst {
namespace cuda {

enum class Kernels {
  kNone,
  kSimt,  // float32 and float64
  kSm80,  // bfloat16, head_dim a multiple of 8 up to 256
  kSm90,  // the same up to 128, on Hopper only
};

// The kernels that serve the calling thread's GPU best; kNone when there are none.
Kernels KernelsFor(DType dtype, int64_t head_dim);

const AttentionKernels* GpuKernels();
void FlashConvert(const Tensor& from, const Tensor& to, const Tensor& addend);

// With the given kernels, which must serve the call: for tests and benchmarks.
void Forward(Kernels kernels, const FlashForwardParams& params);
void Backward(Kernels kernels, const FlashBackwardParams& params);

}  // namespace cuda
}  // namespace burst
