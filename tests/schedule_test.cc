// The ring's schedule against brute force: every mask pair by pair, every transfer by simulating
// where blocks and gradients are.

#include "burst/attention/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <set>

namespace burst {
namespace {

struct MaskCase {
  const char* name;
  AttentionMask mask;
  DocumentStarts documents;  // clipped to the sequence
};

std::vector<MaskCase> MaskCases() {
  return {{"full", {false, 0}, {}},
          {"causal", {true, 0}, {}},
          {"window", {true, 5}, {}},
          {"window of one", {true, 1}, {}},
          {"two-sided window", {false, 7}, {}},
          {"packed", {true, 0}, {{0, 3, 4, 11, 26}, {9}, {0, 1, 2, 30}}},
          {"packed window", {true, 4}, {{5, 12}, {}, {1}}},
          {"packed full", {false, 0}, {{2, 20}}}};
}

DocumentStarts Clip(const DocumentStarts& documents, int64_t seqlen) {
  DocumentStarts clipped = documents;
  for (auto& row : clipped) {
    row.erase(std::remove_if(row.begin(), row.end(), [&](int32_t p) { return p >= seqlen; }),
              row.end());
  }
  return clipped;
}

// The definition, in global positions.
bool Visible(const AttentionMask& mask, const std::vector<int32_t>* starts, int32_t q, int32_t k) {
  if (mask.causal && k > q) return false;
  if (mask.window > 0 && std::abs(q - k) >= mask.window) return false;
  if (starts != nullptr) {
    for (int32_t start : *starts) {
      if ((q < start) != (k < start)) return false;
    }
  }
  return true;
}

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

TEST(ScheduleTest, VisibleKeysMatchTheDefinition) {
  for (const MaskCase& c : MaskCases()) {
    for (Layout layout : kLayouts) {
      for (int64_t seqlen : kLengths) {
        for (int world_size : kWorldSizes) {
          const DocumentStarts documents = Clip(c.documents, seqlen);
          for (int rank = 0; rank < world_size; ++rank) {
            const auto schedule =
                RingSchedule::Create(rank, world_size, layout, seqlen, c.mask, documents);
            ASSERT_TRUE(schedule.ok()) << schedule.status();
            for (int source = 0; source < world_size; ++source) {
              const VisibleKeys& visible = schedule->keys_of(source);
              const auto& queries = schedule->positions(rank);
              const auto& keys = schedule->positions(source);
              int64_t pairs = 0;
              for (int64_t row = 0; row < visible.rows; ++row) {
                for (size_t i = 0; i < queries.size(); ++i) {
                  const int64_t at = row * visible.q_len + i;
                  if (i > 0) {
                    EXPECT_GE(visible.begin[at], visible.begin[at - 1]);
                    EXPECT_GE(visible.end[at], visible.end[at - 1]);
                  }
                  for (size_t j = 0; j < keys.size(); ++j) {
                    const bool expected = Visible(
                        c.mask, documents.empty() ? nullptr : &documents[row], queries[i], keys[j]);
                    const bool actual = static_cast<int32_t>(j) >= visible.begin[at] &&
                                        static_cast<int32_t>(j) < visible.end[at];
                    ASSERT_EQ(actual, expected) << c.name << " " << queries[i] << " " << keys[j];
                    pairs += expected;
                  }
                }
              }
              EXPECT_EQ(visible.pairs, pairs);
              EXPECT_EQ(visible.all,
                        pairs == visible.rows * static_cast<int64_t>(queries.size() * keys.size()));
            }
          }
        }
      }
    }
  }
}

TEST(ScheduleTest, DiagonalPartsAreTheDiagonal) {
  for (const MaskCase& c : MaskCases()) {
    const DocumentStarts documents = Clip(c.documents, 33);
    const auto schedule = RingSchedule::Create(1, 3, Layout::kZigzag, 33, c.mask, documents);
    ASSERT_TRUE(schedule.ok());
    const VisibleKeys& whole = schedule->keys_of(1);
    EXPECT_EQ(schedule->diagonal_part(0).pairs + schedule->diagonal_part(1).pairs, whole.pairs);
    for (int64_t at = 0; at < whole.rows * whole.q_len; ++at) {
      int64_t pairs = 0;
      for (int part : {0, 1}) {
        const VisibleKeys& visible = schedule->diagonal_part(part);
        const int64_t seen = std::max(0, visible.end[at] - visible.begin[at]);
        pairs += seen;
        if (seen > 0) {
          EXPECT_EQ(visible.begin[at], whole.begin[at]);
          EXPECT_EQ(visible.end[at], whole.end[at]);
        }
        if (at % whole.q_len > 0) {
          EXPECT_GE(visible.begin[at], visible.begin[at - 1]);
          EXPECT_GE(visible.end[at], visible.end[at - 1]);
        }
      }
      EXPECT_EQ(pairs, std::max(0, whole.end[at] - whole.begin[at]));
    }
  }
}

// Walks all ranks through a pass: a rank computes only on a block that is there, each needed
// (block, host) pair is computed exactly once, and gradients come home complete.
void SimulatePass(const std::vector<RingSchedule>& schedules, bool queries_travel) {
  const int world_size = static_cast<int>(schedules.size());
  const auto pass = [&](int rank) -> const RingPass& {
    return queries_travel ? schedules[rank].query_pass() : schedules[rank].key_pass();
  };
  std::vector<int> at(world_size);                  // the block a rank holds, -1: none
  std::vector<std::set<int>> gradient(world_size);  // ranks whose part is in a block's gradient
  std::vector<int> gradient_at(world_size, -1);
  for (int rank = 0; rank < world_size; ++rank) at[rank] = rank;
  int64_t block_tokens = 0, gradient_tokens = 0;
  for (int t = 0; t < world_size; ++t) {
    std::vector<int> next(world_size, -1);
    for (int rank = 0; rank < world_size; ++rank) {
      const RingRound& round = pass(rank).rounds[t];
      const bool needed = !(queries_travel ? schedules[rank].seen_by(round.source)
                                           : schedules[rank].keys_of(round.source))
                               .none();
      EXPECT_EQ(round.source, (rank - t + world_size) % world_size);
      EXPECT_EQ(round.compute, needed);
      if (round.compute || round.send) {
        EXPECT_EQ(at[rank], round.source);
      }
      const int to = (rank + 1) % world_size;
      if (round.send) {
        next[to] = round.source;
        block_tokens += schedules[0].length(round.source);
        EXPECT_TRUE(pass(to).rounds[t + 1].receive);
      } else if (t + 1 < world_size) {
        EXPECT_FALSE(pass(to).rounds[t + 1].receive);
      }
      if (t == 0) continue;
      EXPECT_EQ(round.receive_gradient, gradient_at[round.source] == rank);
      if (round.compute) gradient[round.source].insert(rank);
      if (round.compute || round.receive_gradient) {
        EXPECT_TRUE(round.send_gradient);
        gradient_at[round.source] = to;
        gradient_tokens += schedules[0].length(round.source);
      } else {
        EXPECT_FALSE(round.send_gradient);
      }
    }
    at = next;
  }
  for (int rank = 0; rank < world_size; ++rank) {
    EXPECT_EQ(pass(rank).gradient_returns, gradient_at[rank] == rank);
    EXPECT_EQ(pass(rank).gradient_returns, !gradient[rank].empty());
    EXPECT_EQ(pass(rank).block_tokens, block_tokens);
    EXPECT_EQ(pass(rank).gradient_tokens, gradient_tokens);
  }
}

TEST(ScheduleTest, BlocksAndGradientsArriveWhereTheyAreNeeded) {
  for (const MaskCase& c : MaskCases()) {
    for (Layout layout : kLayouts) {
      for (int64_t seqlen : kLengths) {
        for (int world_size : kWorldSizes) {
          SCOPED_TRACE(testing::Message() << c.name << " " << Name(layout) << " seqlen " << seqlen
                                          << " ranks " << world_size);
          std::vector<RingSchedule> schedules;
          for (int rank = 0; rank < world_size; ++rank) {
            schedules.push_back(*RingSchedule::Create(rank, world_size, layout, seqlen, c.mask,
                                                      Clip(c.documents, seqlen)));
          }
          SimulatePass(schedules, /*queries_travel=*/false);
          SimulatePass(schedules, /*queries_travel=*/true);
        }
      }
    }
  }
}

TEST(ScheduleTest, FullAttentionMakesOneHopLessThanRanks) {
  for (int world_size : kWorldSizes) {
    const auto schedule = RingSchedule::Create(0, world_size, Layout::kZigzag, 64, {false, 0});
    ASSERT_TRUE(schedule.ok());
    for (const RingPass* pass : {&schedule->key_pass(), &schedule->query_pass()}) {
      EXPECT_EQ(pass->block_tokens, 64 * (world_size - 1));
      EXPECT_EQ(pass->gradient_tokens, 64 * (world_size - 1));
    }
  }
}

TEST(ScheduleTest, ContiguousWindowTravelsOnlyAsFarAsItReaches) {
  // 8 ranks of 16 tokens, a window of 17: a query sees its own rank's keys and the previous one's.
  const auto schedule = RingSchedule::Create(0, 8, Layout::kContiguous, 128, {true, 17});
  ASSERT_TRUE(schedule.ok());
  EXPECT_EQ(schedule->key_pass().block_tokens, 7 * 16);  // every rank but the last one's, one hop
}

// Ranks of a group hold the tokens of the group's rank in the ring, each those that the layout
// gives it among all ranks, and the runs say where they are.
TEST(ScheduleTest, GroupsShareTheirTokens) {
  constexpr Layout kLayouts[] = {Layout::kContiguous, Layout::kZigzag, Layout::kStriped};
  for (Layout layout : kLayouts) {
    for (int64_t seqlen : {0, 1, 7, 64, 129}) {
      for (const auto& [ring, size] : {std::pair(1, 4), std::pair(2, 2), std::pair(3, 3)}) {
        for (int rank = 0; rank < ring; ++rank) {
          for (int member = 0; member < size; ++member) {
            const auto schedule =
                *RingSchedule::Create(rank, ring, layout, seqlen, {}, {}, {size, member});
            const std::vector<int32_t>& all = schedule.positions(rank);
            EXPECT_TRUE(std::is_sorted(all.begin(), all.end()));
            EXPECT_EQ(schedule.held(),
                      LocalPositions(layout, seqlen, rank * size + member, ring * size));
            std::vector<int32_t> together;
            for (int other = 0; other < size; ++other) {
              const std::vector<int32_t>& held = schedule.held(other);
              std::vector<int32_t> found;
              for (const TokenRun& run : schedule.runs(other)) {
                EXPECT_EQ(run.first, static_cast<int64_t>(found.size()));
                for (int64_t i = 0; i < run.count; ++i) {
                  found.push_back(all[run.begin + i * run.step]);
                }
              }
              EXPECT_EQ(found, held);
              EXPECT_LE(schedule.runs(other).size(), 3u) << "few copies";
              together.insert(together.end(), held.begin(), held.end());
            }
            std::sort(together.begin(), together.end());
            EXPECT_EQ(together, all);
          }
        }
      }
    }
  }
}

TEST(ScheduleTest, RejectsWhatItCannotServe) {
  const AttentionMask mask;
  EXPECT_FALSE(RingSchedule::Create(0, 2, Layout::kZigzag, -1, mask).ok());
  EXPECT_FALSE(RingSchedule::Create(0, 2, Layout::kZigzag, 8, {true, -3}).ok());
  EXPECT_FALSE(RingSchedule::Create(0, 2, Layout::kZigzag, 8, mask, {{0, 8}}).ok());
  EXPECT_FALSE(RingSchedule::Create(0, 2, Layout::kZigzag, 8, mask, {{4, 4}}).ok());
  EXPECT_FALSE(RingSchedule::Create(0, 2, Layout::kZigzag, 8, mask, {{-1}}).ok());
  EXPECT_TRUE(RingSchedule::Create(0, 2, Layout::kZigzag, 8, mask, {{0, 7}}).ok());
}

}  // namespace
}  // namespace burst
