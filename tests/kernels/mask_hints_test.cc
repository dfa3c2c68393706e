// Compares hints of masks for the Hopper kernels with counts by definition.
#include "burst/kernels/gpu/sm90/mask_hints.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

namespace burst {
namespace sm90 {
namespace {

TEST(MaskHintsTest, MostQueriesReachFromTheFirstThatSeesAKeyToTheLast) {
  std::mt19937 random(1);
  for (int n = 0; n < 200; ++n) {
    const int64_t rows = 1 + n % 3, q_len = n % 23;
    std::vector<int32_t> begin, end;
    int64_t most = 0;
    for (int64_t row = 0; row < rows; ++row) {
      int32_t from = 0, to = 0;
      std::vector<int64_t> first(1000, -1);  // the first query that sees each key
      for (int64_t i = 0; i < q_len; ++i) {
        from += static_cast<int32_t>(random() % 4);
        to = std::max(to, from + static_cast<int32_t>(random() % 12) - 3);
        begin.push_back(from);
        end.push_back(to);
        for (int32_t j = from; j < to; ++j) {
          if (first[j] < 0) first[j] = i;
          most = std::max(most, i - first[j] + 1);
        }
      }
    }
    EXPECT_EQ(MostQueries({begin.data(), end.data(), rows == 1 ? 0 : q_len}, rows, q_len), most);
  }
}

// There are two rows of lists. The walk orders the entries of each key block. A key block begins
// with a query block to which no earlier key block adds.
TEST(MaskHintsTest, TheWalkVisitsEveryBlockOnceAndStartsWhereNothingWaits) {
  // The key blocks that each query block sees, row 0 and then row 1.
  const std::vector<std::vector<int32_t>> seen = {{0, 1}, {1}, {0, 1, 2}, {2}, {}, {0, 2}};
  constexpr int64_t kRows = 2, kQueries = 3, kKeys = 3;
  std::vector<int32_t> key_begin, key_list, query_begin, query_list, place_list;
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t i = 0; i < kQueries; ++i) {
      key_begin.push_back(static_cast<int32_t>(key_list.size()));
      for (const int32_t j : seen[row * kQueries + i]) key_list.push_back(j);
    }
    key_begin.push_back(static_cast<int32_t>(key_list.size()));
    for (int32_t j = 0; j < kKeys; ++j) {
      query_begin.push_back(static_cast<int32_t>(query_list.size()));
      for (int32_t i = 0; i < kQueries; ++i) {
        const std::vector<int32_t>& of_query = seen[row * kQueries + i];
        const auto found = std::find(of_query.begin(), of_query.end(), j);
        if (found == of_query.end()) continue;
        query_list.push_back(i);
        place_list.push_back(static_cast<int32_t>(found - of_query.begin()));
      }
    }
    query_begin.push_back(static_cast<int32_t>(query_list.size()));
  }
  const std::vector<int32_t> order =
      WalkOrder({key_begin.data(), key_list.data(), query_begin.data(), query_list.data(),
                 place_list.data(), kQueries + 1, kKeys + 1},
                kRows, kQueries, kKeys);
  ASSERT_EQ(order.size(), query_list.size());
  for (int64_t row = 0; row < kRows; ++row) {
    const int32_t* const begin = query_begin.data() + row * (kKeys + 1);
    for (int64_t j = 0; j < kKeys; ++j) {
      std::vector<int32_t> own(order.begin() + begin[j], order.begin() + begin[j + 1]);
      std::sort(own.begin(), own.end());
      for (int32_t at = begin[j]; at < begin[j + 1]; ++at) EXPECT_EQ(own[at - begin[j]], at);
    }
  }
  EXPECT_EQ(query_list[order[query_begin[1]]], 1) << "query block 0 waits for key block 0";
}

}  // namespace
}  // namespace sm90
}  // namespace burst
