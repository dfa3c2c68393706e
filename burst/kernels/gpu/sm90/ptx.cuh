// Wraps the Hopper instructions that the kernels use, one function each: barriers in shared memory,
// the tensor memory accelerator (TMA), fences, registers. Names follow the PTX ISA.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "burst/kernels/gpu/common/ptx.cuh"

namespace burst {
namespace sm90 {

using cuda::Exp2;
using cuda::LoadAcquire;
using cuda::Pack;
using cuda::SharedAddress;

constexpr int kWarpSize = 32;
constexpr int kWarpgroupSize = 128;

// ---- mbarrier: a phase completes when all arrivals and all announced bytes have come.

using Barrier = uint64_t;

__device__ __forceinline__ void InitBarrier(Barrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(arrivals));
}

// Call it after the initialization, before other threads or the TMA use the barriers.
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void Arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}

// Arrives once for the warp, after all its lanes have come here.
__device__ __forceinline__ void ArriveWarp(Barrier* barrier) {
  __syncwarp();
  if (threadIdx.x % kWarpSize == 0) Arrive(barrier);
}

__device__ __forceinline__ void ArriveExpectBytes(Barrier* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes)
      : "memory");
}

// Waits until the phase of this parity has completed.
__device__ __forceinline__ void Wait(Barrier* barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finish;\n"
      "bra again;\n"
      "finish:\n"
      "}\n" ::"r"(SharedAddress(barrier)),
      "r"(parity)
      : "memory");
}

// A slot of a ring of kStages buffers, and the parity of its current use.
template <int kStages>
struct RingSlot {
  int stage = 0;
  int parity = 0;

  __device__ __forceinline__ void Advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// ---- Named barriers among some warps of a block.

__device__ __forceinline__ void NamedBarrierSync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void NamedBarrierArrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- TMA. Coordinates are (head_dim, seq, head, batch), innermost first.

__device__ __forceinline__ void PrefetchTensorMap(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// kKeep: the L2 cache evicts these lines last.
template <bool kKeep>
__device__ __forceinline__ void TmaLoad(void* shared, const CUtensorMap& map, Barrier* barrier,
                                        int column, int row, int head, int batch) {
  if constexpr (kKeep) {
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(SharedAddress(shared)),
        "l"(&map), "r"(SharedAddress(barrier)), "r"(column), "r"(row), "r"(head), "r"(batch),
        "l"(policy)
        : "memory");
    return;
  }
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(SharedAddress(shared)),
      "l"(&map), "r"(SharedAddress(barrier)), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// Stores shared memory in global memory; complete after BulkWait.
__device__ __forceinline__ void TmaStore(const CUtensorMap& map, uint32_t shared, int column,
                                         int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::
          "l"(&map),
      "r"(shared), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// Adds shared memory to global memory, element by element in fp32; complete after BulkWait.
__device__ __forceinline__ void TmaReduceAdd(const CUtensorMap& map, uint32_t shared, int column,
                                             int row, int head, int batch) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group "
      "[%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
      "r"(shared), "r"(column), "r"(row), "r"(head), "r"(batch)
      : "memory");
}

// Stores shared memory in global memory, or adds it, in fp32; complete after BulkWait.
__device__ __forceinline__ void StoreOrAdd(bool add, const CUtensorMap& map, uint32_t shared,
                                           int column, int row, int head, int batch) {
  add ? TmaReduceAdd(map, shared, column, row, head, batch)
      : TmaStore(map, shared, column, row, head, batch);
}

__device__ __forceinline__ void BulkCommit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all committed bulk operations have read their source.
__device__ __forceinline__ void BulkWaitRead() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Waits until all committed bulk operations have written their destination.
__device__ __forceinline__ void BulkWait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Makes ordinary writes to shared memory visible to wgmma and the TMA.
__device__ __forceinline__ void FenceProxyAsync() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- Order between blocks.

__device__ __forceinline__ void AddRelease(int* global, int x) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(global), "r"(x) : "memory");
}

// ---- Registers.

// Returns threadIdx.x, without letting the compiler use an earlier reading.
__device__ __forceinline__ int ThreadIndexAgain() {
  int x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

// Returns blockIdx.x in the same way.
__device__ __forceinline__ int BlockIndexAgain() {
  int x;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  return x;
}

// Arrives once a warp, after x (not negative) has been computed. It also keeps ptxas from moving
// the computation of x below a later wait.
__device__ __forceinline__ void ArriveWarpAfter(Barrier* barrier, float x) {
  __syncwarp();
  if (threadIdx.x % kWarpSize == 0) {
    asm volatile(
        "{\n"
        ".reg .b32 address;\n"
        "shr.u32 address, %1, 31;\n"
        "add.u32 address, address, %0;\n"
        "mbarrier.arrive.shared::cta.b64 _, [address];\n"
        "}\n" ::"r"(SharedAddress(barrier)),
        "r"(__float_as_uint(x))
        : "memory");
  }
}

// Returns x, which must be equal in all threads of the warp, in a register that they share.
// Addresses and descriptors that depend on nothing else are then computed once a warp, in parallel
// with other arithmetic. Otherwise every wgmma needs vector registers and a move (R2UR).
__device__ __forceinline__ int WarpUniform(int x) { return __shfl_sync(0xffffffff, x, 0); }

template <int kRegisters>
__device__ __forceinline__ void IncreaseRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void DecreaseRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- Shared memory.

// Reads an int of shared memory by one lane for its warp.
__device__ __forceinline__ int ReadByOneLane(const int& x) {
  int value = 0;
  if (threadIdx.x % kWarpSize == 0) value = *const_cast<const volatile int*>(&x);
  return __shfl_sync(0xffffffff, value, 0);
}

// Stores four 8x8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l /
// 8.
__device__ __forceinline__ void StoreMatrix(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                            uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// Stores four 8x8 matrices of 16-bit elements, each transposed. Lane l gives the address of row l %
// 8 of the transposed matrix l / 8.
__device__ __forceinline__ void StoreMatrixTransposed(uint32_t address, uint32_t a, uint32_t b,
                                                      uint32_t c, uint32_t d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
      "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}

// Loads four 8x8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of matrix l /
// 8. It gets elements 2 (l % 4) and the next of row l / 4 of each.
__device__ __forceinline__ void LoadMatrix(uint32_t address, uint32_t (&d)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void StoreShared(uint32_t address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

__device__ __forceinline__ void StoreShared(uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

}  // namespace sm90
}  // namespace burst
