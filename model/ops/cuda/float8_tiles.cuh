// Makes float8 forms (kernels.h) of numbers tile by tile, for several kernels.
#pragma once

#include <algorithm>
#include <cstdint>

#include "burst/base/check.h"
#include "burst/tensor/tensor.h"
#include "model/ops/cuda/float8.cuh"
#include "model/ops/cuda/vectorized.cuh"

namespace burst {
namespace cuda {

constexpr int kThreads = 256;
constexpr int kVec = 8;  // bf16 elements of a load
using Eight = Words<bf16, kVec>;

constexpr int kTile = 128;  // rows and columns of a tile

__device__ inline bool IsFirstThread(int64_t first_row, int64_t first_col) {
  return first_row == 0 && first_col == 0 && threadIdx.x == 0;
}

// Calls body(row, col) for each patch of 4 rows by 8 columns of a tile. row and col count from the
// tile's first. A warp takes 32 rows by 32 columns at a time.
template <typename Body>
__device__ inline void ForEachPatch(const Body& body) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int part = warp; part < 16; part += kThreads / 32) {
    body((part / 4 * 8 + lane / 4) * 4, (part % 4 * 4 + lane % 4) * kVec);
  }
}

// ---- Sources: the numbers that a tile of the results is made of. A source gives eight bytes of
// each of its kOutputs results at (row, col). The results are side by side: [rows, kOutputs cols].
// With kOwnColumns the columns have scales of their own, and ReadColumns gives their bytes.
// Begin(row, col) is called by all threads of a tile that begins there.

// ---- The tile kernel. A block makes 128 rows by 128 columns. Four bytes of a column, one of each
// row, make a word in shared memory. The pitch of 33 words keeps both its writes and its reads free
// of bank conflicts.

constexpr int kPitch = kTile / 4 + 1;

// Returns bytes b of four words, as a word.
__device__ inline uint32_t ByteOfFour(const uint32_t (&words)[4], int b) {
  const uint32_t low = __byte_perm(words[0], words[1], b | (4 + b) << 4);
  const uint32_t high = __byte_perm(words[2], words[3], b | (4 + b) << 4);
  return __byte_perm(low, high, 0x5410);
}

// as_rows: [rows, kOutputs cols]; as_columns: [kOutputs cols, padded_rows]. Either may be null.
template <typename Source>
__global__ void __launch_bounds__(kThreads)
    TileKernel(int64_t rows, int64_t cols, int64_t padded_rows, Source source,
               uint8_t* __restrict__ as_rows, uint8_t* __restrict__ as_columns) {
  constexpr int kOutputs = Source::kOutputs;
  __shared__ uint32_t columns[kOutputs][kTile * kPitch];
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kTile;
  const int64_t first_col = static_cast<int64_t>(blockIdx.y) * kTile;
  source.Begin(first_row, first_col);
  ForEachPatch([&](int patch_row, int col) {
    const int row_group = patch_row / 4;
    uint32_t low[kOutputs][4], high[kOutputs][4];  // columns 0 to 3 and 4 to 7 of each row
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t row = first_row + row_group * 4 + i;
      const bool inside = row < rows && first_col + col < cols;
      uint2 bytes[kOutputs] = {};
      if (inside) source.Read(row, first_col + col, bytes);
#pragma unroll
      for (int o = 0; o < kOutputs; ++o) {
        if (as_rows == nullptr || !inside) continue;
        const int64_t at = (row * kOutputs + o) * cols + first_col + col;
        *reinterpret_cast<uint2*>(as_rows + at) = bytes[o];
      }
      if constexpr (Source::kOwnColumns) {
        if (as_columns != nullptr && inside) source.ReadColumns(row, first_col + col, bytes);
      }
#pragma unroll
      for (int o = 0; o < kOutputs; ++o) {
        low[o][i] = bytes[o].x;
        high[o][i] = bytes[o].y;
      }
    }
    if (as_columns == nullptr) return;
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        columns[o][(col + j) * kPitch + row_group] = ByteOfFour(low[o], j);
        columns[o][(col + 4 + j) * kPitch + row_group] = ByteOfFour(high[o], j);
      }
    }
  });
  if (as_columns == nullptr) return;
  __syncthreads();
  // Eight lanes write the 128 bytes of a column.
#pragma unroll
  for (int o = 0; o < kOutputs; ++o) {
    for (int i = threadIdx.x; i < kTile * 8; i += kThreads) {
      const int col = i / 8, row = i % 8 * 16;
      if (first_col + col >= cols || first_row + row >= padded_rows) continue;
      const uint32_t* from = columns[o] + col * kPitch + row / 4;
      const int64_t to = (o * cols + first_col + col) * padded_rows + first_row + row;
      *reinterpret_cast<uint4*>(as_columns + to) = make_uint4(from[0], from[1], from[2], from[3]);
    }
  }
}

template <typename T>
inline T* DataOrNull(const Tensor& tensor) {
  return tensor.null() ? nullptr : static_cast<T*>(tensor.raw_data());
}
inline float* Float(const Tensor& tensor) { return static_cast<float*>(tensor.raw_data()); }
inline const bf16* Bf16(const Tensor& tensor) {
  BURST_CHECK(tensor.dtype() == DType::kBFloat16 && tensor.is_contiguous());
  return static_cast<const bf16*>(tensor.raw_data());
}

// At least one block, which writes the scale.
inline dim3 Tiles(int64_t rows, int64_t cols) {
  return {static_cast<unsigned>(std::max<int64_t>(1, (rows + kTile - 1) / kTile)),
          static_cast<unsigned>((cols + kTile - 1) / kTile)};
}

template <typename Source>
void MakeTiles(int64_t rows, int64_t cols, const Source& source, const Tensor& as_rows,
               const Tensor& as_columns) {
  BURST_CHECK(cols % 16 == 0);
  TileKernel<<<Tiles(rows, cols), kThreads, 0, CurrentStream()>>>(
      rows, cols, as_columns.null() ? rows : as_columns.dim(1), source,
      DataOrNull<uint8_t>(as_rows), DataOrNull<uint8_t>(as_columns));
  BURST_CUDA_CHECK(cudaGetLastError());
}

// Returns the number of blocks that read `vectors` vectors, and leave few numbers to combine.
inline unsigned BlocksToReduce(int64_t vectors) {
  constexpr int64_t kMostBlocks = 132 * 8;
  return static_cast<unsigned>(std::min(kMostBlocks, (vectors + kThreads - 1) / kThreads));
}

inline DType Float8DType(const Tensor& as_rows, const Tensor& as_columns) {
  const DType dtype = as_rows.null() ? as_columns.dtype() : as_rows.dtype();
  BURST_CHECK(Is8Bit(dtype) &&
              (as_rows.null() || as_columns.null() || as_columns.dtype() == dtype));
  return dtype;
}

}  // namespace cuda
}  // namespace burst
