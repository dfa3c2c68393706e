#include <cmath>

#include "burst/kernels/gpu/simt/flash_attention_simt.h"
#include "burst/kernels/gpu/simt/tile.cuh"
#include "burst/kernels/merge.h"

namespace burst {
namespace simt {
namespace {

// The running softmax of a thread's rows, and the keys [begin, end) that each of them sees. It
// refers to the kernel's arrays: with arrays of its own, one variant spills more registers.
template <typename T, class Tile>
struct Softmax {
  static constexpr int kN = Tile::kPerThread;
  __device__ __forceinline__ bool Sees(int r, int key) const {
    return begin[r] <= key && key < end[r];
  }

  const int (&begin)[kN], (&end)[kN];
  T (&largest)[kN], (&sum)[kN];  // m and l
};

// Replaces Q K^T by P, from key `key` on, and rescales O.
template <class Tile, bool kChanged, typename T>
__device__ __forceinline__ void Update(const ChangedScores<T>& changed, T scale, int64_t first,
                                       int key, const Softmax<T, Tile>& softmax,
                                       T (&s)[Tile::kPerThread][Tile::kPerThread],
                                       T (&o)[Tile::kPerThread][Tile::kColumns]) {
  constexpr int kN = Tile::kPerThread;
  const T kMinusInfinity = -static_cast<T>(INFINITY);
  const int y = threadIdx.x / kSide, x = threadIdx.x % kSide;
#pragma unroll
  for (int r = 0; r < kN; ++r) {
    T row_max = softmax.largest[r];
#pragma unroll
    for (int c = 0; c < kN; ++c) {
      const int j = key + x + kSide * c;
      const bool sees = softmax.Sees(r, j);
      s[r][c] = sees ? scale * s[r][c] : kMinusInfinity;
      if constexpr (kChanged) {
        T slope;
        if (sees) s[r][c] = changed.Score(first + y + kSide * r, j, s[r][c], &slope);
      }
      row_max = max(row_max, s[r][c]);
    }
    row_max = RowMax(row_max);
    const T shift = row_max == kMinusInfinity ? T{0} : row_max;  // nothing seen yet
    const T rescale = exp(softmax.largest[r] - shift);
    T row_sum = 0;
#pragma unroll
    for (int c = 0; c < kN; ++c) {
      s[r][c] = exp(s[r][c] - shift);
      row_sum += s[r][c];
      if constexpr (kChanged) {
        if (s[r][c] != 0) s[r][c] *= changed.Weight(first + y + kSide * r, key + x + kSide * c);
      }
    }
    softmax.sum[r] = softmax.sum[r] * rescale + RowSum(row_sum);
    softmax.largest[r] = row_max;
#pragma unroll
    for (int c = 0; c < Tile::kColumns; ++c) o[r][c] *= rescale;
  }
}

// Computes O = O / l and lse = m + log l, merged with earlier results. rows: the tile's queries.
template <class Tile, bool kChanged, typename T>
__device__ __forceinline__ void Finish(const FlashForwardParams& params, const TileIndex& index,
                                       int64_t rows, const Softmax<T, Tile>& softmax,
                                       const T (&o)[Tile::kPerThread][Tile::kColumns]) {
  constexpr int kN = Tile::kPerThread;
  const FlashAttentionShape& shape = params.shape;
  const int64_t b = index.b, h = index.h, first = index.first;
  const int value_dim = static_cast<int>(shape.value_dim);
  const int y = threadIdx.x / kSide, x = threadIdx.x % kSide;
  const T kMinusInfinity = -static_cast<T>(INFINITY);
  const Head<T> out(params.out, b, h);
  T* const lse = static_cast<T*>(params.lse) + (b * shape.num_heads + h) * shape.q_len;
  T row_lse[kN], factor[kN], keep[kN];
#pragma unroll
  for (int r = 0; r < kN; ++r) {
    T max = softmax.largest[r], total = softmax.sum[r], scale = 1;
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
      if (x == 0 && params.max_logits != nullptr && softmax.largest[r] != kMinusInfinity) {
        cuda::RaiseTo(static_cast<float>(softmax.largest[r]),
                      params.max_logits + b * shape.num_heads + h);
      }
    }
  }
}

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
  const int y = threadIdx.x / kSide;
  const Visible visible(shape, b);
  const ChangedScores<T> changed(shape, b, h);

  int begin[kN], end[kN];  // the keys that the thread's rows see
  T largest[kN], sum[kN];
  const Softmax<T, Tile> softmax = {begin, end, largest, sum};
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
    Update<Tile, kChanged>(changed, scale, first, key, softmax, s, o);
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
  Finish<Tile, kChanged>(params, index, rows, softmax, o);
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
