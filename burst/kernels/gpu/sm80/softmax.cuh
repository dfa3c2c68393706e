// The softmax of the forward, block of keys by block of keys: replaces S in accumulators by P
// (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention-2, arXiv 2307.08691).
#pragma once

#include <cmath>

#include "burst/kernels/gpu/sm80/tile.cuh"

namespace burst {
namespace sm80 {

// The running softmax of the lane's rows: l / 4 + 16 m and 8 below it.
template <int kM>
struct Softmax {
  float max[kM][2], sum[kM][2];  // max of S; sum over this lane's columns

  __device__ __forceinline__ void Reset() {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      max[m][0] = max[m][1] = -INFINITY;
      sum[m][0] = sum[m][1] = 0;
    }
  }
};

// Replaces S by P, and rescales O.
template <int kM, int kN, int kColumns>
__device__ __forceinline__ void Update(float c, float (&s)[kM][kN][4], Softmax<kM>& softmax,
                                       float (&o)[kM][kColumns][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float max = softmax.max[m][half];
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        max = fmaxf(max, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
      }
      max = RowMax(max);
      const float origin = max == -INFINITY ? 0 : max * c;  // no key seen yet: 2^-inf
      const float last = softmax.max[m][half];
      const float rescale = last == -INFINITY ? 0 : Exp2((last - max) * c);  // 1 if unchanged
      float sum = 0;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          s[m][n][i] = Exp2(fmaf(s[m][n][i], c, -origin));
          sum += s[m][n][i];
        }
      }
      softmax.max[m][half] = max;
      softmax.sum[m][half] = fmaf(softmax.sum[m][half], rescale, sum);
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        o[m][n][2 * half] *= rescale;
        o[m][n][2 * half + 1] *= rescale;
      }
    }
  }
}

}  // namespace sm80
}  // namespace burst
