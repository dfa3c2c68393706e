// Shared code of the forward and backward kernels: tiles in shared memory, visible ranges of tiles,
// rows of accumulators on their way to global memory.
#pragma once

#include "burst/kernels/gpu/common/accumulator.cuh"
#include "burst/kernels/gpu/sm90/wgmma.cuh"

namespace burst {
namespace sm90 {

using cuda::kLn2;
using cuda::kLog2E;
using cuda::LoadRowFloat;
using cuda::Offset;
using cuda::StoreRows;

// Returns the number of swizzled blocks that hold `columns` columns.
__host__ __device__ constexpr int ColumnBlocks(int columns) {
  return (columns + kBlockColumns - 1) / kBlockColumns;
}

// A tile [kRows, kColumns] of elements of 16 bits, in whole blocks.
template <int kRows, int kColumns>
struct Tile {
  static constexpr int kBlocks = ColumnBlocks(kColumns);
  static constexpr int kBlockBytes = kRows * kRowBytes;
  static constexpr int kBytes = kBlockBytes * kBlocks;

  alignas(1024) uint16_t data[kRows * kBlocks * kBlockColumns];

  // Returns the place of a part of the tile: its first row and its column block.
  __device__ __forceinline__ const uint16_t* At(int row, int block = 0) const {
    return data + (block * kRows + row) * kBlockColumns;
  }
};

// Loads rows row .. row + kRows - 1 of one head. Announce Tile::kBytes on the barrier first.
template <bool kKeep = false, int kRows, int kColumns>
__device__ __forceinline__ void LoadTile(Tile<kRows, kColumns>& tile, const CUtensorMap& map,
                                         Barrier* barrier, int row, int head, int batch) {
#pragma unroll
  for (int block = 0; block < Tile<kRows, kColumns>::kBlocks; ++block) {
    TmaLoad<kKeep>(tile.data + block * kRows * kBlockColumns, map, barrier, block * kBlockColumns,
                   row, head, batch);
  }
}

constexpr int kWarpRows = 16;  // rows of a warp's accumulators

// Loads rows row .. row + 63 of a tile, the first 4 kCount columns, as an A operand of the
// warpgroup.
template <int kRows, int kColumns, int kCount>
__device__ __forceinline__ void LoadOperand(const Tile<kRows, kColumns>& tile, int row,
                                            uint32_t (&operand)[kCount]) {
  using TileType = Tile<kRows, kColumns>;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize % 4;
  row += warp * kWarpRows + lane % kWarpRows;
#pragma unroll
  for (int k = 0; k < kCount / 4; ++k) {
    uint32_t columns[4];
    LoadMatrix(SharedAddress(tile.data) + k / 4 * TileType::kBlockBytes + row * kRowBytes +
                   ((k % 4 * 2 + lane / kWarpRows) ^ (row % 8)) * 16,
               columns);
#pragma unroll
    for (int i = 0; i < 4; ++i) operand[4 * k + i] = columns[i];
  }
  PinRegisters(operand);
}

// Stores the warp's rows of d * factor (one factor for each of the thread's two rows). They become
// rows of Element in a swizzled tile, whose blocks of 64 columns are block_bytes apart. From there
// the TMA copies them to global memory and leaves out rows beyond the tensor. row: the warp's first
// row. staging: the tile's place in shared memory, free again after BulkWaitRead of lane 0.
template <class Element, int kColumns>
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
      packed[j] = Pack<Element>(d[i] * factor[j % 2], d[i + 1] * factor[j % 2]);
    }
    StoreMatrix(staging + k / 4 * block_bytes + lane % 16 * kRowBytes +
                    ((k % 4 * 2 + lane / 16) ^ (lane % 8)) * 16,
                packed[0], packed[1], packed[2], packed[3]);
  }
  FenceProxyAsync();
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int block = 0; block < ColumnBlocks(kColumns); ++block) {
      TmaStore(map, staging + block * block_bytes, block * kBlockColumns, row, head, batch);
    }
    BulkCommit();
  }
}

constexpr int kFloatBoxColumns = 32;  // fp32 elements in a swizzled row

// Stores like StoreWarpRows, to fp32 rows in global memory, which are assigned or added to. The
// tile's blocks have 32 columns.
template <int kColumns>
__device__ __forceinline__ void StoreFloatWarpRows(bool add, const CUtensorMap& map,
                                                   uint32_t staging, int block_bytes,
                                                   const float (&d)[kColumns / 2],
                                                   const float (&factor)[2], int lane, int row,
                                                   int head, int batch) {
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
      StoreOrAdd(add, map, staging + block * block_bytes, block * kFloatBoxColumns, row, head,
                 batch);
    }
    BulkCommit();
  }
}

}  // namespace sm90
}  // namespace burst
