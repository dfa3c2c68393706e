#include "burst/mask/interval_parts.h"

#include <algorithm>

namespace burst {

void IntervalParts::BeginRow(int64_t row) {
  row_ = row;
  last_.assign(parts_.size(), KeyInterval());
}

bool IntervalParts::Add(int64_t query, const KeyIntervals& intervals) {
  if (static_cast<int64_t>(intervals.size()) > most_) return false;
  absl::InlinedVector<bool, 8> taken(parts_.size(), false);
  // Beginning with the last keys, each interval goes to the part whose keys are the nearest before
  // it. So intervals that move forward with the queries stay in one part, and intervals that stand
  // still in another.
  for (auto keys = intervals.rbegin(); keys != intervals.rend(); ++keys) {
    size_t best = parts_.size();
    for (size_t part = 0; part < parts_.size(); ++part) {
      if (taken[part] || last_[part].begin > keys->begin || last_[part].end > keys->end) continue;
      if (best == parts_.size() || last_[part].end > last_[best].end) best = part;
    }
    if (best == parts_.size()) {
      if (static_cast<int64_t>(parts_.size()) == most_) return false;
      parts_.emplace_back(rows_, q_len_);
      last_.emplace_back();
      taken.push_back(false);
    }
    taken[best] = true;
    last_[best] = *keys;
  }
  for (size_t part = 0; part < parts_.size(); ++part) {
    KeyInterval& last = last_[part];
    if (!taken[part]) last.begin = last.end = std::max(last.begin, last.end);
    parts_[part].begin[row_ * q_len_ + query] = static_cast<int32_t>(last.begin);
    parts_[part].end[row_ * q_len_ + query] = static_cast<int32_t>(last.end);
  }
  return true;
}

}  // namespace burst
