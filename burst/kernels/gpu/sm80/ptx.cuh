// Wraps the instructions of Ampere's tensor cores, one function each: asynchronous copies to shared
// memory, matrix loads, mma. Names follow the PTX ISA.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "burst/kernels/gpu/common/ptx.cuh"

namespace burst {
namespace sm80 {

using cuda::LoadAcquire;
using cuda::SharedAddress;

// Copies 16 bytes from global to shared memory. If !valid it reads nothing and writes zeros.
__device__ __forceinline__ void CopyAsync16(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}

// Copies 4 bytes in the same way.
__device__ __forceinline__ void CopyAsync4(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 4 : 0)
               : "memory");
}

// Commits the copies of this thread so far as a group; waits until at most kPending groups are not
// done. Other threads see the copies after a __syncthreads.
__device__ __forceinline__ void CommitCopies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void WaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Loads four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l /
// 8. In d[i], lane l gets elements (l / 4, 2 (l % 4)) and the next of matrix i. Transposed, it gets
// (2 (l % 4), l / 4) and the element below.
__device__ __forceinline__ void LoadMatrices(uint32_t address, uint32_t (&d)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void LoadMatricesTransposed(uint32_t address, uint32_t (&d)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

// Computes d[16, 8] += a[16, 16] b[16, 8]; Element of a and b is BFloat16 or Float16.
template <class Element>
__device__ __forceinline__ void Mma(const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                    float (&d)[4]) {
#define BURST_MMA(type)                                                      \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                 \
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if constexpr (std::is_same_v<Element, Float16>) {
    BURST_MMA("f16");
  } else {
    BURST_MMA("bf16");
  }
#undef BURST_MMA
}

__device__ __forceinline__ void StoreShared(uint32_t address, uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

// Adds x to target[0] and y to target[1], each atomically; target is 8-byte aligned.
__device__ __forceinline__ void AddGlobal(float* target, float x, float y) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(target), "f"(x), "f"(y) : "memory");
#else
  atomicAdd(target, x);
  atomicAdd(target + 1, y);
#endif
}

// Returns blockIdx.x, read anew by every call, so that values computed from it need no registers.
__device__ __forceinline__ int BlockIndex() {
  int index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

__device__ __forceinline__ void StoreRelease(int* target, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(target), "r"(value) : "memory");
}

}  // namespace sm80
}  // namespace burst
