// Tiles of the float32 and float64 kernels, which have 256 threads as a square of 16 x 16. Thread
// (y, x) holds the rows y + 16 r of a matmul's result. Columns that are keys or queries: it holds x
// + 16 c. Columns that are channels of a head: it holds every 16th vector of 16 bytes, from the
// x-th on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "burst/kernels/flash_attention.h"
#include "burst/kernels/gpu/common/changed_scores.cuh"
#include "burst/kernels/gpu/common/operand.cuh"
#include "burst/kernels/gpu/common/shared_memory.h"
#include "burst/tensor/dispatch.cuh"

namespace burst {
namespace simt {

using cuda::ChangedScores;
using cuda::Head;
using cuda::Visible;

constexpr int kThreads = 256;
constexpr int kSide = 16;

// kHalves: tiles of half as many rows, for GPUs with 99 KB of shared memory a thread block.
template <typename T, int kHeadDimPadded, bool kHalves = false>
struct Tile {
  static constexpr int kHeadDim = kHeadDimPadded;  // 64, 128 or 256; both widths, padded with zeros
  // Rows of queries and of keys. Five tiles of them fit the shared memory of a thread block.
  static constexpr int kRows = (kHeadDim <= 128 ? 64 : 32) / (kHalves ? 2 : 1) *
                               static_cast<int>(sizeof(float)) / static_cast<int>(sizeof(T));
  static_assert(kRows % kSide == 0, "a row of threads has no row");
  static constexpr int kPerThread = kRows / kSide;
  static constexpr int kVec = 16 / sizeof(T);
  // Rows are 16 bytes longer than a multiple of all banks, so that eight threads can read vectors
  // of eight rows at once.
  static constexpr int kStride = kHeadDim + kVec;    // of [rows, head_dim]
  static constexpr int kScoreStride = kRows + kVec;  // of [rows, rows]
  static constexpr int kSize = kRows * kStride;
  static constexpr int kScoreSize = kRows * kScoreStride;
  static constexpr int kColumns = kHeadDim / kSide;  // of head_dim, for a thread

  static constexpr int64_t kForwardBytes = (2 * kSize + kScoreSize) * int64_t{sizeof(T)};
  static constexpr int64_t kBackwardBytes = (4 * kSize + kScoreSize) * int64_t{sizeof(T)};

  // Thread blocks that share a multiprocessor: two, if the tiles of two fit its 227 KB. Each then
  // has at most 128 registers a thread.
  static constexpr int kForwardBlocks = 2 * (kForwardBytes + 1024) <= 227 * 1024 ? 2 : 1;
  static constexpr int kBackwardBlocks = 2 * (kBackwardBytes + 1024) <= 227 * 1024 ? 2 : 1;

  using Scores = T[kPerThread][kPerThread];
  using Rows = T[kPerThread][kColumns];
};

// Loads rows [first, first + rows) of the head into the tile, with zeros below and to the right.
// Returns whether the numbers that this thread has loaded are finite.
template <class Tile, typename T>
__device__ bool LoadTile(const Head<T>& head, int64_t first, int64_t rows, int head_dim, T* tile) {
  T zero = 0;
  for (int index = threadIdx.x; index < Tile::kRows * Tile::kHeadDim; index += kThreads) {
    const int row = index / Tile::kHeadDim, column = index % Tile::kHeadDim;
    const bool valid = row < rows && column < head_dim;
    const T value = valid ? head.row(first + row)[column] : T{0};
    tile[row * Tile::kStride + column] = value;
    zero += value * 0;
  }
  return zero == 0;
}

// Computes scores = a b^T with a, b [rows, head_dim], as sums of 16 products each. A single sum
// would round head_dim times, which is too inexact for scores of a million.
template <class Tile, typename T>
__device__ void Matmul(const T* a, const T* b, T (&scores)[Tile::kPerThread][Tile::kPerThread]) {
  using Vec = cuda::Vec<T, Tile::kVec>;
  constexpr int kN = Tile::kPerThread;
  const int y = threadIdx.x / kSide, x = threadIdx.x % kSide;
#pragma unroll
  for (int r = 0; r < kN; ++r) {
#pragma unroll
    for (int c = 0; c < kN; ++c) scores[r][c] = 0;
  }
  constexpr int kDepth = 16;
#pragma unroll 1
  for (int first = 0; first < Tile::kHeadDim; first += kDepth) {
    T sums[kN][kN] = {};
#pragma unroll
    for (int d = first; d < first + kDepth; d += Tile::kVec) {
      Vec rows[kN], columns[kN];
#pragma unroll
      for (int r = 0; r < kN; ++r) {
        rows[r] = *reinterpret_cast<const Vec*>(a + (y + kSide * r) * Tile::kStride + d);
        columns[r] = *reinterpret_cast<const Vec*>(b + (x + kSide * r) * Tile::kStride + d);
      }
#pragma unroll
      for (int r = 0; r < kN; ++r) {
#pragma unroll
        for (int c = 0; c < kN; ++c) {
#pragma unroll
          for (int i = 0; i < Tile::kVec; ++i) sums[r][c] += rows[r][i] * columns[c][i];
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kN; ++r) {
#pragma unroll
      for (int c = 0; c < kN; ++c) scores[r][c] += sums[r][c];
    }
  }
}

// Returns the place of the c-th of a thread's columns of head_dim.
template <class Tile>
__device__ int ColumnOf(int x, int c) {
  return c / Tile::kVec * Tile::kVec * kSide + x * Tile::kVec + c % Tile::kVec;
}

// Computes sums += scores b, with scores [rows, rows] and b [rows, head_dim].
template <class Tile, typename T>
__device__ void AddMatmul(const T* scores, const T* b,
                          T (&sums)[Tile::kPerThread][Tile::kColumns]) {
  using Vec = cuda::Vec<T, Tile::kVec>;
  const int y = threadIdx.x / kSide, x = threadIdx.x % kSide;
#pragma unroll 1
  for (int j = 0; j < Tile::kRows; j += Tile::kVec) {
    Vec p[Tile::kPerThread];
#pragma unroll
    for (int r = 0; r < Tile::kPerThread; ++r) {
      p[r] = *reinterpret_cast<const Vec*>(scores + (y + kSide * r) * Tile::kScoreStride + j);
    }
#pragma unroll
    for (int i = 0; i < Tile::kVec; ++i) {
#pragma unroll
      for (int c = 0; c < Tile::kColumns; c += Tile::kVec) {
        const Vec v =
            *reinterpret_cast<const Vec*>(b + (j + i) * Tile::kStride + c * kSide + x * Tile::kVec);
#pragma unroll
        for (int r = 0; r < Tile::kPerThread; ++r) {
#pragma unroll
          for (int k = 0; k < Tile::kVec; ++k) sums[r][c + k] += p[r][i] * v[k];
        }
      }
    }
  }
}

// Adds scores b like AddMatmul, but skips row j of b for a row of the sums unless sees(r, j). r
// counts the thread's rows. A row of b that is not finite would add 0 x NaN to the sums.
template <class Tile, typename T, class Sees>
__device__ void AddSeen(const T* scores, const T* b, Sees sees,
                        T (&sums)[Tile::kPerThread][Tile::kColumns]) {
  const int y = threadIdx.x / kSide, x = threadIdx.x % kSide;
#pragma unroll 1
  for (int j = 0; j < Tile::kRows; ++j) {
#pragma unroll
    for (int r = 0; r < Tile::kPerThread; ++r) {
      if (!sees(r, j)) continue;
      const T p = scores[(y + kSide * r) * Tile::kScoreStride + j];
#pragma unroll
      for (int c = 0; c < Tile::kColumns; ++c) {
        sums[r][c] += p * b[j * Tile::kStride + ColumnOf<Tile>(x, c)];
      }
    }
  }
}

// Stores the thread's part of a matmul in shared memory, [rows, rows].
template <class Tile, typename T>
__device__ void StoreScores(const T (&values)[Tile::kPerThread][Tile::kPerThread], T* scores) {
  const int y = threadIdx.x / kSide, x = threadIdx.x % kSide;
#pragma unroll
  for (int r = 0; r < Tile::kPerThread; ++r) {
#pragma unroll
    for (int c = 0; c < Tile::kPerThread; ++c) {
      scores[(y + kSide * r) * Tile::kScoreStride + x + kSide * c] = values[r][c];
    }
  }
}

// Computes row = keep * row + factor * sums; the row's old elements are not read when keep is 0.
template <class Tile, typename T>
__device__ void StoreRow(const T (&sums)[Tile::kColumns], T factor, T keep, int head_dim, T* row) {
  const int x = threadIdx.x % kSide;
#pragma unroll
  for (int c = 0; c < Tile::kColumns; ++c) {
    const int column = ColumnOf<Tile>(x, c);
    if (column >= head_dim) continue;
    const T value = factor * sums[c];
    row[column] = keep == 0 ? value : keep * row[column] + value;
  }
}

// Reduces over the 16 threads of a row.
template <typename T>
__device__ T RowMax(T value) {
#pragma unroll
  for (int distance = kSide / 2; distance > 0; distance /= 2) {
    value = max(value, __shfl_xor_sync(0xffffffff, value, distance));
  }
  return value;
}
template <typename T>
__device__ T RowSum(T value) {
#pragma unroll
  for (int distance = kSide / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffff, value, distance);
  }
  return value;
}

// A thread block takes one tile of one head of one batch row. The last tiles come first, because
// they are the longest under a causal mask.
struct TileIndex {
  __device__ TileIndex(int64_t tiles, int64_t heads, int rows)
      : first((tiles - 1 - blockIdx.x % tiles) * rows),
        h(blockIdx.x / tiles % heads),
        b(blockIdx.x / tiles / heads) {}
  int64_t first;  // row
  int64_t h, b;
};

// Runs kernel<T, padded head_dim>, a thread block for each tile of `length` rows of `heads` heads.
template <typename Kernel, typename Params>
void LaunchTiles(Kernel kernel, const Params& params, int64_t rows, int64_t length, int64_t heads,
                 int64_t shared_bytes) {
  const int64_t tiles = (length + rows - 1) / rows;
  const int64_t blocks = tiles * heads * params.shape.batch;
  if (blocks == 0) return;
  cuda::AllowSharedMemory(reinterpret_cast<const void*>(kernel), shared_bytes);
  kernel<<<static_cast<unsigned>(blocks), kThreads, shared_bytes, cuda::CurrentStream()>>>(params,
                                                                                           tiles);
  BURST_CUDA_CHECK_LAUNCH("attention");
}

// The bytes of the largest kernel: float64, head_dim above 128. It has no variant with half the
// rows, because 16 rows are the fewest.
constexpr int64_t kWidestBytes = Tile<double, 256>::kBackwardBytes;

// Returns the columns of tiles for heads of two widths.
inline int64_t PaddedWidth(const HeadWidths& widths) {
  const int64_t most = std::max(widths.head_dim, widths.value_dim);
  return most <= 64 ? 64 : most <= 128 ? 128 : 256;
}

// Calls function(T{}, Tile<T, kHeadDim>{}) for the dtype and the heads of a shape.
template <typename Function>
void DispatchTile(const FlashAttentionShape& shape, Function&& function) {
  const int64_t shared = cuda::SharedMemoryPerBlock();
  const auto with_head_dim = [&](auto zero, auto head_dim) {
    using T = decltype(zero);
    constexpr int kHeadDim = decltype(head_dim)::value;
    if constexpr (kHeadDim > 64 && !(kHeadDim == 256 && sizeof(T) == 8)) {
      if (Tile<T, kHeadDim>::kBackwardBytes > shared) {
        return function(zero, Tile<T, kHeadDim, /*kHalves=*/true>{});
      }
    }
    function(zero, Tile<T, kHeadDim>{});
  };
  const auto with_dtype = [&](auto zero) {
    const int64_t width = PaddedWidth(shape.widths());
    if (width == 64) return with_head_dim(zero, std::integral_constant<int, 64>{});
    if (width == 128) return with_head_dim(zero, std::integral_constant<int, 128>{});
    return with_head_dim(zero, std::integral_constant<int, 256>{});
  };
  if (shape.dtype == DType::kFloat64) return with_dtype(double{});
  return with_dtype(float{});
}

}  // namespace simt
}  // namespace burst
