// Attention on a GPU, as AttentionKernels. They choose the kernels of a call, check it and allocate
// scratch memory.
#pragma once

#include "burst/kernels/flash_attention.h"

namespace burst {
namespace cuda {

enum class KernelFamily {
  kSimt,    // float32 and float64, any GPU
  kSm80,    // bfloat16 and float16, Ampere and later
  kSm90,    // bfloat16 and float16, Hopper only
  kDecode,  // bfloat16 and float16, Ampere and later: forwards of few queries
};

// Returns kernels that choose the best family for each call on the calling thread's GPU.
const AttentionKernels* GpuKernels();
// Returns the kernels of one family, for tests and benchmarks.
const AttentionKernels* GpuKernels(KernelFamily family);

// The functions of burst/kernels/flash_attention.h, on a GPU.
void FlashConvert(const Tensor& from, const Tensor& to, const Tensor& addend,
                  const int32_t* addend_rows);
void FlashMerge(const Tensor& parts, const Tensor& out, const Tensor& sinks);
void FlashSinkGrads(const Tensor& lse, const Tensor& delta, const Tensor& sinks,
                    const Tensor& dsinks);

}  // namespace cuda
}  // namespace burst
