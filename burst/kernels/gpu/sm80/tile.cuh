// Holds, loads and multiplies tiles of 16-bit elements in shared memory. Element: BFloat16 or
// Float16.
//
// A tile has rows of kColumns elements (a multiple of 64). Piece c (16 bytes) of row r is stored at
// the place of piece c ^ (r % 8). A matrix load reads eight rows of one column of pieces, which
// then touch all banks once.
#pragma once

#include <cmath>
#include <cstdint>

#include "burst/kernels/gpu/common/accumulator.cuh"
#include "burst/kernels/gpu/common/changed_scores.cuh"
#include "burst/kernels/gpu/common/operand.cuh"
#include "burst/kernels/gpu/sm80/ptx.cuh"
#include "burst/tensor/dispatch.cuh"

namespace burst {
namespace sm80 {

using cuda::ChangedScores;
using cuda::Exp2;
using cuda::Head;
using cuda::kLn2;
using cuda::kLog2E;
using cuda::Pack;
using cuda::Visible;

// Returns the number that is exclusive-ored with the number of a 16-byte piece of a row, so that
// eight rows' pieces lie in different banks.
template <int kColumns>
__device__ __forceinline__ int Swizzle(int row) {
  static_assert(kColumns >= 32, "");
  return kColumns >= 64 ? row % 8 : row / 2 % 4;  // of 32 columns, two rows share the banks
}

template <int kColumns>
__device__ __forceinline__ uint32_t TileAddress(uint32_t tile, int row, int column) {
  return tile + row * (kColumns * 2) + (((column / 8) ^ Swizzle<kColumns>(row)) * 16) +
         column % 8 * 2;
}

// The values with which a lane of a warp reads 16 x 16 parts of a tile. Parts begin at multiples of
// 8 rows and of 16 columns.
template <int kColumns, bool kRowsFirst>
class Reader {
 public:
  // Row `row` and column `column` of the tile become 0. All columns read must be less than a power
  // of two that divides `column`. The four 8x8 matrices come rows first (upper left, lower left,
  // upper right, lower right), or columns first.
  __device__ __forceinline__ Reader(uint32_t tile, int row, int column = 0) {
    const int lane = threadIdx.x % 32;
    const int lane_row = kRowsFirst ? lane % 16 : lane % 8 + lane / 16 * 8;
    const int lane_piece = kRowsFirst ? lane / 16 : lane / 8 % 2;
    base_ = tile + (row + lane_row) * (kColumns * 2);
    exclusive_or_ = ((lane_piece ^ Swizzle<kColumns>(lane % 8)) * 16) ^ (column * 2);
    // Computes it anew in a loop, because the many addresses would not fit the registers.
    asm volatile("" : "+r"(exclusive_or_));
  }

 protected:
  __device__ __forceinline__ uint32_t Address(int row, int column) const {
    return base_ + row * (kColumns * 2) + ((column * 2) ^ exclusive_or_);
  }

 private:
  uint32_t base_, exclusive_or_;
};

// Operands of d[M, N] += a[M, K] b[K, N]. In memory, A is [m, k], AT is [k, m], B is [n, k] and BT
// is [k, n]. Load returns the fragments of 16 x 16 elements: one operand of a, or two operands of b
// with eight columns each.
template <int kColumns>
struct A : Reader<kColumns, true> {
  using Reader<kColumns, true>::Reader;
  __device__ __forceinline__ void Load(int m, int k, uint32_t (&d)[4]) const {
    LoadMatrices(this->Address(m, k), d);
  }
};
template <int kColumns>
struct AT : Reader<kColumns, false> {
  using Reader<kColumns, false>::Reader;
  __device__ __forceinline__ void Load(int m, int k, uint32_t (&d)[4]) const {
    LoadMatricesTransposed(this->Address(k, m), d);
  }
};
template <int kColumns>
struct B : Reader<kColumns, false> {
  using Reader<kColumns, false>::Reader;
  __device__ __forceinline__ void Load(int n, int k, uint32_t (&d)[4]) const {
    LoadMatrices(this->Address(n, k), d);
  }
};
template <int kColumns>
struct BT : Reader<kColumns, true> {
  using Reader<kColumns, true>::Reader;
  __device__ __forceinline__ void Load(int n, int k, uint32_t (&d)[4]) const {
    LoadMatricesTransposed(this->Address(k, n), d);
  }
};

// A warp's [16 kM, 8 kN]: kM row tiles, kN column tiles. A lane has four elements of each tile, in
// rows l / 4 (0, 1) and l / 4 + 8 (2, 3).
template <int kM, int kN>
using Accumulators = float[kM][kN][4];

template <int kM, int kN>
__device__ __forceinline__ void Clear(Accumulators<kM, kN>& d) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) d[m][n][i] = 0;
    }
  }
}

// Computes d += a b over a depth of kK; the warp's part of a and b begins at 0.
template <class Element, int kK, int kM, int kN, class A, class B>
__device__ __forceinline__ void Multiply(const A& a, const B& b, float (&d)[kM][kN][4]) {
#pragma unroll
  for (int k = 0; k < kK; k += 16) {
    uint32_t a_part[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) a.Load(16 * m, k, a_part[m]);
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32_t b_part[4];
      b.Load(8 * n, k, b_part);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        Mma<Element>(a_part[m], b_part[0], b_part[1], d[m][n]);
        Mma<Element>(a_part[m], b_part[2], b_part[3], d[m][n + 1]);
      }
    }
  }
}

// Multiplies like Multiply, with a from the accumulators of another matmul, [16 kM, 8 kP], rounded
// to Element.
template <class Element, int kM, int kN, int kP, class B>
__device__ __forceinline__ void MultiplyAccumulators(const float (&a)[kM][kP][4], const B& b,
                                                     float (&d)[kM][kN][4]) {
  uint32_t a_part[kP / 2][kM][4];
#pragma unroll
  for (int k = 0; k < kP; k += 2) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      a_part[k / 2][m][0] = Pack<Element>(a[m][k][0], a[m][k][1]);
      a_part[k / 2][m][1] = Pack<Element>(a[m][k][2], a[m][k][3]);
      a_part[k / 2][m][2] = Pack<Element>(a[m][k + 1][0], a[m][k + 1][1]);
      a_part[k / 2][m][3] = Pack<Element>(a[m][k + 1][2], a[m][k + 1][3]);
    }
  }
#pragma unroll
  for (int k = 0; k < kP / 2; ++k) {
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32_t b_part[4];
      b.Load(8 * n, 16 * k, b_part);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        Mma<Element>(a_part[k][m], b_part[0], b_part[1], d[m][n]);
        Mma<Element>(a_part[k][m], b_part[2], b_part[3], d[m][n + 1]);
      }
    }
  }
}

// Stores the warp's [16 kM, 8 kN] part of a tile as Element; it begins at (row, column).
template <class Element, int kColumns, int kM, int kN>
__device__ __forceinline__ void StoreToTile(const float (&d)[kM][kN][4], uint32_t tile, int row,
                                            int column) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t address =
            TileAddress<kColumns>(tile, row + 16 * m + 8 * half + lane / 4, column + 8 * n) +
            lane % 4 * 4;
        StoreShared(address, Pack<Element>(d[m][n][2 * half], d[m][n][2 * half + 1]));
      }
    }
  }
}

// Copies tiles of kRows rows of a head to shared memory. A thread copies the same 16-byte piece of
// every kRowsAtOnce-th row.
template <int kRows, int kColumns, int kThreads>
class TileLoader {
 public:
  // Loads the rows from `first` on.
  __device__ __forceinline__ TileLoader(const AttentionOperand& operand, int64_t b, int64_t h,
                                        int first)
      : source_(Head<uint16_t>(operand, b, h).row(first + Row()) + Column()) {}

  // Begins the copy of a tile, with zeros from row `rows` and column head_dim on.
  __device__ __forceinline__ void Load(int64_t stride, int rows, int head_dim,
                                       uint32_t tile) const {
    const uint32_t target = TileAddress<kColumns>(tile, Row(), Column());
    const int rows_left = Column() < head_dim ? rows - Row() : 0;
    const uint16_t* source = source_;
#pragma unroll
    for (int i = 0; i < kRows; i += kRowsAtOnce) {
      const uint32_t to = kRowsAtOnce % 8 == 0 ? target + i * (kColumns * 2)
                                               : TileAddress<kColumns>(tile, Row() + i, Column());
      CopyAsync16(to, source, i < rows_left);
      source += kRowsAtOnce * stride;
    }
  }

  // Moves on to the next tile.
  __device__ __forceinline__ void Advance(int64_t stride) { source_ += kRows * stride; }

 private:
  static constexpr int kPieces = kColumns / 8;
  static constexpr int kRowsAtOnce = kThreads / kPieces;
  static_assert(kRows % kRowsAtOnce == 0, "rows do not divide");
  __device__ __forceinline__ static int Row() { return threadIdx.x / kPieces; }
  __device__ __forceinline__ static int Column() { return threadIdx.x % kPieces * 8; }

  const uint16_t* source_;
};

// The keys that all queries [first, first + rows) see. A query from q_len on sees the keys of the
// last query.
struct KeySpan {
  __device__ __forceinline__ KeySpan(const Visible& visible, int first, int rows, int q_len)
      : begin(visible.begin(min(first + rows, q_len) - 1)),
        end(visible.end(min(first, q_len - 1))) {}
  __device__ __forceinline__ bool Contains(int key, int keys) const {
    return begin <= key && key + keys <= end;
  }
  int begin, end;
};

// Sets S = -inf where the query does not see the key; the warp's part begins at (first, key).
template <int kM, int kN>
__device__ __forceinline__ void MaskScores(const Visible& visible, int first, int q_len, int key,
                                           float (&s)[kM][kN][4]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = min(first + 16 * m + 8 * half + lane / 4, q_len - 1);
      const int begin = visible.begin(i) - key, end = visible.end(i) - key;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int j = 8 * n + lane % 4 * 2 + c;
          if (j < begin || j >= end) s[m][n][2 * half + c] = -INFINITY;
        }
      }
    }
  }
}

// The queries of a lane in a warp's part of S, and the keys that each sees, for changed scores. A
// query from q_len on sees nothing.
template <int kM>
struct ChangedRows {
  __device__ __forceinline__ ChangedRows(const ChangedScores<float>& changed,
                                         const Visible& visible, int first, int q_len) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = first + 16 * m + 8 * half + static_cast<int>(threadIdx.x) % 32 / 4;
        const bool valid = i < q_len;
        position[m][half] = valid ? changed.QueryPosition(i) : 0;
        begin[m][half] = valid ? visible.begin(i) : 0;
        end[m][half] = valid ? visible.end(i) : 0;
      }
    }
  }
  // Calls use(m, n, e, visible, kept, change) for every element e of S from key `key` on. Element e
  // is in columns 8 n + ...; change(score, &slope) is ChangedScores::Score.
  template <int kN, class Use>
  __device__ __forceinline__ void ForEach(const ChangedScores<float>& changed, int key, int k_len,
                                          Use&& use) const {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      const int j = key + 8 * n + static_cast<int>(threadIdx.x) % 4 * 2;
      int32_t keys[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) keys[c] = j + c < k_len ? changed.KeyPosition(j + c) : 0;
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int32_t query = position[m][half];
          bool kept[2] = {true, true};
          if (changed.drops()) changed.KeepsPair(query, keys, kept);
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const bool visible = begin[m][half] <= j + c && j + c < end[m][half];
            use(m, n, 2 * half + c, visible, kept[c], [&](float score, float* slope) {
              return changed.ScoreAt(query, keys[c], score, slope);
            });
          }
        }
      }
    }
  }

  int32_t position[kM][2];
  int begin[kM][2], end[kM][2];
};

// Reduces over the four lanes of a row.
__device__ __forceinline__ float RowMax(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
__device__ __forceinline__ float RowSum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// Columns column .. column + kColumns - 1 of two rows of a head, row and row + 8, as a lane sees
// them.
struct RowPair {
  int64_t b, h, row;
  const bool (&valid)[2];
  int head_dim;
  int column = 0;

  template <typename T>
  __device__ __forceinline__ T* Upper(const AttentionOperand& operand) const {
    return Head<T>(operand, b, h).row(row) + column;
  }
  __device__ __forceinline__ int columns() const { return head_dim - column; }
};

// Computes d = d * factor + keep * (the values in fp32 memory).
template <int kColumns>
__device__ __forceinline__ void MergeRows(const AttentionOperand& operand, const RowPair& rows,
                                          const float (&factor)[2], const float (&keep)[2],
                                          float (&d)[kColumns / 8][4]) {
  const float* upper = rows.Upper<const float>(operand);
  float there[kColumns / 2];
  cuda::LoadRowFloat<0, kColumns>(upper, rows.valid[0], rows.columns(), there);
  cuda::LoadRowFloat<1, kColumns>(upper + 8 * operand.seq_stride, rows.valid[1], rows.columns(),
                                  there);
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    float& x = d[i / 4][i % 4];
    x = fmaf(there[i], keep[i / 2 % 2], x * factor[i / 2 % 2]);
  }
}

// Stores d * factor.
template <class Element, int kColumns>
__device__ __forceinline__ void StoreRows(bool is_float, const float (&d)[kColumns / 8][4],
                                          const float (&factor)[2], const AttentionOperand& operand,
                                          const RowPair& rows) {
  float flat[kColumns / 2];
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) flat[i] = d[i / 4][i % 4];
  cuda::StoreRows<Element, kColumns>(is_float, flat, factor, operand,
                                     cuda::Offset(operand, rows.b, rows.h, rows.row) + rows.column,
                                     rows.valid, rows.columns());
}

}  // namespace sm80
}  // namespace burst
