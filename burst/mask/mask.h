// Mask: which keys a query may see, in global positions of tokens. A value that never changes, and
// that knows nothing of ranks, devices or kernels.
#pragma once

#include <cstdint>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "burst/mask/block_mask.h"
#include "burst/mask/slices.h"

namespace burst {

// Packed documents: for each batch row the positions where a document starts, increasing. Position
// 0 always starts one. Empty: no boundaries.
using DocumentStarts = std::vector<std::vector<int32_t>>;

// The tokens at positions [begin, end) see one another, whatever else the mask says. Examples are
// an image in a causal text, the prompt of a prefix-LM, and a block of block-causal attention.
struct Span {
  int32_t begin = 0, end = 0;
};
// The spans of each batch row, increasing and disjoint. Empty: none.
using Spans = std::vector<std::vector<Span>>;

// A mask that shows one interval of positions to each query. A list of one row is for all rows.
struct IntervalMask {
  bool causal = false;  // a query at position q sees the keys at p <= q
  int64_t window = 0;   // and |q - p| < window; 0: no limit
  DocumentStarts documents = {};
  Spans spans = {};

  int64_t rows() const;
};

class Mask {
 public:
  static Mask Full();
  static Mask Causal();
  // A query at position q sees the keys at p with |q - p| < window and, if `causal`, p <= q. A
  // window of 0 sets no limit.
  static Mask SlidingWindow(int64_t window, bool causal = true);
  // A mask of any shape. It takes neither documents nor spans.
  static Mask Slices(MaskSlices slices);

  // A query sees keys of its own document only.
  Mask WithDocuments(DocumentStarts documents) const;
  bool HasWindow() const;
  // A query also sees keys that are farther away than the window.
  Mask WithoutWindow() const;
  // A query sees all keys of its span, each of which is within a document.
  Mask WithSpans(Spans spans) const;

  // InvalidArgument if the mask does not fit a sequence of `seqlen` tokens.
  absl::Status CheckForSequence(int64_t seqlen) const;
  // InvalidArgument if it does not fit queries of one sequence, of `q_len` tokens, and keys of
  // another. Only slices give an order to two sequences; other masks must be full.
  absl::Status CheckForTwoSequences(int64_t q_len) const;

  // Whether tokens may belong to different documents. Slices may separate documents, too.
  bool MaySeparateDocuments() const { return !intervals() || !intervals()->documents.empty(); }
  // Batch rows described; 1: the same mask for all.
  int64_t rows() const;
  // Null for slices.
  const IntervalMask* intervals() const { return std::get_if<IntervalMask>(&form_); }
  // Null for intervals.
  const MaskSlices* slices() const { return std::get_if<MaskSlices>(&form_); }

  // The part between a block of queries and a block of keys, given by their positions, increasing.
  // Masks of intervals become one part in O(queries + keys) for each row. Slices may become lists
  // of whole blocks, of `block` by `block`, where that takes fewer parts.
  BlockMask Between(const std::vector<int32_t>& queries, const std::vector<int32_t>& keys,
                    int64_t block) const;
  // Whether some query sees some key: !Between(...).none(), sooner.
  bool AnyVisible(const std::vector<int32_t>& queries, const std::vector<int32_t>& keys) const;

  // The mask of the first `tokens` tokens, which see no others: it must be causal, without spans or
  // slices.
  Mask Prefix(int64_t tokens) const;

 private:
  explicit Mask(IntervalMask mask) : form_(std::move(mask)) {}
  explicit Mask(MaskSlices slices) : form_(std::move(slices)) {}
  IntervalMask CopyIntervals() const;  // there must be no slices

  std::variant<IntervalMask, MaskSlices> form_;
};

}  // namespace burst
