// The softmax of the forward: rows of S in a warp's accumulators, masked, to P, block by block
// (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention-2, arXiv 2307.08691).
#pragma once

#include "burst/kernels/gpu/sm90/tile.cuh"

namespace burst {
namespace sm90 {

// The softmax of this thread's two rows, l / 4 and l / 4 + 8 of its warp, as blocks come in. A
// block takes, in this order, UpdateMax and Exponentiate of both rows, and Rescale of O.
//
// It has no branch: everything between two products is one basic block. So ptxas can run one row's
// exponentials in parallel with the other row's conversions and sums, and with O's multiplications.
// Skipping the multiplications when no maximum has changed costs more than the multiplications. A
// maximum that lags behind by a bounded factor would cost more, too. The largest P would then not
// be exactly 1, which doubles the error of peaked rows when P is rounded to bf16.
struct OnlineSoftmax {
  float max[2];         // of S, unscaled
  float sum[2];         // this thread's columns only
  float correction[2];  // what O so far is to be multiplied by
  float origin[2];      // max scale_log2; 0 where there is no maximum yet

  __device__ __forceinline__ void Reset() {
    max[0] = max[1] = -INFINITY;
    sum[0] = sum[1] = 0;
  }

  // The maximum of row r with a new block S. kMasked: the row may not have seen any key yet, not
  // even of this block.
  template <bool kMasked, int kCount>
  __device__ __forceinline__ void UpdateMax(int r, const float (&s)[kCount], float scale_log2) {
    float partial[2] = {max[r], s[2 * r + 1]};  // short chains, so that their latencies overlap
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      partial[i % 2] = fmaxf(partial[i % 2], s[Index(r, i)]);
    }
    float top = fmaxf(partial[0], partial[1]);
    top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
    top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
    const float finite = kMasked && top == -INFINITY ? 0.f : top;
    correction[r] = Exp2((max[r] - finite) * scale_log2);
    max[r] = top;
    origin[r] = finite * scale_log2;
  }

  // Makes the maximum of row 1 wait for that of row 0, so that ptxas does not interleave the two
  // and row 0's exponentials begin half a row earlier. Changes no value.
  __device__ __forceinline__ void OrderRows() {
    asm volatile(
        "{\n"
        ".reg .f32 lowest;\n"
        "min.f32 lowest, %1, 0fFF800000;\n"
        "max.f32 %0, %0, lowest;\n"
        "}\n"
        : "+f"(max[1])
        : "f"(max[0]));
  }

  // Row r: S -> P = exp2(scale_log2 (S - max)), and its sum.
  template <int kCount>
  __device__ __forceinline__ void Exponentiate(int r, float (&s)[kCount], float scale_log2) {
    float total = sum[r] * correction[r];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      float& x = s[Index(r, i)];
      x = Exp2(fmaf(x, scale_log2, -origin[r]));
      total += x;
    }
    sum[r] = total;
  }

  template <int kCount>
  __device__ __forceinline__ void Rescale(float (&o)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) o[i] *= correction[i / 2 % 2];
  }

  // Returns the place of the i-th of the thread's columns of row r in an accumulator.
  __device__ static constexpr int Index(int r, int i) { return i / 2 * 4 + 2 * r + i % 2; }
};

// S = -inf before begin, or from end on, of each of the thread's rows.
template <bool kBefore, int kCount>
__device__ __forceinline__ void MaskRows(float (&s)[kCount], int first_column,
                                         const int (&limit)[2]) {
  const int column = first_column + threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int distance = limit[i / 2 % 2] - column;
    const int offset = i / 4 * 8 + i % 2;
    if (kBefore ? offset < distance : offset >= distance) s[i] = -INFINITY;
  }
}

}  // namespace sm90
}  // namespace burst
