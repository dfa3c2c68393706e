// Makes float8 forms (kernels.h) of bfloat16 tensors.
#include "burst/base/check.h"
#include "burst/tensor/dispatch.cuh"
#include "model/ops/cuda/float8_tiles.cuh"
#include "model/ops/cuda/kernels.h"

namespace burst {
namespace cuda {
namespace {

// ---- Largest magnitudes.

__global__ void __launch_bounds__(kThreads)
    LargestMagnitudeKernel(int64_t vectors, const bf16* __restrict__ x, uint32_t* amax) {
  uint32_t most = 0;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < vectors;
       i += stride) {
    most = max(most, MagnitudeBits(Load<kVec>(x + i * kVec)));
  }
  RaiseAmax(most, amax);
}

// Each thread has a weight.
__global__ void ScalesOfRanksKernel(int64_t ranks, int64_t n, const uint32_t* __restrict__ of_ranks,
                                    float* scales) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n) return;
  uint32_t most = 0;
  for (int64_t rank = 0; rank < ranks; ++rank) most = max(most, of_ranks[rank * n + i]);
  scales[i * kScaleRow] = ScaleFor(__uint_as_float(most), kLargestE4M3);
}

// ---- One scale a tensor.

__global__ void __launch_bounds__(kThreads)
    RoundPieceKernel(int64_t vectors, const bf16* __restrict__ x, const float* __restrict__ scale,
                     uint8_t* y) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= vectors) return;
  const Eight words = Load<kVec>(x + i * kVec);
  float v[kVec];
#pragma unroll
  for (int j = 0; j < kVec; ++j) v[j] = words[j];
  *reinterpret_cast<uint2*>(y + i * kVec) = RoundEight<__NV_E4M3>(v, 1 / *scale);
}

struct TensorSource {
  static constexpr int kOutputs = 1;
  static constexpr bool kOwnColumns = false;
  const bf16* x;
  const float* amax;
  float* scale_out;
  int64_t cols;
};

// Gives x / scale.
template <__nv_fp8_interpretation_t kKind>
struct Rounded : TensorSource {
  float inverse = 0;

  __device__ void Begin(int64_t first_row, int64_t first_col) {
    const float scale = ScaleFor(*amax, kKind == __NV_E4M3 ? kLargestE4M3 : kLargestE5M2);
    if (IsFirstThread(first_row, first_col)) *scale_out = scale;
    inverse = 1 / scale;
  }
  __device__ void Read(int64_t row, int64_t col, uint2 (&out)[1]) const {
    const Eight words = Load<kVec>(x + row * cols + col);
    float v[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) v[j] = words[j];
    out[0] = RoundEight<kKind>(v, inverse);
  }
};

// Gives bytes as they are, for their transpose.
struct Bytes {
  static constexpr int kOutputs = 1;
  static constexpr bool kOwnColumns = false;
  const uint8_t* x;
  int64_t cols;

  __device__ void Begin(int64_t, int64_t) {}
  __device__ void Read(int64_t row, int64_t col, uint2 (&out)[1]) const {
    out[0] = *reinterpret_cast<const uint2*>(x + row * cols + col);
  }
};

// ---- Sources with many scales.

// Raises of_rows[128] and of_cols[128] to the largest magnitudes of a tile's rows and columns, as
// bits. x points at the tile.
__device__ inline void RaiseTileAmax(const bf16* x, int64_t cols, int64_t tile_rows,
                                     int64_t tile_cols, uint32_t* of_rows, uint32_t* of_cols) {
  ForEachPatch([&](int row, int col) {
    const int lane = threadIdx.x % 32;
    uint32_t column[kVec] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool inside = row + i < tile_rows && col < tile_cols;
      Eight words = {};
      if (inside) words = Load<kVec>(x + (row + i) * cols + col);
#pragma unroll
      for (int j = 0; j < kVec; ++j) column[j] = max(column[j], MagnitudeBits(words[j]));
      uint32_t most = MagnitudeBits(words);  // of the four lanes of a row
      most = max(most, __shfl_xor_sync(~0u, most, 1));
      most = max(most, __shfl_xor_sync(~0u, most, 2));
      if (lane % 4 == 0 && row + i < tile_rows) atomicMax(of_rows + row + i, most);
    }
#pragma unroll
    for (int j = 0; j < kVec; ++j) {  // of the eight lanes of a column
      uint32_t most = column[j];
#pragma unroll
      for (int other = 4; other < 32; other *= 2) {
        most = max(most, __shfl_xor_sync(~0u, most, other));
      }
      if (lane < 4 && col < tile_cols) atomicMax(of_cols + col + j, most);
    }
  });
}

__global__ void __launch_bounds__(kThreads)
    RowAndColumnAmaxKernel(int64_t rows, int64_t cols, const bf16* __restrict__ x,
                           uint32_t* row_amax, uint32_t* column_amax) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kTile;
  const int64_t col = static_cast<int64_t>(blockIdx.y) * kTile;
  RaiseTileAmax(x + row * cols + col, cols, rows - row, cols - col, row_amax + row,
                column_amax + col);
}

// Gives x / scale in e4m3, where each form has the scales of kScaling (matmul.h).
template <Scaling kScaling>
struct ScaledSource {
  static constexpr int kOutputs = 1;
  static constexpr bool kOwnColumns = kScaling != Scaling::kBlock;
  const bf16* x = nullptr;
  int64_t rows = 0, cols = 0;
  // Largest magnitudes of kRow, as their bits.
  const uint32_t *row_amax = nullptr, *column_amax = nullptr;
  float *row_scales = nullptr, *column_scales = nullptr;  // results

  // A thread has a row (of the first 128 threads) or a column.
  __device__ void Begin(int64_t first_row, int64_t first_col) {
    __shared__ uint32_t most[2 * kTile];
    __shared__ float inverse[2 * kTile];
    const int thread = threadIdx.x;
    const bool has_row = thread < kTile;
    const int64_t at = has_row ? first_row + thread : first_col + thread - kTile;
    const bool inside = at < (has_row ? rows : cols);
    if constexpr (kScaling == Scaling::kRow) {
      most[thread] = inside ? (has_row ? row_amax : column_amax)[at] : 0;
    } else {
      most[thread] = 0;
      __syncthreads();
      RaiseTileAmax(x + first_row * cols + first_col, cols, rows - first_row, cols - first_col,
                    most, most + kTile);
      __syncthreads();
    }
    uint32_t bound = most[thread];
    if constexpr (kScaling == Scaling::kBlock) {
      for (int i = 0; i < kTile; ++i) bound = max(bound, most[i]);
    }
    const float scale = ScaleFor(__uint_as_float(bound), kLargestE4M3);
    inverse[thread] = 1 / scale;
    StoreScale(scale, has_row, first_row, first_col, at, inside);
    row_inverse = inverse;
    column_inverse = inverse + kTile;
    tile_row = first_row;
    tile_col = first_col;
    __syncthreads();
  }
  __device__ void Read(int64_t row, int64_t col, uint2 (&out)[1]) const {
    float v[kVec];
    ReadNumbers(row, col, v);
    out[0] = RoundEight<__NV_E4M3>(v, row_inverse[row - tile_row]);
  }
  __device__ void ReadColumns(int64_t row, int64_t col, uint2 (&out)[1]) const {
    float v[kVec];
    ReadNumbers(row, col, v);
#pragma unroll
    for (int j = 0; j < kVec; ++j) v[j] *= column_inverse[col - tile_col + j];
    out[0] = RoundEight<__NV_E4M3>(v, 1);
  }

 private:
  __device__ void ReadNumbers(int64_t row, int64_t col, float (&v)[kVec]) const {
    const Eight words = Load<kVec>(x + row * cols + col);
#pragma unroll
    for (int j = 0; j < kVec; ++j) v[j] = words[j];
  }
  __device__ void StoreScale(float scale, bool has_row, int64_t first_row, int64_t first_col,
                             int64_t at, bool inside) {
    const int64_t row_tile = first_row / kTile, col_tile = first_col / kTile;
    if constexpr (kScaling == Scaling::kBlock) {
      if (threadIdx.x % kTile != 0) return;
      const auto stride = [](int64_t n) { return ((n + kTile - 1) / kTile + 3) / 4 * 4; };
      if (has_row) row_scales[row_tile * stride(cols) + col_tile] = scale;
      if (!has_row) column_scales[col_tile * stride(rows) + row_tile] = scale;
    } else {
      if (!inside) return;
      constexpr bool kMany = kScaling == Scaling::kVector;
      if (has_row && (kMany || col_tile == 0))
        row_scales[(kMany ? col_tile * rows : 0) + at] = scale;
      if (!has_row && (kMany || row_tile == 0)) {
        column_scales[(kMany ? row_tile * cols : 0) + at] = scale;
      }
    }
  }

  // The tile's place, and 1 / scale of its rows and columns.
  int64_t tile_row = 0, tile_col = 0;
  const float *row_inverse = nullptr, *column_inverse = nullptr;
};

}  // namespace

void LargestMagnitude(const Tensor& x, const Tensor& amax) {
  const int64_t vectors = x.numel() / kVec;
  BURST_CHECK(x.numel() % kVec == 0);
  BURST_CUDA_CHECK(cudaMemsetAsync(amax.raw_data(), 0, sizeof(float), CurrentStream()));
  if (vectors == 0) return;
  LargestMagnitudeKernel<<<BlocksToReduce(vectors), kThreads, 0, CurrentStream()>>>(
      vectors, Bf16(x), static_cast<uint32_t*>(amax.raw_data()));
  BURST_CUDA_CHECK(cudaGetLastError());
}

void ScalesOfRanks(const Tensor& of_ranks, const Tensor& scales) {
  const int64_t n = scales.numel() / kScaleRow;
  ScalesOfRanksKernel<<<(n + kThreads - 1) / kThreads, kThreads, 0, CurrentStream()>>>(
      of_ranks.numel() / n, n, static_cast<const uint32_t*>(of_ranks.raw_data()), Float(scales));
  BURST_CUDA_CHECK(cudaGetLastError());
}

void RoundPieceToE4M3(const Tensor& x, const Tensor& scale, const Tensor& y) {
  const int64_t vectors = x.numel() / kVec;
  BURST_CHECK(x.numel() % kVec == 0 && y.numel() == x.numel() && y.dtype() == DType::kFloat8E4M3);
  if (vectors == 0) return;
  RoundPieceKernel<<<(vectors + kThreads - 1) / kThreads, kThreads, 0, CurrentStream()>>>(
      vectors, Bf16(x), Float(scale), static_cast<uint8_t*>(y.raw_data()));
  BURST_CUDA_CHECK(cudaGetLastError());
}

void RoundToFloat8(const Tensor& x, int64_t cols, const Tensor& amax, const Tensor& as_rows,
                   const Tensor& as_columns, const Tensor& scale) {
  const TensorSource source{Bf16(x), Float(amax), Float(scale), cols};
  const int64_t rows = x.numel() / cols;
  if (Float8DType(as_rows, as_columns) == DType::kFloat8E4M3) {
    MakeTiles(rows, cols, Rounded<__NV_E4M3>{source}, as_rows, as_columns);
  } else {
    MakeTiles(rows, cols, Rounded<__NV_E5M2>{source}, as_rows, as_columns);
  }
}

void TransposeFloat8(const Tensor& as_rows, int64_t cols, const Tensor& as_columns) {
  BURST_CHECK(Float8DType(as_rows, as_columns) == as_rows.dtype() && as_rows.is_contiguous());
  MakeTiles(as_rows.numel() / cols, cols, Bytes{static_cast<uint8_t*>(as_rows.raw_data()), cols},
            Tensor(), as_columns);
}

void RowAndColumnAmax(const Tensor& x, int64_t cols, const Tensor& row_amax,
                      const Tensor& column_amax) {
  const int64_t rows = x.numel() / cols;
  BURST_CHECK(cols % 16 == 0 && row_amax.numel() == rows && column_amax.numel() == cols);
  for (const Tensor& amax : {row_amax, column_amax}) {
    BURST_CUDA_CHECK(
        cudaMemsetAsync(amax.raw_data(), 0, amax.numel() * sizeof(float), CurrentStream()));
  }
  if (rows == 0) return;
  RowAndColumnAmaxKernel<<<Tiles(rows, cols), kThreads, 0, CurrentStream()>>>(
      rows, cols, Bf16(x), DataOrNull<uint32_t>(row_amax), DataOrNull<uint32_t>(column_amax));
  BURST_CUDA_CHECK(cudaGetLastError());
}

void RoundWithScales(const Tensor& x, int64_t cols, Scaling scaling, const Tensor& row_amax,
                     const Tensor& column_amax, const Tensor& as_rows, const Tensor& as_columns,
                     const Tensor& row_scales, const Tensor& column_scales) {
  BURST_CHECK(Float8DType(as_rows, as_columns) == DType::kFloat8E4M3);
  const int64_t rows = x.numel() / cols;
  const auto make = [&](auto source) {
    source.x = Bf16(x);
    source.rows = rows;
    source.cols = cols;
    source.row_amax = DataOrNull<uint32_t>(row_amax);
    source.column_amax = DataOrNull<uint32_t>(column_amax);
    source.row_scales = Float(row_scales);
    source.column_scales = Float(column_scales);
    MakeTiles(rows, cols, source, as_rows, as_columns);
  };
  switch (scaling) {
    case Scaling::kRow:
      return make(ScaledSource<Scaling::kRow>{});
    case Scaling::kVector:
      return make(ScaledSource<Scaling::kVector>{});
    case Scaling::kBlock:
      return make(ScaledSource<Scaling::kBlock>{});
    case Scaling::kTensor:
      break;
  }
  BURST_CHECK(false) << "one scale of a tensor is RoundToFloat8's";
}

}  // namespace cuda
}  // namespace burst
