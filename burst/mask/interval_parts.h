// Intervals of keys, and their division into parts of one interval a query (VisibleKeys).
#pragma once

#include <cstdint>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "burst/mask/block_mask.h"

namespace burst {

struct KeyInterval {
  int64_t begin = 0, end = 0;  // begin < end
};

// Increasing, with gaps between.
using KeyIntervals = absl::InlinedVector<KeyInterval, 8>;

// Deals the intervals of queries to parts, such that neither begins nor ends of a part ever
// decrease; a new part where an interval fits into none.
class IntervalParts {
 public:
  // Adds to `parts`, up to `most` of them.
  IntervalParts(int64_t rows, int64_t q_len, int64_t most, std::vector<VisibleKeys>* parts)
      : rows_(rows), q_len_(q_len), most_(most), parts_(*parts) {}

  void BeginRow(int64_t row);
  // Queries come in order. False: it would take more parts; they are then good for nothing.
  bool Add(int64_t query, const KeyIntervals& intervals);

 private:
  const int64_t rows_, q_len_, most_;
  std::vector<VisibleKeys>& parts_;
  int64_t row_ = 0;
  std::vector<KeyInterval> last_;  // each part's interval for the previous query
};

}  // namespace burst
