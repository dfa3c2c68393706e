#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <queue>
#include <utility>
#include <vector>

#include "burst/attention/ring/interval_parts.h"
#include "burst/attention/ring/mask.h"
#include "burst/base/check.h"

namespace burst {
namespace {

// The order in which the thread blocks of a GPU take up the query blocks of a list, as positions in
// query_list. Where dQ is accumulated in a fixed order, a key block adds to a query block after all
// key blocks before it in that query block's list. It should begin with query blocks that need no
// waiting, and among these with the ones that others will wait for soonest. To find them, we walk
// the key blocks at the pace of one query block a step while `kTogether` of them are at work. With
// fewer at work, no key block waits longer.
std::vector<int32_t> WalkOrder(const VisibleBlocks& blocks) {
  constexpr int64_t kTogether = 64, kStart = 2;
  const int64_t queries = blocks.query_blocks(), keys = blocks.key_blocks();
  std::vector<int32_t> order(blocks.query_list.size());
  std::vector<int64_t> ready(queries);       // when the last key block so far has added to each
  std::vector<std::array<int64_t, 3>> left;  // of a key block: ready, next key block, position
  for (int64_t row = 0; row < blocks.rows; ++row) {
    const int32_t* const key_begin = blocks.key_begin.data() + row * (queries + 1);
    const int32_t* const query_begin = blocks.query_begin.data() + row * (keys + 1);
    std::fill(ready.begin(), ready.end(), 0);
    std::priority_queue<int64_t, std::vector<int64_t>, std::greater<>> free;
    for (int64_t n = 0; n < kTogether; ++n) free.push(0);
    for (int64_t j = 0; j < keys; ++j) {
      left.clear();
      for (int32_t at = query_begin[j]; at < query_begin[j + 1]; ++at) {
        const int32_t i = blocks.query_list[at];
        const int32_t next = key_begin[i] + blocks.place_list[at] + 1;
        left.push_back({ready[i], next < key_begin[i + 1] ? blocks.key_list[next] : keys, at});
      }
      std::sort(left.begin(), left.end());
      // Among the query blocks that are ready: the soonest next key block first.
      std::priority_queue<std::pair<int64_t, int64_t>, std::vector<std::pair<int64_t, int64_t>>,
                          std::greater<>>
          waiting;
      int64_t time = free.top() + kStart;
      free.pop();
      size_t seen = 0;
      for (int32_t to = query_begin[j]; to < query_begin[j + 1]; ++to) {
        if (waiting.empty()) time = std::max(time, left[seen][0]);
        for (; seen < left.size() && left[seen][0] <= time; ++seen) {
          waiting.push({left[seen][1], left[seen][2]});
        }
        order[to] = static_cast<int32_t>(waiting.top().second);
        waiting.pop();
        ready[blocks.query_list[order[to]]] = ++time;
      }
      free.push(time);
    }
  }
  return order;
}

}  // namespace

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
    // at[j + 1]: first how many see block j, then where its next one goes, at last its end.
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

KeyBlocks VisibleBlocks::lists(DeviceType device) const {
  BURST_CHECK_EQ(block, kListBlock);
  const int64_t key_stride = rows == 1 ? 0 : query_blocks() + 1;
  const int64_t query_stride = rows == 1 ? 0 : key_blocks() + 1;
  if (device == DeviceType::kCpu) {
    return {key_begin.data(),  key_list.data(), query_begin.data(), query_list.data(),
            place_list.data(), key_stride,      query_stride};
  }
  const auto starts = static_cast<int64_t>(key_begin.size() + query_begin.size());
  const auto count = static_cast<int64_t>(key_list.size());
  if (on_gpu.null()) {
    std::vector<int32_t> all;
    all.reserve(starts + 3 * count);
    for (const auto* part : {&key_begin, &query_begin, &key_list}) {
      all.insert(all.end(), part->begin(), part->end());
    }
    const std::vector<int32_t> order = WalkOrder(*this);
    for (const auto* list : {&query_list, &place_list}) {
      for (const int32_t at : order) all.push_back((*list)[at]);
    }
    on_gpu = Tensor::FromVector(all, {starts + 3 * count}, device);
  }
  const auto* const data = static_cast<const int32_t*>(on_gpu.raw_data());
  return {data,
          data + starts,
          data + key_begin.size(),
          data + starts + count,
          data + starts + 2 * count,
          key_stride,
          query_stride};
}

const std::vector<VisibleKeys>& VisibleBlocks::parts() const {
  if (!as_parts.empty() || none()) return as_parts;
  IntervalParts dealt(rows, q_len, /*most=*/std::numeric_limits<int64_t>::max(), &as_parts);
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
  for (VisibleKeys& part : as_parts) part.Count(k_len);
  return as_parts;
}

}  // namespace burst
