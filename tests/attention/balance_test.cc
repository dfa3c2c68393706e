// Tests the layout "balanced". Ranks have every token once and equal numbers of tokens. The work of
// a rank is counted pair by pair from its schedule.

#include "burst/sequence/balance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <utility>

#include "burst/attention/ring/schedule.h"

namespace burst {
namespace {

// Returns lengths from a log-normal distribution, most of them short. A length is exp of a normal
// of mean log(median) and deviation `spread`, at most `longest`.
std::vector<int32_t> LongTailed(int64_t seqlen, double median, double spread, int64_t longest,
                                unsigned seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> starts;
  for (int64_t at = 0; at < seqlen;) {
    starts.push_back(static_cast<int32_t>(at));
    // This is Box and Muller's method, because std::normal_distribution differs between libraries.
    const double a = (random() + 1.0) / 4294967297.0, b = random() / 4294967296.0;
    const double normal = std::sqrt(-2 * std::log(a)) * std::cos(2 * M_PI * b);
    const auto length = static_cast<int64_t>(median * std::exp(spread * normal));
    at += std::clamp<int64_t>(length, 1, longest);
  }
  return starts;
}

std::vector<RingSchedule> Schedules(const std::vector<std::vector<int32_t>>& positions,
                                    const Mask& mask) {
  std::vector<RingSchedule> schedules;
  const auto ranks = static_cast<int>(positions.size());
  for (int rank = 0; rank < ranks; ++rank) {
    schedules.push_back(*RingSchedule::Create(*TokenShard::Create(rank, ranks, positions), mask));
  }
  return schedules;
}

std::vector<std::vector<int32_t>> InLayout(Layout layout, int64_t seqlen, int ranks) {
  std::vector<std::vector<int32_t>> positions;
  for (int rank = 0; rank < ranks; ++rank) {
    positions.push_back(LocalPositions(layout, seqlen, rank, ranks));
  }
  return positions;
}

// Returns the busiest rank's pairs divided by the mean.
double Busiest(const std::vector<RingSchedule>& schedules) {
  int64_t sum = 0, most = 0;
  for (const RingSchedule& schedule : schedules) {
    int64_t pairs = 0;
    for (size_t source = 0; source < schedules.size(); ++source) {
      pairs += schedule.for_keys_of(static_cast<int>(source)).pairs();
    }
    sum += pairs;
    most = std::max(most, pairs);
  }
  return static_cast<double>(most) * static_cast<double>(schedules.size()) /
         static_cast<double>(sum);
}

// Returns the time of a division by balance.cc's factors, in pairs. Everything is counted in the
// schedules.
double Cost(const std::vector<RingSchedule>& schedules) {
  double most = 0;
  for (size_t rank = 0; rank < schedules.size(); ++rank) {
    double cost = 0;
    for (size_t source = 0; source < schedules.size(); ++source) {
      const auto pairs = schedules[rank].for_keys_of(static_cast<int>(source)).pairs();
      cost += (source == rank ? 1 : 1.5) * static_cast<double>(pairs);
    }
    most = std::max(most, cost);
  }
  const auto sent = static_cast<double>(schedules[0].kv_route().block_tokens.total());
  return most + 300 * sent / static_cast<double>(schedules.size());
}

TEST(Balance, EveryTokenIsOnOneRankAndRanksHaveEquallyMany) {
  for (const int64_t seqlen : {1, 2, 7, 64, 333, 1000}) {
    for (const int ranks : {1, 2, 3, 5, 8}) {
      for (unsigned seed = 0; seed < 20; ++seed) {
        DocumentStarts documents;
        for (unsigned row = 0; row < 1 + seed % 3; ++row) {
          documents.push_back(LongTailed(seqlen, 1 + seed, 2, seqlen, 100 * row + seed));
          if (seed % 5 == 4) documents.back().clear();
        }
        const Mask mask = Mask::SlidingWindow(seed % 4 < 2 ? 0 : 1 + seed, /*causal=*/seed % 2 == 0)
                              .WithDocuments(documents);
        const auto positions = BalancedPositions(mask, seqlen, ranks);
        EXPECT_EQ(positions, BalancedPositions(mask, seqlen, ranks));
        ASSERT_EQ(positions.size(), static_cast<size_t>(ranks));
        std::set<int32_t> all;
        for (int rank = 0; rank < ranks; ++rank) {
          const std::vector<int32_t>& own = positions[rank];
          EXPECT_EQ(static_cast<int64_t>(own.size()),
                    LocalLength(Layout::kBalanced, seqlen, rank, ranks));
          EXPECT_EQ(std::adjacent_find(own.begin(), own.end(), std::greater_equal<>()), own.end());
          all.insert(own.begin(), own.end());
        }
        ASSERT_EQ(static_cast<int64_t>(all.size()), seqlen);
        EXPECT_TRUE(*all.begin() == 0 && *all.rbegin() == seqlen - 1);
      }
    }
  }
}

TEST(Balance, WithoutDocumentsItIsZigzag) {
  for (const DocumentStarts& documents :
       {DocumentStarts{}, DocumentStarts{{}}, DocumentStarts{{0}}}) {
    for (const int ranks : {1, 3, 4}) {
      EXPECT_EQ(BalancedPositions(Mask::Causal().WithDocuments(documents), 100, ranks),
                InLayout(Layout::kZigzag, 100, ranks));
    }
  }
}

// Sequences have 8 and 128 thousand tokens. The longest document has at most a quarter of them, or
// any length. The busiest rank's work is within 5 % of the mean. The cost is at most that of any
// other layout that is as balanced. One percent more is for the estimate of the tokens sent.
TEST(Balance, TheBusiestRankIsWithinFivePercentOfTheMean) {
  for (const int64_t seqlen : {8192, 131072}) {
    for (const int ranks : {2, 3, 4, 8}) {
      for (const int64_t longest : {seqlen / 4, seqlen}) {
        for (unsigned seed = 0; seed < 4; ++seed) {
          for (const auto& [window, causal] : {std::pair(0, true), std::pair(700, true),
                                               std::pair(0, false), std::pair(300, false)}) {
            SCOPED_TRACE(testing::Message()
                         << seqlen << " tokens, " << ranks << " ranks, longest " << longest
                         << ", seed " << seed << ", window " << window);
            const Mask mask =
                Mask::SlidingWindow(window, causal)
                    .WithDocuments({LongTailed(seqlen, static_cast<double>(seqlen) / 200, 1.5,
                                               longest, seed)});
            const auto balanced = Schedules(BalancedPositions(mask, seqlen, ranks), mask);
            EXPECT_LE(Busiest(balanced), 1.05);
            int64_t most = 0;
            for (size_t rank = 0; rank < balanced.size(); ++rank) {
              int64_t pairs = 0;
              for (size_t source = 0; source < balanced.size(); ++source) {
                pairs += balanced[rank].for_keys_of(static_cast<int>(source)).pairs();
              }
              most = std::max(most, pairs);
            }
            EXPECT_EQ(balanced[0].busiest_by_queries(), most);
            const double cost = Cost(balanced);
            for (const Layout layout : {Layout::kZigzag, Layout::kStriped, Layout::kContiguous}) {
              const auto others = Schedules(InLayout(layout, seqlen, ranks), mask);
              if (Busiest(others) > 1.05) continue;
              EXPECT_LE(cost, 1.01 * Cost(others)) << Name(layout);
            }
          }
        }
      }
    }
  }
}

// A document with more work than a rank's share is cut near its end. The rank of its last tokens
// then computes few pairs with keys of the other rank.
TEST(Balance, ALongDocumentKeepsMostOfItsTokensTogether) {
  std::vector<int32_t> starts;
  int32_t at = 0;
  for (const int32_t length : {3535, 4502, 565, 162, 99, 536, 110, 59, 690, 625, 1162, 129, 515,
                               464, 53, 1147, 828, 1203}) {
    starts.push_back(at);
    at += length;
  }
  const Mask mask = Mask::Causal().WithDocuments({starts});
  const auto schedules = Schedules(BalancedPositions(mask, at, 2), mask);
  const int64_t elsewhere =
      schedules[0].for_keys_of(1).pairs() + schedules[1].for_keys_of(0).pairs();
  const int64_t here = schedules[0].for_keys_of(0).pairs() + schedules[1].for_keys_of(1).pairs();
  EXPECT_LE(Busiest(schedules), 1.05);
  EXPECT_LT(elsewhere, (elsewhere + here) / 16);  // in zigzag it would be a quarter
  // The cut fills both ranks, so that no short document is cut.
  EXPECT_EQ(schedules[0].for_keys_of(1).pairs() == 0, schedules[1].for_keys_of(0).pairs() != 0);
  // Queries are dealt by their work, and the keys of the long document have more.
  EXPECT_GT(schedules[0].busiest_by_keys(), 1.1 * schedules[0].busiest_by_queries());
}

// Rows with different documents share one division, by chunks.
TEST(Balance, SeveralRows) {
  const int64_t seqlen = 16384;
  for (const int ranks : {2, 4, 8}) {
    for (unsigned seed = 0; seed < 4; ++seed) {
      DocumentStarts documents;
      for (unsigned row = 0; row < 4; ++row) {
        documents.push_back(LongTailed(seqlen, 200, 1.5, seqlen, 10 * row + seed));
      }
      const Mask mask = Mask::Causal().WithDocuments(documents);
      EXPECT_LE(Busiest(Schedules(BalancedPositions(mask, seqlen, ranks), mask)), 1.05);
    }
  }
}

// If the number of documents of equal lengths is a multiple of the ranks, nothing is sent.
TEST(Balance, DocumentsThatFitAreNotSent) {
  for (const int ranks : {2, 4, 8}) {
    for (const int64_t of_a_rank : {1, 3}) {
      const int64_t length = 50, seqlen = length * of_a_rank * ranks;
      DocumentStarts documents(1);
      for (int64_t at = 0; at < seqlen; at += length) {
        documents[0].push_back(static_cast<int32_t>(at));
      }
      const Mask mask = Mask::Causal().WithDocuments(documents);
      const auto schedules = Schedules(BalancedPositions(mask, seqlen, ranks), mask);
      EXPECT_DOUBLE_EQ(Busiest(schedules), 1);
      EXPECT_EQ(schedules[0].kv_route().block_tokens.total(), 0);
      EXPECT_EQ(schedules[0].query_route().block_tokens.total(), 0);
    }
  }
}

}  // namespace
}  // namespace burst
