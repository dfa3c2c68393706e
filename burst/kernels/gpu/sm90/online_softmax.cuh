// Computes the softmax of the forward, block by block: rows of S in a warp's accumulators, masked,
// become P (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention-2, arXiv 2307.08691).
#pragma once

#include "burst/kernels/gpu/sm90/tile.cuh"

namespace burst {
namespace sm90 {

// The softmax of this thread's two rows, l / 4 and l / 4 + 8 of its warp. A block takes, in this
// order, UpdateMax and Exponentiate of both rows, and Rescale of O.
//
// It has no branch: everything between two products is one basic block. So ptxas can run one row's
// exponentials in parallel with the other row's conversions and sums, and with O's multiplications.
// Skipping these when no maximum has changed costs more than it saves. A maximum that lags behind
// by a bounded factor would cost more, too: the largest P would not be 1, which doubles the error
// of peaked rows in bf16.
struct OnlineSoftmax {
  float max[2];         // maximum of S, unscaled
  float sum[2];         // sum of P over this thread's columns
  float correction[2];  // factor of O so far
  float origin[2];      // max scale_log2; 0 where there is no maximum yet

  __device__ __forceinline__ void Reset() {
    max[0] = max[1] = -INFINITY;
    sum[0] = sum[1] = 0;
  }

  // Updates the maximum of row r with a new block of S. kMasked: the row may not have seen any key
  // yet, in this block or before.
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

  // Makes the maximum of row 1 wait for the maximum of row 0. So ptxas does not interleave the two,
  // and row 0's exponentials begin half a row earlier. It changes no value.
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

  // Replaces S of row r by P = exp2(scale_log2 (S - max)), and adds P to the sum.
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

// Sets S = -inf before begin and from end on, for each of the thread's rows.
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
