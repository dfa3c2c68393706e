#include "burst/attention/ring/mask.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"

namespace burst {
namespace {

using Positions = std::vector<int32_t>;

constexpr int64_t kInfinity = std::numeric_limits<int32_t>::max();

// The mask of a batch row. Null: no documents, no spans.
struct RowMask {
  const AttentionMask& mask;
  const Positions* document_starts;
  const std::vector<Span>* spans;

  RowMask(const AttentionMask& mask, const DocumentStarts& documents, const Spans& spans,
          int64_t row)
      : mask(mask), document_starts(Row(documents, row)), spans(Row(spans, row)) {}

 private:
  template <typename List>
  static const List* Row(const std::vector<List>& rows, int64_t row) {
    return rows.empty() ? nullptr : &rows[rows.size() == 1 ? 0 : row];
  }
};

// Calls visit(i, begin, end) for every query i: it sees the keys begin <= j < end of k_positions.
// Stops when visit returns false. Linear, because both bounds only move forward.
template <typename Visit>
void ForEachQuery(const RowMask& row, const Positions& q_positions, const Positions& k_positions,
                  Visit visit) {
  const AttentionMask& mask = row.mask;
  const Positions* const document_starts = row.document_starts;
  const int64_t k_len = static_cast<int64_t>(k_positions.size());
  const int64_t window = std::min(mask.window, kInfinity);
  int64_t begin = 0, end = 0;
  size_t next_document = 0, next_span = 0;
  int64_t document_begin = 0, document_end = kInfinity;
  for (size_t i = 0; i < q_positions.size(); ++i) {
    const int64_t q = q_positions[i];
    if (document_starts != nullptr) {
      while (next_document < document_starts->size() && (*document_starts)[next_document] <= q) {
        document_begin = (*document_starts)[next_document++];
      }
      document_end =
          next_document < document_starts->size() ? (*document_starts)[next_document] : kInfinity;
    }
    int64_t lower = document_begin, upper = document_end;  // visible positions: lower <= p < upper
    if (mask.causal) upper = std::min(upper, q + 1);
    if (window > 0) {
      lower = std::max(lower, q - window + 1);
      upper = std::min(upper, q + window);
    }
    if (row.spans != nullptr) {
      const std::vector<Span>& spans = *row.spans;
      while (next_span < spans.size() && spans[next_span].end <= q) ++next_span;
      if (next_span < spans.size() && spans[next_span].begin <= q) {
        lower = std::min(lower, std::max<int64_t>(spans[next_span].begin, document_begin));
        upper = std::max(upper, std::min<int64_t>(spans[next_span].end, document_end));
      }
    }
    while (begin < k_len && k_positions[begin] < lower) ++begin;
    while (end < k_len && k_positions[end] < upper) ++end;
    if (!visit(i, begin, end)) return;
  }
}

}  // namespace

absl::Status CheckDocuments(int64_t seqlen, const DocumentStarts& documents) {
  for (const std::vector<int32_t>& starts : documents) {
    for (size_t i = 0; i < starts.size(); ++i) {
      if (starts[i] < 0 || starts[i] >= seqlen || (i > 0 && starts[i] <= starts[i - 1])) {
        return absl::InvalidArgumentError(
            absl::StrCat("document start ", starts[i], " (number ", i,
                         ") is out of order or beyond the sequence of ", seqlen, " tokens"));
      }
    }
  }
  return absl::OkStatus();
}

int64_t NumRows(const DocumentStarts& documents, const Spans& spans) {
  return static_cast<int64_t>(std::max<size_t>({1, documents.size(), spans.size()}));
}

KeyRanges VisibleKeys::ranges(DeviceType device) const {
  if (all) return {};
  const int64_t batch_stride = rows == 1 ? 0 : q_len;
  if (device == DeviceType::kCpu) return {begin.data(), end.data(), batch_stride, most_queries};
  if (on_gpu.null()) {
    std::vector<int32_t> both = begin;
    both.insert(both.end(), end.begin(), end.end());
    on_gpu = Tensor::FromVector(both, {2, rows, q_len}, device);
  }
  const auto* data = static_cast<const int32_t*>(on_gpu.raw_data());
  return {data, data + rows * q_len, batch_stride, most_queries};
}

VisibleKeys EmptyKeys(int64_t rows, int64_t q_len) {
  VisibleKeys keys;
  keys.rows = rows;
  keys.q_len = q_len;
  keys.begin.resize(rows * q_len);
  keys.end.resize(rows * q_len);
  return keys;
}

void VisibleKeys::Count(int64_t k_len) {
  pairs = seeing = most_queries = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t* const begins = begin.data() + row * q_len;
    const int32_t* const ends = end.data() + row * q_len;
    int64_t first = 0;  // query that sees the key begins[i]
    for (int64_t i = 0; i < q_len; ++i) {
      if (begins[i] >= ends[i]) continue;
      pairs += ends[i] - begins[i];
      ++seeing;
      while (ends[first] <= begins[i]) ++first;
      most_queries = std::max(most_queries, i - first + 1);
    }
  }
  all = pairs == rows * q_len * k_len;
}

int64_t BlockMask::pairs() const {
  int64_t sum = blocks.pairs;
  for (const VisibleKeys& part : parts) sum += part.pairs;
  return sum;
}

VisibleKeys ComputeVisibleKeys(const AttentionMask& mask, const DocumentStarts& documents,
                               const Spans& spans, const Positions& q_positions,
                               const Positions& k_positions) {
  VisibleKeys visible =
      EmptyKeys(NumRows(documents, spans), static_cast<int64_t>(q_positions.size()));
  for (int64_t row = 0; row < visible.rows; ++row) {
    int32_t* const begins = visible.begin.data() + row * visible.q_len;
    int32_t* const ends = visible.end.data() + row * visible.q_len;
    ForEachQuery(RowMask(mask, documents, spans, row), q_positions, k_positions,
                 [&](int64_t i, int64_t begin, int64_t end) {
                   begins[i] = static_cast<int32_t>(begin);
                   ends[i] = static_cast<int32_t>(end);
                   return true;
                 });
  }
  visible.Count(static_cast<int64_t>(k_positions.size()));
  return visible;
}

bool SeesAny(const AttentionMask& mask, const DocumentStarts& documents, const Spans& spans,
             const Positions& q_positions, const Positions& k_positions) {
  bool any = false;
  for (int64_t row = 0; row < NumRows(documents, spans) && !any; ++row) {
    ForEachQuery(RowMask(mask, documents, spans, row), q_positions, k_positions,
                 [&](int64_t, int64_t begin, int64_t end) {
                   any = begin < end;
                   return !any;
                 });
  }
  return any;
}

}  // namespace burst
