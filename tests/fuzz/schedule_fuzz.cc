// Makes schedules of random rings: mask, layout, documents, spans or slices, length, ranks, groups
// and nodes. Every rank's mask is compared with its definition, pair by pair. Then all ranks walk
// their routes together, as Ring::Run posts and awaits transfers:
//
//    - each message has a receiver and a length that both ends know, and none waits in a circle;
//    - each visible (query, key) pair is computed on exactly one rank in exactly one round with a
//      block that is there;
//    - the gradients that return to an owner hold every part once.
//
// A causal schedule's prefix is checked in this way, too.
#include <algorithm>
#include <cstdlib>
#include <deque>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "burst/attention/ring/schedule.h"
#include "burst/base/check.h"
#include "tests/fuzz/fuzz_input.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/mask/mask_definition.h"

namespace burst {
namespace {

struct Problem {
  int ranks = 1, group = 1, per_node = 0;
  int64_t seqlen = 0;
  Layout layout = Layout::kContiguous;
  IntervalMask mask;
  MaskSlices slices;  // in place of `mask`, if there are any

  size_t rows() const { return slices.empty() ? mask.rows() : slices.size(); }
};

// Reads disjoint spans, each within a document of its row.
void ReadSpans(FuzzInput* input, Problem* p) {
  const size_t documents = p->mask.documents.size(), rows = input->Integer(0, 3);
  p->mask.spans.resize(documents > 1 && rows > 1 ? documents : rows);
  for (size_t row = 0; row < p->mask.spans.size(); ++row) {
    int64_t begin = 0;
    while ((begin += input->Integer(0, 15)) < p->seqlen) {
      int64_t end = std::min(p->seqlen, begin + 1 + input->Integer(0, 31));
      for (size_t d = 0; d < documents; ++d) {
        if (p->mask.spans.size() > 1 && documents > 1 && d != row) continue;
        for (const int32_t start : p->mask.documents[d]) {
          if (start > begin) end = std::min<int64_t>(end, start);
        }
      }
      p->mask.spans[row].push_back({static_cast<int32_t>(begin), static_cast<int32_t>(end)});
      begin = end;
    }
  }
}

void ReadSlices(FuzzInput* input, Problem* p) {
  constexpr SliceKind kKinds[] = {SliceKind::kFull, SliceKind::kCausal, SliceKind::kInverseCausal,
                                  SliceKind::kBand};
  p->slices.resize(input->Integer(0, 3));
  const auto range = [&](int64_t first, int64_t last, int32_t* begin, int32_t* end) {
    *begin = static_cast<int32_t>(input->Integer(first, last - 1));
    *end = static_cast<int32_t>(input->Integer(*begin + 1, last));
  };
  for (std::vector<MaskSlice>& row : p->slices) {
    row.resize(input->Integer(0, 9));
    for (MaskSlice& slice : row) {
      range(0, p->seqlen, &slice.q_begin, &slice.q_end);
      range(-p->seqlen, 2 * p->seqlen, &slice.k_begin, &slice.k_end);
      slice.kind = input->Pick(kKinds);
    }
  }
}

Problem Read(FuzzInput* input) {
  constexpr Layout kLayouts[] = {Layout::kContiguous, Layout::kZigzag, Layout::kStriped};
  Problem p;
  p.ranks = static_cast<int>(input->Integer(1, 12));
  p.group = static_cast<int>(input->Integer(1, 3));
  p.seqlen = input->Integer(0, 48);
  p.layout = input->Pick(kLayouts);
  p.mask.causal = input->Bool();
  // Some windows are larger than the sequence, up to the largest number.
  const int64_t window = input->Integer(0, 99);
  p.mask.window = window < 96 ? window : INT64_MAX - input->Integer(0, int64_t{1} << (window - 64));
  std::vector<int> divisors = {0};
  for (int n = 1; n <= p.ranks; ++n) {
    if (p.ranks % n == 0) divisors.push_back(n);
  }
  p.per_node = divisors[input->Integer(0, static_cast<int64_t>(divisors.size()) - 1)];
  p.mask.documents.resize(input->Integer(0, 3));
  for (std::vector<int32_t>& starts : p.mask.documents) {
    int64_t start = -1;
    while ((start += 1 + input->Integer(0, 31)) < p.seqlen) {
      starts.push_back(static_cast<int32_t>(start));
    }
  }
  ReadSpans(input, &p);
  if (p.seqlen > 0) ReadSlices(input, &p);
  return p;
}

bool Visible(const Problem& p, size_t row, int64_t q, int64_t k) {
  const auto at = static_cast<int64_t>(row);
  return p.slices.empty() ? Visible(p.mask, at, q, k) : Visible(p.slices, at, q, k);
}

// Counts the visible pairs of these queries and keys, and checks `mask`.
template <typename BetweenBlocks>  // KernelMask or BlockMask
int64_t CheckMask(const Problem& p, const std::vector<int32_t>& queries,
                  const std::vector<int32_t>& keys, const BetweenBlocks& mask) {
  const size_t rows = p.rows(), all = rows * queries.size() * keys.size();
  BURST_CHECK(mask.parts.size() == 1 || !p.slices.empty());
  std::vector<int> seen(all);
  for (const VisibleKeys& visible : mask.parts) {
    BURST_CHECK_EQ(visible.rows, static_cast<int64_t>(rows));
    BURST_CHECK_EQ(visible.q_len, static_cast<int64_t>(queries.size()));
    int64_t pairs = 0;
    for (size_t row = 0; row < rows; ++row) {
      int64_t begin = 0, end = 0;
      for (size_t i = 0; i < queries.size(); ++i) {
        const size_t at = row * queries.size() + i;
        BURST_CHECK(begin <= visible.begin[at] && end <= visible.end[at]) << "order";
        begin = visible.begin[at];
        end = visible.end[at];
        BURST_CHECK(end <= static_cast<int64_t>(keys.size()));
        for (int64_t j = begin; j < end; ++j, ++pairs) ++seen[at * keys.size() + j];
      }
    }
    BURST_CHECK_EQ(visible.pairs, pairs);
    BURST_CHECK_EQ(visible.all, pairs == static_cast<int64_t>(all));
  }
  const VisibleBlocks& blocks = mask.blocks;
  BURST_CHECK(blocks.none() || !p.slices.empty());
  std::set<std::tuple<size_t, int64_t, int64_t, int64_t>> listed;  // row, blocks, place
  for (size_t row = 0; row < rows && !blocks.none(); ++row) {
    const int32_t* begin = blocks.key_begin.data() + row * (blocks.query_blocks() + 1);
    for (int64_t i = 0; i < blocks.query_blocks(); ++i) {
      for (int64_t at = begin[i]; at < begin[i + 1]; ++at) {
        const int64_t key = blocks.key_list[at] * blocks.block, query = i * blocks.block;
        BURST_CHECK(at == begin[i] || blocks.key_list[at - 1] < blocks.key_list[at]) << "order";
        listed.insert({row, i, blocks.key_list[at], at - begin[i]});
        for (int64_t q = query; q < std::min(blocks.q_len, query + blocks.block); ++q) {
          for (int64_t k = key; k < std::min(blocks.k_len, key + blocks.block); ++k) {
            ++seen[(row * queries.size() + q) * keys.size() + k];
          }
        }
      }
    }
    begin = blocks.query_begin.data() + row * (blocks.key_blocks() + 1);
    for (int64_t j = 0; j < blocks.key_blocks(); ++j) {
      for (int64_t at = begin[j]; at < begin[j + 1]; ++at) {
        BURST_CHECK(at == begin[j] || blocks.query_list[at - 1] < blocks.query_list[at]) << "order";
        BURST_CHECK_EQ(listed.erase({row, blocks.query_list[at], j, blocks.place_list[at]}), 1u);
      }
    }
  }
  BURST_CHECK(listed.empty());
  BURST_CHECK_EQ(mask.pairs(),
                 std::count_if(seen.begin(), seen.end(), [](int n) { return n > 0; }));
  for (size_t n = 0; n < all; ++n) {
    const size_t j = n % keys.size(), i = n / keys.size() % queries.size();
    BURST_CHECK_EQ(seen[n], Visible(p, n / keys.size() / queries.size(), queries[i], keys[j]))
        << "query at " << queries[i] << ", key at " << keys[j];
  }
  return mask.pairs();
}

// Counts the pairs of rank q's queries and rank k's keys. The number is the same where keys are
// sent, where queries are sent, and with all tokens.
int64_t CheckMasks(const Problem& p, const std::vector<RingSchedule>& schedules, int q, int k) {
  const auto &queries = schedules[q].shard().group_positions(q),
             &keys = schedules[k].shard().group_positions(k);
  const int64_t pairs = CheckMask(p, queries, q == k ? keys : schedules[q].keys_sent_by(k),
                                  schedules[q].for_keys_of(k));
  if (!p.slices.empty()) {  // block sizes that fit these short sequences
    for (const int64_t block : {2, 5}) {
      BURST_CHECK_EQ(
          pairs, CheckMask(p, queries, keys, Mask::Slices(p.slices).Between(queries, keys, block)));
    }
  }
  BURST_CHECK_EQ(pairs, CheckMask(p, q == k ? queries : schedules[k].queries_sent_by(q), keys,
                                  schedules[k].for_queries_of(q)));
  return pairs;
}

// Checks that every position is on one rank, and that a group's runs lead to its ranks' tokens.
void CheckShards(const Problem& p, const std::vector<TokenShard>& shards) {
  std::vector<int> seen(p.seqlen);
  for (int index = 0; index < p.ranks; ++index) {
    const TokenShard& shard = shards[index];
    int64_t tokens = 0;
    for (int g = 0; g < p.group; ++g) {
      const std::vector<int32_t>& local = shard.local_positions(g);
      for (int32_t position : local) ++seen[position];
      int64_t next = 0;
      for (const TokenRun& run : shard.runs(g)) {
        BURST_CHECK_EQ(run.first, next);
        for (int64_t i = 0; i < run.count; ++i) {
          BURST_CHECK_EQ(local[run.first + i],
                         shard.group_positions(index)[run.begin + i * run.step]);
        }
        next += run.count;
      }
      BURST_CHECK_EQ(next, shard.local_length(g));
      tokens += next;
    }
    BURST_CHECK_EQ(tokens, shard.group_length());
    for (int other = 0; other < p.ranks; ++other) {
      BURST_CHECK(shard.group_positions(other) == shards[other].group_positions(other));
    }
  }
  for (int count : seen) BURST_CHECK_EQ(count, 1);
}

// A message on its way: a rank's block, or its gradient.
struct Message {
  int owner = -1;            // owner of the block
  int64_t length = 0;        // tokens
  std::set<int> parts = {};  // ranks whose part of a gradient it holds
};

// Runs all ranks' routes together as Ring::Run does. Posting never waits. A wait for a channel ends
// when its messages have arrived and the receivers have taken the sent ones, the strictest rule of
// communicators.
class Walk {
 public:
  Walk(const std::vector<RingSchedule>& schedules, bool queries_are_sent, bool has_gradients)
      : schedules_(schedules),
        queries_are_sent_(queries_are_sent),
        has_gradients_(has_gradients),
        ranks_(static_cast<int>(schedules.size())),
        states_(schedules.size()) {
    for (int rank = 0; rank < ranks_; ++rank) {
      states_[rank].current = {rank, Length(rank, rank)};
      BeginRound(rank);
    }
    // Ranks go on in turn as far as they can. When none can, all must be done.
    for (bool moved = true; moved;) {
      moved = false;
      for (int rank = 0; rank < ranks_; ++rank) {
        while (Step(rank)) moved = true;
      }
    }
    for (int rank = 0; rank < ranks_; ++rank) CheckEnd(rank);
    for (const auto& [key, queue] : in_transit_) BURST_CHECK(queue.empty()) << "not received";
    for (Link link : kLinks) {
      BURST_CHECK_EQ(Route(0).block_tokens[link], tokens_sent_[0][link]);
      if (has_gradients) {
        BURST_CHECK_EQ(Route(0).gradient_tokens[link], tokens_sent_[1][link]);
      }
    }
  }

 private:
  enum class Kind { kBlock, kGradient };
  struct Channel {
    RingTransfer receive;  // from is -1 if no message is expected
    Message received;      // owner is -1 if no message came
    int unsent = 0;        // messages sent that nobody has taken yet
  };
  struct State {
    int round = 0;
    int waits = 0;  // how many of the round's waits are over
    Message previous, current;
    PerLink<Channel> blocks, gradients;
    std::vector<Message> arrived;  // gradients of this round's block, or of the next one's
    std::set<int> computed, returned;
  };

  const RingRoute& Route(int rank) const {
    return queries_are_sent_ ? schedules_[rank].query_route() : schedules_[rank].kv_route();
  }
  const KernelMask& Work(int host, int block) const {
    return queries_are_sent_ ? schedules_[host].for_queries_of(block)
                             : schedules_[host].for_keys_of(block);
  }
  // Returns the tokens of a block, as `rank` knows them.
  int64_t Length(int rank, int block) const { return Route(rank).lengths[block]; }
  bool FirstInNode(int round) const { return round % Route(0).ranks_per_node == 0; }
  Channel& At(int rank, Link link, Kind kind) {
    return kind == Kind::kBlock ? states_[rank].blocks[link] : states_[rank].gradients[link];
  }

  void Post(int rank, Link link, Kind kind, const RingTransfer& transfer, const Message& out) {
    Channel& channel = At(rank, link, kind);
    if (transfer.to >= 0) {
      const int per_node = Route(rank).ranks_per_node;
      BURST_CHECK(transfer.to != rank && transfer.to < ranks_);
      BURST_CHECK_EQ(rank / per_node == transfer.to / per_node, link == Link::kIntra);
      BURST_CHECK(out.owner >= 0) << "rank " << rank << " sends what it does not have";
      tokens_sent_[kind == Kind::kGradient][link] += out.length;
      in_transit_[{rank, transfer.to, link, kind}].push_back(out);
      ++channel.unsent;
    }
    if (transfer.from >= 0) {
      BURST_CHECK(channel.receive.from < 0 && channel.received.owner < 0) << "two at once";
      channel.receive = transfer;
    }
  }

  // Acts as Communicator::Wait. Returns false if the wait goes on.
  bool Wait(int rank, Link link, Kind kind) {
    Channel& channel = At(rank, link, kind);
    const int from = channel.receive.from;
    if (from >= 0) {
      auto& queue = in_transit_[{from, rank, link, kind}];
      if (queue.empty()) return false;
      channel.received = queue.front();
      queue.pop_front();
      BURST_CHECK_EQ(channel.received.owner, channel.receive.arriving);
      BURST_CHECK_EQ(channel.received.length, Length(rank, channel.receive.arriving));
      channel.receive = {};
      --At(from, link, kind).unsent;
    }
    return channel.unsent == 0;
  }

  void BeginRound(int rank) {
    State& s = states_[rank];
    const RingRound& round = Route(rank).rounds[s.round];
    const RingTransfer &within = round.block[Link::kIntra], &across = round.block[Link::kInter];
    const bool first = FirstInNode(s.round), last = FirstInNode(s.round + 1);
    BURST_CHECK(first || (across.to < 0 && across.from < 0));
    BURST_CHECK(!last || (within.to < 0 && within.from < 0));
    Post(rank, Link::kIntra, Kind::kBlock, within, first ? s.current : s.previous);
    Post(rank, Link::kInter, Kind::kBlock, across, s.current);
    BURST_CHECK_EQ(round.compute, !Work(rank, round.source).none());
    BURST_CHECK(s.computed.insert(round.source).second) << "block " << round.source << " twice";
    BURST_CHECK(!round.compute || s.current.owner == round.source) << "block not there";
  }

  // Makes the next wait of a rank and the steps after it. Returns false if it still waits, or all
  // is done.
  bool Step(int rank) {
    State& s = states_[rank];
    const bool last = FirstInNode(s.round + 1);
    if (s.round == ranks_) {
      if (!has_gradients_ || s.waits == 2) return false;
      if (!Arrive(rank, s.waits == 0 ? Link::kIntra : Link::kInter)) return false;
      ++s.waits;
      return true;
    }
    const RingRound& round = Route(rank).rounds[s.round];
    switch (s.waits) {
      case 0:
        if (has_gradients_ && !Arrive(rank, Link::kIntra)) return false;
        break;
      case 1:
        if (!has_gradients_) break;
        if (last && !Arrive(rank, Link::kInter)) return false;
        SendGradient(rank, round);
        break;
      case 2:
        if (!Wait(rank, Link::kIntra, Kind::kBlock)) return false;
        break;
      case 3:
        if (last && !Wait(rank, Link::kInter, Kind::kBlock)) return false;
        s.previous = s.current;
        s.current = std::exchange(s.blocks[last ? Link::kInter : Link::kIntra].received, {});
        s.waits = -1;
        if (++s.round < ranks_) BeginRound(rank);
    }
    ++s.waits;
    return true;
  }

  bool Arrive(int rank, Link link) {
    State& s = states_[rank];
    if (!Wait(rank, link, Kind::kGradient)) return false;
    const Message gradient = std::exchange(s.gradients[link].received, {});
    if (gradient.owner < 0) return true;
    if (gradient.owner != rank) {
      const int ahead = gradient.owner == Source(rank, s.round) ? 0 : 1;
      BURST_CHECK_EQ(gradient.owner, Source(rank, s.round + ahead)) << "too early, or too late";
      s.arrived.push_back(gradient);
      return true;
    }
    for (int part : gradient.parts) BURST_CHECK(s.returned.insert(part).second) << "part twice";
    return true;
  }
  int Source(int rank, int round) const {
    return round < ranks_ ? Route(rank).rounds[round].source : -1;
  }

  void SendGradient(int rank, const RingRound& round) {
    State& s = states_[rank];
    Message sum = {round.source, Length(rank, round.source)};
    if (s.round > 0 && round.compute) sum.parts.insert(rank);
    std::vector<Message> ahead;
    for (const Message& message : s.arrived) {
      if (message.owner != round.source) {
        ahead.push_back(message);
        continue;
      }
      for (int part : message.parts) BURST_CHECK(sum.parts.insert(part).second) << "part twice";
    }
    s.arrived = ahead;
    int sends = 0;
    for (Link link : kLinks) {
      sends += round.gradient[link].to >= 0;
      Post(rank, link, Kind::kGradient, round.gradient[link], sum);
    }
    BURST_CHECK_EQ(sends, sum.parts.empty() ? 0 : 1);
  }

  void CheckEnd(int rank) const {
    const State& s = states_[rank];
    BURST_CHECK(s.round == ranks_ && (!has_gradients_ || s.waits == 2))
        << "rank " << rank << " waits for ever in round " << s.round;
    BURST_CHECK(s.arrived.empty());
    BURST_CHECK_EQ(static_cast<int>(s.computed.size()), ranks_);
    std::set<int> expected;
    for (int host = 0; host < ranks_ && has_gradients_; ++host) {
      if (host != rank && !Work(host, rank).none()) expected.insert(host);
    }
    BURST_CHECK(s.returned == expected) << "gradients of rank " << rank;
  }

  const std::vector<RingSchedule>& schedules_;
  const bool queries_are_sent_, has_gradients_;
  const int ranks_;
  std::vector<State> states_;
  std::map<std::tuple<int, int, Link, Kind>, std::deque<Message>> in_transit_;
  PerLink<int64_t> tokens_sent_[2];  // tokens of blocks, and of gradients
};

// Checks the schedule of the first `tokens` tokens alone.
void CheckPrefix(Problem p, int64_t tokens, const std::vector<RingSchedule>& schedules) {
  p.seqlen = tokens;  // documents that begin after it do not divide its tokens
  std::vector<TokenShard> shards;
  std::vector<RingSchedule> prefixes;
  for (const RingSchedule& schedule : schedules) {
    prefixes.push_back(schedule.Prefix(tokens));
    shards.push_back(prefixes.back().shard());
  }
  CheckShards(p, shards);
  for (int q = 0; q < p.ranks; ++q) {
    for (int k = 0; k < p.ranks; ++k) {
      CheckMasks(p, prefixes, q, k);
    }
  }
  Walk(prefixes, /*queries_are_sent=*/false, /*has_gradients=*/true);
  Walk(prefixes, /*queries_are_sent=*/true, /*has_gradients=*/true);
}

}  // namespace

void FuzzOne(const uint8_t* data, size_t size) {
  FuzzInput input(data, size);
  const Problem p = Read(&input);
  std::vector<TokenShard> shards;
  std::vector<RingSchedule> schedules;
  for (int rank = 0; rank < p.ranks; ++rank) {
    shards.push_back(
        *TokenShard::Create(rank, p.ranks, p.layout, p.seqlen, {p.group, rank % p.group}));
    absl::StatusOr<RingSchedule> schedule = RingSchedule::Create(
        shards.back(), p.slices.empty() ? MaskOf(p.mask) : Mask::Slices(p.slices), p.per_node);
    BURST_CHECK(schedule.ok()) << schedule.status().message();
    BURST_CHECK_EQ(schedule->ranks_per_node(), p.per_node == 0 ? p.ranks : p.per_node);
    schedules.push_back(*std::move(schedule));
  }
  CheckShards(p, shards);
  int64_t pairs = 0, expected = 0;
  for (int q = 0; q < p.ranks; ++q) {
    for (int k = 0; k < p.ranks; ++k) {
      pairs += CheckMasks(p, schedules, q, k);
    }
  }
  for (size_t row = 0; row < p.rows(); ++row) {
    for (int64_t q = 0; q < p.seqlen; ++q) {
      for (int64_t k = 0; k < p.seqlen; ++k) expected += Visible(p, row, q, k);
    }
  }
  BURST_CHECK_EQ(pairs, expected);
  Walk(schedules, /*queries_are_sent=*/false, /*has_gradients=*/false);
  Walk(schedules, /*queries_are_sent=*/false, /*has_gradients=*/true);
  Walk(schedules, /*queries_are_sent=*/true, /*has_gradients=*/true);
  if (p.mask.causal && p.mask.spans.empty() && p.slices.empty()) {
    CheckPrefix(p, input.Integer(0, p.seqlen), schedules);
  }
}

}  // namespace burst
