// The forward. A task has one tile of queries, and reads the keys tile by tile.
//
// Scores are kept transposed, [keys, queries], so that a vector holds the scores of several queries
// for one key. The softmax over the keys then needs no reduction across a vector, and keys and
// values enter the matmuls in their memory order.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "burst/base/check.h"
#include "burst/base/parallel.h"
#include "burst/kernels/cpu/changed_scores.h"
#include "burst/kernels/cpu/flash_attention_cpu.h"
#include "burst/kernels/cpu/gemm.h"
#include "burst/kernels/cpu/tile.h"
#include "burst/kernels/cpu/vector.h"
#include "burst/kernels/merge.h"

namespace burst {
namespace cpu {
namespace {

constexpr int64_t kBlockM = 192;   // the most queries of a task; with lists the queries of a block
constexpr int64_t kTileKeys = 96;  // keys of a step
constexpr int kPanelVectors = 4;   // queries whose scores stay in the first-level cache

template <typename T>
constexpr T kMinusInfinity = -std::numeric_limits<T>::infinity();

// The running softmax of a tile of queries, to base 2.
template <typename T>
struct RunningSoftmax {
  T max[kBlockM];      // largest score so far; -inf before the first visible one
  T sum[kBlockM];      // sum of 2^(score - max)
  T rescale[kBlockM];  // factor of the last step for sum, and for the output
};

// Takes in the scores [keys, kVectors vectors of queries], masked with -inf, and turns them into
// 2^(score - max):
//
//   max' = max(max, colmax S);  P = 2^(S - max');  rescale = 2^(max - max')
//   sum' = rescale sum + colsum P
template <int kVectors, typename T>
void UpdateColumns(int64_t keys, T* scores, int64_t stride, T* max, T* sum, T* rescale) {
  constexpr int kWidth = kLanes<T>;
  Vec<T> shift[kVectors], total[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    shift[v] = Load(max + v * kWidth);
    total[v] = Vec<T>{};
  }
  for (int64_t j = 0; j < keys; ++j) {
    for (int v = 0; v < kVectors; ++v) {
      shift[v] = Max(shift[v], Load(scores + j * stride + v * kWidth));
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    const Vec<T> old_max = Load(max + v * kWidth);
    Store(max + v * kWidth, shift[v]);
    // For queries that have not seen a key yet, any finite shift gives 2^-inf = 0.
    shift[v] = shift[v] == kMinusInfinity<T> ? Vec<T>{} : shift[v];
    Store(rescale + v * kWidth, Exp2<T>(old_max - shift[v]));
  }
  for (int64_t j = 0; j < keys; ++j) {
    for (int v = 0; v < kVectors; ++v) {
      T* score = scores + j * stride + v * kWidth;
      const Vec<T> p = Exp2<T>(Load(score) - shift[v]);
      Store(score, p);
      total[v] += p;
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    Store(sum + v * kWidth, Load(rescale + v * kWidth) * Load(sum + v * kWidth) + total[v]);
  }
}

template <typename Element>
class ForwardTask {
  using T = Computed<Element>;

 public:
  ForwardTask(const FlashForwardParams& params, int64_t tile_keys, std::atomic<int64_t>* pairs)
      : params_(params),
        shape_(params.shape),
        pairs_(pairs),
        d_(shape_.head_dim),
        value_d_(shape_.value_dim),
        stride_(TileStride<T>(d_)),
        value_stride_(TileStride<T>(value_d_)),
        tile_keys_(TileKeys(shape_, tile_keys, kTileKeys)),
        rows_(shape_.blocks.key_begin == nullptr ? kBlockM : kListBlock),
        tiles_((shape_.q_len + rows_ - 1) / rows_) {
    static_assert(kListBlock <= kBlockM, "");
  }

  int64_t num_tasks() const { return shape_.batch * shape_.num_heads * tiles_; }

  // Returns the largest score of the task's queries, -inf if they see no key.
  T Run(int64_t task) const {
    // The last tiles come first, because they have the most work under a causal mask.
    const int64_t tile = tiles_ - 1 - task % tiles_;
    const int64_t h = task / tiles_ % shape_.num_heads;
    const int64_t b = task / tiles_ / shape_.num_heads;
    const Range queries = {tile * rows_, std::min(shape_.q_len, (tile + 1) * rows_)};
    const Mask mask(shape_, b);
    const ChangedScores<T> changed(shape_, b, h);

    ScratchSpace& scratch = ThreadScratch();
    Tiles tiles;
    tiles.q = scratch.Get<T>(0, d_ * kScoreStride);
    tiles.k = scratch.Get<T>(1, tile_keys_ * stride_);
    tiles.v = scratch.Get<T>(2, tile_keys_ * value_stride_);
    tiles.s = scratch.Get<T>(3, tile_keys_ * kScoreStride);
    tiles.o = scratch.Get<T>(4, kBlockM * value_stride_);
    std::fill_n(tiles.o, kBlockM * value_stride_, T{0});
    std::fill_n(tiles.softmax.max, kBlockM, kMinusInfinity<T>);
    std::fill_n(tiles.softmax.sum, kBlockM, T{0});
    CopyTileTransposed(Head<Element>(params_.q, b, h), queries.begin, queries.end - queries.begin,
                       d_, static_cast<T>(shape_.softmax_scale * kLog2E), tiles.q, kScoreStride);

    const int64_t kv_head = h / (shape_.num_heads / shape_.num_kv_heads);
    const Head<Element> k(params_.k, b, kv_head), v(params_.v, b, kv_head);
    // next: the keys that the next step copies; empty where it is not known.
    const auto step = [&](Range keys, Range next) {
      mask.ForEachBlock(queries, keys, rows_, [&](Range seeing) {
        // The range grows to whole vectors of the tile.
        seeing.begin -= (seeing.begin - queries.begin) % kLanes<T>;
        seeing.end =
            std::min(queries.end, queries.begin + RoundUpToLanes<T>(seeing.end - queries.begin));
        CopyTile(k, keys.begin, keys.end - keys.begin, d_, T{1}, tiles.k, stride_);
        CopyTile(v, keys.begin, keys.end - keys.begin, value_d_, T{1}, tiles.v, value_stride_);
        Prefetch(k, next, d_);
        Prefetch(v, next, value_d_);
        Step(mask, shape_.scores.any() ? &changed : nullptr, queries.begin, seeing, keys, &tiles);
      });
    };
    if (shape_.blocks.key_begin != nullptr) {
      const BlockList list = Blocks(shape_, b).KeysOf(tile);
      for (const int32_t* block = list.begin; block < list.end; ++block) {
        step({*block * kListBlock, std::min(shape_.k_len, (*block + 1) * kListBlock)}, {0, 0});
      }
    } else {
      const Range all = mask.Keys(queries, {0, shape_.k_len});
      for (int64_t j = all.begin; j < all.end; j += tile_keys_) {
        const int64_t end = std::min(j + tile_keys_, all.end);
        step({j, end}, {end, std::min(end + tile_keys_, all.end)});
      }
    }
    if (params_.out_dtype == shape_.dtype || !Is16Bit(shape_.dtype)) {
      Finish<Element>(tiles, b, h, queries);
    } else {
      Finish<T>(tiles, b, h, queries);
    }
    const T* const max = tiles.softmax.max;
    return static_cast<T>(kLn2) * *std::max_element(max, max + (queries.end - queries.begin));
  }

 private:
  static constexpr int64_t kScoreStride = TileStride<T>(kBlockM);

  struct Tiles {
    T* q;  // [head_dim, kBlockM], scaled
    T* k;  // [tile_keys, head_dim]
    T* v;  // [tile_keys, value_dim]
    T* s;  // [tile_keys, kBlockM]
    T* o;  // [kBlockM, value_dim]
    RunningSoftmax<T> softmax;
  };

  // Adds P V to O for `queries`, whole vectors of the tile that starts at query i0. changed may be
  // null.
  void Step(const Mask& mask, const ChangedScores<T>* changed, int64_t i0, Range queries,
            Range keys, Tiles* tiles) const {
    const int64_t num_keys = keys.end - keys.begin;
    const int64_t begin = queries.begin - i0, end = queries.end - i0;
    if (pairs_ != nullptr) *pairs_ += (end - begin) * num_keys;
    const bool full = mask.Full(queries, keys);
    RunningSoftmax<T>& softmax = tiles->softmax;
    constexpr int64_t kPanel = kPanelVectors * kLanes<T>;
    for (int64_t i = begin; i < end; i += kPanel) {
      const int64_t columns = std::min(kPanel, RoundUpToLanes<T>(end - i));
      T* s = tiles->s + i;
      Gemm<Layout::kRows>(num_keys, columns, d_, tiles->k, stride_, tiles->q + i, kScoreStride, s,
                          kScoreStride, Update::kAssign);
      const Range panel = {i0 + i, std::min(i0 + i + columns, queries.end)};
      if (changed != nullptr) changed->ChangeScores(panel, keys, s, kScoreStride);
      if (!full) MaskPanel(mask, panel, keys, s);
      UpdatePanel(num_keys, columns, s, i, &softmax);
      if (changed != nullptr) changed->Drop(panel, keys, s, kScoreStride);
    }
    for (int64_t i = begin; i < end; ++i) {
      if (softmax.rescale[i] == 1) continue;
      T* o = tiles->o + i * value_stride_;
      for (int64_t c = 0; c < value_d_; ++c) o[c] *= softmax.rescale[i];
    }
    if (!full && !AllFinite(tiles->v, value_stride_, num_keys, value_d_)) {
      return AddSeenValues(mask, i0, queries, keys, tiles);
    }
    Gemm<Layout::kTransposed>(end - begin, RoundUpToLanes<T>(value_d_), num_keys, tiles->s + begin,
                              kScoreStride, tiles->v, value_stride_,
                              tiles->o + begin * value_stride_, value_stride_, Update::kContinue);
  }

  // Adds P V to O over the keys that each query sees. The matmul would add 0 x NaN of the other
  // keys.
  void AddSeenValues(const Mask& mask, int64_t i0, Range queries, Range keys, Tiles* tiles) const {
    for (int64_t i = queries.begin; i < queries.end; ++i) {
      const Range seen = mask.Keys({i, i + 1}, keys);
      T* o = tiles->o + (i - i0) * value_stride_;
      for (int64_t j = seen.begin; j < seen.end; ++j) {
        const T p = tiles->s[(j - keys.begin) * kScoreStride + i - i0];
        const T* v = tiles->v + (j - keys.begin) * value_stride_;
        for (int64_t c = 0; c < value_d_; ++c) o[c] += p * v[c];
      }
    }
  }

  // Updates the scores of the queries from i on, [keys, columns], several vectors at a time if
  // possible.
  static void UpdatePanel(int64_t keys, int64_t columns, T* scores, int64_t i,
                          RunningSoftmax<T>* softmax) {
    T *max = softmax->max + i, *sum = softmax->sum + i, *rescale = softmax->rescale + i;
    if (columns == kPanelVectors * kLanes<T>) {
      return UpdateColumns<kPanelVectors>(keys, scores, kScoreStride, max, sum, rescale);
    }
    for (int64_t c = 0; c < columns; c += kLanes<T>) {
      UpdateColumns<1>(keys, scores + c, kScoreStride, max + c, sum + c, rescale + c);
    }
  }

  // Sets scores [keys, queries] to -inf where the query does not see the key.
  static void MaskPanel(const Mask& mask, Range queries, Range keys, T* scores) {
    // Key j is seen by the queries [first, last); both only grow with j.
    int64_t first = queries.begin, last = queries.begin;
    for (int64_t j = keys.begin; j < keys.end; ++j) {
      while (first < queries.end && mask.end(first) <= j) ++first;
      while (last < queries.end && mask.begin(last) <= j) ++last;
      T* row = scores + (j - keys.begin) * kScoreStride;
      std::fill(row, row + (first - queries.begin), kMinusInfinity<T>);
      std::fill(row + (last - queries.begin), row + (queries.end - queries.begin),
                kMinusInfinity<T>);
    }
  }

  // Computes O = O / sum and lse = ln 2 (max + log2 sum), merged with earlier results. Out is the
  // type of O in `out`.
  template <typename Out>
  void Finish(const Tiles& tiles, int64_t b, int64_t h, Range queries) const {
    const Head<Out> out(params_.out, b, h);
    const Head<T> so_far(params_.sum.data != nullptr ? params_.sum : params_.out, b, h);
    T* lse = static_cast<T*>(params_.lse) + (b * shape_.num_heads + h) * shape_.q_len;
    for (int64_t i = queries.begin; i < queries.end; ++i) {
      const int64_t calls_left = params_.rows.Left(b, i);
      if (calls_left < 0) continue;
      T max = tiles.softmax.max[i - queries.begin] * static_cast<T>(kLn2),
        sum = tiles.softmax.sum[i - queries.begin], keep = 1;
      if (params_.sinks != nullptr) {
        keep = AddSink(static_cast<const T*>(params_.sinks)[h], &max, &sum);
      }
      const T* o = tiles.o + (i - queries.begin) * value_stride_;
      const bool seen = sum != 0;
      MergeWeights<T> weights = {seen ? max + std::log(sum) : kMinusInfinity<T>, 0, 1};
      if (params_.merge) weights = Merge(lse[i], weights.lse);
      lse[i] = weights.lse;
      const T weight = seen ? keep / sum * weights.b : 0;
      const auto store = [&](auto* row) {
        if (!params_.merge) return ScaleRow(value_d_, weight, o, row);
        AddRows(value_d_, weights.a, so_far.row(i), weight, o, row);
      };
      calls_left > 0 ? store(so_far.row(i)) : store(out.row(i));
    }
  }

  const FlashForwardParams& params_;
  const FlashAttentionShape& shape_;
  std::atomic<int64_t>* const pairs_;
  const int64_t d_, value_d_;            // head_dim, value_dim
  const int64_t stride_, value_stride_;  // distances of a tile's rows of these
  const int64_t tile_keys_;
  const int64_t rows_;  // queries of a task
  const int64_t tiles_;
};

}  // namespace

void Forward(const FlashForwardParams& params, int64_t tile_keys, std::atomic<int64_t>* pairs) {
  const DType dtype = params.shape.dtype;
  BURST_CHECK(params.sum.data == nullptr || Is16Bit(dtype)) << Name(dtype) << " is merged in place";
  BURST_CHECK(!params.merge || !Is16Bit(dtype) || params.sum.data != nullptr ||
              params.out_dtype == DType::kFloat32)
      << "merging needs a float32 sum";
  BURST_CHECK(params.sinks == nullptr || !params.merge) << "sinks are for the first call";
  BURST_CHECK_GT(params.shape.num_kv_heads, 0);
  BURST_CHECK_GT(params.shape.value_dim, 0);
  BURST_CHECK_EQ(params.shape.num_heads % params.shape.num_kv_heads, 0);
  DispatchElement(dtype, [&](auto zero) {
    const ForwardTask<decltype(zero)> task(params, tile_keys, pairs);
    std::vector<Computed<decltype(zero)>> largest(task.num_tasks());
    ParallelTasks(task.num_tasks(), [&](int64_t index) { largest[index] = task.Run(index); });
    if (params.max_logits == nullptr || largest.empty()) return;
    const int64_t heads = params.shape.batch * params.shape.num_heads;
    const auto tiles = static_cast<int64_t>(largest.size()) / heads;
    for (int64_t index = 0; index < task.num_tasks(); ++index) {
      float& max = params.max_logits[index / tiles];
      max = std::max(max, static_cast<float>(largest[index]));
    }
  });
}

}  // namespace cpu
}  // namespace burst
