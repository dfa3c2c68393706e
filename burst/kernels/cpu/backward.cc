// Backward: a chunk of queries stays in cache and collects its dQ, the keys are read tile by tile,
// and each tile of keys collects its dK and dV over the chunk.

#include <algorithm>
#include <limits>

#include "burst/base/check.h"
#include "burst/base/parallel.h"
#include "burst/kernels/cpu/flash_attention_cpu.h"
#include "burst/kernels/cpu/gemm.h"
#include "burst/kernels/cpu/tile.h"
#include "burst/kernels/cpu/vector.h"

namespace burst {
namespace cpu {
namespace {

constexpr int64_t kBlockM = 128;    // queries of a tile of scores
constexpr int64_t kTileKeys = 128;  // keys of a tile of scores
constexpr int64_t kChunk = 512;     // queries that one loop over the keys serves

template <typename T>
constexpr T kMinusInfinity = -std::numeric_limits<T>::infinity();

// One row of a tile of scores (to base 2) and its dP, both [columns], whole vectors; the query sees
// [first, last). lse is to base 2. s becomes P and dp becomes dS:
//
//   P = 2^(S - lse);  dS = P * (dP - delta)
template <typename T>
void SoftmaxBackwardRow(int64_t columns, int64_t first, int64_t last, T lse, T delta, T* s, T* dp) {
  if (lse == kMinusInfinity<T>) {  // the query saw nothing
    lse = 0;
    last = first;
  }
  std::fill(s, s + first, kMinusInfinity<T>);
  std::fill(s + last, s + columns, kMinusInfinity<T>);
  const Vec<T> row_lse = Broadcast(lse), row_delta = Broadcast(delta);
  for (int64_t j = 0; j < columns; j += kLanes<T>) {
    const Vec<T> p = Exp2<T>(Load(s + j) - row_lse);
    Store(s + j, p);
    Store(dp + j, p * (Load(dp + j) - row_delta));
  }
}

template <typename T>
class BackwardTask {
 public:
  BackwardTask(const FlashBackwardParams& params, int64_t tile_keys)
      : params_(params),
        shape_(params.shape),
        d_(shape_.head_dim),
        padded_d_(RoundUpToLanes<T>(d_)),
        stride_(TileStride<T>(d_)),
        tile_keys_(TileKeys(shape_, tile_keys, kTileKeys)),
        score_stride_(TileStride<T>(tile_keys_)) {}

  int64_t stride() const { return stride_; }

  // Query head h, the queries of a chunk, and every step-th tile of keys, beginning with number
  // `first`. Adds to dK and dV; dq [kChunk, head_dim] is assigned, its rows stride() apart.
  void RunChunk(int64_t b, int64_t h, Range chunk, int64_t first, int64_t step, T* dq) const {
    const int64_t rows = chunk.end - chunk.begin;
    ScratchSpace& scratch = ThreadScratch();
    Tiles tiles;
    tiles.q = scratch.Get<T>(0, kChunk * stride_);
    tiles.dout = scratch.Get<T>(1, kChunk * stride_);
    tiles.k = scratch.Get<T>(2, tile_keys_ * stride_);
    tiles.k_transposed = scratch.Get<T>(3, d_ * score_stride_);
    tiles.v_transposed = scratch.Get<T>(4, d_ * score_stride_);
    tiles.dk = scratch.Get<T>(5, tile_keys_ * stride_);
    tiles.dv = scratch.Get<T>(6, tile_keys_ * stride_);
    tiles.s = scratch.Get<T>(7, kBlockM * score_stride_);
    tiles.dp = scratch.Get<T>(8, kBlockM * score_stride_);
    tiles.dq = dq;
    CopyTile(Head<T>(params_.q, b, h), chunk.begin, rows, d_, T{1}, tiles.q, stride_);
    CopyTile(Head<T>(params_.dout, b, h), chunk.begin, rows, d_, T{1}, tiles.dout, stride_);
    std::fill_n(dq, rows * stride_, T{0});

    const Mask mask(shape_, b);
    const Range all = mask.Keys(chunk, {0, shape_.k_len});
    const int64_t begin = all.begin / tile_keys_ + first;
    for (int64_t j = begin * tile_keys_; j < all.end; j += step * tile_keys_) {
      RunKeys(mask, b, h, chunk, {j, std::min(j + tile_keys_, shape_.k_len)}, tiles);
    }
  }

 private:
  struct Tiles {
    T *q, *dout, *dq;                // [kChunk, head_dim]
    T* k;                            // [tile_keys, head_dim], scaled by softmax_scale
    T *k_transposed, *v_transposed;  // [head_dim, tile_keys], K scaled for scores to base 2
    T *dk, *dv;                      // [tile_keys, head_dim]
    T *s, *dp;                       // [kBlockM, tile_keys]
  };

  // One tile of keys and the queries of the chunk.
  void RunKeys(const Mask& mask, int64_t b, int64_t h, Range chunk, Range keys,
               const Tiles& tiles) const {
    const Range queries = mask.Queries(chunk, keys);
    if (queries.begin == queries.end) return;
    const int64_t num_keys = keys.end - keys.begin;
    const int64_t kv_head = h / (shape_.num_heads / shape_.num_kv_heads);
    const Head<T> k(params_.k, b, kv_head), v(params_.v, b, kv_head);
    const T scale = static_cast<T>(shape_.softmax_scale);
    CopyTile(k, keys.begin, num_keys, d_, scale, tiles.k, stride_);
    CopyTileTransposed(k, keys.begin, num_keys, d_, static_cast<T>(shape_.softmax_scale * kLog2E),
                       tiles.k_transposed, score_stride_);
    CopyTileTransposed(v, keys.begin, num_keys, d_, T{1}, tiles.v_transposed, score_stride_);
    std::fill_n(tiles.dk, num_keys * stride_, T{0});
    std::fill_n(tiles.dv, num_keys * stride_, T{0});
    for (int64_t i = queries.begin; i < queries.end; i += kBlockM) {
      Step(mask, b, h, chunk.begin, {i, std::min(i + kBlockM, queries.end)}, keys, tiles);
    }
    AddTile(tiles.dk, stride_, num_keys, d_, scale, Head<T>(params_.dk, b, kv_head), keys.begin);
    AddTile(tiles.dv, stride_, num_keys, d_, T{1}, Head<T>(params_.dv, b, kv_head), keys.begin);
  }

  // S = Q K^T, dP = dO V^T, dV += P^T dO, dK += dS^T Q, dQ += dS K for one tile of scores; the
  // chunk begins at query i0.
  void Step(const Mask& mask, int64_t b, int64_t h, int64_t i0, Range queries, Range keys,
            const Tiles& tiles) const {
    const int64_t rows = queries.end - queries.begin, num_keys = keys.end - keys.begin;
    const int64_t columns = RoundUpToLanes<T>(num_keys);
    const T* q = tiles.q + (queries.begin - i0) * stride_;
    const T* dout = tiles.dout + (queries.begin - i0) * stride_;
    T* dq = tiles.dq + (queries.begin - i0) * stride_;
    Gemm<Layout::kRows>(rows, columns, d_, q, stride_, tiles.k_transposed, score_stride_, tiles.s,
                        score_stride_, false);
    Gemm<Layout::kRows>(rows, columns, d_, dout, stride_, tiles.v_transposed, score_stride_,
                        tiles.dp, score_stride_, false);
    const int64_t statistics = (b * shape_.num_heads + h) * shape_.q_len;
    const T* lse = static_cast<const T*>(params_.lse) + statistics;
    const T* delta = static_cast<const T*>(params_.delta) + statistics;
    for (int64_t i = queries.begin; i < queries.end; ++i) {
      const Range seen = mask.Keys({i, i + 1}, keys);
      const int64_t offset = (i - queries.begin) * score_stride_;
      SoftmaxBackwardRow(columns, seen.begin - keys.begin, seen.end - keys.begin,
                         lse[i] * static_cast<T>(kLog2E), delta[i], tiles.s + offset,
                         tiles.dp + offset);
    }
    Gemm<Layout::kTransposed>(num_keys, padded_d_, rows, tiles.s, score_stride_, dout, stride_,
                              tiles.dv, stride_, true);
    Gemm<Layout::kTransposed>(num_keys, padded_d_, rows, tiles.dp, score_stride_, q, stride_,
                              tiles.dk, stride_, true);
    Gemm<Layout::kRows>(rows, padded_d_, num_keys, tiles.dp, score_stride_, tiles.k, stride_, dq,
                        stride_, true);
  }

  const FlashBackwardParams& params_;
  const FlashAttentionShape& shape_;
  const int64_t d_;
  const int64_t padded_d_;
  const int64_t stride_;
  const int64_t tile_keys_;
  const int64_t score_stride_;
};

// operand [batch, length, heads, head_dim] = 0
template <typename T>
void Clear(const FlashAttentionShape& shape, int64_t length, int64_t heads,
           const AttentionOperand& operand) {
  constexpr int64_t kGrain = 256;  // rows a thread takes at least
  ParallelFor(shape.batch * length, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      for (int64_t h = 0; h < heads; ++h) {
        T* row = Head<T>(operand, index / length, h).row(index % length);
        std::fill_n(row, shape.head_dim, T{0});
      }
    }
  });
}

template <typename Function>
void ForEachChunk(int64_t q_len, Function function) {
  for (int64_t i = 0; i < q_len; i += kChunk) function(Range{i, std::min(i + kChunk, q_len)});
}

// KV heads are independent: a thread takes one with all of its query heads. Those left over when
// the heads are dealt out evenly (all of them, if there are few) are shared chunk by chunk: every
// thread takes each n-th tile of keys with a dQ of its own, and these are added in order.
template <typename T>
void BackwardOf(const FlashBackwardParams& params, int64_t tile_keys) {
  const FlashAttentionShape& shape = params.shape;
  if (params.assign) {
    Clear<T>(shape, shape.q_len, shape.num_heads, params.dq);
    Clear<T>(shape, shape.k_len, shape.num_kv_heads, params.dk);
    Clear<T>(shape, shape.k_len, shape.num_kv_heads, params.dv);
  }
  const BackwardTask<T> task(params, tile_keys);
  const int64_t group = shape.num_heads / shape.num_kv_heads, d = shape.head_dim;
  const int64_t heads = shape.batch * shape.num_kv_heads;
  const int64_t threads = NumThreads(), whole = heads / threads * threads;
  const int64_t dq_size = kChunk * task.stride();
  ParallelTasks(whole, [&](int64_t index) {
    const int64_t b = index / shape.num_kv_heads, kv_head = index % shape.num_kv_heads;
    T* dq = ThreadScratch().Get<T>(9, dq_size);
    for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
      ForEachChunk(shape.q_len, [&](Range chunk) {
        task.RunChunk(b, h, chunk, 0, 1, dq);
        AddTile(dq, task.stride(), chunk.end - chunk.begin, d, T{1}, Head<T>(params.dq, b, h),
                chunk.begin);
      });
    }
  });
  if (whole == heads) return;

  const Tensor partial = Tensor::Empty({threads, dq_size}, shape.dtype);
  for (int64_t index = whole * group; index < heads * group; ++index) {
    const int64_t b = index / shape.num_heads, h = index % shape.num_heads;
    ForEachChunk(shape.q_len, [&](Range chunk) {
      ParallelTasks(threads, [&](int64_t thread) {
        task.RunChunk(b, h, chunk, thread, threads, partial.data<T>() + thread * dq_size);
      });
      ParallelFor(chunk.end - chunk.begin, kBlockM, [&](int64_t begin, int64_t end) {
        for (int64_t thread = 0; thread < threads; ++thread) {
          AddTile(partial.data<T>() + thread * dq_size + begin * task.stride(), task.stride(),
                  end - begin, d, T{1}, Head<T>(params.dq, b, h), chunk.begin + begin);
        }
      });
    });
  }
}

}  // namespace

void Backward(const FlashBackwardParams& params, int64_t tile_keys) {
  BURST_CHECK_GT(params.shape.num_kv_heads, 0);
  BURST_CHECK_EQ(params.shape.num_heads % params.shape.num_kv_heads, 0);
  DispatchFloat(params.shape.dtype,
                [&](auto zero) { BackwardOf<decltype(zero)>(params, tile_keys); });
}

}  // namespace cpu
}  // namespace burst
