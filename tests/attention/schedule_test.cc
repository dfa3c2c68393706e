// The ring's schedule against brute force: every mask pair by pair, every transfer by simulating
// where blocks and gradients are.

#include "burst/attention/ring/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <functional>
#include <random>
#include <set>
#include <string>

namespace burst {
namespace {

struct MaskCase {
  const char* name;
  AttentionMask mask;
  DocumentStarts documents;  // clipped to the sequence
  Spans spans = {};          // likewise
  MaskSlices slices = {};    // likewise; instead of all that
};

constexpr SliceKind kKinds[] = {SliceKind::kFull, SliceKind::kCausal, SliceKind::kInverseCausal,
                                SliceKind::kBand};

// Slices of any place and size, which overlap, in rows of their own.
MaskSlices RandomSlices(unsigned seed) {
  std::mt19937 random(seed);
  const auto below = [&](int n) { return static_cast<int32_t>(random() % n); };
  MaskSlices slices(1 + below(3));
  for (std::vector<MaskSlice>& row : slices) {
    for (int n = below(12); n > 0; --n) {
      const int32_t q = below(33), k = below(66) - 33;
      row.push_back({q, q + 1 + below(33 - q), k, k + 1 + below(66), kKinds[below(4)]});
    }
  }
  return slices;
}

std::vector<MaskCase> MaskCases() {
  return {{"full", {false, 0}, {}},
          {"causal", {true, 0}, {}},
          {"window", {true, 5}, {}},
          {"window of one", {true, 1}, {}},
          {"two-sided window", {false, 7}, {}},
          {"window of any size", {true, INT64_MAX}, {}},
          {"packed", {true, 0}, {{0, 3, 4, 11, 26}, {9}, {0, 1, 2, 30}}},
          {"packed window", {true, 4}, {{5, 12}, {}, {1}}},
          {"packed full", {false, 0}, {{2, 20}}},
          {"prefix", {true, 0}, {}, {{{0, 9}}}},
          {"packed prefixes", {true, 0}, {{0, 3, 11}}, {{{0, 2}, {3, 9}, {11, 30}}}},
          {"images", {true, 0}, {}, {{{1, 4}, {4, 5}, {12, 33}}, {}, {{0, 33}}}},
          {"images under a window", {true, 4}, {{0, 20}}, {{{3, 13}, {20, 31}}}},
          {"images under a two-sided window", {false, 3}, {}, {{{2, 16}}}},
          {"blocks", {true, 0}, {}, {{{0, 8}, {8, 16}, {16, 24}, {24, 32}}}},
          {"tree", {}, {}, {}, {TreeSlices(9, {6, 1, 17})}},
          {"global tokens", {}, {}, {}, {WindowWithGlobalTokens(33, 6, {0, 1, 17}, true)}},
          {"global tokens", {}, {}, {}, {WindowWithGlobalTokens(33, 3, {5, 16, 17, 32}, false)}},
          {"blocks", {}, {}, {}, {BlockSlices(33, 4, {{0}, {0, 1}, {7}, {}, {3, 4}}, true)}},
          {"one slice", {}, {}, {}, {{{3, 20, 8, 25, SliceKind::kBand}}, {}}},
          {"slices 1", {}, {}, {}, RandomSlices(1)},
          {"slices 2", {}, {}, {}, RandomSlices(2)},
          {"slices 3", {}, {}, {}, RandomSlices(3)}};
}

DocumentStarts Clip(const DocumentStarts& documents, int64_t seqlen) {
  DocumentStarts clipped = documents;
  for (auto& row : clipped) {
    row.erase(std::remove_if(row.begin(), row.end(), [&](int32_t p) { return p >= seqlen; }),
              row.end());
  }
  return clipped;
}

Spans Clip(const Spans& spans, int64_t seqlen) {
  Spans clipped = spans;
  for (auto& row : clipped) {
    for (Span& span : row) span.end = std::min(span.end, static_cast<int32_t>(seqlen));
    row.erase(std::remove_if(row.begin(), row.end(), [](Span s) { return s.begin >= s.end; }),
              row.end());
  }
  return clipped;
}

// Of the slices, those whose queries are inside.
MaskSlices Clip(const MaskSlices& slices, int64_t seqlen) {
  const auto n = static_cast<int32_t>(seqlen);
  MaskSlices clipped = slices;
  for (auto& row : clipped) {
    row.erase(
        std::remove_if(row.begin(), row.end(), [n](const MaskSlice& s) { return s.q_end > n; }),
        row.end());
  }
  return clipped;
}

// The definition, in global positions; of documents alone,
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

bool Visible(const MaskSlice& s, int32_t q, int32_t k) {
  if (q < s.q_begin || q >= s.q_end || k < s.k_begin || k >= s.k_end) return false;
  const bool causal = k - s.k_end <= q - s.q_end, inverse = k - s.k_begin >= q - s.q_begin;
  return (causal || s.kind == SliceKind::kFull || s.kind == SliceKind::kInverseCausal) &&
         (inverse || s.kind == SliceKind::kFull || s.kind == SliceKind::kCausal);
}

// and with the spans or slices of a row.
bool Visible(const MaskCase& c, int64_t seqlen, int64_t row, int32_t q, int32_t k) {
  if (!c.slices.empty()) {
    const MaskSlices slices = Clip(c.slices, seqlen);
    const auto& of_row = slices[slices.size() == 1 ? 0 : row];
    return std::any_of(of_row.begin(), of_row.end(),
                       [&](const MaskSlice& slice) { return Visible(slice, q, k); });
  }
  const DocumentStarts documents = Clip(c.documents, seqlen);
  const auto of_row = [row](const auto& rows) -> const auto& {
    return rows[rows.size() == 1 ? 0 : row];
  };
  if (Visible(c.mask, documents.empty() ? nullptr : &of_row(documents), q, k)) return true;
  const Spans spans = Clip(c.spans, seqlen);
  if (spans.empty()) return false;
  return std::any_of(of_row(spans).begin(), of_row(spans).end(), [&](const Span& span) {
    return span.begin <= std::min(q, k) && std::max(q, k) < span.end;
  });
}

RingSchedule Schedule(const MaskCase& c, const TokenShard& shard, int per_node = 0) {
  const int64_t seqlen = shard.seqlen();
  auto schedule = c.slices.empty()
                      ? RingSchedule::Create(shard, c.mask, Clip(c.documents, seqlen), per_node,
                                             Clip(c.spans, seqlen))
                      : RingSchedule::CreateSliced(shard, Clip(c.slices, seqlen), per_node);
  EXPECT_TRUE(schedule.ok()) << schedule.status();
  return *std::move(schedule);
}

constexpr Layout kLayouts[] = {Layout::kContiguous, Layout::kZigzag, Layout::kStriped};
constexpr int64_t kLengths[] = {0, 1, 2, 5, 7, 16, 33};
constexpr int kWorldSizes[] = {1, 2, 3, 4, 8};

// Adds what lists of blocks show to seen[row, query, key]. The lists of queries say the same as
// those of keys, and so do the parts of intervals for kernels that take no lists.
void AddBlocks(const VisibleBlocks& blocks, int64_t rows, int64_t q_len, int64_t k_len,
               std::vector<int>* seen) {
  if (blocks.none()) {
    EXPECT_EQ(blocks.pairs, 0);
    return;
  }
  EXPECT_EQ(blocks.rows, rows);
  EXPECT_EQ(blocks.q_len, q_len);
  EXPECT_EQ(blocks.k_len, k_len);
  std::vector<int> shown(seen->size());
  std::set<std::array<int64_t, 4>> by_queries, by_keys;  // row, query block, key block, place
  int64_t pairs = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t* begin = blocks.key_begin.data() + row * (blocks.query_blocks() + 1);
    for (int64_t i = 0; i < blocks.query_blocks(); ++i) {
      for (int64_t at = begin[i]; at < begin[i + 1]; ++at) {
        const int64_t j = blocks.key_list[at];
        EXPECT_TRUE(at == begin[i] || blocks.key_list[at - 1] < j) << "order";
        by_queries.insert({row, i, j, at - begin[i]});
        for (int64_t q = i * blocks.block; q < std::min(q_len, (i + 1) * blocks.block); ++q) {
          for (int64_t k = j * blocks.block; k < std::min(k_len, (j + 1) * blocks.block); ++k) {
            ++shown[(row * q_len + q) * k_len + k];
            ++pairs;
          }
        }
      }
    }
    begin = blocks.query_begin.data() + row * (blocks.key_blocks() + 1);
    for (int64_t j = 0; j < blocks.key_blocks(); ++j) {
      for (int64_t at = begin[j]; at < begin[j + 1]; ++at) {
        const int64_t i = blocks.query_list[at];
        EXPECT_TRUE(at == begin[j] || blocks.query_list[at - 1] < i) << "order";
        by_keys.insert({row, i, j, blocks.place_list[at]});
      }
    }
  }
  EXPECT_EQ(blocks.pairs, pairs);
  EXPECT_EQ(by_queries, by_keys);
  EXPECT_EQ(by_queries.size(), blocks.key_list.size());
  EXPECT_EQ(by_queries.size(), blocks.query_list.size());
  std::vector<int> in_parts(seen->size());
  for (const VisibleKeys& part : blocks.parts()) {
    for (int64_t at = 0; at < rows * q_len; ++at) {
      EXPECT_TRUE(at % q_len == 0 ||
                  (part.begin[at - 1] <= part.begin[at] && part.end[at - 1] <= part.end[at]));
      for (int32_t k = part.begin[at]; k < part.end[at]; ++k) ++in_parts[at * k_len + k];
    }
  }
  EXPECT_EQ(in_parts, shown);
  for (size_t n = 0; n < seen->size(); ++n) (*seen)[n] += shown[n];
}

// Every visible pair of these queries and keys is in one of the mask's parts, and no other; and
// what the parts say of themselves.
void CheckMask(const MaskCase& c, const RingSchedule& schedule, const std::vector<int32_t>& queries,
               const std::vector<int32_t>& keys, const BlockMask& mask) {
  std::vector<int> seen(schedule.rows() * queries.size() * keys.size());
  EXPECT_TRUE(c.slices.size() > 0 || mask.parts.size() == 1);
  for (const VisibleKeys& visible : mask.parts) {
    EXPECT_EQ(visible.rows, schedule.rows());
    int64_t pairs = 0, seeing = 0, most_queries = 0;
    for (int64_t row = 0; row < visible.rows; ++row) {
      std::vector<size_t> first(keys.size(), queries.size());  // that sees each key
      for (size_t i = 0; i < queries.size(); ++i) {
        const int64_t at = row * visible.q_len + i;
        if (i > 0) {
          EXPECT_GE(visible.begin[at], visible.begin[at - 1]);
          EXPECT_GE(visible.end[at], visible.end[at - 1]);
        }
        seeing += visible.begin[at] < visible.end[at];
        for (int32_t j = visible.begin[at]; j < visible.end[at]; ++j) {
          ++seen[at * keys.size() + j];
          ++pairs;
          first[j] = std::min(first[j], i);
          most_queries = std::max(most_queries, static_cast<int64_t>(i - first[j] + 1));
        }
      }
    }
    EXPECT_EQ(visible.pairs, pairs);
    EXPECT_EQ(visible.seeing, seeing);
    EXPECT_EQ(visible.most_queries, most_queries);
    EXPECT_EQ(visible.all, pairs == static_cast<int64_t>(seen.size()));
    EXPECT_TRUE(pairs > 0 || mask.parts.size() == 1) << "a part of nothing";
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

// What a rank sends of `all` its tokens: those that others need, in order, and where they are.
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
  EXPECT_TRUE(rows != nullptr || sent == all);
  std::vector<int32_t> in_rows;
  for (const BlockRows& range : rows == nullptr ? FindRows(all, all) : *rows) {
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

// Walks all ranks through their routes, message by message: a rank computes and sends only what it
// has, every send has its receive in the same round, what a round needs has arrived when it begins
// (blocks) or ends (gradients), each needed (block, host) pair is computed exactly once, gradients
// return complete, and the tokens are those that the routes announce.
void SimulateRoute(const std::vector<RingSchedule>& schedules, bool queries_are_sent) {
  const int world_size = static_cast<int>(schedules.size());
  const int per_node = schedules[0].ranks_per_node();
  const auto route = [&](int rank) -> const RingRoute& {
    return queries_are_sent ? schedules[rank].query_route() : schedules[rank].kv_route();
  };
  const auto check_peer = [&](int from, int to, Link link) {
    EXPECT_NE(from, to);
    EXPECT_EQ(from / per_node == to / per_node, link == Link::kIntra);
  };
  const auto length = [&](int rank) { return route(0).lengths[rank]; };

  struct Message {
    int source;                // whose block
    std::set<int> added = {};  // of a gradient
  };
  using Arrivals = std::vector<std::vector<Message>>;  // by rank
  std::vector<std::vector<int>> has(world_size);       // blocks by round: [rank][round], -1: none
  PerLink<Arrivals> gradients;                         // posted and not yet awaited
  std::vector<std::set<int>> returned(world_size), computed(world_size);
  std::vector<std::vector<Message>> arrived(world_size);  // partial gradients at hand
  for (Link link : kLinks) gradients[link].resize(world_size);
  for (int rank = 0; rank < world_size; ++rank) {
    has[rank].assign(world_size, -1);
    has[rank][0] = rank;
  }
  PerLink<int64_t> block_tokens, gradient_tokens;
  for (int t = 0; t < world_size; ++t) {
    const bool first = t % per_node == 0, last = (t + 1) % per_node == 0;
    // Blocks.
    for (int rank = 0; rank < world_size; ++rank) {
      const RingRound& round = route(rank).rounds[t];
      for (Link link : kLinks) {
        const RingTransfer& transfer = round.block[link];
        if (link == Link::kInter) {
          EXPECT_TRUE(first || (transfer.to < 0 && transfer.from < 0));
        }
        if (transfer.to >= 0) {
          const int block = link == Link::kInter || first ? has[rank][t] : has[rank][t - 1];
          ASSERT_GE(block, 0);
          check_peer(rank, transfer.to, link);
          const RingTransfer& other = route(transfer.to).rounds[t].block[link];
          EXPECT_EQ(other.from, rank);
          EXPECT_EQ(other.arriving, block);
          block_tokens[link] += length(block);
        }
        if (transfer.from >= 0) {
          EXPECT_EQ(route(transfer.from).rounds[t].block[link].to, rank);
          const int arrives = link == Link::kIntra ? t + 1 : t + per_node;
          ASSERT_LT(arrives, world_size);
          EXPECT_TRUE(link == Link::kInter || !last);
          EXPECT_EQ(has[rank][arrives], -1);
          has[rank][arrives] = transfer.arriving;
        }
      }
    }
    // Computation, and the gradients that have arrived when it is done.
    for (int rank = 0; rank < world_size; ++rank) {
      const RingRound& round = route(rank).rounds[t];
      const bool needed = !(queries_are_sent ? schedules[rank].for_queries_of(round.source)
                                             : schedules[rank].for_keys_of(round.source))
                               .none();
      EXPECT_EQ(round.compute, needed);
      EXPECT_TRUE(computed[rank].insert(round.source).second) << "every block once";
      if (round.compute) {
        EXPECT_EQ(has[rank][t], round.source);
      }
      for (Link link : kLinks) {
        if (link == Link::kInter && !last) continue;
        for (Message& message : gradients[link][rank]) {
          if (message.source == rank) {
            for (int other : message.added) EXPECT_TRUE(returned[rank].insert(other).second);
          } else {
            arrived[rank].push_back(message);
          }
        }
        gradients[link][rank].clear();
      }
      EXPECT_LE(arrived[rank].size(), 3u) << "few buffers";
    }
    // Gradients that are sent.
    for (int rank = 0; rank < world_size; ++rank) {
      const RingRound& round = route(rank).rounds[t];
      Message sum = {round.source};
      if (t > 0 && round.compute) sum.added.insert(rank);
      std::vector<Message> kept;
      for (const Message& message : arrived[rank]) {
        if (message.source == round.source) {
          for (int other : message.added) EXPECT_TRUE(sum.added.insert(other).second);
        } else {
          EXPECT_EQ(message.source, route(rank).rounds[t + 1].source) << "at most a round ahead";
          kept.push_back(message);
        }
      }
      arrived[rank] = kept;
      int sent = 0;
      for (Link link : kLinks) {
        const RingTransfer& transfer = round.gradient[link];
        if (transfer.from >= 0) {
          EXPECT_EQ(route(transfer.from).rounds[t].gradient[link].to, rank);
        }
        if (transfer.to < 0) continue;
        ++sent;
        check_peer(rank, transfer.to, link);
        EXPECT_TRUE(gradients[link][transfer.to].empty()) << "one in transit at a time";
        gradients[link][transfer.to].push_back(sum);
        EXPECT_EQ(route(transfer.to).rounds[t].gradient[link].from, rank);
        EXPECT_EQ(route(transfer.to).rounds[t].gradient[link].arriving, round.source);
        gradient_tokens[link] += length(round.source);
      }
      EXPECT_EQ(sent, sum.added.empty() ? 0 : 1);
    }
  }
  for (int rank = 0; rank < world_size; ++rank) {
    for (Link link : kLinks) {
      for (const Message& message : gradients[link][rank]) {
        EXPECT_EQ(message.source, rank);
        for (int other : message.added) EXPECT_TRUE(returned[rank].insert(other).second);
      }
    }
    std::set<int> expected;
    for (int other = 0; other < world_size; ++other) {
      const BlockMask& keys = queries_are_sent ? schedules[other].for_queries_of(rank)
                                               : schedules[other].for_keys_of(rank);
      if (other != rank && !keys.none()) expected.insert(other);
    }
    EXPECT_EQ(returned[rank], expected);
    for (Link link : kLinks) {
      EXPECT_EQ(route(rank).block_tokens[link], block_tokens[link]);
      EXPECT_EQ(route(rank).gradient_tokens[link], gradient_tokens[link]);
    }
  }
}

// Ranks, and how many of them a node has; 0: one flat ring.
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
          SimulateRoute(schedules, /*queries_are_sent=*/false);
          SimulateRoute(schedules, /*queries_are_sent=*/true);
        }
      }
    }
  }
}

TEST(ScheduleTest, FullAttentionMakesOneTransferLessThanRanks) {
  for (const auto& [world_size, per_node] : kRings) {
    const int64_t per = per_node == 0 ? world_size : per_node, nodes = world_size / per;
    const auto schedule = RingSchedule::Create(
        *TokenShard::Create(0, world_size, Layout::kZigzag, 720), {false, 0}, {}, per_node);
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

// In a flat ring the gradient of others has arrived, to be added to, in all rounds but two; and
// two additions are left, on the last rank and on the owner.
TEST(ScheduleTest, GradientsArriveAheadOfTheirBlocks) {
  for (int world_size : {4, 5, 8}) {
    const auto schedule =
        *RingSchedule::Create(*TokenShard::Create(0, world_size, Layout::kZigzag, 720), {false, 0});
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
  // 8 ranks of 16 tokens, a window of 17: a query sees its own rank's keys and the previous one's.
  const auto schedule =
      RingSchedule::Create(*TokenShard::Create(0, 8, Layout::kContiguous, 128), {true, 17});
  ASSERT_TRUE(schedule.ok());
  // The block of every rank but the last, one transfer.
  EXPECT_EQ(schedule->kv_route().block_tokens.total(), 7 * 16);
}

TEST(ScheduleTest, DocumentsOfOneRankAreNotSent) {
  // 4 ranks of 32 tokens. Rank 0 has a document and a half, the others share one with a neighbor.
  const AttentionMask causal = {true, 0};
  const DocumentStarts documents = {{0, 20, 40, 90, 96}};
  const RingSchedule schedule =
      *RingSchedule::Create(*TokenShard::Create(1, 4, Layout::kContiguous, 128), causal, documents);
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
  const RingSchedule window =
      *RingSchedule::Create(*TokenShard::Create(1, 4, Layout::kContiguous, 128), {true, 8});
  EXPECT_EQ(window.keys_sent_by(0), range(25, 32));
  EXPECT_EQ(window.queries_sent_by(1), range(32, 39));
  EXPECT_EQ(window.kv_route().block_tokens.total(), 3 * 7);
  EXPECT_EQ(window.query_route().block_tokens.total(), 3 * 7);
}

// As if the sequence ended there.
TEST(ScheduleTest, APrefixIsAShorterSequence) {
  for (const MaskCase& c : MaskCases()) {
    if (!c.mask.causal || !c.spans.empty() || !c.slices.empty()) continue;
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
            const auto whole =
                RingSchedule::Create(*TokenShard::Create(rank, world_size, layout, seqlen), c.mask,
                                     Clip(c.documents, seqlen));
            const auto expected =
                RingSchedule::Create(*TokenShard::Create(rank, world_size, positions), c.mask,
                                     Clip(c.documents, tokens));
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

// What a query sees is one or two intervals in these masks, and they take as few calls of a kernel.
TEST(ScheduleTest, SlicesTakeFewParts) {
  const auto parts = [](const MaskSlices& slices, Layout layout, int world_size) {
    size_t most = 0;
    for (int rank = 0; rank < world_size; ++rank) {
      const RingSchedule schedule =
          *RingSchedule::CreateSliced(*TokenShard::Create(rank, world_size, layout, 33), slices);
      for (int source = 0; source < world_size; ++source) {
        most = std::max(most, schedule.for_keys_of(source).parts.size());
      }
    }
    return most;
  };
  for (const Layout layout : kLayouts) {
    for (const int world_size : {1, 2, 4}) {
      SCOPED_TRACE(testing::Message() << Name(layout) << " " << world_size);
      EXPECT_EQ(parts({{{0, 33, 0, 33, SliceKind::kCausal}}}, layout, world_size), 1);
      EXPECT_LE(parts({TreeSlices(9, {6, 1, 17})}, layout, world_size), 2);
      EXPECT_LE(parts({WindowWithGlobalTokens(33, 6, {0, 1}, true)}, layout, world_size), 2);
      EXPECT_LE(parts({WindowWithGlobalTokens(33, 6, {0, 1, 17}, true)}, layout, world_size), 4);
    }
  }
}

// What these slices show, [n, n].
std::vector<int> Shown(const std::vector<MaskSlice>& slices, int32_t n) {
  std::vector<int> shown(static_cast<size_t>(n) * n);
  for (const MaskSlice& slice : slices) {
    for (int32_t q = slice.q_begin; q < slice.q_end; ++q) {
      for (int32_t k = std::max(0, slice.k_begin); k < std::min(n, slice.k_end); ++k) {
        if (Visible(slice, q, k)) shown[q * n + k] = 1;
      }
    }
  }
  return shown;
}

// Every visible pair is once in a part, and no other; returns the calls of a kernel.
size_t CheckDivided(const MaskSlices& slices, int32_t n, const std::vector<int32_t>& queries,
                    const std::vector<int32_t>& keys, const BlockMask& mask) {
  const auto rows = static_cast<int64_t>(slices.size());
  std::vector<int> seen(rows * queries.size() * keys.size()), expected;
  for (const std::vector<MaskSlice>& row : slices) {
    const std::vector<int> shown = Shown(row, n);
    for (const int32_t q : queries) {
      for (const int32_t k : keys) expected.push_back(shown[q * n + k]);
    }
  }
  for (const VisibleKeys& part : mask.parts) {
    for (size_t at = 0; at < rows * queries.size(); ++at) {
      EXPECT_TRUE(at % queries.size() == 0 ||
                  (part.begin[at - 1] <= part.begin[at] && part.end[at - 1] <= part.end[at]));
      for (int32_t k = part.begin[at]; k < part.end[at]; ++k) ++seen[at * keys.size() + k];
    }
  }
  AddBlocks(mask.blocks, rows, static_cast<int64_t>(queries.size()),
            static_cast<int64_t>(keys.size()), &seen);
  EXPECT_EQ(seen, expected);
  return mask.parts.size() + !mask.blocks.none();
}

// With blocks so small that slices of a few tokens have whole ones, in every layout.
TEST(ScheduleTest, WholeBlocksAreListed) {
  constexpr int32_t kSeqlen = 33;
  std::vector<MaskSlices> cases = {
      {BlockSlices(kSeqlen, 4, {{0, 2, 5, 7}, {1, 4}, {0, 3, 6}}, true)}};
  for (unsigned seed = 1; seed <= 40; ++seed) cases.push_back(RandomSlices(seed));
  int masks_with_lists = 0;
  for (const MaskSlices& slices : cases) {
    for (const Layout layout : kLayouts) {
      for (const int ranks : {1, 3}) {
        const TokenShard shard = *TokenShard::Create(0, ranks, layout, kSeqlen);
        for (int source = 0; source < ranks; ++source) {
          const auto &queries = shard.group_positions(0), &keys = shard.group_positions(source);
          size_t fewest = SIZE_MAX;
          for (const int64_t block : {1, 2, 3, 5, 64}) {
            SCOPED_TRACE(testing::Message() << "case " << &slices - cases.data() << " "
                                            << Name(layout) << " " << ranks << " " << block);
            const BlockMask mask = ComputeVisibleKeys(slices, queries, keys, block);
            const size_t calls = CheckDivided(slices, kSeqlen, queries, keys, mask);
            masks_with_lists += !mask.blocks.none();
            if (block == 1) fewest = calls;  // then everything is whole: one call
            EXPECT_EQ(fewest, 1u);
          }
        }
      }
    }
  }
  EXPECT_GT(masks_with_lists, 100);
}

// Sparse blocks of any size on the kernels' grid. What is whole there is one call.
TEST(ScheduleTest, SparseBlocksAreLists) {
  std::mt19937 random(5);
  const auto chosen = [&](int32_t count) {
    std::vector<std::vector<int32_t>> key_blocks(count);
    for (int32_t i = 0; i < count; ++i) {
      for (int32_t j = 0; j < count; ++j) {
        if (i == j || random() % 3 == 0) key_blocks[i].push_back(j);
      }
    }
    return key_blocks;
  };
  for (const int32_t seqlen : {1000, 1024}) {
    for (const int32_t size : {64, 96, 100, 128, 130, 256}) {
      for (const bool causal : {false, true}) {
        const MaskSlices slices = {
            BlockSlices(seqlen, size, chosen((seqlen + size - 1) / size), causal),
            BlockSlices(seqlen, size, chosen((seqlen + size - 1) / size), causal)};
        for (const Layout layout : kLayouts) {
          for (const int ranks : {1, 2}) {
            SCOPED_TRACE(testing::Message() << seqlen << " tokens, blocks of " << size << " "
                                            << causal << " " << Name(layout) << " " << ranks);
            const TokenShard shard = *TokenShard::Create(ranks - 1, ranks, layout, seqlen);
            const RingSchedule schedule = *RingSchedule::CreateSliced(shard, slices);
            const auto &queries = shard.group_positions(ranks - 1),
                       &keys = shard.group_positions(0);
            const BlockMask& mask = schedule.for_keys_of(0);
            const size_t calls = CheckDivided(slices, seqlen, queries, keys, mask);
            const bool whole = size % 128 == 0 && layout != Layout::kStriped;
            if (whole && (ranks == 1 || seqlen == 1024)) {
              EXPECT_TRUE(!mask.blocks.none() || size > 128);
              EXPECT_LE(calls, causal ? 2u : 1u);
            }
          }
        }
      }
    }
  }
}

// Windows and trees take few parts of intervals, and lists would not make them fewer.
TEST(ScheduleTest, FewPartsNeedNoLists) {
  const int32_t n = 2048;
  for (const std::vector<MaskSlice>& slices :
       {TreeSlices(512, {256, 300, 256, 724}), WindowWithGlobalTokens(n, 300, {0, 1, 2}, true),
        WindowWithGlobalTokens(n, 300, {0, 1, 2}, false)}) {
    const RingSchedule schedule =
        *RingSchedule::CreateSliced(*TokenShard::Create(0, 1, Layout::kContiguous, n), {slices});
    EXPECT_TRUE(schedule.for_keys_of(0).blocks.none());
    EXPECT_LE(schedule.for_keys_of(0).parts.size(), 3u);
  }
}

// By their definitions, token by token.
TEST(ScheduleTest, NamedSlices) {
  const int32_t n = 33;
  const auto expect = [&](const char* name, const std::vector<MaskSlice>& slices,
                          const std::function<bool(int32_t q, int32_t k)>& visible) {
    ASSERT_TRUE(CheckSlices(n, {slices}).ok()) << name;
    for (int32_t q = 0; q < n; ++q) {
      for (int32_t k = 0; k < n; ++k) {
        EXPECT_EQ(std::any_of(slices.begin(), slices.end(),
                              [&](const MaskSlice& slice) { return Visible(slice, q, k); }),
                  visible(q, k))
            << name << ", query " << q << ", key " << k;
      }
    }
  };
  const auto answer = [](int32_t at) { return at < 9 ? 0 : at < 15 ? 1 : at < 16 ? 2 : 3; };
  expect("tree", TreeSlices(9, {6, 0, 1, 17}), [&](int32_t q, int32_t k) {
    return k <= q && (answer(k) == 0 || answer(k) == answer(q));
  });
  expect("answers without a prompt", TreeSlices(0, {9, 6, 1, 17}),
         [&](int32_t q, int32_t k) { return k <= q && answer(k) == answer(q); });
  const std::set<int32_t> global = {2, 3, 17, 32};
  for (const bool causal : {false, true}) {
    for (const int32_t window : {1, 5, 33, 50, INT32_MAX}) {
      expect("window", WindowWithGlobalTokens(n, window, {2, 3, 17, 32}, causal),
             [&](int32_t q, int32_t k) {
               return (!causal || k <= q) &&
                      (std::abs(q - k) < window || global.count(q) > 0 || global.count(k) > 0);
             });
    }
    const std::vector<std::vector<int32_t>> blocks = {{0}, {0, 1}, {}, {2}, {4, 3, 0}};
    expect("blocks", BlockSlices(n, 7, blocks, causal), [&](int32_t q, int32_t k) {
      const auto& seen = blocks[q / 7];
      return std::count(seen.begin(), seen.end(), k / 7) > 0 &&
             (!causal || k / 7 != q / 7 || k <= q);
    });
  }
}

TEST(ScheduleTest, RejectsSlicesThatAreNone) {
  const TokenShard shard = *TokenShard::Create(0, 1, Layout::kContiguous, 20);
  const auto message = [&](const MaskSlices& slices) {
    const absl::Status status = RingSchedule::CreateSliced(shard, slices).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_EQ(message({}), "slices are given, but of no rows");
  const std::string beyond = " is empty or beyond the sequence of 20 tokens";
  EXPECT_EQ(message({{}, {{0, 0, 0, 5}}}),
            "slice of queries [0, 0) and keys [0, 5) of row 1" + beyond);
  EXPECT_EQ(message({{{0, 5, 9, 8}}}), "slice of queries [0, 5) and keys [9, 8) of row 0" + beyond);
  EXPECT_EQ(message({{{-1, 5, 0, 8}}}),
            "slice of queries [-1, 5) and keys [0, 8) of row 0" + beyond);
  EXPECT_EQ(message({{{0, 21, 0, 5}}}),
            "slice of queries [0, 21) and keys [0, 5) of row 0" + beyond);
  EXPECT_TRUE(RingSchedule::CreateSliced(shard, {{}}).ok()) << "nobody sees anything";
}

TEST(ScheduleTest, RejectsSpansThatAreNone) {
  const TokenShard shard = *TokenShard::Create(0, 1, Layout::kContiguous, 20);
  const auto message = [&](const Spans& spans, const DocumentStarts& documents = {}) {
    const absl::Status status =
        RingSchedule::Create(shard, AttentionMask(), documents, 0, spans).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  const std::string order = " is empty, out of order or beyond the sequence of 20 tokens";
  EXPECT_EQ(message({{{3, 3}}}), "span [3, 3) of row 0" + order);
  EXPECT_EQ(message({{}, {{-1, 2}}}), "span [-1, 2) of row 1" + order);
  EXPECT_EQ(message({{{3, 21}}}), "span [3, 21) of row 0" + order);
  EXPECT_EQ(message({{{3, 9}, {8, 12}}}), "span [8, 12) of row 0" + order);
  const std::string beyond = "span [3, 9) of row 0 goes beyond its document, which ends at 7";
  EXPECT_EQ(message({{{3, 9}}}, {{0, 7, 12}}), beyond);
  EXPECT_EQ(message({{{3, 9}}}, {{0, 3, 9}, {7}}), beyond) << "one row of spans, for all";
  EXPECT_EQ(message({{{3, 9}}, {}}, {{7}}), beyond) << "one row of documents, for all";
  EXPECT_EQ(message({{}, {}}, {{0}, {1}, {2}}), "documents of 3 rows, but spans of 2");
  EXPECT_TRUE(
      RingSchedule::Create(shard, AttentionMask(), {{3, 9}, {7}}, 0, {{{3, 9}}, {{7, 20}}}).ok());
}

TEST(ScheduleTest, RejectsWhatItCannotServe) {
  const AttentionMask mask;
  const TokenShard shard = *TokenShard::Create(0, 2, Layout::kZigzag, 8);
  EXPECT_FALSE(RingSchedule::Create(shard, {true, -3}).ok());
  EXPECT_FALSE(RingSchedule::Create(shard, mask, {{0, 8}}).ok());
  EXPECT_FALSE(RingSchedule::Create(shard, mask, {{4, 4}}).ok());
  EXPECT_FALSE(RingSchedule::Create(shard, mask, {{-1}}).ok());
  EXPECT_TRUE(RingSchedule::Create(shard, mask, {{0, 7}}).ok());
}

}  // namespace
}  // namespace burst
