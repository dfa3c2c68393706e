#include "burst/kernels/gpu/sm90/mask_hints.h"

#include <algorithm>
#include <array>
#include <functional>
#include <queue>
#include <utility>

namespace burst {
namespace sm90 {

int64_t MostQueries(const KeyRanges& ranges, int64_t rows, int64_t q_len) {
  int64_t most = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t* const begins = ranges.begin + row * ranges.batch_stride;
    const int32_t* const ends = ranges.end + row * ranges.batch_stride;
    int64_t first = 0;  // the first query that sees the key begins[i]
    for (int64_t i = 0; i < q_len; ++i) {
      if (begins[i] >= ends[i]) continue;
      while (ends[first] <= begins[i]) ++first;
      most = std::max(most, i - first + 1);
    }
  }
  return most;
}

// Where dQ is accumulated in a fixed order, a key block adds to a query block after all key blocks
// before it in that query block's list. It should begin with query blocks that need no waiting, and
// among these with the ones that others will wait for soonest. To find them, we walk the key blocks
// at the pace of one query block a step while `kTogether` of them are at work. With fewer at work,
// no key block waits longer.
std::vector<int32_t> WalkOrder(const KeyBlocks& blocks, int64_t rows, int64_t queries,
                               int64_t keys) {
  constexpr int64_t kTogether = 64, kStart = 2;
  std::vector<int32_t> order(blocks.query_begin[(rows - 1) * blocks.query_stride + keys]);
  std::vector<int64_t> ready(queries);       // when the last key block so far has added to each
  std::vector<std::array<int64_t, 3>> left;  // of a key block: ready, next key block, position
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t* const key_begin = blocks.key_begin + row * blocks.key_stride;
    const int32_t* const query_begin = blocks.query_begin + row * blocks.query_stride;
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

}  // namespace sm90
}  // namespace burst
