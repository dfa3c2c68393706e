// Warpgroup matmuls: D[64, N] += A[64, K] B[K, N], operands of Element, BFloat16 or Float16, fp32
// accumulators.
//
// Tiles in shared memory. A tile of R rows and C columns is C/64 blocks (rounded up), 1024-byte
// aligned. A block is R rows of 64 elements (128 bytes) in the 128-byte swizzle of the TMA: the
// 16-byte chunk c of row r is at r * 128 + (c ^ (r % 8)) * 16. An operand reads such a tile
//   K-major:  rows are the M (or N) index, columns the K index;
//   MN-major: rows are the K index, columns the M (or N) index.
//
// Accumulators. Thread t of the warpgroup (warp w = t / 32, lane l) holds in d[4 j + 2 r + c] the
// element (16 w + l / 4 + 8 r, 8 j + 2 (l % 4) + c). Packed to Element in pairs, d[8 k .. 8 k + 7]
// is this thread's part of an A operand's columns 16 k .. 16 k + 15: no shuffle between two
// matmuls.
#pragma once

#include <cuda_fp16.h>

#include "burst/kernels/gpu/sm90/ptx.cuh"

namespace burst {
namespace sm90 {

constexpr int kBlockColumns = 64;             // elements in a swizzled row
constexpr int kRowBytes = kBlockColumns * 2;  // 128
constexpr int kWgmmaM = 64;
constexpr int kWgmmaK = 16;

enum class Major { kK, kMN };

// Returns the matrix descriptor of a block at `shared` (PTX ISA, "Matrix descriptor"). K-major
// operands step by 1024 bytes between groups of eight rows. MN-major operands step by 1024 bytes
// along K, and by block_bytes to the next 64 columns.
__device__ __forceinline__ uint64_t Descriptor(const void* shared, int block_bytes = 16) {
  uint64_t descriptor = (SharedAddress(shared) & 0x3FFFF) >> 4;
  descriptor |= static_cast<uint64_t>(block_bytes >> 4) << 16;
  descriptor |= static_cast<uint64_t>(1024 >> 4) << 32;
  descriptor |= uint64_t{1} << 62;  // 128-byte swizzle
  return descriptor;
}

// Returns the byte offset of a tile's k-th group of 16 columns (K-major) or 16 rows (MN-major).
template <Major kMajor>
__device__ __forceinline__ constexpr int StepBytes(int k, int block_bytes) {
  return kMajor == Major::kMN ? k * kWgmmaK * kRowBytes : (k / 4) * block_bytes + (k % 4) * 32;
}

// Call it after registers have been written; wgmma may read them then.
__device__ __forceinline__ void WgmmaFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending of the committed groups are in flight.
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of the registers across this point.
template <int kCount>
__device__ __forceinline__ void PinRegisters(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <int kCount>
__device__ __forceinline__ void PinRegisters(uint32_t (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// Makes the compiler compute or load the value before this point.
__device__ __forceinline__ void Pin(const float2& value) {
  asm volatile("" ::"f"(value.x), "f"(value.y));
}

// Wgmma<Element, N>::SharedShared<kTransposeA, kTransposeB>(d, a, b, accumulate): A and B from
// shared memory. Wgmma<Element, N>::RegisterShared<kTransposeB>(d, a, b, accumulate): A from
// registers. kTranspose: MN-major.
template <class Element, int kN>
struct Wgmma;

// clang-format off
#define BURST_NAMES_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define BURST_NAMES_1 BURST_NAMES_0 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define BURST_NAMES_2 BURST_NAMES_1 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define BURST_NAMES_3 BURST_NAMES_2 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define BURST_NAMES_4 BURST_NAMES_3 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define BURST_NAMES_5 BURST_NAMES_4 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define BURST_NAMES_6 BURST_NAMES_5 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define BURST_NAMES_7 BURST_NAMES_6 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define BURST_NAMES_8 BURST_NAMES_7 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define BURST_NAMES_9 BURST_NAMES_8 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define BURST_NAMES_10 BURST_NAMES_9 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define BURST_NAMES_11 BURST_NAMES_10 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define BURST_NAMES_12 BURST_NAMES_11 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define BURST_NAMES_13 BURST_NAMES_12 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define BURST_NAMES_14 BURST_NAMES_13 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define BURST_NAMES_15 BURST_NAMES_14 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define BURST_EIGHT(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
  "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define BURST_REGISTERS_0 BURST_EIGHT(0)
#define BURST_REGISTERS_1 BURST_REGISTERS_0, BURST_EIGHT(8)
#define BURST_REGISTERS_2 BURST_REGISTERS_1, BURST_EIGHT(16)
#define BURST_REGISTERS_3 BURST_REGISTERS_2, BURST_EIGHT(24)
#define BURST_REGISTERS_4 BURST_REGISTERS_3, BURST_EIGHT(32)
#define BURST_REGISTERS_5 BURST_REGISTERS_4, BURST_EIGHT(40)
#define BURST_REGISTERS_6 BURST_REGISTERS_5, BURST_EIGHT(48)
#define BURST_REGISTERS_7 BURST_REGISTERS_6, BURST_EIGHT(56)
#define BURST_REGISTERS_8 BURST_REGISTERS_7, BURST_EIGHT(64)
#define BURST_REGISTERS_9 BURST_REGISTERS_8, BURST_EIGHT(72)
#define BURST_REGISTERS_10 BURST_REGISTERS_9, BURST_EIGHT(80)
#define BURST_REGISTERS_11 BURST_REGISTERS_10, BURST_EIGHT(88)
#define BURST_REGISTERS_12 BURST_REGISTERS_11, BURST_EIGHT(96)
#define BURST_REGISTERS_13 BURST_REGISTERS_12, BURST_EIGHT(104)
#define BURST_REGISTERS_14 BURST_REGISTERS_13, BURST_EIGHT(112)
#define BURST_REGISTERS_15 BURST_REGISTERS_14, BURST_EIGHT(120)

// The operands after the N / 2 accumulators have the numbers r0, r1, ...
#define BURST_WGMMA(N, LAST, r0, r1, r2, r3, r4, r5, r6)                    \
  BURST_WGMMA_OF(BFloat16, "bf16", N, LAST, r0, r1, r2, r3, r4, r5, r6);    \
  BURST_WGMMA_OF(Float16, "f16", N, LAST, r0, r1, r2, r3, r4, r5, r6)
#define BURST_WGMMA_OF(ELEMENT, TYPE, N, LAST, r0, r1, r2, r3, r4, r5, r6)                        \
  template <>                                                                                     \
  struct Wgmma<ELEMENT, N> {                                                                      \
    template <int kTransposeA, int kTransposeB>                                                   \
    __device__ __forceinline__ static void SharedShared(float (&d)[N / 2], uint64_t a,            \
                                                        uint64_t b, int accumulate) {             \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #r2 ", 0;\n"                              \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {"           \
                   BURST_NAMES_##LAST "}, %" #r0 ", %" #r1 ", p, 1, 1, %" #r3 ", %" #r4 ";\n}\n"  \
                   : BURST_REGISTERS_##LAST                                                       \
                   : "l"(a), "l"(b), "r"(accumulate), "n"(kTransposeA), "n"(kTransposeB));        \
    }                                                                                             \
    template <int kTransposeB>                                                                    \
    __device__ __forceinline__ static void RegisterShared(float (&d)[N / 2],                      \
                                                          const uint32_t* a, uint64_t b,          \
                                                          int accumulate) {                       \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #r5 ", 0;\n"                              \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {"           \
                   BURST_NAMES_##LAST "}, {%" #r0 ", %" #r1 ", %" #r2 ", %" #r3 "}, %" #r4        \
                   ", p, 1, 1, %" #r6 ";\n}\n"                                                    \
                   : BURST_REGISTERS_##LAST                                                       \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),         \
                     "n"(kTransposeB));                                                           \
    }                                                                                             \
  }

BURST_WGMMA(32, 1, 16, 17, 18, 19, 20, 21, 22);
BURST_WGMMA(64, 3, 32, 33, 34, 35, 36, 37, 38);
BURST_WGMMA(80, 4, 40, 41, 42, 43, 44, 45, 46);
BURST_WGMMA(96, 5, 48, 49, 50, 51, 52, 53, 54);
BURST_WGMMA(112, 6, 56, 57, 58, 59, 60, 61, 62);
BURST_WGMMA(128, 7, 64, 65, 66, 67, 68, 69, 70);
BURST_WGMMA(160, 9, 80, 81, 82, 83, 84, 85, 86);
BURST_WGMMA(176, 10, 88, 89, 90, 91, 92, 93, 94);
BURST_WGMMA(192, 11, 96, 97, 98, 99, 100, 101, 102);
BURST_WGMMA(256, 15, 128, 129, 130, 131, 132, 133, 134);
// clang-format on

// Computes D = (accumulate ? D : 0) + A B over kK. A and B are tiles in shared memory whose
// 64-column blocks are a_block_bytes and b_block_bytes apart. Asynchronous: commit, then wait.
template <class Element, int kN, int kK, Major kMajorA = Major::kK, Major kMajorB = Major::kK>
__device__ __forceinline__ void MatmulSharedShared(float (&d)[kN / 2], const void* a,
                                                   int a_block_bytes, const void* b,
                                                   int b_block_bytes, bool accumulate) {
  const uint64_t a_descriptor = Descriptor(a, kMajorA == Major::kMN ? a_block_bytes : 16);
  const uint64_t b_descriptor = Descriptor(b, kMajorB == Major::kMN ? b_block_bytes : 16);
#pragma unroll
  for (int k = 0; k < kK / kWgmmaK; ++k) {
    Wgmma<Element, kN>::template SharedShared<kMajorA == Major::kMN, kMajorB == Major::kMN>(
        d, a_descriptor + (StepBytes<kMajorA>(k, a_block_bytes) >> 4),
        b_descriptor + (StepBytes<kMajorB>(k, b_block_bytes) >> 4), accumulate || k > 0);
  }
}

// Multiplies with A, [64, kK], in registers: a[4 k .. 4 k + 3] has columns 16 k .. 16 k + 15.
template <class Element, int kN, int kK, Major kMajorB>
__device__ __forceinline__ void MatmulRegisterShared(float (&d)[kN / 2],
                                                     const uint32_t (&a)[kK / 4], const void* b,
                                                     int b_block_bytes, bool accumulate) {
  const uint64_t b_descriptor = Descriptor(b, kMajorB == Major::kMN ? b_block_bytes : 16);
#pragma unroll
  for (int k = 0; k < kK / kWgmmaK; ++k) {
    Wgmma<Element, kN>::template RegisterShared<kMajorB == Major::kMN>(
        d, &a[4 * k], b_descriptor + (StepBytes<kMajorB>(k, b_block_bytes) >> 4),
        accumulate || k > 0);
  }
}

// Computes D = A B, both K-major. A is in shared memory, its first columns also in registers.
template <class Element, int kN, int kK, int kCount>
__device__ __forceinline__ void MatmulPartlyFromRegisters(float (&d)[kN / 2],
                                                          const uint32_t (&a_registers)[kCount],
                                                          const void* a, int a_block_bytes,
                                                          const void* b, int b_block_bytes) {
  const uint64_t a_descriptor = Descriptor(a), b_descriptor = Descriptor(b);
#pragma unroll
  for (int k = 0; k < kK / kWgmmaK; ++k) {
    const uint64_t b_step = b_descriptor + (StepBytes<Major::kK>(k, b_block_bytes) >> 4);
    if (k < kCount / 4) {
      Wgmma<Element, kN>::template RegisterShared<false>(d, &a_registers[4 * k], b_step, k > 0);
    } else {
      Wgmma<Element, kN>::template SharedShared<false, false>(
          d, a_descriptor + (StepBytes<Major::kK>(k, a_block_bytes) >> 4), b_step, k > 0);
    }
  }
}

// Converts accumulators [64, kN] to the A operand [64, kN] of the next matmul.
template <class Element, int kCount>
__device__ __forceinline__ void PackOperand(const float (&d)[kCount], uint32_t (&a)[kCount / 2]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) a[i] = Pack<Element>(d[2 * i], d[2 * i + 1]);
}

// Returns the two float16 numbers of a register.
__device__ __forceinline__ float2 UnpackHalf(uint32_t pair) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}

}  // namespace sm90
}  // namespace burst
