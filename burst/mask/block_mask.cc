#include "burst/mask/block_mask.h"

#include <algorithm>
#include <limits>

#include "burst/base/check.h"
#include "burst/mask/interval_parts.h"

namespace burst {

VisibleKeys::VisibleKeys(int64_t rows, int64_t q_len)
    : begin(rows * q_len), end(rows * q_len), rows(rows), q_len(q_len) {}

void VisibleKeys::Count(int64_t k_len) {
  pairs = 0;
  for (size_t i = 0; i < begin.size(); ++i) {
    if (begin[i] < end[i]) pairs += end[i] - begin[i];
  }
  all = pairs == rows * q_len * k_len;
}

int64_t BlockMask::pairs() const {
  int64_t sum = blocks.pairs;
  for (const VisibleKeys& part : parts) sum += part.pairs;
  return sum;
}

VisibleBlocks::VisibleBlocks(int64_t rows, int64_t q_len, int64_t k_len, int64_t block)
    : rows(rows), q_len(q_len), k_len(k_len), block(block) {
  key_begin.reserve(rows * (query_blocks() + 1));
}

void VisibleBlocks::BeginRow() { key_begin.push_back(static_cast<int32_t>(key_list.size())); }

void VisibleBlocks::EndQueryBlock() {
  BURST_CHECK(key_list.size() < std::numeric_limits<int32_t>::max() / 4) << "too many blocks";
  key_begin.push_back(static_cast<int32_t>(key_list.size()));
}

void VisibleBlocks::Finish() {
  const int64_t queries = query_blocks(), keys = key_blocks();
  query_begin.assign(rows * (keys + 1), 0);
  query_list.resize(key_list.size());
  place_list.resize(key_list.size());
  pairs = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t* const begin = key_begin.data() + row * (queries + 1);
    int32_t* const at = query_begin.data() + row * (keys + 1);
    // at[j + 1] is first the number of blocks that see block j, then the place of its next one, and
    // at last its end.
    for (int32_t e = begin[0]; e < begin[queries]; ++e) ++at[key_list[e] + 1];
    int32_t sum = at[0] = begin[0];
    for (int64_t j = 0; j < keys; ++j) {
      const int32_t count = at[j + 1];
      at[j + 1] = sum;
      sum += count;
    }
    for (int64_t i = 0; i < queries; ++i) {
      const int64_t height = std::min(block, q_len - i * block);
      for (int32_t e = begin[i]; e < begin[i + 1]; ++e) {
        const int32_t to = at[key_list[e] + 1]++;
        query_list[to] = static_cast<int32_t>(i);
        place_list[to] = e - begin[i];
        pairs += height * std::min(block, k_len - key_list[e] * block);
      }
    }
  }
}

std::vector<VisibleKeys> VisibleBlocks::AsIntervals() const {
  std::vector<VisibleKeys> parts;
  if (none()) return parts;
  IntervalParts dealt(rows, q_len, /*most=*/std::numeric_limits<int64_t>::max(), &parts);
  for (int64_t row = 0; row < rows; ++row) {
    dealt.BeginRow(row);
    const int32_t* const begin = key_begin.data() + row * (query_blocks() + 1);
    for (int64_t i = 0; i < query_blocks(); ++i) {
      KeyIntervals intervals;
      for (int32_t e = begin[i]; e < begin[i + 1]; ++e) {
        const int64_t first = key_list[e] * block, end = std::min(k_len, first + block);
        if (!intervals.empty() && intervals.back().end == first) {
          intervals.back().end = end;
        } else {
          intervals.push_back({first, end});
        }
      }
      for (int64_t q = i * block; q < std::min(q_len, (i + 1) * block); ++q) {
        dealt.Add(q, intervals);
      }
    }
  }
  for (VisibleKeys& part : parts) part.Count(k_len);
  return parts;
}

}  // namespace burst
