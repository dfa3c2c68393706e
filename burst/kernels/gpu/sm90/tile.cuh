// What the forward and backward kernels share: tiles in shared memory, the visible range of a tile,
// and rows of accumulators on their way to global memory.
#pragma once

#include "burst/kernels/gpu/common/accumulator.cuh"
#include "burst/kernels/gpu/sm90/flash_attention_sm90.h"
#include "burst/kernels/gpu/sm90/wgmma.cuh"

namespace burst {
namespace sm90 {

using cuda::kLn2;
using cuda::kLog2E;
using cuda::LoadRowFloat;
using cuda::StoreRowBf16;
using cuda::StoreRowFloat;

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

// Both rows of the thread: d * factor to the row at `offset` and the one 8 rows below.
template <int kColumns>
__device__ __forceinline__ void StoreRows(bool is_float, const float (&d)[kColumns / 2],
                                          const float (&factor)[2], const OutputView& view,
                                          int64_t offset, const bool (&valid)[2], int head_dim) {
  if (is_float) {
    float* row = static_cast<float*>(view.data) + offset;
    StoreRowFloat<0, kColumns>(d, factor[0], row, valid[0], head_dim);
    StoreRowFloat<1, kColumns>(d, factor[1], row + 8 * view.seq_stride, valid[1], head_dim);
  } else {
    bf16* row = static_cast<bf16*>(view.data) + offset;
    StoreRowBf16<0, kColumns>(d, factor[0], row, valid[0], head_dim);
    StoreRowBf16<1, kColumns>(d, factor[1], row + 8 * view.seq_stride, valid[1], head_dim);
  }
}

constexpr int kWarpRows = 16;  // of a warp's accumulators

// The warp's rows of d * factor (of each of the thread's two rows) -> bf16 rows of a swizzled tile,
// whose blocks of 64 columns are block_bytes apart, and from there to global memory by the TMA,
// which leaves out what lies beyond the tensor. row: the warp's first; staging: its place in shared
// memory, free again after BulkWaitRead of lane 0.
template <int kColumns>
__device__ __forceinline__ void StoreWarpRows(const CUtensorMap& map, uint32_t staging,
                                              int block_bytes, const float (&d)[kColumns / 2],
                                              const float (&factor)[2], int lane, int row, int head,
                                              int batch) {
#pragma unroll
  for (int k = 0; k < kColumns / 16; ++k) {
    uint32_t packed[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int i = 8 * k + 2 * j;
      packed[j] = cuda::PackBf16(d[i] * factor[j % 2], d[i + 1] * factor[j % 2]);
    }
    StoreMatrix(staging + k / 4 * block_bytes + lane % 16 * kRowBytes +
                    ((k % 4 * 2 + lane / 16) ^ (lane % 8)) * 16,
                packed[0], packed[1], packed[2], packed[3]);
  }
  FenceProxyAsync();
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int block = 0; block < kColumns / kBlockColumns; ++block) {
      TmaStore(map, staging + block * block_bytes, block * kBlockColumns, row, head, batch);
    }
    BulkCommit();
  }
}

constexpr int kFloatBoxColumns = 32;  // fp32 in a swizzled row

// The same, added to fp32 rows in global memory; the tile's blocks are of 32 columns.
template <int kColumns>
__device__ __forceinline__ void AddWarpRows(const CUtensorMap& map, uint32_t staging,
                                            int block_bytes, const float (&d)[kColumns / 2],
                                            const float (&factor)[2], int lane, int row, int head,
                                            int batch) {
  const uint32_t place =
      staging + lane / 4 * kRowBytes + ((lane % 4 / 2) ^ (lane / 4)) * 16 + lane % 2 * 8;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      StoreShared((place ^ (j % 4 * 32)) + j / 4 * block_bytes + r * 8 * kRowBytes,
                  d[4 * j + 2 * r] * factor[r], d[4 * j + 2 * r + 1] * factor[r]);
    }
  }
  FenceProxyAsync();
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int block = 0; block < kColumns / kFloatBoxColumns; ++block) {
      TmaReduceAdd(map, staging + block * block_bytes, block * kFloatBoxColumns, row, head, batch);
    }
    BulkCommit();
  }
}

}  // namespace sm90
}  // namespace burst
