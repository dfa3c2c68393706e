// Instructions that Ampere's and Hopper's kernels both use, one function each.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "burst/tensor/tensor.h"

namespace burst {
namespace cuda {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Rounds (low, high) to two of Element, BFloat16 or Float16, in a register, to nearest even.
template <class Element>
__device__ __forceinline__ uint32_t Pack(float low, float high) {
  static_assert(std::is_same_v<Element, BFloat16> || std::is_same_v<Element, Float16>, "");
  uint32_t packed;
  if constexpr (std::is_same_v<Element, Float16>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Loads with acquire semantics: what other blocks wrote before they released this value is then
// visible.
__device__ __forceinline__ int LoadAcquire(const int* source) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(source) : "memory");
  return value;
}

}  // namespace cuda
}  // namespace burst
