// What the forward and backward kernels share: tiles in shared memory, the visible range of a tile,
// and rows of accumulators on their way to global memory.
#pragma once

#include "burst/kernels/sm90/flash_attention_sm90.h"
#include "burst/kernels/sm90/wgmma.cuh"

namespace burst {
namespace sm90 {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// A bf16 tile [kRows, kColumns]: kColumns / 64 swizzled blocks.
template <int kRows, int kColumns>
struct Tile {
  static constexpr int kBlockBytes = kRows * kRowBytes;
  static constexpr int kBytes = kBlockBytes * (kColumns / kBlockColumns);

  alignas(1024) bf16 data[kRows * kColumns];

  // The first row and the column block of a part of the tile.
  __device__ __forceinline__ const bf16* At(int row, int block = 0) const {
    return data + (block * kRows + row) * kBlockColumns;
  }
};

// Rows row .. row + kRows - 1 of one head, all columns. Announce Tile::kBytes on the barrier first.
template <int kRows, int kColumns>
__device__ __forceinline__ void LoadTile(Tile<kRows, kColumns>& tile, const CUtensorMap& map,
                                         Barrier* barrier, int row, int head, int batch) {
#pragma unroll
  for (int block = 0; block < kColumns / kBlockColumns; ++block) {
    TmaLoad(tile.data + block * kRows * kBlockColumns, map, barrier, block * kBlockColumns, row,
            head, batch);
  }
}

// A [batch, seqlen, num_heads, head_dim] tensor of either type in global memory.
struct OutputView {
  void* data;
  int64_t batch_stride, seq_stride, head_stride;

  __device__ __forceinline__ int64_t Offset(int batch, int head, int row) const {
    return batch * batch_stride + row * seq_stride + head * head_stride;
  }
};

inline OutputView View(const Operand& tensor) {
  return {tensor.data, tensor.batch_stride, tensor.seq_stride, tensor.head_stride};
}

// Row `kHalf` (0: l / 4, 1: l / 4 + 8) of a warp's accumulators, times `factor`, to 16-bit memory.
// Four lanes hold a row, each two columns of every eight; a 4x4 transpose among them gives each
// lane eight columns in sequence, so that every store is 16 bytes.
template <int kHalf, int kColumns>
__device__ __forceinline__ void StoreRowBf16(const float (&d)[kColumns / 2], float factor,
                                             bf16* row, bool valid, int head_dim) {
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int group = 0; group < kColumns / 32; ++group) {
    uint32_t own[4];  // own[j]: columns 32 group + 8 j + 2 lane, + 1
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = (group * 4 + j) * 4 + 2 * kHalf;
      own[j] = PackBf16(d[i] * factor, d[i + 1] * factor);
    }
    // Exchange with the lane at distance 1, then 2: element j of lane i becomes element i of lane
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

// The same to fp32 memory: row = row * keep + d * factor (keep unused unless kAccumulate).
template <int kHalf, bool kAccumulate, int kColumns>
__device__ __forceinline__ void StoreRowFloat(const float (&d)[kColumns / 2], float factor,
                                              float* row, float keep, bool valid, int head_dim) {
  if (!valid) return;
  const int lane = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    const int column = j * 8 + lane * 2;
    if (column >= head_dim) continue;
    float2* target = reinterpret_cast<float2*>(row + column);
    float2 value = {d[4 * j + 2 * kHalf] * factor, d[4 * j + 2 * kHalf + 1] * factor};
    if (kAccumulate) {
      const float2 old = *target;
      value.x = fmaf(old.x, keep, value.x);
      value.y = fmaf(old.y, keep, value.y);
    }
    *target = value;
  }
}

// Both rows of the thread: d * factor to the row at `offset` and the one 8 rows below.
template <int kColumns>
__device__ __forceinline__ void StoreRows(Store store, const float (&d)[kColumns / 2],
                                          const float (&factor)[2], const OutputView& view,
                                          int64_t offset, const float (&keep)[2],
                                          const bool (&valid)[2], int head_dim) {
  if (store == Store::kBf16) {
    bf16* row = static_cast<bf16*>(view.data) + offset;
    StoreRowBf16<0, kColumns>(d, factor[0], row, valid[0], head_dim);
    StoreRowBf16<1, kColumns>(d, factor[1], row + 8 * view.seq_stride, valid[1], head_dim);
    return;
  }
  float* row = static_cast<float*>(view.data) + offset;
  float* below = row + 8 * view.seq_stride;
  if (store == Store::kFloat) {
    StoreRowFloat<0, false, kColumns>(d, factor[0], row, 0, valid[0], head_dim);
    StoreRowFloat<1, false, kColumns>(d, factor[1], below, 0, valid[1], head_dim);
  } else {
    StoreRowFloat<0, true, kColumns>(d, factor[0], row, keep[0], valid[0], head_dim);
    StoreRowFloat<1, true, kColumns>(d, factor[1], below, keep[1], valid[1], head_dim);
  }
}

}  // namespace sm90
}  // namespace burst
