#include "burst/sequence/token_shard.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>
#include <utility>
#include <vector>

namespace burst {
namespace {

constexpr Layout kLayouts[] = {Layout::kContiguous, Layout::kZigzag, Layout::kStriped};
constexpr int64_t kLengths[] = {0, 1, 2, 5, 7, 16, 33};
constexpr int kWorldSizes[] = {1, 2, 3, 4, 8};

TEST(LayoutTest, EveryPositionIsOnOneRankInOrder) {
  for (Layout layout : kLayouts) {
    for (int64_t seqlen : kLengths) {
      for (int world_size : kWorldSizes) {
        std::set<int32_t> seen;
        size_t shortest = seqlen, longest = 0;
        for (int rank = 0; rank < world_size; ++rank) {
          const auto positions = LocalPositions(layout, seqlen, rank, world_size);
          EXPECT_TRUE(std::is_sorted(positions.begin(), positions.end()));
          for (int32_t p : positions) {
            EXPECT_TRUE(p >= 0 && p < seqlen && seen.insert(p).second) << p;
          }
          shortest = std::min(shortest, positions.size());
          longest = std::max(longest, positions.size());
        }
        EXPECT_EQ(static_cast<int64_t>(seen.size()), seqlen);
        EXPECT_LE(longest - shortest, layout == Layout::kZigzag ? 2u : 1u);
      }
    }
  }
}

TEST(LayoutTest, NamesRoundTrip) {
  for (Layout layout : kLayouts) EXPECT_EQ(*ParseLayout(Name(layout)), layout);
  const auto bad = ParseLayout("diagonal");
  EXPECT_EQ(bad.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(bad.status().message().find("zigzag"), absl::string_view::npos);
}

// The ranks of a group divide the group's tokens: each has those that the layout gives it among all
// ranks, and the runs say where they are in the group.
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

TEST(TokenShardTest, RejectsALengthThatIsNoInt32) {
  EXPECT_FALSE(TokenShard::Create(0, 2, Layout::kZigzag, -1).ok());
  EXPECT_FALSE(TokenShard::Create(0, 2, Layout::kZigzag, std::numeric_limits<int32_t>::max()).ok());
}

}  // namespace
}  // namespace burst
