#include "burst/attention/ring/slices.h"

#include <algorithm>
#include <string>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"

namespace burst {
namespace {

using Positions = std::vector<int32_t>;

struct Interval {
  int64_t begin = 0, end = 0;  // of keys
};

// Of the slice, which holds query position q; may be empty.
Interval PositionsSeen(const MaskSlice& slice, int64_t q) {
  Interval seen{slice.k_begin, slice.k_end};
  if (slice.kind == SliceKind::kCausal || slice.kind == SliceKind::kBand) {
    seen.end = slice.k_end - (slice.q_end - 1 - q);
  }
  if (slice.kind == SliceKind::kInverseCausal || slice.kind == SliceKind::kBand) {
    seen.begin = slice.k_begin + (q - slice.q_begin);
  }
  return seen;
}

// Of positions: the keys of a block, by number.
Interval InBlock(const Interval& positions, const Positions& k_positions) {
  const auto first = k_positions.begin(), last = k_positions.end();
  return {std::lower_bound(first, last, positions.begin) - first,
          std::lower_bound(first, last, positions.end) - first};
}

using Intervals = absl::InlinedVector<Interval, 8>;

// Calls visit(i, intervals) for every query i: the keys that it sees, increasing, with gaps
// between.
template <typename Visit>
void ForEachQuery(std::vector<MaskSlice> slices, const Positions& q_positions,
                  const Positions& k_positions, Visit visit) {
  std::sort(slices.begin(), slices.end(),
            [](const MaskSlice& a, const MaskSlice& b) { return a.q_begin < b.q_begin; });
  std::vector<MaskSlice> active;
  size_t next = 0;
  for (size_t i = 0; i < q_positions.size(); ++i) {
    const int32_t q = q_positions[i];
    while (next < slices.size() && slices[next].q_begin <= q) active.push_back(slices[next++]);
    active.erase(std::remove_if(active.begin(), active.end(),
                                [q](const MaskSlice& slice) { return slice.q_end <= q; }),
                 active.end());
    Intervals seen;
    for (const MaskSlice& slice : active) {
      const Interval keys = InBlock(PositionsSeen(slice, q), k_positions);
      if (keys.begin < keys.end) seen.push_back(keys);
    }
    std::sort(seen.begin(), seen.end(),
              [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
    Intervals disjoint;
    for (const Interval& keys : seen) {
      if (disjoint.empty() || keys.begin > disjoint.back().end) {
        disjoint.push_back(keys);
      } else {
        disjoint.back().end = std::max(disjoint.back().end, keys.end);
      }
    }
    visit(static_cast<int64_t>(i), disjoint);
  }
}

// Deals the intervals of a batch row's queries to parts, such that neither begins nor ends of a
// part ever decrease; a new part where an interval fits into none.
class Parts {
 public:
  Parts(int64_t rows, int64_t q_len, std::vector<VisibleKeys>* parts)
      : rows_(rows), q_len_(q_len), parts_(*parts) {}

  void BeginRow(int64_t row) {
    row_ = row;
    last_.assign(parts_.size(), Interval());
  }

  void Add(int64_t query, const Intervals& intervals) {
    absl::InlinedVector<bool, 8> taken(parts_.size(), false);
    // From the last keys, each to the part whose keys are the nearest before: what moves forward
    // with the queries stays in its part, and what stands still in another.
    for (auto keys = intervals.rbegin(); keys != intervals.rend(); ++keys) {
      size_t best = parts_.size();
      for (size_t part = 0; part < parts_.size(); ++part) {
        if (taken[part] || last_[part].begin > keys->begin || last_[part].end > keys->end) continue;
        if (best == parts_.size() || last_[part].end > last_[best].end) best = part;
      }
      if (best == parts_.size()) {
        parts_.push_back(EmptyKeys(rows_, q_len_));
        last_.emplace_back();
        taken.push_back(false);
      }
      taken[best] = true;
      last_[best] = *keys;
    }
    for (size_t part = 0; part < parts_.size(); ++part) {
      Interval& last = last_[part];
      if (!taken[part]) last.begin = last.end = std::max(last.begin, last.end);
      parts_[part].begin[row_ * q_len_ + query] = static_cast<int32_t>(last.begin);
      parts_[part].end[row_ * q_len_ + query] = static_cast<int32_t>(last.end);
    }
  }

 private:
  const int64_t rows_, q_len_;
  std::vector<VisibleKeys>& parts_;
  int64_t row_ = 0;
  std::vector<Interval> last_;  // of each part, of the query before
};

}  // namespace

std::vector<MaskSlice> TreeSlices(int32_t prompt, const std::vector<int32_t>& answers) {
  std::vector<MaskSlice> slices = {{0, prompt, 0, prompt, SliceKind::kCausal}};
  int32_t begin = prompt;
  for (const int32_t answer : answers) {
    const int32_t end = begin + answer;
    slices.push_back({begin, end, 0, prompt, SliceKind::kFull});
    slices.push_back({begin, end, begin, end, SliceKind::kCausal});
    begin = end;
  }
  slices.erase(std::remove_if(slices.begin(), slices.end(),
                              [](const MaskSlice& slice) {
                                return slice.q_begin == slice.q_end || slice.k_begin == slice.k_end;
                              }),
               slices.end());
  return slices;
}

std::vector<MaskSlice> WindowWithGlobalTokens(int32_t seqlen, int32_t window,
                                              const std::vector<int32_t>& global, bool causal) {
  window = std::min(window, seqlen);  // no two tokens are farther apart
  const int32_t after = causal ? 0 : window - 1;
  std::vector<MaskSlice> slices = {{0, seqlen, 1 - window, seqlen + after, SliceKind::kBand}};
  for (size_t i = 0; i < global.size();) {
    const int32_t begin = global[i];
    int32_t end = begin;
    while (i < global.size() && global[i] == end) ++i, ++end;
    if (causal) {
      slices.push_back({begin, end, begin, end, SliceKind::kCausal});
      if (end < seqlen) slices.push_back({end, seqlen, begin, end, SliceKind::kFull});
      if (begin > 0) slices.push_back({begin, end, 0, begin, SliceKind::kFull});
    } else {
      slices.push_back({0, seqlen, begin, end, SliceKind::kFull});
      slices.push_back({begin, end, 0, seqlen, SliceKind::kFull});
    }
  }
  return slices;
}

std::vector<MaskSlice> BlockSlices(int32_t seqlen, int32_t size,
                                   const std::vector<std::vector<int32_t>>& key_blocks,
                                   bool causal) {
  std::vector<MaskSlice> slices;
  for (int32_t i = 0; i < static_cast<int32_t>(key_blocks.size()); ++i) {
    const int32_t q_begin = i * size, q_end = std::min(seqlen, q_begin + size);
    for (const int32_t block : key_blocks[i]) {
      const int32_t k_begin = block * size, k_end = std::min(seqlen, k_begin + size);
      const bool diagonal = causal && block == i;
      slices.push_back(
          {q_begin, q_end, k_begin, k_end, diagonal ? SliceKind::kCausal : SliceKind::kFull});
    }
  }
  return slices;
}

absl::Status CheckSlices(int64_t seqlen, const MaskSlices& slices) {
  if (slices.empty()) return absl::InvalidArgumentError("slices are given, but of no rows");
  for (size_t row = 0; row < slices.size(); ++row) {
    for (const MaskSlice& slice : slices[row]) {
      if (slice.q_begin >= 0 && slice.q_begin < slice.q_end && slice.q_end <= seqlen &&
          slice.k_begin < slice.k_end) {
        continue;
      }
      return absl::InvalidArgumentError(
          absl::StrCat("slice of queries [", slice.q_begin, ", ", slice.q_end, ") and keys [",
                       slice.k_begin, ", ", slice.k_end, ") of row ", row,
                       " is empty or beyond the sequence of ", seqlen, " tokens"));
    }
  }
  return absl::OkStatus();
}

BlockMask ComputeVisibleKeys(const MaskSlices& slices, const Positions& q_positions,
                             const Positions& k_positions) {
  const auto rows = static_cast<int64_t>(slices.size());
  const auto q_len = static_cast<int64_t>(q_positions.size());
  BlockMask mask{{EmptyKeys(rows, q_len)}};
  Parts parts(rows, q_len, &mask.parts);
  for (int64_t row = 0; row < rows; ++row) {
    parts.BeginRow(row);
    ForEachQuery(slices[row], q_positions, k_positions,
                 [&](int64_t query, const Intervals& intervals) { parts.Add(query, intervals); });
  }
  for (VisibleKeys& part : mask.parts) part.Count(static_cast<int64_t>(k_positions.size()));
  return mask;
}

bool SeesAny(const MaskSlices& slices, const Positions& q_positions, const Positions& k_positions) {
  for (const std::vector<MaskSlice>& row : slices) {
    for (const MaskSlice& slice : row) {
      auto q = std::lower_bound(q_positions.begin(), q_positions.end(), slice.q_begin);
      for (; q != q_positions.end() && *q < slice.q_end; ++q) {
        const Interval keys = InBlock(PositionsSeen(slice, *q), k_positions);
        if (keys.begin < keys.end) return true;
        if (slice.kind == SliceKind::kFull) break;  // the others see the same
      }
    }
  }
  return false;
}

}  // namespace burst
