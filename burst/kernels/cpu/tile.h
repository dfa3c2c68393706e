// Code that the forward and the backward share: masks, and tiles of the operands copied into cache.
//
// Tiles lie in scratch memory with rows of whole vectors, padded with zeros, so that matmuls need
// no special cases for head_dim and lengths.
#pragma once

#include <algorithm>
#include <cstdint>

#include "burst/kernels/cpu/row.h"
#include "burst/kernels/cpu/scratch.h"
#include "burst/kernels/cpu/vector.h"
#include "burst/kernels/flash_attention.h"
#include "burst/tensor/tensor.h"

namespace burst {
namespace cpu {

// The softmax is computed to base 2, which saves the exponential a multiplication: scores are
// scaled by softmax_scale * kLog2E, and lse = ln 2 * log2 sum 2^score.
inline constexpr double kLog2E = 1.4426950408889634;
inline constexpr double kLn2 = 0.6931471805599453;

// The keys of a tile: the kernel's own number, or the one asked for, but not more than there are.
// With lists tiles of keys are their blocks.
inline int64_t TileKeys(const FlashAttentionShape& shape, int64_t asked, int64_t own) {
  if (shape.blocks.key_begin != nullptr) return kListBlock;
  return asked == 0 ? own : std::clamp<int64_t>(shape.k_len, 1, asked);
}

struct Range {
  int64_t begin;
  int64_t end;
};

// One head of an operand: row i is [head_dim].
template <typename Element>
struct Head {
  Head(const AttentionOperand& operand, int64_t b, int64_t h)
      : data(static_cast<Element*>(operand.data) + b * operand.batch_stride +
             h * operand.head_stride),
        stride(operand.seq_stride) {}
  Element* row(int64_t i) const { return data + i * stride; }

  Element* data;
  int64_t stride;
};

// tile[i, c] = factor * head[begin + i, c]; i < rows, c < d, then zeros to whole vectors.
template <typename Element, typename T>
void CopyTile(const Head<Element>& head, int64_t begin, int64_t rows, int64_t d, T factor, T* tile,
              int64_t stride) {
  for (int64_t i = 0; i < rows; ++i) {
    T* y = tile + i * stride;
    ScaleRow(d, factor, head.row(begin + i), y);
    std::fill(y + d, y + RoundUpToLanes<T>(d), T{0});
  }
}

// Asks for rows of a head that are copied next, while the processor computes.
template <typename Element>
void Prefetch(const Head<Element>& head, Range rows, int64_t d) {
  constexpr int64_t kLine = 64 / sizeof(Element);
  for (int64_t i = rows.begin; i < rows.end; ++i) {
    const Element* x = head.row(i);
    for (int64_t c = 0; c < d; c += kLine) __builtin_prefetch(x + c, /*rw=*/0, /*locality=*/2);
  }
}

// tile[c, i] = factor * head[begin + i, c]; c < d, i < rows, then zeros to whole vectors.
template <typename Element, typename T>
void CopyTileTransposed(const Head<Element>& head, int64_t begin, int64_t rows, int64_t d, T factor,
                        T* tile, int64_t stride) {
  CopyTransposed(head.row(begin), head.stride, rows, d, tile, stride,
                 [factor](Element x) { return factor * Read(x); });
  for (int64_t c = 0; c < d; ++c) {
    std::fill(tile + c * stride + rows, tile + c * stride + RoundUpToLanes<T>(rows), T{0});
  }
}

// head[begin + i, c] += factor * tile[i, c]; i < rows, c < d.
template <typename T>
void AddTile(const T* tile, int64_t stride, int64_t rows, int64_t d, T factor, const Head<T>& head,
             int64_t begin) {
  for (int64_t i = 0; i < rows; ++i) {
    const T* x = tile + i * stride;
    T* y = head.row(begin + i);
    for (int64_t c = 0; c < d; ++c) y[c] += factor * x[c];
  }
}

// Whether no element of a tile is infinite or NaN; rows of d elements, then zeros to whole vectors.
template <typename T>
bool AllFinite(const T* tile, int64_t stride, int64_t rows, int64_t d) {
  Vec<T> zeros = {};
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t c = 0; c < d; c += kLanes<T>) zeros += T{0} * Load(tile + i * stride + c);
  }
  return HorizontalSum<T>(zeros) == 0;
}

// Some blocks of a grid, by number, increasing.
struct BlockList {
  const int32_t* begin = nullptr;
  const int32_t* end = nullptr;

  // Returns the blocks of the list in [first, last).
  BlockList Within(int64_t first, int64_t last) const {
    return {std::lower_bound(begin, end, first), std::lower_bound(begin, end, last)};
  }
  bool empty() const { return begin == end; }
};

// A mask of lists, of one batch row.
class Blocks {
 public:
  Blocks(const FlashAttentionShape& shape, int64_t b)
      : lists_(shape.blocks),
        key_begin_(lists_.key_begin + b * lists_.key_stride),
        query_begin_(lists_.query_begin + b * lists_.query_stride) {}

  BlockList KeysOf(int64_t query_block) const {
    return {lists_.key_list + key_begin_[query_block],
            lists_.key_list + key_begin_[query_block + 1]};
  }
  BlockList QueriesOf(int64_t key_block) const {
    return {lists_.query_list + query_begin_[key_block],
            lists_.query_list + query_begin_[key_block + 1]};
  }

 private:
  const KeyBlocks lists_;
  const int32_t* const key_begin_;
  const int32_t* const query_begin_;
};

// The mask of one batch row, as ranges. With lists of blocks, or without a mask, every query sees
// every key. begin and end never decrease. So the keys that a range of queries sees are one range,
// and so are the queries that see some of a range of keys.
class Mask {
 public:
  Mask(const FlashAttentionShape& shape, int64_t b) : k_len_(shape.k_len) {
    if (shape.visible.begin == nullptr) return;
    begin_ = shape.visible.begin + b * shape.visible.batch_stride;
    end_ = shape.visible.end + b * shape.visible.batch_stride;
  }

  int64_t begin(int64_t i) const { return begin_ == nullptr ? 0 : begin_[i]; }
  int64_t end(int64_t i) const { return end_ == nullptr ? k_len_ : end_[i]; }

  // No query outside of the result, which lies in `queries`, sees a key of `keys`.
  Range Queries(Range queries, Range keys) const {
    const int64_t first = FirstQuery(queries, [&](int64_t i) { return end(i) > keys.begin; });
    const int64_t last = FirstQuery(queries, [&](int64_t i) { return begin(i) >= keys.end; });
    return {first, std::max(first, last)};
  }

  // Calls block(rows) for blocks of at most `most` of `queries`. They hold every query that sees a
  // key of `keys`, and begin and end with one. Queries between documents may see none.
  template <typename Block>
  void ForEachBlock(Range queries, Range keys, int64_t most, const Block& block) const {
    const Range near = Queries(queries, keys);
    const auto sees = [&](int64_t i) {
      return std::max<int64_t>(begin(i), keys.begin) < std::min<int64_t>(end(i), keys.end);
    };
    for (int64_t i = near.begin; i < near.end;) {
      if (!sees(i)) {
        ++i;
        continue;
      }
      Range rows = {i, std::min(i + most, near.end)};
      i = rows.end;
      while (!sees(rows.end - 1)) --rows.end;
      block(rows);
    }
  }

  // No query of `queries`, which is not empty, sees a key outside of the result, which lies in
  // `keys`.
  Range Keys(Range queries, Range keys) const {
    const int64_t first = std::clamp(begin(queries.begin), keys.begin, keys.end);
    return {first, std::clamp(end(queries.end - 1), first, keys.end)};
  }

  // Every query of `queries`, which is not empty, sees every key of `keys`.
  bool Full(Range queries, Range keys) const {
    return begin(queries.end - 1) <= keys.begin && keys.end <= end(queries.begin);
  }

 private:
  // The first query for which a predicate that only changes from false to true holds, or the end.
  template <typename Predicate>
  static int64_t FirstQuery(Range queries, Predicate predicate) {
    while (queries.begin < queries.end) {
      const int64_t middle = (queries.begin + queries.end) / 2;
      if (predicate(middle)) {
        queries.end = middle;
      } else {
        queries.begin = middle + 1;
      }
    }
    return queries.begin;
  }

  const int64_t k_len_;
  const int32_t* begin_ = nullptr;
  const int32_t* end_ = nullptr;
};

}  // namespace cpu
}  // namespace burst
