// Rounds numbers to float8, for several kernels.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>

#include "model/ops/cuda/vectorized.cuh"

namespace burst {
namespace cuda {

constexpr float kLargestE4M3 = 448, kLargestE5M2 = 57344;

// Magnitudes of floats have the order of their bits. NaN is above infinity.
__device__ inline uint32_t MagnitudeBits(float x) { return __float_as_uint(x) & 0x7fffffff; }
template <int N>
__device__ inline uint32_t MagnitudeBits(const Words<bf16, N>& words) {
  uint32_t most = 0;
#pragma unroll
  for (int j = 0; j < N; ++j) most = max(most, MagnitudeBits(words[j]));
  return most;
}

// Raises *amax to the largest `most` of the warp, as magnitude bits. All 32 lanes call it.
__device__ inline void RaiseAmax(uint32_t most, uint32_t* amax) {
  most = __reduce_max_sync(~0u, most);
  // Most warps see that there is nothing to raise, which costs less than an atomic operation.
  if (threadIdx.x % 32 == 0 && most > *static_cast<volatile uint32_t*>(amax)) {
    atomicMax(amax, most);
  }
}

// Returns the smallest power of two s for which bound / s is at most `largest`. A bound that is not
// finite gives NaN, so that every product is NaN.
__device__ inline float ScaleFor(float bound, float largest) {
  if (!isfinite(bound)) return __int_as_float(0x7fffffff);
  if (bound == 0) return 1;
  int exponent = ilogbf(bound / largest);
  if (bound > ldexpf(largest, exponent)) ++exponent;
  return ldexpf(1, max(exponent, -126));
}

// Returns two numbers in the low 16 bits, saturated; NaN stays NaN.
template <__nv_fp8_interpretation_t kKind>
__device__ inline uint32_t RoundTwo(float a, float b) {
  return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, kKind);
}

// Sets v to eight e4m3 numbers times scale.
__device__ inline void FromE4M3(uint2 bytes, float scale, float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t word = i < 2 ? bytes.x : bytes.y;
    const __half2_raw two = __nv_cvt_fp8x2_to_halfraw2(
        static_cast<__nv_fp8x2_storage_t>(word >> i % 2 * 16), __NV_E4M3);
    const float2 numbers = __half22float2(__half2(two));
    v[2 * i] = numbers.x * scale;
    v[2 * i + 1] = numbers.y * scale;
  }
}

// Returns eight numbers / scale, as eight bytes.
template <__nv_fp8_interpretation_t kKind>
__device__ inline uint2 RoundEight(const float (&v)[8], float inverse_scale) {
  const auto two = [&](int i) {
    return RoundTwo<kKind>(v[i] * inverse_scale, v[i + 1] * inverse_scale);
  };
  return make_uint2(two(0) | two(2) << 16, two(4) | two(6) << 16);
}

}  // namespace cuda
}  // namespace burst
