// The head_dims that the GPU's attention kernels serve, one row for each kind of input. All checks,
// and the simulated GPU, read these rows.
#pragma once

#include <cstdint>

namespace burst {

struct HeadDims {
  int64_t least, most, multiple;

  constexpr bool Has(int64_t head_dim) const {
    return least <= head_dim && head_dim <= most && head_dim % multiple == 0;
  }
};

inline constexpr HeadDims kWideHeadDims = {1, 256, 1};   // float32 and float64
inline constexpr HeadDims k16BitHeadDims = {8, 256, 8};  // bfloat16 and float16
// Heads of 64 and less would gain little in fp8: exponentials take most of their time.
inline constexpr HeadDims kFp8HeadDims = {72, 128, 8};  // the forward in 8 bits, on Hopper GPUs

}  // namespace burst
