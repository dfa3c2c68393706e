// Warpgroup matmuls of e4m3, like wgmma.cuh's: D[64, 128] += A[64, K] B[128, K]^T, in fp32. Both
// operands have the summed index innermost (K-major). A tile's rows of 128 elements are 128 bytes
// in the same swizzle.
//
// The tensor cores add 8-bit products with fewer bits than fp32 has: about 14 after the binary
// point of the largest. A sum over many calls must therefore be in registers.
#pragma once

#include "burst/kernels/gpu/sm90/wgmma.cuh"

namespace burst {
namespace sm90 {

constexpr int kFp8WgmmaK = 32;  // 32 bytes, as 16 elements of 16 bits

// clang-format off
// Computes D = (accumulate ? D : 0) + A B^T over a row of 128. A, B: descriptors of first rows.
__device__ __forceinline__ void Fp8SharedShared(float (&d)[64], uint64_t a, uint64_t b,
                                                int accumulate) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" BURST_NAMES_7 "}, "
               "%64, %65, p, 1, 1;\n}\n"
               : BURST_REGISTERS_7
               : "l"(a), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ void Fp8RegisterShared(float (&d)[64], const uint32_t* a, uint64_t b,
                                                  int accumulate) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" BURST_NAMES_7 "}, "
               "{%64, %65, %66, %67}, %68, p, 1, 1;\n}\n"
               : BURST_REGISTERS_7
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}
// clang-format on

// Computes D = A B^T over 128, of rows in shared memory. Asynchronous: commit, then wait.
__device__ __forceinline__ void Fp8MatmulSharedShared(float (&d)[64], const void* a,
                                                      const void* b) {
  const uint64_t a_descriptor = Descriptor(a), b_descriptor = Descriptor(b);
#pragma unroll
  for (int k = 0; k < kRowBytes / kFp8WgmmaK; ++k) {
    Fp8SharedShared(d, a_descriptor + k * kFp8WgmmaK / 16, b_descriptor + k * kFp8WgmmaK / 16,
                    k > 0);
  }
}

// Multiplies with A, [64, 128], in registers: a[4 k .. 4 k + 3] has columns 32 k .. 32 k + 31.
__device__ __forceinline__ void Fp8MatmulRegisterShared(float (&d)[64], const uint32_t (&a)[16],
                                                        const void* b) {
  const uint64_t b_descriptor = Descriptor(b);
#pragma unroll
  for (int k = 0; k < kRowBytes / kFp8WgmmaK; ++k) {
    Fp8RegisterShared(d, &a[4 * k], b_descriptor + k * kFp8WgmmaK / 16, k > 0);
  }
}

// Packs four numbers of e4m3 into a register, the first in the lowest byte, to nearest even.
__device__ __forceinline__ uint32_t PackFp8(float a, float b, float c, float d) {
  uint32_t packed;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}\n"
      : "=r"(packed)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}

// Converts accumulators [64, 128] to the A operand of the next matmul, whose columns are in the
// order of quantize_fp8.h.
__device__ __forceinline__ void PackFp8Operand(const float (&d)[64], uint32_t (&a)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int first = i / 2 * 8 + i % 2 * 2;  // of 16 columns; of the thread's lower or upper row
    a[i] = PackFp8(d[first], d[first + 1], d[first + 4], d[first + 5]);
  }
}

}  // namespace sm90
}  // namespace burst
