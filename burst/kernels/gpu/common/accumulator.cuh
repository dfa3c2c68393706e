// Moves accumulators of the tensor cores to operands and to global memory. Instructions wgmma and
// mma.sync distribute them in the same way. Lane l holds rows l / 4 and l / 4 + 8 of each 16 rows,
// and columns 2 (l % 4) and the next of every eight columns.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "burst/kernels/gpu/common/operand.cuh"
#include "burst/kernels/gpu/common/ptx.cuh"

namespace burst {
namespace cuda {

// Stores row `kHalf` (0: l / 4, 1: l / 4 + 8) of a warp's accumulators, times `factor`, in 16 bits.
// Four lanes hold a row, two columns of every eight each. A 4x4 transpose among them gives each
// lane eight consecutive columns, so that every store is 16 bytes.
template <class Element, int kHalf, int kColumns>
__device__ __forceinline__ void StoreRowElements(const float (&d)[kColumns / 2], float factor,
                                                 Element* row, bool valid, int head_dim) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int group = 0; group < kColumns / 32; ++group) {
    uint32_t own[4];  // own[j]: columns 32 group + 8 j + 2 lane, + 1
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = (group * 4 + j) * 4 + 2 * kHalf;
      own[j] = Pack<Element>(d[i] * factor, d[i + 1] * factor);
    }
    // Exchanges with the lane at distance 1, then 2: element j of lane i becomes element i of lane
    // j.
#pragma unroll
    for (int distance = 1; distance <= 2; distance *= 2) {
      const bool upper = (lane & distance) != 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j & distance) continue;
        const uint32_t sent = upper ? own[j] : own[j + distance];
        const uint32_t received = __shfl_xor_sync(0xffffffff, sent, distance);
        if (upper) {
          own[j] = received;
        } else {
          own[j + distance] = received;
        }
      }
    }
    const int column = group * 32 + lane * 8;
    if (valid && column < head_dim) {
      *reinterpret_cast<uint4*>(row + column) = make_uint4(own[0], own[1], own[2], own[3]);
    }
  }
}

// Stores a row, like StoreRow, to fp32 memory.
template <int kHalf, int kColumns>
__device__ __forceinline__ void StoreRowFloat(const float (&d)[kColumns / 2], float factor,
                                              float* row, bool valid, int head_dim) {
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    const int column = j * 8 + threadIdx.x % 4 * 2, i = 4 * j + 2 * kHalf;
    const float2 value = {d[i] * factor, d[i + 1] * factor};
    if (valid && column < head_dim) *reinterpret_cast<float2*>(row + column) = value;
  }
}

// Loads row `kHalf` of fp32 memory into a warp's accumulators. Elements beyond head_dim are zeros,
// and so are rows that are not valid.
template <int kHalf, int kColumns>
__device__ __forceinline__ void LoadRowFloat(const float* row, bool valid, int head_dim,
                                             float (&d)[kColumns / 2]) {
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    const int column = j * 8 + threadIdx.x % 4 * 2, i = 4 * j + 2 * kHalf;
    float2 x = {0, 0};
    if (valid && column < head_dim) x = __ldcg(reinterpret_cast<const float2*>(row + column));
    d[i] = x.x;
    d[i + 1] = x.y;
  }
}

// Stores d * factor, both rows of the thread, in fp32 or Element: the row at `offset` of the
// operand, and the row 8 below.
template <class Element, int kColumns>
__device__ __forceinline__ void StoreRows(bool is_float, const float (&d)[kColumns / 2],
                                          const float (&factor)[2], const AttentionOperand& operand,
                                          int64_t offset, const bool (&valid)[2], int head_dim) {
  if (is_float) {
    float* row = static_cast<float*>(operand.data) + offset;
    StoreRowFloat<0, kColumns>(d, factor[0], row, valid[0], head_dim);
    StoreRowFloat<1, kColumns>(d, factor[1], row + 8 * operand.seq_stride, valid[1], head_dim);
  } else {
    auto* row = static_cast<Element*>(operand.data) + offset;
    StoreRowElements<Element, 0, kColumns>(d, factor[0], row, valid[0], head_dim);
    StoreRowElements<Element, 1, kColumns>(d, factor[1], row + 8 * operand.seq_stride, valid[1],
                                           head_dim);
  }
}

}  // namespace cuda
}  // namespace burst
