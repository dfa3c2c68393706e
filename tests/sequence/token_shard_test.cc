#include "burst/sequence/token_shard.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

namespace burst {
namespace {

constexpr Layout kLayouts[] = {Layout::kContiguous, Layout::kZigzag, Layout::kStriped,
                               Layout::kBalanced};
constexpr int64_t kLengths[] = {0, 1, 2, 5, 7, 16, 33};
constexpr int kWorldSizes[] = {1, 2, 3, 4, 8};

TEST(LayoutTest, EveryPositionIsOnOneRankInOrder) {
  for (Layout layout : kLayouts) {
    for (int64_t seqlen : kLengths) {
      for (int world_size : kWorldSizes) {
        std::set<int32_t> seen;
        size_t shortest = seqlen, longest = 0;
        const bool two_chunks = layout == Layout::kZigzag || layout == Layout::kBalanced;
        for (int rank = 0; rank < world_size; ++rank) {
          const auto positions = LocalPositions(layout, seqlen, rank, world_size);
          EXPECT_TRUE(std::is_sorted(positions.begin(), positions.end()));
          EXPECT_EQ(LocalLength(layout, seqlen, rank, world_size),
                    static_cast<int64_t>(positions.size()));
          for (int32_t p : positions) {
            EXPECT_TRUE(p >= 0 && p < seqlen && seen.insert(p).second) << p;
          }
          shortest = std::min(shortest, positions.size());
          longest = std::max(longest, positions.size());
        }
        EXPECT_EQ(static_cast<int64_t>(seen.size()), seqlen);
        EXPECT_LE(longest - shortest, two_chunks ? 2u : 1u);
      }
    }
  }
}

TEST(LayoutTest, NamesRoundTrip) {
  for (Layout layout : kLayouts) EXPECT_EQ(*ParseLayout(Name(layout)), layout);
  const auto bad = ParseLayout("diagonal");
  EXPECT_EQ(bad.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(bad.status().message(),
            "must be one of contiguous, zigzag, striped, balanced; got 'diagonal'");
}

// The ranks of a group divide the group's tokens. Each has the tokens that the layout gives it
// among all ranks, and the runs say where they are in the group.
TEST(TokenShardTest, GroupsShareTheirTokens) {
  for (Layout layout : kLayouts) {
    for (int64_t seqlen : {0, 1, 7, 64, 129}) {
      for (const auto& [ring, size] : {std::pair(1, 4), std::pair(2, 2), std::pair(3, 3)}) {
        for (int rank = 0; rank < ring; ++rank) {
          for (int group_rank = 0; group_rank < size; ++group_rank) {
            const TokenShard shard =
                *TokenShard::Create(rank, ring, layout, seqlen, {size, group_rank});
            const std::vector<int32_t>& all = shard.group_positions(rank);
            EXPECT_TRUE(std::is_sorted(all.begin(), all.end()));
            EXPECT_EQ(shard.local_positions(),
                      LocalPositions(layout, seqlen, rank * size + group_rank, ring * size));
            std::vector<int32_t> together;
            for (int other = 0; other < size; ++other) {
              const std::vector<int32_t>& local = shard.local_positions(other);
              std::vector<int32_t> found;
              for (const TokenRun& run : shard.runs(other)) {
                EXPECT_EQ(run.first, static_cast<int64_t>(found.size()));
                for (int64_t i = 0; i < run.count; ++i) {
                  found.push_back(all[run.begin + i * run.step]);
                }
              }
              EXPECT_EQ(found, local);
              EXPECT_LE(shard.runs(other).size(), 3u) << "few copies";
              together.insert(together.end(), local.begin(), local.end());
            }
            std::sort(together.begin(), together.end());
            EXPECT_EQ(together, all);
          }
        }
      }
    }
  }
}

// A plan has hundreds of ranks in one process.
TEST(TokenShardTest, RanksOfAProcessShareThePositionsOfAll) {
  const auto a = TokenShard::Create(0, 4, Layout::kZigzag, 64);
  const auto b = TokenShard::Create(3, 4, Layout::kZigzag, 64);
  const auto other = TokenShard::Create(3, 4, Layout::kStriped, 64);
  EXPECT_EQ(&a->group_positions(1), &b->group_positions(1));
  EXPECT_NE(&a->group_positions(1), &other->group_positions(1));
  EXPECT_EQ(&a->Prefix(30).group_positions(1), &b->Prefix(30).group_positions(1));
}

TEST(TokenShardTest, APrefixHasTheFirstTokensOfEachRank) {
  constexpr int kRing = 2, kSize = 3;
  for (const Layout layout : kLayouts) {
    for (const int64_t tokens : {0, 1, 32, 64}) {
      std::vector<std::vector<int32_t>> positions;
      for (int rank = 0; rank < kRing * kSize; ++rank) {
        positions.push_back(LocalPositions(layout, 64, rank, kRing * kSize));
        auto& own = positions.back();
        own.erase(std::lower_bound(own.begin(), own.end(), tokens), own.end());
      }
      const RankGroup group{kSize, 1};
      const TokenShard prefix = TokenShard::Create(1, kRing, layout, 64, group)->Prefix(tokens);
      const TokenShard expected = *TokenShard::Create(1, kRing, positions, group);
      EXPECT_EQ(prefix.seqlen(), tokens);
      for (int index = 0; index < kRing; ++index) {
        EXPECT_EQ(prefix.group_positions(index), expected.group_positions(index));
      }
      for (int rank = 0; rank < kSize; ++rank) {
        EXPECT_EQ(prefix.local_positions(rank), expected.local_positions(rank));
        ASSERT_EQ(prefix.runs(rank).size(), expected.runs(rank).size());
        for (size_t i = 0; i < prefix.runs(rank).size(); ++i) {
          const TokenRun &a = prefix.runs(rank)[i], &b = expected.runs(rank)[i];
          EXPECT_EQ(std::tie(a.first, a.begin, a.count, a.step),
                    std::tie(b.first, b.begin, b.count, b.step));
        }
      }
    }
  }
}

TEST(TokenShardTest, TakesPositionsThatNoLayoutGives) {
  // Two documents of 4 and 2 tokens, each in zigzag order over two ranks.
  const std::vector<std::vector<int32_t>> positions = {{0, 3, 4}, {1, 2, 5}};
  const auto shard = TokenShard::Create(1, 2, positions);
  ASSERT_TRUE(shard.ok()) << shard.status();
  EXPECT_EQ(shard->seqlen(), 6);
  EXPECT_EQ(shard->local_positions(), positions[1]);
  EXPECT_EQ(shard->group_positions(0), positions[0]);
  // Both ranks are one group, which has all tokens.
  const auto group = TokenShard::Create(0, 1, positions, {2, 1});
  ASSERT_TRUE(group.ok()) << group.status();
  EXPECT_EQ(group->group_length(), 6);
  EXPECT_EQ(group->local_positions(), positions[1]);

  const std::vector<std::vector<std::vector<int32_t>>> wrong = {
      {{0, 1}},            // positions of one rank only
      {{0, 2, 1}, {3}},    // out of order
      {{0, 1}, {1, 2}},    // there twice
      {{0, 1}, {2, 4}},    // after the last token
      {{-1, 0}, {1, 2}}};  // before the first token
  for (const auto& positions : wrong) {
    EXPECT_TRUE(absl::IsInvalidArgument(TokenShard::Create(0, 2, positions).status()));
  }
}

TEST(TokenShardTest, RejectsALengthThatIsNoInt32) {
  EXPECT_FALSE(TokenShard::Create(0, 2, Layout::kZigzag, -1).ok());
  EXPECT_FALSE(TokenShard::Create(0, 2, Layout::kZigzag, std::numeric_limits<int32_t>::max()).ok());
}

}  // namespace
}  // namespace burst
