#include "burst/mask/slices.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/mask/interval_parts.h"

namespace burst {
namespace {

using Positions = std::vector<int32_t>;

// The most parts of intervals into which a mask is divided before lists are tried.
constexpr int64_t kMostIntervals = 16;

// Returns the positions of the slice's keys that one of its queries, at position q, sees. They may
// be empty.
KeyInterval PositionsSeen(const MaskSlice& slice, int64_t q) {
  KeyInterval seen{slice.k_begin, slice.k_end};
  if (slice.kind == SliceKind::kCausal || slice.kind == SliceKind::kBand) {
    seen.end = slice.k_end - (slice.q_end - 1 - q);
  }
  if (slice.kind == SliceKind::kInverseCausal || slice.kind == SliceKind::kBand) {
    seen.begin = slice.k_begin + (q - slice.q_begin);
  }
  return seen;
}

// Converts an interval of positions into the indices of the block's tokens in it.
KeyInterval InBlock(const KeyInterval& positions, const Positions& block) {
  const auto size = static_cast<int64_t>(block.size());
  if (size == 0) return {0, 0};
  if (block.back() - block.front() == size - 1) {  // all tokens are neighbors
    return {std::clamp<int64_t>(positions.begin - block.front(), 0, size),
            std::clamp<int64_t>(positions.end - block.front(), 0, size)};
  }
  const auto first = block.begin(), last = block.end();
  return {std::lower_bound(first, last, positions.begin) - first,
          std::lower_bound(first, last, positions.end) - first};
}

// Sorts intervals and joins those that overlap or touch.
void Join(KeyIntervals* intervals) {
  std::sort(intervals->begin(), intervals->end(),
            [](const KeyInterval& a, const KeyInterval& b) { return a.begin < b.begin; });
  size_t count = 0;
  for (const KeyInterval keys : *intervals) {
    if (count == 0 || keys.begin > (*intervals)[count - 1].end) {
      (*intervals)[count++] = keys;
    } else {
      (*intervals)[count - 1].end = std::max((*intervals)[count - 1].end, keys.end);
    }
  }
  intervals->resize(count);
}

// Returns the intersection of two intervals.
KeyIntervals Intersection(const KeyIntervals& a, const KeyIntervals& b) {
  KeyIntervals both;
  for (auto x = a.begin(), y = b.begin(); x != a.end() && y != b.end();) {
    const int64_t begin = std::max(x->begin, y->begin), end = std::min(x->end, y->end);
    if (begin < end) both.push_back({begin, end});
    x->end < y->end ? ++x : ++y;
  }
  return both;
}

// Adds to `left` the keys that are in `keys` and not in `taken`.
void AddDifference(const KeyInterval& keys, const KeyIntervals& taken, KeyIntervals* left) {
  int64_t begin = keys.begin;
  auto next =
      std::upper_bound(taken.begin(), taken.end(), begin,
                       [](int64_t key, const KeyInterval& interval) { return key < interval.end; });
  for (; next != taken.end() && next->begin < keys.end; ++next) {
    if (begin < next->begin) left->push_back({begin, next->begin});
    begin = next->end;
  }
  if (begin < keys.end) left->push_back({begin, keys.end});
}

KeyIntervals Difference(const KeyIntervals& intervals, const KeyIntervals& taken) {
  KeyIntervals left;
  for (const KeyInterval& keys : intervals) AddDifference(keys, taken, &left);
  return left;
}

// Walks the slices of a batch row between a block of queries and a block of keys, from the first
// query to the last. Slices without diagonals show the same keys to a run of queries, so they are
// joined once for the run.
class RowWalk {
 public:
  RowWalk(const std::vector<MaskSlice>& slices, const Positions& q_positions,
          const Positions& k_positions)
      : q_positions_(q_positions), k_positions_(k_positions) {
    for (const MaskSlice& slice : slices) {
      const KeyInterval queries = InBlock({slice.q_begin, slice.q_end}, q_positions);
      const KeyInterval keys = InBlock({slice.k_begin, slice.k_end}, k_positions);
      if (queries.begin < queries.end && keys.begin < keys.end) {
        slices_.push_back({slice, queries.begin, queries.end, keys});
      }
    }
    std::sort(slices_.begin(), slices_.end(),
              [](const Slice& a, const Slice& b) { return a.q_begin < b.q_begin; });
  }

  // The queries [begin, end) see the keys `full` and the keys of the slices `others`, which have
  // diagonals.
  struct Run {
    int64_t begin, end;
    KeyIntervals full;
    std::vector<const MaskSlice*> others;
  };

  // Returns the queries from `begin` on that have the same slices, up to `limit`. Runs follow one
  // another.
  const Run& Next(int64_t begin, int64_t limit) {
    if (begin >= run_end_) Enter(begin);
    run_.begin = begin;
    run_.end = std::min(run_end_, limit);
    return run_;
  }

  // Adds the keys that a query sees by slices with diagonals.
  void AddOthers(const Run& run, int64_t query, const KeyIntervals& taken,
                 KeyIntervals* seen) const {
    for (const MaskSlice* slice : run.others) {
      const KeyInterval keys = InBlock(PositionsSeen(*slice, q_positions_[query]), k_positions_);
      if (keys.begin < keys.end) AddDifference(keys, taken, seen);
    }
    Join(seen);
  }

 private:
  struct Slice {
    MaskSlice slice;
    int64_t q_begin, q_end;  // numbers of the block's first query and of the query after its last
    KeyInterval keys;
  };

  void Enter(int64_t begin) {
    while (next_ < slices_.size() && slices_[next_].q_begin <= begin) {
      active_.push_back(&slices_[next_++]);
    }
    active_.erase(std::remove_if(active_.begin(), active_.end(),
                                 [=](const Slice* slice) { return slice->q_end <= begin; }),
                  active_.end());
    run_end_ =
        next_ < slices_.size() ? slices_[next_].q_begin : static_cast<int64_t>(q_positions_.size());
    run_.full.clear();
    run_.others.clear();
    for (const Slice* slice : active_) {
      run_end_ = std::min(run_end_, slice->q_end);
      if (slice->slice.kind == SliceKind::kFull) {
        run_.full.push_back(slice->keys);
      } else {
        run_.others.push_back(&slice->slice);
      }
    }
    Join(&run_.full);
  }

  const Positions &q_positions_, &k_positions_;
  std::vector<Slice> slices_;
  size_t next_ = 0;
  std::vector<const Slice*> active_;
  Run run_ = {};
  int64_t run_end_ = 0;
};

// Calls visit(i, intervals) for every query i, with the keys that it sees. It stops when visit
// returns false.
template <typename Visit>
bool ForEachQuery(RowWalk* walk, int64_t q_len, Visit visit) {
  for (int64_t begin = 0; begin < q_len;) {
    const RowWalk::Run& run = walk->Next(begin, q_len);
    for (int64_t i = run.begin; i < run.end; ++i) {
      if (run.others.empty()) {
        if (!visit(i, run.full)) return false;
        continue;
      }
      KeyIntervals seen = run.full;
      walk->AddOthers(run, i, /*taken=*/{}, &seen);
      if (!visit(i, seen)) return false;
    }
    begin = run.end;
  }
  return true;
}

// Returns the numbers of key blocks that are wholly in the intervals.
KeyIntervals WholeBlocks(const KeyIntervals& intervals, int64_t block, int64_t k_len) {
  KeyIntervals whole;
  for (const KeyInterval& keys : intervals) {
    const int64_t begin = (keys.begin + block - 1) / block;
    const int64_t end = (keys.end == k_len ? keys.end + block - 1 : keys.end) / block;
    if (begin < end) whole.push_back({begin, end});
  }
  return whole;
}
KeyIntervals KeysOf(KeyIntervals blocks, int64_t block, int64_t k_len) {
  for (KeyInterval& keys : blocks) {
    keys = {keys.begin * block, std::min(k_len, keys.end * block)};
  }
  return blocks;
}

// The keys that the queries of a block see. `whole` has the key blocks that all of the queries see
// whole. `rest` has all other keys that each query sees. The queries are runs of slices.
struct QueryBlock {
  KeyIntervals whole;
  std::vector<KeyIntervals> rest;
};

QueryBlock DivideQueryBlock(RowWalk* walk, int64_t begin, int64_t end, int64_t block,
                            int64_t k_len) {
  std::vector<RowWalk::Run> runs;
  for (int64_t i = begin; i < end; i = runs.back().end) runs.push_back(walk->Next(i, end));
  QueryBlock divided;
  divided.whole = WholeBlocks(runs[0].full, block, k_len);
  bool diagonals = !runs[0].others.empty();
  for (size_t n = 1; n < runs.size(); ++n) {
    divided.whole = Intersection(divided.whole, WholeBlocks(runs[n].full, block, k_len));
    diagonals |= !runs[n].others.empty();
  }
  // Slices with diagonals may complete more blocks. The blocks above are already known.
  const KeyIntervals taken = KeysOf(divided.whole, block, k_len);
  for (const RowWalk::Run& run : runs) {
    const KeyIntervals full = Difference(run.full, taken);
    for (int64_t i = run.begin; i < run.end; ++i) {
      divided.rest.push_back(full);
      if (!run.others.empty()) walk->AddOthers(run, i, taken, &divided.rest.back());
    }
  }
  if (!diagonals) return divided;
  KeyIntervals more = WholeBlocks(divided.rest[0], block, k_len);
  for (const KeyIntervals& rest : divided.rest) {
    if (more.empty()) return divided;
    more = Intersection(more, WholeBlocks(rest, block, k_len));
  }
  const KeyIntervals keys = KeysOf(more, block, k_len);
  for (KeyIntervals& rest : divided.rest) rest = Difference(rest, keys);
  divided.whole.insert(divided.whole.end(), more.begin(), more.end());
  Join(&divided.whole);
  return divided;
}

// Divides the mask into parts of intervals alone. Returns nullopt if there would be more than
// `most`.
std::optional<BlockMask> ByIntervals(const MaskSlices& slices, const Positions& q_positions,
                                     const Positions& k_positions, int64_t most) {
  const auto rows = static_cast<int64_t>(slices.size());
  const auto q_len = static_cast<int64_t>(q_positions.size());
  BlockMask mask{{VisibleKeys(rows, q_len)}};
  IntervalParts parts(rows, q_len, most, &mask.parts);
  for (int64_t row = 0; row < rows; ++row) {
    RowWalk walk(slices[row], q_positions, k_positions);
    parts.BeginRow(row);
    const bool fits = ForEachQuery(&walk, q_len, [&](int64_t query, const KeyIntervals& intervals) {
      return parts.Add(query, intervals);
    });
    if (!fits) return std::nullopt;
  }
  return mask;
}

// Divides the mask into lists for whole blocks, and up to `most` parts of intervals for the rest.
std::optional<BlockMask> ByBlocks(const MaskSlices& slices, const Positions& q_positions,
                                  const Positions& k_positions, int64_t block, int64_t most) {
  const auto rows = static_cast<int64_t>(slices.size());
  const auto q_len = static_cast<int64_t>(q_positions.size());
  const auto k_len = static_cast<int64_t>(k_positions.size());
  BlockMask mask{{}, VisibleBlocks(rows, q_len, k_len, block)};
  IntervalParts parts(rows, q_len, most, &mask.parts);
  for (int64_t row = 0; row < rows; ++row) {
    RowWalk walk(slices[row], q_positions, k_positions);
    parts.BeginRow(row);
    mask.blocks.BeginRow();
    for (int64_t begin = 0; begin < q_len; begin += block) {
      const int64_t end = std::min(q_len, begin + block);
      const QueryBlock divided = DivideQueryBlock(&walk, begin, end, block, k_len);
      for (const KeyInterval& run : divided.whole) {
        for (int64_t j = run.begin; j < run.end; ++j) {
          mask.blocks.key_list.push_back(static_cast<int32_t>(j));
        }
      }
      mask.blocks.EndQueryBlock();
      for (int64_t i = begin; i < end; ++i) {
        if (!parts.Add(i, divided.rest[i - begin])) return std::nullopt;
      }
    }
  }
  mask.blocks.Finish();
  return mask;
}

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

absl::Status CheckSlices(int64_t q_len, const MaskSlices& slices) {
  if (slices.empty()) {
    return absl::InvalidArgumentError("slices: must have at least one row; got none");
  }
  for (size_t row = 0; row < slices.size(); ++row) {
    for (const MaskSlice& slice : slices[row]) {
      if (slice.q_begin >= 0 && slice.q_begin < slice.q_end && slice.q_end <= q_len &&
          slice.k_begin < slice.k_end) {
        continue;
      }
      return absl::InvalidArgumentError(
          absl::StrCat("slices: must not be empty, with queries in [0, ", q_len, "); got queries [",
                       slice.q_begin, ", ", slice.q_end, ") and keys [", slice.k_begin, ", ",
                       slice.k_end, ") of row ", row));
    }
  }
  return absl::OkStatus();
}

BlockMask SlicesBetween(const MaskSlices& slices, const Positions& q_positions,
                        const Positions& k_positions, int64_t block) {
  const auto k_len = static_cast<int64_t>(k_positions.size());
  std::optional<BlockMask> mask = ByIntervals(slices, q_positions, k_positions, kMostIntervals);
  const auto calls = mask.has_value() ? static_cast<int64_t>(mask->parts.size())
                                      : std::numeric_limits<int64_t>::max();
  // The lists take a call, too.
  if (calls > 1) {
    std::optional<BlockMask> listed = ByBlocks(slices, q_positions, k_positions, block, calls - 2);
    if (listed.has_value()) mask = std::move(listed);
  }
  for (VisibleKeys& part : mask->parts) part.Count(k_len);
  return *std::move(mask);
}

bool AnySliceVisible(const MaskSlices& slices, const Positions& q_positions,
                     const Positions& k_positions) {
  for (const std::vector<MaskSlice>& row : slices) {
    for (const MaskSlice& slice : row) {
      auto q = std::lower_bound(q_positions.begin(), q_positions.end(), slice.q_begin);
      for (; q != q_positions.end() && *q < slice.q_end; ++q) {
        const KeyInterval keys = InBlock(PositionsSeen(slice, *q), k_positions);
        if (keys.begin < keys.end) return true;
        if (slice.kind == SliceKind::kFull) break;  // the other rows see the same
      }
    }
  }
  return false;
}

}  // namespace burst
