#include "burst/mask/mask.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "burst/base/status.h"

namespace burst {
namespace {

using Positions = std::vector<int32_t>;

constexpr int64_t kInfinity = std::numeric_limits<int32_t>::max();

// Returns the list of a batch row, or null if there are none.
template <typename List>
const List* RowOf(const std::vector<List>& rows, int64_t row) {
  return rows.empty() ? nullptr : &rows[rows.size() == 1 ? 0 : row];
}

// Returns the positions that the query at position q sees, [first, second). `document` are the
// positions of its document, and `span` is the first span that ends after q; null: none.
std::pair<int64_t, int64_t> SeenBy(const IntervalMask& mask, int64_t q,
                                   const std::pair<int64_t, int64_t>& document, const Span* span) {
  auto [lower, upper] = document;
  if (mask.causal) upper = std::min(upper, q + 1);
  if (mask.window > 0) {
    const int64_t window = std::min(mask.window, kInfinity);
    lower = std::max(lower, q - window + 1);
    upper = std::min(upper, q + window);
  }
  if (span != nullptr && span->begin <= q) {
    lower = std::min(lower, std::max<int64_t>(span->begin, document.first));
    upper = std::max(upper, std::min<int64_t>(span->end, document.second));
  }
  return {lower, upper};
}

// Returns the same, and finds the document and the span of a batch row.
std::pair<int64_t, int64_t> SeenBy(const IntervalMask& mask, int64_t row, int64_t q) {
  std::pair<int64_t, int64_t> document = {0, kInfinity};
  if (const Positions* const starts = RowOf(mask.documents, row); starts != nullptr) {
    const auto next = std::upper_bound(starts->begin(), starts->end(), q);
    if (next != starts->begin()) document.first = *(next - 1);
    if (next != starts->end()) document.second = *next;
  }
  const Span* span = nullptr;
  if (const std::vector<Span>* const spans = RowOf(mask.spans, row); spans != nullptr) {
    const auto next = std::partition_point(spans->begin(), spans->end(),
                                           [&](const Span& other) { return other.end <= q; });
    if (next != spans->end()) span = &*next;
  }
  return SeenBy(mask, q, document, span);
}

// Calls visit(i, begin, end) for every query i, which sees the keys begin <= j < end of
// k_positions. The time is linear, because both bounds only move forward.
template <typename Visit>
void ForEachQuery(const IntervalMask& mask, int64_t row, const Positions& q_positions,
                  const Positions& k_positions, Visit visit) {
  const Positions* const document_starts = RowOf(mask.documents, row);
  const std::vector<Span>* const spans = RowOf(mask.spans, row);
  const int64_t k_len = static_cast<int64_t>(k_positions.size());
  int64_t begin = 0, end = 0;
  size_t next_document = 0, next_span = 0;
  std::pair<int64_t, int64_t> document = {0, kInfinity};
  for (size_t i = 0; i < q_positions.size(); ++i) {
    const int64_t q = q_positions[i];
    if (document_starts != nullptr) {
      while (next_document < document_starts->size() && (*document_starts)[next_document] <= q) {
        document.first = (*document_starts)[next_document++];
      }
      document.second =
          next_document < document_starts->size() ? (*document_starts)[next_document] : kInfinity;
    }
    const Span* span = nullptr;
    if (spans != nullptr) {
      while (next_span < spans->size() && (*spans)[next_span].end <= q) ++next_span;
      if (next_span < spans->size()) span = &(*spans)[next_span];
    }
    const auto [lower, upper] = SeenBy(mask, q, document, span);
    while (begin < k_len && k_positions[begin] < lower) ++begin;
    while (end < k_len && k_positions[end] < upper) ++end;
    visit(i, begin, end);
  }
}

VisibleKeys IntervalsBetween(const IntervalMask& mask, const Positions& q_positions,
                             const Positions& k_positions) {
  VisibleKeys visible(mask.rows(), static_cast<int64_t>(q_positions.size()));
  for (int64_t row = 0; row < visible.rows; ++row) {
    int32_t* const begins = visible.begin.data() + row * visible.q_len;
    int32_t* const ends = visible.end.data() + row * visible.q_len;
    ForEachQuery(mask, row, q_positions, k_positions, [&](int64_t i, int64_t begin, int64_t end) {
      begins[i] = static_cast<int32_t>(begin);
      ends[i] = static_cast<int32_t>(end);
    });
  }
  visible.Count(static_cast<int64_t>(k_positions.size()));
  return visible;
}

// A query's first key is found by bisection, and so is the next query that may see it.
bool AnyIntervalVisible(const IntervalMask& mask, const Positions& q_positions,
                        const Positions& k_positions) {
  for (int64_t row = 0; row < mask.rows(); ++row) {
    auto q = q_positions.begin();
    auto k = k_positions.begin();
    while (q != q_positions.end()) {
      const auto [lower, upper] = SeenBy(mask, row, *q);
      k = std::lower_bound(k, k_positions.end(), lower);
      if (k == k_positions.end()) break;
      if (*k < upper) return true;
      q = std::partition_point(q + 1, q_positions.end(), [&, row](int32_t other) {
        return SeenBy(mask, row, other).second <= *k;
      });
    }
  }
  return false;
}

absl::Status CheckDocuments(int64_t seqlen, const DocumentStarts& documents) {
  for (size_t row = 0; row < documents.size(); ++row) {
    const std::vector<int32_t>& starts = documents[row];
    for (size_t i = 0; i < starts.size(); ++i) {
      if (starts[i] >= 0 && starts[i] < seqlen && (i == 0 || starts[i] > starts[i - 1])) continue;
      return absl::InvalidArgumentError(absl::StrCat("documents: starts must increase within [0, ",
                                                     seqlen, "); got ", starts[i], " as number ", i,
                                                     " of row ", row));
    }
  }
  return absl::OkStatus();
}

// Returns the end of the row's first document that ends within a span, or -1.
int32_t DocumentEndWithin(const Span& span, const Positions& starts) {
  const auto next = std::upper_bound(starts.begin(), starts.end(), span.begin);
  return next == starts.end() || *next >= span.end ? -1 : *next;
}

absl::Status CheckSpans(int64_t seqlen, const DocumentStarts& documents, const Spans& spans) {
  if (documents.size() > 1 && spans.size() > 1 && documents.size() != spans.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("spans: must have one row, or those of documents, ", documents.size(),
                     "; got ", spans.size()));
  }
  for (size_t row = 0; row < spans.size(); ++row) {
    int32_t last = 0;
    for (const Span& span : spans[row]) {
      const std::string got = absl::StrCat("; got [", span.begin, ", ", span.end, ") of row ", row);
      if (span.begin < last || span.end <= span.begin || span.end > seqlen) {
        return absl::InvalidArgumentError(absl::StrCat(
            "spans: must not be empty, and must increase within [0, ", seqlen, ")", got));
      }
      last = span.end;
      for (size_t i = 0; i < documents.size(); ++i) {
        if (spans.size() > 1 && documents.size() > 1 && i != row) continue;
        const int32_t end = DocumentEndWithin(span, documents[i]);
        if (end < 0) continue;
        return absl::InvalidArgumentError(absl::StrCat("spans: must each be within a document", got,
                                                       ", whose document ends at ", end));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

int64_t IntervalMask::rows() const {
  return static_cast<int64_t>(std::max<size_t>({1, documents.size(), spans.size()}));
}

Mask Mask::Full() { return Mask(IntervalMask()); }

Mask Mask::Causal() { return SlidingWindow(0); }

Mask Mask::SlidingWindow(int64_t window, bool causal) { return Mask(IntervalMask{causal, window}); }

Mask Mask::Slices(MaskSlices slices) { return Mask(std::move(slices)); }

IntervalMask Mask::CopyIntervals() const {
  BURST_CHECK(intervals() != nullptr) << "slices are the whole mask";
  return *intervals();
}

Mask Mask::WithDocuments(DocumentStarts documents) const {
  IntervalMask mask = CopyIntervals();
  mask.documents = std::move(documents);
  return Mask(std::move(mask));
}

bool Mask::HasWindow() const { return intervals() != nullptr && intervals()->window > 0; }

Mask Mask::WithoutWindow() const {
  IntervalMask mask = CopyIntervals();
  mask.window = 0;
  return Mask(std::move(mask));
}

Mask Mask::WithSpans(Spans spans) const {
  IntervalMask mask = CopyIntervals();
  mask.spans = std::move(spans);
  return Mask(std::move(mask));
}

absl::Status Mask::CheckForSequence(int64_t seqlen) const {
  if (slices() != nullptr) return CheckSlices(seqlen, *slices());
  const IntervalMask& mask = *intervals();
  if (mask.window < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("window: must be at least 0; got ", mask.window));
  }
  BURST_RETURN_IF_ERROR(CheckDocuments(seqlen, mask.documents));
  return CheckSpans(seqlen, mask.documents, mask.spans);
}

absl::Status Mask::CheckForTwoSequences(int64_t q_len) const {
  if (slices() != nullptr) return CheckSlices(q_len, *slices());
  const IntervalMask& mask = *intervals();
  const char* const given = mask.causal               ? "a causal mask"
                            : mask.window != 0        ? "a window"
                            : !mask.documents.empty() ? "documents"
                            : !mask.spans.empty()     ? "spans"
                                                      : nullptr;
  if (given == nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("mask: must be full or of slices in cross-attention, whose two sequences have "
                   "no common order; "
                   "got ",
                   given));
}

int64_t Mask::rows() const {
  return slices() != nullptr ? static_cast<int64_t>(slices()->size()) : intervals()->rows();
}

BlockMask Mask::Between(const Positions& queries, const Positions& keys, int64_t block) const {
  if (slices() != nullptr) return SlicesBetween(*slices(), queries, keys, block);
  return {{IntervalsBetween(*intervals(), queries, keys)}};
}

bool Mask::AnyVisible(const Positions& queries, const Positions& keys) const {
  return slices() != nullptr ? AnySliceVisible(*slices(), queries, keys)
                             : AnyIntervalVisible(*intervals(), queries, keys);
}

Mask Mask::Prefix(int64_t tokens) const {
  IntervalMask mask = CopyIntervals();
  BURST_CHECK(mask.causal && mask.spans.empty());
  for (std::vector<int32_t>& starts : mask.documents) {
    starts.erase(std::lower_bound(starts.begin(), starts.end(), tokens), starts.end());
  }
  return Mask(std::move(mask));
}

}  // namespace burst
