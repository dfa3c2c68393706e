#include "burst/kernels/gpu/common/probability.cuh"
#include "burst/kernels/gpu/common/query_gap.cuh"
#include "burst/kernels/gpu/simt/flash_attention_simt.h"
#include "burst/kernels/gpu/simt/tile.cuh"

namespace burst {
namespace simt {
namespace {

using cuda::Probability;

// A block owns a tile of queries and reads the keys and values tile by tile:
//
//   S = Q K^T;  dP = dO V^T;  P = exp(scale S - lse);  dS = P * (dP - delta);  dQ += scale dS K
template <typename T, class Tile, bool kChanged>
__global__ __launch_bounds__(kThreads, Tile::kBackwardBlocks) void QueryGradientKernel(
    FlashBackwardParams params, int64_t tiles) {
  extern __shared__ __align__(16) unsigned char shared[];
  T* const q_tile = reinterpret_cast<T*>(shared);
  T* const dout_tile = q_tile + Tile::kSize;
  T* const k_tile = dout_tile + Tile::kSize;
  T* const v_tile = k_tile + Tile::kSize;
  T* const ds_tile = v_tile + Tile::kSize;
  constexpr int kN = Tile::kPerThread;

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

  int begin[kN], end[kN];
  T lse[kN], delta[kN];
  const int64_t statistics = (b * shape.num_heads + h) * shape.q_len + first;
#pragma unroll
  for (int r = 0; r < kN; ++r) {
    const int row = y + kSide * r;
    const bool valid = row < rows;
    begin[r] = valid ? visible.begin(first + row) : 0;
    end[r] = valid ? visible.end(first + row) : 0;
    lse[r] = valid ? static_cast<const T*>(params.lse)[statistics + row] : T{0};
    delta[r] = valid ? static_cast<const T*>(params.delta)[statistics + row] : T{0};
  }
  LoadTile<Tile>(Head<T>(params.q, b, h), first, rows, head_dim, q_tile);
  LoadTile<Tile>(Head<T>(params.dout, b, h), first, rows, value_dim, dout_tile);

  typename Tile::Rows dq = {};
  const int last_key = visible.end(first + rows - 1);
  for (int key = visible.begin(first); key < last_key; key += Tile::kRows) {
    const bool own_finite =
        LoadTile<Tile>(Head<T>(params.k, b, kv_head), key, shape.k_len - key, head_dim, k_tile);
    LoadTile<Tile>(Head<T>(params.v, b, kv_head), key, shape.k_len - key, value_dim, v_tile);
    const bool finite = __syncthreads_and(own_finite);
    typename Tile::Scores s, dp;
    Matmul<Tile>(q_tile, k_tile, s);
    Matmul<Tile>(dout_tile, v_tile, dp);
#pragma unroll
    for (int r = 0; r < kN; ++r) {
#pragma unroll
      for (int c = 0; c < kN; ++c) {
        const int j = key + x + kSide * c;
        s[r][c] =
            Probability<T, kChanged>(s[r][c], dp[r][c], scale, lse[r], delta[r],
                                     begin[r] <= j && j < end[r], changed, first + y + kSide * r, j)
                .ds;
      }
    }
    StoreScores<Tile>(s, ds_tile);
    __syncthreads();
    if (finite) {
      AddMatmul<Tile>(ds_tile, k_tile, dq);
    } else {
      AddSeen<Tile>(
          ds_tile, k_tile, [&](int r, int j) { return begin[r] <= key + j && key + j < end[r]; },
          dq);
    }
    __syncthreads();
  }
  const Head<T> target(params.dq.Of(h), b, h);
  const T keep = params.dq.Begins(h) ? T{0} : T{1};
#pragma unroll
  for (int r = 0; r < kN; ++r) {
    if (y + kSide * r >= rows) continue;
    StoreRow<Tile>(dq[r], scale, keep, head_dim, target.row(first + y + kSide * r));
  }
}

// Finds the queries that see some of the keys [key, key_end): `near` without `gap`, which is whole
// tiles. A whole block calls it, with results in shared memory.
template <class Tile>
__device__ __forceinline__ void FindQueries(const FlashAttentionShape& shape, int64_t b, int key,
                                            int key_end, cuda::Run* near, cuda::Run* gap) {
  const cuda::RowRanges ranges(shape.visible, b, shape.q_len);
  const cuda::Run found = cuda::QueriesNear(ranges, key, key_end);
  const cuda::Run tiles = cuda::LongestGap<Tile::kRows>(ranges, found, /*origin=*/found.begin);
  if (threadIdx.x == 0) {
    *near = found;
    *gap = {found.begin + tiles.begin * Tile::kRows, found.begin + tiles.end * Tile::kRows};
  }
  __syncthreads();
}

// The queries of a head that are near the keys, and what the gradients of their scores need.
template <typename T>
struct HeadQueries {
  const cuda::Run& near;
  const Visible& visible;
  const ChangedScores<T>& changed;
  const T *lse, *delta;  // [q_len]
  T scale;
};

// Replaces S^T by P^T, and dP^T by dS^T, [keys, queries]: keys from `key` on, queries from `query`.
template <class Tile, bool kChanged, typename T>
__device__ __forceinline__ void ScoreGradients(const HeadQueries<T>& queries, int key, int query,
                                               T (&s)[Tile::kPerThread][Tile::kPerThread],
                                               T (&dp)[Tile::kPerThread][Tile::kPerThread]) {
  constexpr int kN = Tile::kPerThread;
  const int y = threadIdx.x / kSide, x = threadIdx.x % kSide;
#pragma unroll
  for (int c = 0; c < kN; ++c) {
    const int i = query + x + kSide * c;
    const bool valid = i < queries.near.end;
    const int begin = valid ? queries.visible.begin(i) : 0;
    const int end = valid ? queries.visible.end(i) : 0;
    const T lse = valid ? queries.lse[i] : T{0}, delta = valid ? queries.delta[i] : T{0};
#pragma unroll
    for (int r = 0; r < kN; ++r) {
      const int j = key + y + kSide * r;
      const Probability<T, kChanged> probability(s[r][c], dp[r][c], queries.scale, lse, delta,
                                                 begin <= j && j < end, queries.changed, i, j);
      s[r][c] = probability.p;
      dp[r][c] = probability.ds;
    }
  }
}

// A block owns a tile of keys and values. It reads the queries that see it, of every query head of
// the group:
//
//   dV += P^T dO;  dK += scale dS^T Q
template <typename T, class Tile, bool kChanged>
__global__ __launch_bounds__(kThreads, Tile::kBackwardBlocks) void KeyGradientKernel(
    FlashBackwardParams params, int64_t tiles) {
  extern __shared__ __align__(16) unsigned char shared[];
  T* const k_tile = reinterpret_cast<T*>(shared);
  T* const v_tile = k_tile + Tile::kSize;
  T* const q_tile = v_tile + Tile::kSize;
  T* const dout_tile = q_tile + Tile::kSize;
  T* const score_tile = dout_tile + Tile::kSize;  // P^T, then dS^T
  constexpr int kN = Tile::kPerThread;

  const FlashAttentionShape& shape = params.shape;
  const TileIndex index(tiles, shape.num_kv_heads, Tile::kRows);
  const int64_t b = index.b, kv_head = index.h;
  const int first = static_cast<int>(index.first);
  const int rows = static_cast<int>(min(static_cast<int64_t>(Tile::kRows), shape.k_len - first));
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  const int head_dim = static_cast<int>(shape.head_dim);
  const int value_dim = static_cast<int>(shape.value_dim);
  const T scale = static_cast<T>(shape.softmax_scale);
  const int y = threadIdx.x / kSide;
  const Visible visible(shape, b);

  LoadTile<Tile>(Head<T>(params.k, b, kv_head), first, rows, head_dim, k_tile);
  LoadTile<Tile>(Head<T>(params.v, b, kv_head), first, rows, value_dim, v_tile);
  typename Tile::Rows dk = {}, dv = {};
  __shared__ cuda::Run near, gap;  // here they take no registers
  FindQueries<Tile>(shape, b, first, first + rows, &near, &gap);
  for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
    const ChangedScores<T> changed(shape, b, h);
    const T* lse = static_cast<const T*>(params.lse) + (b * shape.num_heads + h) * shape.q_len;
    const T* delta = static_cast<const T*>(params.delta) + (b * shape.num_heads + h) * shape.q_len;
    const HeadQueries<T> head = {near, visible, changed, lse, delta, scale};
    for (int query = near.begin; query < near.end; query += Tile::kRows) {
      if (query == gap.begin) query = gap.end;
      if (query >= near.end) break;
      const int64_t queries = near.end - query;
      const bool q_finite =
          LoadTile<Tile>(Head<T>(params.q, b, h), query, queries, head_dim, q_tile);
      const bool dout_finite =
          LoadTile<Tile>(Head<T>(params.dout, b, h), query, queries, value_dim, dout_tile);
      const bool finite = __syncthreads_and(q_finite && dout_finite);
      const auto add = [&](const T* b_tile, typename Tile::Rows& sums) {
        if (finite) return AddMatmul<Tile>(score_tile, b_tile, sums);
        AddSeen<Tile>(
            score_tile, b_tile,
            [&](int r, int i) {
              const int j = first + y + kSide * r;
              return query + i < near.end && visible.begin(query + i) <= j &&
                     j < visible.end(query + i);
            },
            sums);
      };
      typename Tile::Scores s, dp;  // [keys, queries]
      Matmul<Tile>(k_tile, q_tile, s);
      Matmul<Tile>(v_tile, dout_tile, dp);
      ScoreGradients<Tile, kChanged>(head, first, query, s, dp);
      StoreScores<Tile>(s, score_tile);
      __syncthreads();
      add(dout_tile, dv);
      __syncthreads();
      StoreScores<Tile>(dp, score_tile);
      __syncthreads();
      add(q_tile, dk);
      __syncthreads();
    }
  }
  const Head<T> dk_target(params.dk.Of(kv_head), b, kv_head);
  const Head<T> dv_target(params.dv.Of(kv_head), b, kv_head);
  const T keep = params.dk.Begins(kv_head) ? T{0} : T{1};
#pragma unroll
  for (int r = 0; r < kN; ++r) {
    if (y + kSide * r >= rows) continue;
    StoreRow<Tile>(dk[r], scale, keep, head_dim, dk_target.row(first + y + kSide * r));
    StoreRow<Tile>(dv[r], T{1}, keep, value_dim, dv_target.row(first + y + kSide * r));
  }
}

}  // namespace

bool Fits(DType dtype, const HeadWidths& widths) {
  return dtype != DType::kFloat64 || PaddedWidth(widths) <= 128 ||
         kWidestBytes <= cuda::SharedMemoryPerBlock();
}

void Backward(const FlashBackwardParams& params) {
  const FlashAttentionShape& shape = params.shape;
  DispatchTile(shape, [&](auto zero, auto tile) {
    using T = decltype(zero);
    using Tile = decltype(tile);
    const bool changed = shape.scores.any();
    LaunchTiles(changed ? QueryGradientKernel<T, Tile, true> : QueryGradientKernel<T, Tile, false>,
                params, Tile::kRows, shape.q_len, shape.num_heads, Tile::kBackwardBytes);
    LaunchTiles(changed ? KeyGradientKernel<T, Tile, true> : KeyGradientKernel<T, Tile, false>,
                params, Tile::kRows, shape.k_len, shape.num_kv_heads, Tile::kBackwardBytes);
  });
}

}  // namespace simt
}  // namespace burst
