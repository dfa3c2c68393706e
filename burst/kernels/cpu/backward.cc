// The backward. A chunk of queries stays in cache while the keys are read tile by tile. A tile
// collects its dK and dV over the chunk. The chunk's dQ is collected over the tiles of a span.
//
// The order of all sums is fixed. The gradient dQ adds spans in the order of the keys. The
// gradients dK and dV add chunks in the order of the query heads and the queries. So the bits do
// not depend on the number of threads.

#include <algorithm>
#include <atomic>
#include <limits>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#include "burst/base/check.h"
#include "burst/base/parallel.h"
#include "burst/kernels/cpu/changed_scores.h"
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
constexpr int64_t kSpanTiles = 2;   // tiles of keys whose parts of a dQ are added up at once

template <typename T>
constexpr T kMinusInfinity = -std::numeric_limits<T>::infinity();

// Computes one row of a tile. s has scores to base 2 and dp has dP, both [columns], in whole
// vectors. The query sees [first, last). lse is to base 2. s becomes P and dp becomes dS:
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
  // dP, lse and delta may be NaN, so the mask makes P and dS zero, not their values.
  for (T* x : {s, dp}) {
    std::fill(x, x + first, T{0});
    std::fill(x + last, x + columns, T{0});
  }
}

template <typename Element>
class BackwardTask {
  using T = Computed<Element>;

 public:
  BackwardTask(const FlashBackwardParams& params, int64_t tile_keys, std::atomic<int64_t>* pairs)
      : params_(params),
        shape_(params.shape),
        pairs_(pairs),
        d_(shape_.head_dim),
        value_d_(shape_.value_dim),
        stride_(TileStride<T>(d_)),
        value_stride_(TileStride<T>(value_d_)),
        tile_keys_(TileKeys(shape_, tile_keys, kTileKeys)),
        score_stride_(TileStride<T>(tile_keys_)) {}

  int64_t num_spans() const {
    const int64_t keys = kSpanTiles * tile_keys_;
    return (shape_.k_len + keys - 1) / keys;
  }

  // Returns the numbers of the spans that some query of the chunk sees. With lists it returns all
  // of them.
  Range Spans(int64_t b, Range chunk) const {
    if (shape_.blocks.key_begin != nullptr) return {0, num_spans()};
    const Range keys = Mask(shape_, b).Keys(chunk, {0, shape_.k_len});
    const int64_t span = kSpanTiles * tile_keys_;
    if (keys.begin == keys.end) return {0, 0};
    return {keys.begin / span, (keys.end + span - 1) / span};
  }

  // Adds the gradients of query head h, of the queries of a chunk and the keys of `spans`, to dQ,
  // dK and dV. Calls before_dkv(span) before the first addition to dK and dV of a span. Calls
  // before_dq(span) before the first addition to the chunk's dQ, and done(span) after the last one.
  template <typename BeforeDkv, typename BeforeDq, typename Done>
  void RunChunk(int64_t b, int64_t h, Range chunk, Range spans, BeforeDkv before_dkv,
                BeforeDq before_dq, Done done) const {
    const int64_t rows = chunk.end - chunk.begin;
    ScratchSpace& scratch = ThreadScratch();
    Tiles tiles;
    tiles.q = scratch.Get<T>(0, kChunk * stride_);
    tiles.dout = scratch.Get<T>(1, kChunk * value_stride_);
    tiles.k = scratch.Get<T>(2, tile_keys_ * stride_);
    tiles.k_transposed = scratch.Get<T>(3, d_ * score_stride_);
    tiles.v_transposed = scratch.Get<T>(4, value_d_ * score_stride_);
    tiles.dk = scratch.Get<T>(5, tile_keys_ * stride_);
    tiles.dv = scratch.Get<T>(6, tile_keys_ * value_stride_);
    tiles.s = scratch.Get<T>(7, kBlockM * score_stride_);
    tiles.dp = scratch.Get<T>(8, kBlockM * score_stride_);
    tiles.dq = scratch.Get<T>(9, kChunk * stride_);
    const Mask mask(shape_, b);
    bool here = false;  // whether the chunk's q and dout are in their tiles
    for (int64_t span = spans.begin; span < spans.end; ++span) {
      if (!Meet(mask, b, chunk, span)) {
        before_dq(span);
        done(span);
        continue;
      }
      if (!here) {
        CopyTile(Head<Element>(params_.q, b, h), chunk.begin, rows, d_, T{1}, tiles.q, stride_);
        CopyTile(Head<Element>(params_.dout, b, h), chunk.begin, rows, value_d_, T{1}, tiles.dout,
                 value_stride_);
        tiles.finite = AllFinite(tiles.q, stride_, rows, d_) &&
                       AllFinite(tiles.dout, value_stride_, rows, value_d_);
        here = true;
      }
      std::fill_n(tiles.dq, rows * stride_, T{0});
      for (int64_t tile = span * kSpanTiles; tile < (span + 1) * kSpanTiles; ++tile) {
        RunKeys(
            mask, b, h, chunk, Keys(tile, tile + 1), [&] { before_dkv(span); }, tiles);
      }
      before_dq(span);
      AddTile(tiles.dq, stride_, rows, d_, T{1}, Head<T>(params_.dq.sum, b, h), chunk.begin);
      done(span);
    }
  }

 private:
  struct Tiles {
    T *q, *dq, *dout;  // [kChunk, head_dim], dout [kChunk, value_dim]
    T* k;              // [tile_keys, head_dim], scaled by softmax_scale
    T* k_transposed;   // [head_dim, tile_keys], scaled for scores to base 2
    T* v_transposed;   // [value_dim, tile_keys]
    T *dk, *dv;        // [tile_keys, head_dim], [tile_keys, value_dim]
    T *s, *dp;         // [kBlockM, tile_keys]
    bool finite;       // whether all of q and dout is finite
  };

  // Returns the keys of some tiles.
  Range Keys(int64_t first_tile, int64_t last_tile) const {
    return {std::min(shape_.k_len, first_tile * tile_keys_),
            std::min(shape_.k_len, last_tile * tile_keys_)};
  }

  // Returns, with lists, the blocks of the chunk's queries that see a tile of keys.
  BlockList SeenBy(int64_t b, Range chunk, int64_t tile) const {
    if (tile * kListBlock >= shape_.k_len) return {};
    static_assert(kChunk % kListBlock == 0 && kBlockM == kListBlock, "");
    return Blocks(shape_, b).QueriesOf(tile).Within(chunk.begin / kListBlock,
                                                    (chunk.end + kListBlock - 1) / kListBlock);
  }

  // Returns whether queries of the chunk see keys of the span.
  bool Meet(const Mask& mask, int64_t b, Range chunk, int64_t span) const {
    bool some = false;
    if (shape_.blocks.key_begin == nullptr) {
      mask.ForEachBlock(chunk, Keys(span * kSpanTiles, (span + 1) * kSpanTiles), kChunk,
                        [&](Range) { some = true; });
      return some;
    }
    for (int64_t tile = span * kSpanTiles; tile < (span + 1) * kSpanTiles; ++tile) {
      some |= !SeenBy(b, chunk, tile).empty();
    }
    return some;
  }

  // Copies a tile of keys and values and clears its gradients. Returns whether all keys are finite.
  bool LoadKeys(int64_t b, int64_t kv_head, Range keys, const Tiles& tiles) const {
    const int64_t num_keys = keys.end - keys.begin;
    const Head<Element> k(params_.k, b, kv_head), v(params_.v, b, kv_head);
    CopyTile(k, keys.begin, num_keys, d_, static_cast<T>(shape_.softmax_scale), tiles.k, stride_);
    CopyTileTransposed(k, keys.begin, num_keys, d_, static_cast<T>(shape_.softmax_scale * kLog2E),
                       tiles.k_transposed, score_stride_);
    CopyTileTransposed(v, keys.begin, num_keys, value_d_, T{1}, tiles.v_transposed, score_stride_);
    std::fill_n(tiles.dk, num_keys * stride_, T{0});
    std::fill_n(tiles.dv, num_keys * value_stride_, T{0});
    return AllFinite(tiles.k, stride_, num_keys, d_);
  }

  // Computes one tile of keys with the queries of the chunk.
  template <typename BeforeDkv>
  void RunKeys(const Mask& mask, int64_t b, int64_t h, Range chunk, Range keys,
               BeforeDkv before_dkv, const Tiles& tiles) const {
    if (keys.begin == keys.end) return;
    const int64_t num_keys = keys.end - keys.begin;
    const int64_t kv_head = h / (shape_.num_heads / shape_.num_kv_heads);
    const T scale = static_cast<T>(shape_.softmax_scale);
    bool some = false, finite = false;
    const auto step = [&](Range rows) {
      if (!some) finite = LoadKeys(b, kv_head, keys, tiles) && tiles.finite;
      some = true;
      Step(mask, b, h, chunk.begin, rows, keys, finite || mask.Full(rows, keys), tiles);
    };
    if (shape_.blocks.key_begin != nullptr) {
      const BlockList list = SeenBy(b, chunk, keys.begin / kListBlock);
      for (const int32_t* block = list.begin; block < list.end; ++block) {
        step({*block * kListBlock, std::min((*block + 1) * kListBlock, chunk.end)});
      }
    } else {
      mask.ForEachBlock(chunk, keys, kBlockM, step);
    }
    if (!some) return;
    before_dkv();
    AddTile(tiles.dk, stride_, num_keys, d_, scale, Head<T>(params_.dk.sum, b, kv_head),
            keys.begin);
    AddTile(tiles.dv, value_stride_, num_keys, value_d_, T{1}, Head<T>(params_.dv.sum, b, kv_head),
            keys.begin);
  }

  // S = Q K^T, dP = dO V^T, dV += P^T dO, dK += dS^T Q, dQ += dS K for one tile of scores; the
  // chunk begins at query i0. whole: matmuls may take in all pairs, also those that the mask hides.
  void Step(const Mask& mask, int64_t b, int64_t h, int64_t i0, Range queries, Range keys,
            bool whole, const Tiles& tiles) const {
    const int64_t rows = queries.end - queries.begin, num_keys = keys.end - keys.begin;
    const int64_t columns = RoundUpToLanes<T>(num_keys);
    if (pairs_ != nullptr) *pairs_ += rows * num_keys;
    const T* q = tiles.q + (queries.begin - i0) * stride_;
    const T* dout = tiles.dout + (queries.begin - i0) * value_stride_;
    T* dq = tiles.dq + (queries.begin - i0) * stride_;
    Gemm<Layout::kRows>(rows, columns, d_, q, stride_, tiles.k_transposed, score_stride_, tiles.s,
                        score_stride_, Update::kAssign);
    Gemm<Layout::kRows>(rows, columns, value_d_, dout, value_stride_, tiles.v_transposed,
                        score_stride_, tiles.dp, score_stride_, Update::kAssign);
    const int64_t statistics = (b * shape_.num_heads + h) * shape_.q_len;
    const T* lse = static_cast<const T*>(params_.lse) + statistics;
    const T* delta = static_cast<const T*>(params_.delta) + statistics;
    const ChangedScores<T> changed(shape_, b, h);
    for (int64_t i = queries.begin; i < queries.end; ++i) {
      const Range seen = mask.Keys({i, i + 1}, keys);
      const int64_t offset = (i - queries.begin) * score_stride_;
      if (shape_.scores.any()) {
        changed.BackwardRow(i, seen, keys, columns, lse[i] * static_cast<T>(kLog2E), delta[i],
                            tiles.s + offset, tiles.dp + offset);
        continue;
      }
      SoftmaxBackwardRow(columns, seen.begin - keys.begin, seen.end - keys.begin,
                         lse[i] * static_cast<T>(kLog2E), delta[i], tiles.s + offset,
                         tiles.dp + offset);
    }
    if (!whole) return AddSeen(mask, queries, keys, q, dout, dq, tiles);
    const int64_t padded_d = RoundUpToLanes<T>(d_), padded_value_d = RoundUpToLanes<T>(value_d_);
    Gemm<Layout::kTransposed>(num_keys, padded_value_d, rows, tiles.s, score_stride_, dout,
                              value_stride_, tiles.dv, value_stride_, Update::kContinue);
    Gemm<Layout::kTransposed>(num_keys, padded_d, rows, tiles.dp, score_stride_, q, stride_,
                              tiles.dk, stride_, Update::kContinue);
    Gemm<Layout::kRows>(rows, padded_d, num_keys, tiles.dp, score_stride_, tiles.k, stride_, dq,
                        stride_, Update::kContinue);
  }

  // Computes the last three matmuls over the pairs of a query and a key that it sees. Other pairs
  // would add 0 x NaN. q, dout and dq point to the first query.
  void AddSeen(const Mask& mask, Range queries, Range keys, const T* q, const T* dout, T* dq,
               const Tiles& tiles) const {
    for (int64_t i = 0; i < queries.end - queries.begin; ++i) {
      const int64_t query = queries.begin + i, row = i * stride_, value_row = i * value_stride_;
      const Range seen = mask.Keys({query, query + 1}, keys);
      for (int64_t j = seen.begin - keys.begin; j < seen.end - keys.begin; ++j) {
        const T p = tiles.s[i * score_stride_ + j], ds = tiles.dp[i * score_stride_ + j];
        T *dk = tiles.dk + j * stride_, *dv = tiles.dv + j * value_stride_;
        const T* k = tiles.k + j * stride_;
        for (int64_t c = 0; c < value_d_; ++c) dv[c] += p * dout[value_row + c];
        for (int64_t c = 0; c < d_; ++c) {
          dk[c] += ds * q[row + c];
          dq[row + c] += ds * k[c];
        }
      }
    }
  }

  const FlashBackwardParams& params_;
  const FlashAttentionShape& shape_;
  std::atomic<int64_t>* const pairs_;
  const int64_t d_, value_d_;            // head_dim, value_dim
  const int64_t stride_, value_stride_;  // distances of a tile's rows of these
  const int64_t tile_keys_;
  const int64_t score_stride_;
};

// Calls row(b, i, h) for every row of some heads of [batch, length, heads, ...].
template <typename Row>
void ForEachRow(const FlashAttentionShape& shape, int64_t length, const HeadRange& heads,
                const Row& row) {
  if (heads.empty()) return;
  constexpr int64_t kGrain = 256;  // the fewest rows of a thread
  ParallelFor(shape.batch * length, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      for (int64_t h = heads.begin; h < heads.end; ++h) row(index / length, index % length, h);
    }
  });
}

// Clears the heads that a call begins, of `columns` columns.
template <typename T>
void Clear(const FlashAttentionShape& shape, int64_t length, int64_t columns,
           const GradientTarget& target) {
  ForEachRow(shape, length, target.first, [&](int64_t b, int64_t i, int64_t h) {
    std::fill_n(Head<T>(target.sum, b, h).row(i), columns, T{0});
  });
}

// Returns where a call adds up a gradient of this shape: the sum of several calls, the result where
// it has the sum's dtype, or `memory`.
template <typename Element>
GradientTarget SumOf(const Shape& shape, const GradientTarget& target, Tensor* memory) {
  using T = Computed<Element>;
  if (!target.assigned()) return target;
  if (std::is_same_v<Element, T>) return AddsTo(target.result, {0, shape[2]});
  *memory = Tensor::Empty(shape, DTypeOf<T>::value);
  return AddsTo(Operand(*memory), {0, shape[2]});
}

// Rounds the heads that a call ends, from their sum to the result, which has the shape `gradient`.
template <typename Element>
void RoundSums(const FlashAttentionShape& shape, const Shape& gradient, const AttentionOperand& sum,
               const GradientTarget& target) {
  using T = Computed<Element>;
  const HeadRange heads = target.assigned() ? HeadRange{0, gradient[2]} : target.last;
  ForEachRow(shape, gradient[1], heads, [&](int64_t b, int64_t i, int64_t h) {
    ScaleRow(gradient[3], T{1}, Head<T>(sum, b, h).row(i),
             Head<Element>(target.result, b, h).row(i));
  });
}

// Returns a KV head's chunk in the order of its work: query head after query head, chunk after
// chunk.
struct ChunkOf {
  int64_t h;  // query head
  Range chunk;
};
ChunkOf ChunkOfStep(const FlashAttentionShape& shape, int64_t kv_head, int64_t step) {
  const int64_t chunks = (shape.q_len + kChunk - 1) / kChunk;
  const int64_t group = shape.num_heads / shape.num_kv_heads, begin = step % chunks * kChunk;
  return {kv_head * group + step / chunks, {begin, std::min(begin + kChunk, shape.q_len)}};
}

// KV heads that several threads share. A free thread takes the next span of the next chunk and
// computes. Before it adds to dK and dV, it waits for the chunks before. Before it adds to dQ, it
// waits for the spans before. A thread waits only for work taken earlier, which is rare.
template <typename Element>
class SharedHeads {
 public:
  // Shares the heads [first, last) of batch * num_kv_heads.
  SharedHeads(const BackwardTask<Element>& task, const FlashAttentionShape& shape, int64_t first,
              int64_t last)
      : task_(task),
        shape_(shape),
        last_(last),
        steps_((shape.q_len + kChunk - 1) / kChunk * (shape.num_heads / shape.num_kv_heads)),
        head_(first),
        taken_(task.num_spans()),
        chunks_added_((last - first) * task.num_spans()),
        spans_added_((last - first) * steps_),
        first_(first) {
    if (head_ < last_ && steps_ > 0) left_ = SpansOfStep();
  }

  // Every thread calls this.
  void Work() {
    while (true) {
      Item item;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!Take(&item)) return;
      }
      const int64_t b = item.head / shape_.num_kv_heads;
      const ChunkOf work = ChunkOfStep(shape_, item.head % shape_.num_kv_heads, item.step);
      std::atomic<int32_t>& chunks =
          chunks_added_[(item.head - first_) * task_.num_spans() + item.span];
      std::atomic<int32_t>& spans = spans_added_[(item.head - first_) * steps_ + item.step];
      task_.RunChunk(
          b, work.h, work.chunk, {item.span, item.span + 1},
          [&](int64_t) { Await(chunks, item.chunks_before); },
          [&](int64_t) { Await(spans, item.spans_before); },
          [&](int64_t) {
            Await(chunks, item.chunks_before);
            chunks.store(item.chunks_before + 1, std::memory_order_release);
            spans.store(item.spans_before + 1, std::memory_order_release);
          });
    }
  }

 private:
  struct Item {
    int64_t head, step, span;
    int32_t chunks_before;  // chunks that add to the span's dK and dV first
    int32_t spans_before;   // spans that add to the chunk's dQ first
  };

  Range SpansOfStep() const {
    const ChunkOf work = ChunkOfStep(shape_, head_ % shape_.num_kv_heads, step_);
    return task_.Spans(head_ / shape_.num_kv_heads, work.chunk);
  }

  // Takes the next span of a chunk, in the order of a single thread. Returns false if none is left.
  bool Take(Item* item) {
    while (head_ < last_ && steps_ > 0) {
      if (left_.begin < left_.end) {
        const int64_t span = left_.begin++;
        *item = {head_, step_, span, taken_[span]++, spans_taken_++};
        return true;
      }
      spans_taken_ = 0;
      if (++step_ == steps_) {
        step_ = 0, ++head_;
        std::fill(taken_.begin(), taken_.end(), 0);
      }
      if (head_ < last_) left_ = SpansOfStep();
    }
    return false;
  }

  static void Await(const std::atomic<int32_t>& added, int32_t before) {
    while (added.load(std::memory_order_acquire) != before) std::this_thread::yield();
  }

  const BackwardTask<Element>& task_;
  const FlashAttentionShape& shape_;
  const int64_t last_, steps_;
  std::mutex mutex_;  // guards these fields:
  int64_t head_, step_ = 0;
  Range left_ = {0, 0};         // of the step
  int32_t spans_taken_ = 0;     // of the step
  std::vector<int32_t> taken_;  // [num_spans]: steps of the head that took the span
  std::vector<std::atomic<int32_t>> chunks_added_;  // [heads, num_spans]
  std::vector<std::atomic<int32_t>> spans_added_;   // [heads, steps]
  const int64_t first_;
};

// KV heads are independent, so a thread takes one with all of its query heads. If the heads do not
// divide evenly among the threads, the threads share the remaining heads, maybe all of them.
template <typename Element>
void AddGradients(const FlashBackwardParams& params, int64_t tile_keys,
                  std::atomic<int64_t>* pairs) {
  using T = Computed<Element>;
  const FlashAttentionShape& shape = params.shape;
  Clear<T>(shape, shape.q_len, shape.head_dim, params.dq);
  Clear<T>(shape, shape.k_len, shape.head_dim, params.dk);
  Clear<T>(shape, shape.k_len, shape.value_dim, params.dv);
  const BackwardTask<Element> task(params, tile_keys, pairs);
  const int64_t steps =
      (shape.q_len + kChunk - 1) / kChunk * (shape.num_heads / shape.num_kv_heads);
  const int64_t heads = shape.batch * shape.num_kv_heads;
  const int64_t threads = NumThreads(), whole = heads / threads * threads;
  const auto nothing = [](int64_t) {};
  ParallelTasks(whole, [&](int64_t head) {
    const int64_t b = head / shape.num_kv_heads;
    for (int64_t step = 0; step < steps; ++step) {
      const ChunkOf work = ChunkOfStep(shape, head % shape.num_kv_heads, step);
      task.RunChunk(b, work.h, work.chunk, task.Spans(b, work.chunk), nothing, nothing, nothing);
    }
  });
  if (whole == heads) return;
  SharedHeads<Element> shared(task, shape, whole, heads);
  ParallelTasks(threads, [&](int64_t) { shared.Work(); });
}

template <typename Element>
void BackwardOf(const FlashBackwardParams& params, int64_t tile_keys, std::atomic<int64_t>* pairs) {
  const FlashAttentionShape& shape = params.shape;
  const Shape q = {shape.batch, shape.q_len, shape.num_heads, shape.head_dim};
  const Shape k = {shape.batch, shape.k_len, shape.num_kv_heads, shape.head_dim};
  const Shape v = {shape.batch, shape.k_len, shape.num_kv_heads, shape.value_dim};
  FlashBackwardParams own = params;
  Tensor memory[3];
  own.dq = SumOf<Element>(q, params.dq, &memory[0]);
  own.dk = SumOf<Element>(k, params.dk, &memory[1]);
  own.dv = SumOf<Element>(v, params.dv, &memory[2]);
  AddGradients<Element>(own, tile_keys, pairs);
  if constexpr (!std::is_same_v<Element, Computed<Element>>) {
    RoundSums<Element>(shape, q, own.dq.sum, params.dq);
    RoundSums<Element>(shape, k, own.dk.sum, params.dk);
    RoundSums<Element>(shape, v, own.dv.sum, params.dv);
  }
}

}  // namespace

void Backward(const FlashBackwardParams& params, int64_t tile_keys, std::atomic<int64_t>* pairs) {
  BURST_CHECK_GT(params.shape.num_kv_heads, 0);
  BURST_CHECK_GT(params.shape.value_dim, 0);
  BURST_CHECK_EQ(params.shape.num_heads % params.shape.num_kv_heads, 0);
  BURST_CHECK(params.dk.last.empty() || Is16Bit(params.shape.dtype))
      << "sums are of the inputs' dtype, nothing is converted";
  DispatchElement(params.shape.dtype,
                  [&](auto zero) { BackwardOf<decltype(zero)>(params, tile_keys, pairs); });
}

}  // namespace cpu
}  // namespace burst
