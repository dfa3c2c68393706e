// Checks the ring's schedule by brute force: every mask pair by pair, and every transfer by
// simulating where blocks and gradients are.

#include "burst/attention/ring/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>
#include <vector>

#include "tests/mask/mask_cases.h"

namespace burst {
namespace {

RingSchedule Schedule(const MaskCase& c, const TokenShard& shard, int per_node = 0) {
  auto schedule = RingSchedule::Create(shard, MaskOf(c, shard.seqlen()), per_node);
  EXPECT_TRUE(schedule.ok()) << schedule.status();
  return *std::move(schedule);
}

constexpr Layout kLayouts[] = {Layout::kContiguous, Layout::kZigzag, Layout::kStriped};
constexpr int64_t kLengths[] = {0, 1, 2, 5, 7, 16, 33};
constexpr int kWorldSizes[] = {1, 2, 3, 4, 8};

// Checks that the mask between these queries and keys is the definition's. mask_test.cc checks its
// parts.
void CheckMask(const MaskCase& c, const RingSchedule& schedule, const std::vector<int32_t>& queries,
               const std::vector<int32_t>& keys, const KernelMask& mask) {
  std::vector<int> seen(schedule.rows() * queries.size() * keys.size());
  for (const VisibleKeys& visible : mask.parts) {
    EXPECT_EQ(visible.rows, schedule.rows());
    for (size_t at = 0; at < schedule.rows() * queries.size(); ++at) {
      for (int32_t j = visible.begin[at]; j < visible.end[at]; ++j) ++seen[at * keys.size() + j];
    }
  }
  AddBlocks(mask.blocks, schedule.rows(), static_cast<int64_t>(queries.size()),
            static_cast<int64_t>(keys.size()), &seen);
  for (size_t n = 0; n < seen.size(); ++n) {
    const size_t row = n / keys.size() / queries.size(), i = n / keys.size() % queries.size(),
                 j = n % keys.size();
    EXPECT_EQ(seen[n], Visible(c, schedule.shard().seqlen(), row, queries[i], keys[j]))
        << c.name << " " << queries[i] << " " << keys[j];
  }
}

// Checks what a rank sends of `all` its tokens: the ones that others need, in order, and their
// places.
void CheckSent(const MaskCase& c, const RingSchedule& schedule, int rank, bool keys) {
  const auto& all = schedule.shard().group_positions(rank);
  const auto& sent = keys ? schedule.keys_sent_by(rank) : schedule.queries_sent_by(rank);
  EXPECT_TRUE(std::includes(all.begin(), all.end(), sent.begin(), sent.end()));
  EXPECT_EQ((keys ? schedule.kv_route() : schedule.query_route()).lengths[rank],
            static_cast<int64_t>(sent.size()));
  for (int other = 0; other < schedule.shard().num_groups(); ++other) {
    for (const int32_t there : schedule.shard().group_positions(other)) {
      for (const int32_t here : all) {
        if (other == rank || std::binary_search(sent.begin(), sent.end(), here)) continue;
        for (int64_t row = 0; row < schedule.rows(); ++row) {
          EXPECT_FALSE(
              Visible(c, schedule.shard().seqlen(), row, keys ? there : here, keys ? here : there))
              << c.name << ": " << here << " is not sent";
        }
      }
    }
  }
  if (rank != schedule.shard().group_index()) return;
  const auto* const rows = keys ? schedule.key_rows() : schedule.query_rows();
  if (rows == nullptr) {
    EXPECT_EQ(sent, all);
    return;
  }
  std::vector<int32_t> in_rows;
  for (const BlockRows& range : *rows) {
    for (int64_t i = 0; i < range.count; ++i) in_rows.push_back(all[range.begin + i]);
  }
  EXPECT_EQ(in_rows, sent);
}

TEST(ScheduleTest, MasksMatchTheDefinition) {
  for (const MaskCase& c : MaskCases()) {
    for (Layout layout : kLayouts) {
      for (int64_t seqlen : kLengths) {
        for (int world_size : kWorldSizes) {
          for (int rank = 0; rank < world_size; ++rank) {
            const RingSchedule schedule =
                Schedule(c, *TokenShard::Create(rank, world_size, layout, seqlen));
            for (int source = 0; source < world_size; ++source) {
              const auto &own = schedule.shard().group_positions(rank),
                         &keys = source == rank ? own : schedule.keys_sent_by(source),
                         &queries = source == rank ? own : schedule.queries_sent_by(source);
              CheckMask(c, schedule, own, keys, schedule.for_keys_of(source));
              CheckMask(c, schedule, queries, own, schedule.for_queries_of(source));
              CheckSent(c, schedule, source, /*keys=*/true);
              CheckSent(c, schedule, source, /*keys=*/false);
              if (HasFailure()) return;
            }
          }
        }
      }
    }
  }
}

// Walks all ranks through their routes, message by message, and checks that
//
//    - a rank computes and sends only what it has;
//    - every send has its receive in the same round;
//    - what a round needs has arrived when it begins (blocks) or ends (gradients);
//    - each needed (block, host) pair is computed exactly once;
//    - gradients return complete, and the tokens are those that the routes announce.
class RouteWalk {
 public:
  RouteWalk(const std::vector<RingSchedule>& schedules, bool queries_are_sent)
      : schedules_(schedules),
        queries_are_sent_(queries_are_sent),
        world_size_(static_cast<int>(schedules.size())),
        per_node_(schedules[0].ranks_per_node()),
        has_(world_size_, std::vector<int>(world_size_, -1)),
        arrived_(world_size_),
        returned_(world_size_),
        computed_(world_size_) {
    for (Link link : kLinks) gradients_[link].resize(world_size_);
    for (int rank = 0; rank < world_size_; ++rank) has_[rank][0] = rank;
  }

  void Walk() {
    for (int t = 0; t < world_size_; ++t) {
      for (int rank = 0; rank < world_size_; ++rank) ASSERT_NO_FATAL_FAILURE(SendBlock(t, rank));
      for (int rank = 0; rank < world_size_; ++rank) Compute(t, rank);
      for (int rank = 0; rank < world_size_; ++rank) SendGradient(t, rank);
    }
    for (int rank = 0; rank < world_size_; ++rank) CheckEnd(rank);
  }

 private:
  struct Message {
    int source;                // owner of the block
    std::set<int> added = {};  // ranks that have added to a gradient
  };

  const RingRoute& Route(int rank) const {
    return queries_are_sent_ ? schedules_[rank].query_route() : schedules_[rank].kv_route();
  }
  const RingRound& Round(int t, int rank) const { return Route(rank).rounds[t]; }
  int64_t Length(int block) const { return Route(0).lengths[block]; }
  bool IsFirst(int t) const { return t % per_node_ == 0; }  // of the rounds within nodes
  bool IsLast(int t) const { return (t + 1) % per_node_ == 0; }
  bool IsNeeded(int rank, int source) const {
    const RingSchedule& schedule = schedules_[rank];
    return !(queries_are_sent_ ? schedule.for_queries_of(source) : schedule.for_keys_of(source))
                .none();
  }

  void CheckPeer(int from, int to, Link link) const {
    EXPECT_NE(from, to);
    EXPECT_EQ(from / per_node_ == to / per_node_, link == Link::kIntra);
  }

  void SendBlock(int t, int rank) {
    for (Link link : kLinks) {
      const RingTransfer& transfer = Round(t, rank).block[link];
      if (link == Link::kInter) {
        EXPECT_TRUE(IsFirst(t) || (transfer.to < 0 && transfer.from < 0));
      }
      if (transfer.to >= 0) {
        const bool own = link == Link::kInter || IsFirst(t);
        const int block = own ? has_[rank][t] : has_[rank][t - 1];
        ASSERT_GE(block, 0);
        CheckPeer(rank, transfer.to, link);
        const RingTransfer& other = Round(t, transfer.to).block[link];
        EXPECT_EQ(other.from, rank);
        EXPECT_EQ(other.arriving, block);
        block_tokens_[link] += Length(block);
      }
      if (transfer.from >= 0) {
        EXPECT_EQ(Round(t, transfer.from).block[link].to, rank);
        const int arrives = link == Link::kIntra ? t + 1 : t + per_node_;
        ASSERT_LT(arrives, world_size_);
        EXPECT_TRUE(link == Link::kInter || !IsLast(t));
        EXPECT_EQ(has_[rank][arrives], -1);
        has_[rank][arrives] = transfer.arriving;
      }
    }
  }

  // Computes, and takes the gradients that have arrived when that is done.
  void Compute(int t, int rank) {
    const RingRound& round = Round(t, rank);
    EXPECT_EQ(round.compute, IsNeeded(rank, round.source));
    EXPECT_TRUE(computed_[rank].insert(round.source).second) << "every block once";
    if (round.compute) {
      EXPECT_EQ(has_[rank][t], round.source);
    }
    for (Link link : kLinks) {
      if (link == Link::kInter && !IsLast(t)) continue;
      for (Message& message : gradients_[link][rank]) {
        if (message.source == rank) {
          Return(message);
        } else {
          arrived_[rank].push_back(message);
        }
      }
      gradients_[link][rank].clear();
    }
    EXPECT_LE(arrived_[rank].size(), 3u) << "few buffers";
  }

  void Return(const Message& message) {
    for (int other : message.added) EXPECT_TRUE(returned_[message.source].insert(other).second);
  }

  void SendGradient(int t, int rank) {
    const RingRound& round = Round(t, rank);
    const Message sum = SumOf(t, rank);
    int sent = 0;
    for (Link link : kLinks) {
      const RingTransfer& transfer = round.gradient[link];
      if (transfer.from >= 0) {
        EXPECT_EQ(Round(t, transfer.from).gradient[link].to, rank);
      }
      if (transfer.to < 0) continue;
      ++sent;
      CheckPeer(rank, transfer.to, link);
      EXPECT_TRUE(gradients_[link][transfer.to].empty()) << "one in transit at a time";
      gradients_[link][transfer.to].push_back(sum);
      EXPECT_EQ(Round(t, transfer.to).gradient[link].from, rank);
      EXPECT_EQ(Round(t, transfer.to).gradient[link].arriving, round.source);
      gradient_tokens_[link] += Length(round.source);
    }
    EXPECT_EQ(sent, sum.added.empty() ? 0 : 1);
  }

  // Returns the gradient of the round's block: this rank's part, and what has arrived of it.
  Message SumOf(int t, int rank) {
    const RingRound& round = Round(t, rank);
    Message sum = {round.source};
    if (t > 0 && round.compute) sum.added.insert(rank);
    std::vector<Message> kept;
    for (const Message& message : arrived_[rank]) {
      if (message.source == round.source) {
        for (int other : message.added) EXPECT_TRUE(sum.added.insert(other).second);
      } else {
        EXPECT_EQ(message.source, Round(t + 1, rank).source) << "at most a round ahead";
        kept.push_back(message);
      }
    }
    arrived_[rank] = kept;
    return sum;
  }

  void CheckEnd(int rank) {
    for (Link link : kLinks) {
      for (const Message& message : gradients_[link][rank]) {
        EXPECT_EQ(message.source, rank);
        Return(message);
      }
    }
    std::set<int> expected;
    for (int other = 0; other < world_size_; ++other) {
      if (other != rank && IsNeeded(other, rank)) expected.insert(other);
    }
    EXPECT_EQ(returned_[rank], expected);
    for (Link link : kLinks) {
      EXPECT_EQ(Route(rank).block_tokens[link], block_tokens_[link]);
      EXPECT_EQ(Route(rank).gradient_tokens[link], gradient_tokens_[link]);
    }
  }

  const std::vector<RingSchedule>& schedules_;
  const bool queries_are_sent_;
  const int world_size_, per_node_;
  std::vector<std::vector<int>> has_;                     // the block by [rank][round]; -1: none
  PerLink<std::vector<std::vector<Message>>> gradients_;  // by rank: posted and not yet awaited
  std::vector<std::vector<Message>> arrived_;             // by rank: partial gradients it has
  std::vector<std::set<int>> returned_, computed_;        // by rank
  PerLink<int64_t> block_tokens_, gradient_tokens_;
};

// Pairs of ranks and ranks on a node; 0 means one flat ring.
constexpr std::pair<int, int> kRings[] = {{1, 0}, {2, 0}, {3, 0}, {4, 0}, {5, 0}, {8, 0},
                                          {4, 2}, {6, 3}, {6, 2}, {8, 2}, {8, 4}, {9, 3},
                                          {4, 1}, {5, 1}, {4, 4}, {12, 4}};

TEST(ScheduleTest, BlocksAndGradientsArriveWhereTheyAreNeeded) {
  for (const MaskCase& c : MaskCases()) {
    for (Layout layout : kLayouts) {
      for (int64_t seqlen : kLengths) {
        for (const auto& [world_size, per_node] : kRings) {
          SCOPED_TRACE(testing::Message() << c.name << " " << Name(layout) << " seqlen " << seqlen
                                          << " ranks " << world_size << " a node " << per_node);
          std::vector<RingSchedule> schedules;
          for (int rank = 0; rank < world_size; ++rank) {
            schedules.push_back(
                Schedule(c, *TokenShard::Create(rank, world_size, layout, seqlen), per_node));
          }
          RouteWalk(schedules, /*queries_are_sent=*/false).Walk();
          RouteWalk(schedules, /*queries_are_sent=*/true).Walk();
        }
      }
    }
  }
}

TEST(ScheduleTest, FullAttentionMakesOneTransferLessThanRanks) {
  for (const auto& [world_size, per_node] : kRings) {
    const int64_t per = per_node == 0 ? world_size : per_node, nodes = world_size / per;
    const auto schedule = RingSchedule::Create(
        *TokenShard::Create(0, world_size, Layout::kZigzag, 720), Mask::Full(), per_node);
    ASSERT_TRUE(schedule.ok());
    EXPECT_EQ(schedule->ranks_per_node(), per);
    for (const RingRoute* route : {&schedule->kv_route(), &schedule->query_route()}) {
      for (const PerLink<int64_t>* tokens : {&route->block_tokens, &route->gradient_tokens}) {
        EXPECT_EQ(tokens->total(), 720 * (world_size - 1));
        EXPECT_EQ((*tokens)[Link::kInter], 720 * (nodes - 1));
        EXPECT_EQ((*tokens)[Link::kIntra], 720 * nodes * (per - 1));
      }
    }
  }
}

// In a flat ring, the gradient of other ranks has arrived, to be added to, in all rounds but two.
// Two additions are left, on the last rank and on the owner.
TEST(ScheduleTest, GradientsArriveAheadOfTheirBlocks) {
  for (int world_size : {4, 5, 8}) {
    const auto schedule = *RingSchedule::Create(
        *TokenShard::Create(0, world_size, Layout::kZigzag, 720), Mask::Full());
    int ahead = 0, late = 0;
    for (int t = 1; t + 1 < world_size; ++t) {
      const auto& rounds = schedule.query_route().rounds;
      const int arriving = rounds[t].gradient[Link::kIntra].arriving;
      ahead += t + 2 < world_size && arriving == rounds[t + 2].source;
      late += arriving == rounds[t + 1].source;
    }
    EXPECT_EQ(ahead, world_size - 3);
    EXPECT_EQ(late, 1);
  }
}

TEST(ScheduleTest, ContiguousWindowIsSentOnlyAsFarAsItReaches) {
  // 8 ranks have 16 tokens each. With a window of 17, a query sees the keys of its own rank and of
  // the previous one.
  const auto schedule = RingSchedule::Create(*TokenShard::Create(0, 8, Layout::kContiguous, 128),
                                             Mask::SlidingWindow(17));
  ASSERT_TRUE(schedule.ok());
  // Every rank but the last sends its block in one transfer.
  EXPECT_EQ(schedule->kv_route().block_tokens.total(), 7 * 16);
}

// Whether blocks move while a round is computed, or after it, in the order of the rounds.
TEST(ScheduleTest, BlocksMoveUntilTheLastOneHasArrived) {
  const auto moves = [](const RingSchedule& schedule) {
    std::vector<bool> found;
    const RingRoute& route = schedule.kv_route();
    for (const RingRound& round : route.rounds) {
      found.push_back(MovesBlocksFrom(route, round.source));
    }
    return found;
  };
  const auto of = [](int rank, int world_size, Layout layout, const Mask& mask, int per_node) {
    return *RingSchedule::Create(*TokenShard::Create(rank, world_size, layout, 128), mask,
                                 per_node);
  };
  using Rounds = std::vector<bool>;
  EXPECT_EQ(moves(of(0, 1, Layout::kZigzag, Mask::Full(), 0)), (Rounds{false}));
  EXPECT_EQ(moves(of(1, 2, Layout::kZigzag, Mask::Causal(), 0)), (Rounds{true, false}));
  EXPECT_EQ(moves(of(1, 4, Layout::kZigzag, Mask::Full(), 0)), (Rounds{true, true, true, false}));
  // In round 1 a block is still crossing between the nodes.
  EXPECT_EQ(moves(of(1, 4, Layout::kZigzag, Mask::Full(), 2)), (Rounds{true, true, true, false}));
  // Under a window the keys of a rank go to the next rank only, and rank 0 receives none.
  const Mask window = Mask::SlidingWindow(17);
  EXPECT_EQ(moves(of(2, 4, Layout::kContiguous, window, 0)), (Rounds{true, false, false, false}));
  EXPECT_EQ(moves(of(0, 4, Layout::kContiguous, Mask::SlidingWindow(1), 0)), Rounds(4));
}

TEST(ScheduleTest, DocumentsOfOneRankAreNotSent) {
  // 4 ranks have 32 tokens each. Rank 0 has a document and a half, and the others share one with a
  // neighbor.
  const Mask mask = Mask::Causal().WithDocuments({{0, 20, 40, 90, 96}});
  const RingSchedule schedule =
      *RingSchedule::Create(*TokenShard::Create(1, 4, Layout::kContiguous, 128), mask);
  const auto range = [](int32_t begin, int32_t end) {
    std::vector<int32_t> positions;
    for (int32_t t = begin; t < end; ++t) positions.push_back(t);
    return positions;
  };
  EXPECT_EQ(schedule.keys_sent_by(0), range(20, 32)) << "of the document that goes on";
  EXPECT_EQ(schedule.queries_sent_by(0), range(0, 0)) << "nothing is before them";
  EXPECT_EQ(schedule.keys_sent_by(1), range(40, 64));
  EXPECT_EQ(schedule.queries_sent_by(1), range(32, 40));
  EXPECT_EQ(schedule.keys_sent_by(2), range(0, 0));
  EXPECT_EQ(schedule.queries_sent_by(2), range(64, 96)) << "26 of 32: all";
  EXPECT_EQ(schedule.keys_sent_by(3), range(0, 0));
  EXPECT_EQ(schedule.kv_route().block_tokens.total(), 12 + 24);
  // A window reaches 7 tokens into the neighbor.
  const RingSchedule window = *RingSchedule::Create(
      *TokenShard::Create(1, 4, Layout::kContiguous, 128), Mask::SlidingWindow(8));
  EXPECT_EQ(window.keys_sent_by(0), range(25, 32));
  EXPECT_EQ(window.queries_sent_by(1), range(32, 39));
  EXPECT_EQ(window.kv_route().block_tokens.total(), 3 * 7);
  EXPECT_EQ(window.query_route().block_tokens.total(), 3 * 7);
}

// The schedule of a prefix is the one of a sequence that ends there.
TEST(ScheduleTest, APrefixIsAShorterSequence) {
  for (const MaskCase& c : MaskCases()) {
    if (!c.mask.causal || !c.mask.spans.empty() || !c.slices.empty()) continue;
    for (const Layout layout : kLayouts) {
      for (const int world_size : kWorldSizes) {
        const int64_t seqlen = 33;
        for (const int64_t tokens : {0, 1, 16, 32, 33}) {
          std::vector<std::vector<int32_t>> positions;
          for (int rank = 0; rank < world_size; ++rank) {
            positions.push_back(LocalPositions(layout, seqlen, rank, world_size));
            auto& own = positions.back();
            own.erase(std::lower_bound(own.begin(), own.end(), tokens), own.end());
          }
          for (int rank = 0; rank < world_size; ++rank) {
            const auto whole = RingSchedule::Create(
                *TokenShard::Create(rank, world_size, layout, seqlen), MaskOf(c, seqlen));
            const auto expected = RingSchedule::Create(
                *TokenShard::Create(rank, world_size, positions), MaskOf(c, tokens));
            ASSERT_TRUE(whole.ok() && expected.ok());
            const RingSchedule prefix = whole->Prefix(tokens);
            EXPECT_EQ(prefix.shard().seqlen(), tokens);
            EXPECT_EQ(prefix.shard().local_positions(), positions[rank]);
            EXPECT_EQ(prefix.rows(), expected->rows());
            for (int source = 0; source < world_size; ++source) {
              const VisibleKeys &a = prefix.for_keys_of(source).parts[0],
                                &b = expected->for_keys_of(source).parts[0];
              EXPECT_EQ(a.begin, b.begin) << c.name;
              EXPECT_EQ(a.end, b.end) << c.name;
            }
          }
        }
      }
    }
  }
}

TEST(ScheduleTest, RejectsAMaskThatDoesNotFit) {
  const TokenShard shard = *TokenShard::Create(0, 2, Layout::kZigzag, 8);
  EXPECT_FALSE(RingSchedule::Create(shard, Mask::Causal().WithDocuments({{0, 8}})).ok());
  EXPECT_TRUE(RingSchedule::Create(shard, Mask::Causal().WithDocuments({{0, 7}})).ok());
}

}  // namespace
}  // namespace burst
