// The softmax of the forward: rows of S in a warp's accumulators, masked, to P, block by block
// (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention-2, arXiv 2307.08691).
#pragma once

#include "burst/kernels/gpu/sm90/tile.cuh"

namespace burst {
namespace sm90 {

// The softmax of this thread's two rows, l / 4 and l / 4 + 8 of its warp, as blocks come in.
struct OnlineSoftmax {
  float max[2];         // of S, unscaled
  float sum[2];         // this thread's columns only
  float correction[2];  // what O so far is to be multiplied by
  bool rescale;         // uniform in the warp

  __device__ __forceinline__ void Reset() {
    max[0] = max[1] = -INFINITY;
    sum[0] = sum[1] = 0;
  }

  // S -> P = exp2(scale_log2 (S - max)). O is spared the multiplication when no row of the warp has
  // a new maximum. (A maximum that lags behind by a bounded factor would spare more, but then the
  // largest P is no longer exactly 1 and rounding it to bf16 doubles the error of peaked rows.)
  //
  // kAhead: for a wait for O that follows, beside which the exponentials are to run. ptxas moves
  // them below the wait unless a branch in between depends on them. So the one on `rescale` does,
  // by a sum of P that is never that large; if it were, O would be multiplied by 1.
  template <bool kAhead, int kCount>
  __device__ __forceinline__ void Apply(float (&s)[kCount], float scale_log2) {
    float partial[2][4];  // short chains, so that their latencies overlap
#pragma unroll
    for (int i = 0; i < 8; ++i) partial[i / 4][i % 4] = max[i / 4];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float& top = partial[i / 2 % 2][i / 4 % 2 * 2 + i % 2];
      top = fmaxf(top, s[i]);
    }
    float block_max[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      block_max[r] =
          fmaxf(fmaxf(partial[r][0], partial[r][1]), fmaxf(partial[r][2], partial[r][3]));
    }
#pragma unroll
    for (int distance = 1; distance <= 2; distance *= 2) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        block_max[r] = fmaxf(block_max[r], __shfl_xor_sync(0xffffffff, block_max[r], distance));
      }
    }
    const bool new_max = block_max[0] > max[0] || block_max[1] > max[1];
    if (!kAhead) UpdateMax(new_max, block_max, scale_log2);
    float origin[2], block_sum[2][2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float top = kAhead ? block_max[r] : max[r];
      origin[r] = top == -INFINITY ? 0.f : top * scale_log2;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int r = i / 2 % 2;
      s[i] = Exp2(fmaf(s[i], scale_log2, -origin[r]));
      block_sum[r][i % 2] += s[i];
    }
    if (kAhead) {
      const float total = block_sum[0][0] + block_sum[0][1] + block_sum[1][0] + block_sum[1][1];
      UpdateMax(new_max || total > 2 * kCount, block_max, scale_log2);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] += block_sum[r][0] + block_sum[r][1];
  }

  __device__ __forceinline__ void UpdateMax(bool new_max, const float (&block_max)[2],
                                            float scale_log2) {
    rescale = __any_sync(0xffffffff, new_max);
    if (!rescale) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // -inf - -inf: nothing seen so far, O = 0.
      correction[r] = max[r] == -INFINITY ? 0.f : Exp2((max[r] - block_max[r]) * scale_log2);
      sum[r] *= correction[r];
      max[r] = block_max[r];
    }
  }

  template <int kCount>
  __device__ __forceinline__ void Rescale(float (&o)[kCount]) const {
    if (!rescale) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) o[i] *= correction[(i / 2) % 2];
  }
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
