// Defines masks pair by pair.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "burst/mask/mask.h"

namespace burst {

inline Mask MaskOf(const IntervalMask& mask) {
  return Mask::SlidingWindow(mask.window, mask.causal)
      .WithDocuments(mask.documents)
      .WithSpans(mask.spans);
}

// Returns the row's list, or the only list; null if there are none.
template <typename List>
const List* RowOf(const std::vector<List>& rows, int64_t row) {
  return rows.empty() ? nullptr : &rows[rows.size() == 1 ? 0 : row];
}

// Returns whether a query sees a key, by the positions of both in their sequences.
inline bool Visible(const IntervalMask& mask, int64_t row, int64_t q, int64_t k) {
  if (const auto* const spans = RowOf(mask.spans, row); spans != nullptr) {
    for (const Span& span : *spans) {
      if (span.begin <= std::min(q, k) && std::max(q, k) < span.end) return true;
    }
  }
  if (mask.causal && k > q) return false;
  if (mask.window > 0 && std::abs(q - k) >= mask.window) return false;
  if (const auto* const starts = RowOf(mask.documents, row); starts != nullptr) {
    for (int32_t start : *starts) {
      if ((q < start) != (k < start)) return false;
    }
  }
  return true;
}

inline bool Visible(const MaskSlice& s, int64_t q, int64_t k) {
  if (q < s.q_begin || q >= s.q_end || k < s.k_begin || k >= s.k_end) return false;
  const bool causal = k - s.k_end <= q - s.q_end, inverse = k - s.k_begin >= q - s.q_begin;
  return (causal || s.kind == SliceKind::kFull || s.kind == SliceKind::kInverseCausal) &&
         (inverse || s.kind == SliceKind::kFull || s.kind == SliceKind::kCausal);
}

inline bool Visible(const MaskSlices& slices, int64_t row, int64_t q, int64_t k) {
  const std::vector<MaskSlice>& of_row = *RowOf(slices, row);
  return std::any_of(of_row.begin(), of_row.end(),
                     [&](const MaskSlice& slice) { return Visible(slice, q, k); });
}

}  // namespace burst
