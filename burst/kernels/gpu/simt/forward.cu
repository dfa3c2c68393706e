#include <cmath>

#include "burst/kernels/gpu/simt/flash_attention_simt.h"
#include "burst/kernels/gpu/simt/tile.cuh"
#include "burst/kernels/merge.h"

namespace burst {
namespace simt {
namespace {

// A block owns a tile of queries and reads the keys and values tile by tile:
//
//   S = scale Q K^T;  m' = max(m, rowmax S);  P = exp(S - m')
//   l = l exp(m - m') + rowsum P;  O = O exp(m - m') + P V
//
// kChanged: scores and weights are changed, or the largest score is asked for (scores.h).
template <typename T, class Tile, bool kChanged>
__global__ __launch_bounds__(kThreads,
                             Tile::kForwardBlocks) void ForwardKernel(FlashForwardParams params,
                                                                      int64_t tiles) {
  extern __shared__ __align__(16) unsigned char shared[];
  T* const q_tile = reinterpret_cast<T*>(shared);
  T* const kv_tile = q_tile + Tile::kSize;  // K, then V
  T* const p_tile = kv_tile + Tile::kSize;
  constexpr int kN = Tile::kPerThread;
  const T kMinusInfinity = -static_cast<T>(INFINITY);

  const FlashAttentionShape& shape = params.shape;
  const TileIndex index(tiles, shape.num_heads, Tile::kRows);
  const int64_t b = index.b, h = index.h, first = index.first;
  const int64_t rows = min(static_cast<int64_t>(Tile::kRows), shape.q_len - first);
  const int64_t kv_head = h / (shape.num_heads / shape.num_kv_heads);
  const int head_dim = static_cast<int>(shape.head_dim);
  const int value_dim = static_cast<int>(shape.value_dim);
  const T scale = static_cast<T>(shape.softmax_scale);
  const int y = threadIdx.x / kSide, x = threadIdx.x % kSide;
  const Visible visible(shape, b);
  const ChangedScores<T> changed(shape, b, h);

  int begin[kN], end[kN];  // the keys that the thread's rows see
  T largest[kN], sum[kN];
  typename Tile::Rows o = {};
#pragma unroll
  for (int r = 0; r < kN; ++r) {
    const bool valid = y + kSide * r < rows;
    begin[r] = valid ? visible.begin(first + y + kSide * r) : 0;
    end[r] = valid ? visible.end(first + y + kSide * r) : 0;
    largest[r] = kMinusInfinity;
    sum[r] = 0;
  }

  LoadTile<Tile>(Head<T>(params.q, b, h), first, rows, head_dim, q_tile);
  const Head<T> k(params.k, b, kv_head), v(params.v, b, kv_head);
  const int last_key = visible.end(first + rows - 1);
  for (int key = visible.begin(first); key < last_key; key += Tile::kRows) {
    LoadTile<Tile>(k, key, shape.k_len - key, head_dim, kv_tile);
    __syncthreads();
    typename Tile::Scores s;
    Matmul<Tile>(q_tile, kv_tile, s);
#pragma unroll
    for (int r = 0; r < kN; ++r) {
      T row_max = largest[r];
#pragma unroll
      for (int c = 0; c < kN; ++c) {
        const int j = key + x + kSide * c;
        s[r][c] = begin[r] <= j && j < end[r] ? scale * s[r][c] : kMinusInfinity;
        if constexpr (kChanged) {
          T slope;
          if (begin[r] <= j && j < end[r]) {
            s[r][c] = changed.Score(first + y + kSide * r, j, s[r][c], &slope);
          }
        }
        row_max = max(row_max, s[r][c]);
      }
      row_max = RowMax(row_max);
      const T shift = row_max == kMinusInfinity ? T{0} : row_max;  // nothing seen yet
      const T rescale = exp(largest[r] - shift);
      T row_sum = 0;
#pragma unroll
      for (int c = 0; c < kN; ++c) {
        s[r][c] = exp(s[r][c] - shift);
        row_sum += s[r][c];
        if constexpr (kChanged) {
          if (s[r][c] != 0) s[r][c] *= changed.Weight(first + y + kSide * r, key + x + kSide * c);
        }
      }
      sum[r] = sum[r] * rescale + RowSum(row_sum);
      largest[r] = row_max;
#pragma unroll
      for (int c = 0; c < Tile::kColumns; ++c) o[r][c] *= rescale;
    }
    StoreScores<Tile>(s, p_tile);
    __syncthreads();
    const bool finite = LoadTile<Tile>(v, key, shape.k_len - key, value_dim, kv_tile);
    if (__syncthreads_and(finite)) {
      AddMatmul<Tile>(p_tile, kv_tile, o);
    } else {
      AddSeen<Tile>(
          p_tile, kv_tile, [&](int r, int j) { return begin[r] <= key + j && key + j < end[r]; },
          o);
    }
    __syncthreads();
  }

  // Computes O = O / l and lse = m + log l, merged with earlier results.
  const Head<T> out(params.out, b, h);
  T* const lse = static_cast<T*>(params.lse) + (b * shape.num_heads + h) * shape.q_len;
  T row_lse[kN], factor[kN], keep[kN];
#pragma unroll
  for (int r = 0; r < kN; ++r) {
    T max = largest[r], total = sum[r], scale = 1;
    if (params.sinks != nullptr) {
      scale = AddSink(static_cast<const T*>(params.sinks)[h], &max, &total);
    }
    row_lse[r] = total == 0 ? kMinusInfinity : max + log(total);
    factor[r] = total == 0 ? T{0} : scale / total;
    keep[r] = 0;
    if (params.merge && y + kSide * r < rows) {
      const MergeWeights<T> weights = Merge(lse[first + y + kSide * r], row_lse[r]);
      row_lse[r] = weights.lse;
      factor[r] *= weights.b;
      keep[r] = weights.a;
    }
  }
  __syncwarp();  // all threads of a row have read lse
#pragma unroll
  for (int r = 0; r < kN; ++r) {
    if (y + kSide * r >= rows) continue;
    const int64_t i = first + y + kSide * r;
    StoreRow<Tile>(o[r], factor[r], keep[r], value_dim, out.row(i));
    if (x == 0) lse[i] = row_lse[r];
    if constexpr (kChanged) {
      if (x == 0 && params.max_logits != nullptr && largest[r] != kMinusInfinity) {
        cuda::RaiseTo(static_cast<float>(largest[r]), params.max_logits + b * shape.num_heads + h);
      }
    }
  }
}

}  // namespace

void Forward(const FlashForwardParams& params) {
  DispatchTile(params.shape, [&](auto zero, auto tile) {
    using T = decltype(zero);
    using Tile = decltype(tile);
    const bool changed = params.shape.scores.any() || params.max_logits != nullptr;
    LaunchTiles(changed ? ForwardKernel<T, Tile, true> : ForwardKernel<T, Tile, false>, params,
                Tile::kRows, params.shape.q_len, params.shape.num_heads, Tile::kForwardBytes);
  });
}

}  // namespace simt
}  // namespace burst
