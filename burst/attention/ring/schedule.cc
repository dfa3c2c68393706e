#include "burst/attention/ring/schedule.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "burst/base/status.h"

namespace burst {

enum class BlockOf { kKeys, kQueries };

namespace {

using Positions = std::vector<int32_t>;

// ---- The tokens that a ring sends of a rank's block. A document on one rank never leaves it, and
// only the edge of a window does.

// More pieces, or a larger share of the block, are not worth a copy of the rows.
constexpr size_t kMostPieces = 64;
constexpr double kMostOfBlock = 0.75;

// Calls f(i, begin, end) for every token, positions[i]. Its counterparts are [begin, end): the keys
// that a query may see, or the queries that may see a key.
template <typename Function>
void ForEachToken(BlockOf block, const IntervalMask& mask, int64_t row, int64_t seqlen,
                  const Positions& positions, Function f) {
  constexpr int64_t kInfinity = std::numeric_limits<int32_t>::max();
  const int64_t window = mask.window > 0 ? std::min(mask.window, kInfinity) : kInfinity;
  const DocumentStarts& documents = mask.documents;
  const Spans& spans = mask.spans;
  const Positions* const starts =
      documents.empty() ? nullptr : &documents[documents.size() == 1 ? 0 : row];
  const bool has_spans = !spans.empty() && !spans[spans.size() == 1 ? 0 : row].empty();
  size_t next_document = 0;
  int64_t document_begin = 0, document_end = seqlen;
  for (size_t i = 0; i < positions.size(); ++i) {
    const int64_t t = positions[i];
    if (starts != nullptr) {
      while (next_document < starts->size() && (*starts)[next_document] <= t) {
        document_begin = (*starts)[next_document++];
      }
      document_end = next_document < starts->size() ? (*starts)[next_document] : seqlen;
    }
    int64_t begin = document_begin, end = document_end;
    if (!has_spans) {
      begin = std::max(begin, t - window + 1);
      end = std::min(end, t + window);
      // Later tokens see a key, and a query sees earlier ones.
      if (mask.causal && block == BlockOf::kKeys) begin = t;
      if (mask.causal && block == BlockOf::kQueries) end = t + 1;
    }
    f(i, begin, end);
  }
}

// Marks the tokens whose counterparts are not all among the neighbors that the rank has.
void MarkIntervals(BlockOf block, const IntervalMask& mask, int64_t seqlen,
                   const Positions& positions, std::vector<bool>* needed) {
  for (int64_t row = 0; row < mask.rows(); ++row) {
    size_t last = 0;           // the end of a run of positions without a gap
    int64_t first_in_run = 0;  // its first position
    ForEachToken(block, mask, row, seqlen, positions, [&](size_t i, int64_t begin, int64_t end) {
      if (i == last) {
        first_in_run = positions[i];
        do ++last;
        while (last < positions.size() && positions[last] == positions[last - 1] + 1);
      }
      if (begin < first_in_run || end > positions[last - 1] + 1) (*needed)[i] = true;
    });
  }
}

// Marks the tokens of slices whose counterparts are not all on the rank.
void MarkSlices(BlockOf block, const MaskSlices& slices, int64_t seqlen, const Positions& positions,
                std::vector<bool>* needed) {
  const auto place = [&](int64_t position) {
    return std::lower_bound(positions.begin(), positions.end(), position) - positions.begin();
  };
  std::vector<int64_t> change(positions.size() + 1);  // of the slices that need a token
  for (const std::vector<MaskSlice>& row : slices) {
    for (const MaskSlice& slice : row) {
      const int64_t queries[] = {slice.q_begin, slice.q_end};
      const int64_t keys[] = {std::max<int64_t>(slice.k_begin, 0),
                              std::min<int64_t>(slice.k_end, seqlen)};
      const auto& [begin, end] = block == BlockOf::kKeys ? keys : queries;
      const auto& [other_begin, other_end] = block == BlockOf::kKeys ? queries : keys;
      if (place(other_end) - place(other_begin) >= other_end - other_begin || begin >= end)
        continue;
      ++change[place(begin)];
      --change[place(end)];
    }
  }
  int64_t needing = 0;
  for (size_t i = 0; i < positions.size(); ++i) {
    needing += change[i];
    if (needing > 0) (*needed)[i] = true;
  }
}

// Returns where the positions `some` are among `all`; both increase.
std::vector<BlockRows> FindRows(const Positions& some, const Positions& all) {
  std::vector<BlockRows> rows;
  int64_t at = 0;
  for (const int32_t position : some) {
    while (all[at] != position) ++at;
    if (!rows.empty() && rows.back().begin + rows.back().count == at) {
      ++rows.back().count;
    } else {
      rows.push_back({at, 1});
    }
  }
  return rows;
}

// Returns the tokens that others need, of a rank's `positions`, increasing: keys that queries of
// others see, or queries that see keys of others. Null means to send all of them, because most are
// needed or they are in many pieces. Takes O(positions + slices * log positions) for each row.
std::optional<Positions> NeededElsewhere(BlockOf block, const Mask& mask, int64_t seqlen,
                                         const Positions& positions) {
  std::vector<bool> needed(positions.size());
  if (const IntervalMask* const intervals = mask.intervals()) {
    if (intervals->documents.empty() && intervals->window == 0) return std::nullopt;
    MarkIntervals(block, *intervals, seqlen, positions, &needed);
  } else {
    MarkSlices(block, *mask.slices(), seqlen, positions, &needed);
  }
  Positions some;
  for (size_t i = 0; i < positions.size(); ++i) {
    if (needed[i]) some.push_back(positions[i]);
  }
  if (some.size() > kMostOfBlock * positions.size() ||
      FindRows(some, positions).size() > kMostPieces) {
    return std::nullopt;
  }
  return some;
}

// Returns the most pairs of a rank's queries, or of its keys, if there are documents; otherwise 0.
int64_t BusiestRank(BlockOf block, const Mask& mask, const TokenShard& tokens) {
  const IntervalMask* const intervals = mask.intervals();
  if (intervals == nullptr || intervals->documents.empty()) return 0;
  int64_t most = 0;
  for (int r = 0; r < tokens.num_groups(); ++r) {
    int64_t pairs = 0;
    for (int64_t row = 0; row < intervals->rows(); ++row) {
      ForEachToken(block, *intervals, row, tokens.seqlen(), tokens.group_positions(r),
                   [&](size_t, int64_t begin, int64_t end) { pairs += end - begin; });
    }
    most = std::max(most, pairs);
  }
  return most;
}

}  // namespace

absl::StatusOr<RingSchedule> RingSchedule::Create(TokenShard tokens, Mask mask,
                                                  int ranks_per_node) {
  BURST_RETURN_IF_ERROR(mask.CheckForSequence(tokens.seqlen()));
  RingSchedule schedule(std::move(tokens), /*keys=*/std::nullopt, std::move(mask));
  schedule.Fill(ranks_per_node);
  return schedule;
}

absl::StatusOr<RingSchedule> RingSchedule::Create(TokenShard queries, TokenShard keys, Mask mask,
                                                  int ranks_per_node) {
  if (queries.group_index() != keys.group_index() || queries.num_groups() != keys.num_groups() ||
      queries.group().size != keys.group().size ||
      queries.group().group_rank != keys.group().group_rank) {
    return absl::InvalidArgumentError(
        absl::StrCat("the queries are for rank ", queries.group_index(), " of ",
                     queries.num_groups(), ", the keys for rank ", keys.group_index(), " of ",
                     keys.num_groups(), ", or their groups of ranks differ"));
  }
  BURST_RETURN_IF_ERROR(mask.CheckForTwoSequences(queries.seqlen()));
  RingSchedule schedule(std::move(queries), std::move(keys), std::move(mask));
  schedule.Fill(ranks_per_node);
  return schedule;
}

RingSchedule RingSchedule::Prefix(int64_t tokens) const {
  BURST_CHECK(!is_cross());
  RingSchedule prefix(shard_.Prefix(tokens), /*keys=*/std::nullopt, mask_.Prefix(tokens));
  prefix.Fill(ranks_per_node());
  return prefix;
}

const std::vector<int32_t>& RingSchedule::keys_sent_by(int source) const {
  return kv_.sent[source].has_value() ? *kv_.sent[source] : key_shard().group_positions(source);
}

const std::vector<int32_t>& RingSchedule::queries_sent_by(int source) const {
  return queries_.sent[source].has_value() ? *queries_.sent[source]
                                           : shard().group_positions(source);
}

const std::vector<int32_t>& RingSchedule::KeysOf(int source) const {
  return source == shard().group_index() ? key_shard().group_positions(source)
                                         : keys_sent_by(source);
}

const std::vector<int32_t>& RingSchedule::QueriesOf(int source) const {
  return source == shard().group_index() ? shard().group_positions(source)
                                         : queries_sent_by(source);
}

const CallPlan& RingSchedule::calls(const CallPlanKey& key) const {
  const std::lock_guard<std::mutex> lock(plans_->mutex);
  const auto found = plans_->made.find(key);
  if (found != plans_->made.end()) return found->second;
  const bool queries_travel = key.pass == RingPass::kBurstBackward;
  const Blocks& travels = queries_travel ? queries_ : kv_;
  CallPlan plan = MakeCallPlan(key, travels.route, queries_travel ? for_queries_of_ : for_keys_of_,
                               /*sends_all=*/!travels.rows.has_value());
  return plans_->made.emplace(key, std::move(plan)).first->second;
}

void RingSchedule::FillSent(BlockOf block, const TokenShard& tokens, Blocks* blocks) const {
  blocks->sent.resize(tokens.num_groups());
  blocks->positions.resize(tokens.num_groups());
  if (is_cross() || tokens.num_groups() == 1) return;
  for (int r = 0; r < tokens.num_groups(); ++r) {
    blocks->sent[r] = NeededElsewhere(block, mask_, tokens.seqlen(), tokens.group_positions(r));
  }
  blocks->busiest = BusiestRank(block, mask_, tokens);
  const int rank = tokens.group_index();
  if (!blocks->sent[rank].has_value()) return;
  blocks->rows = FindRows(*blocks->sent[rank], tokens.group_positions(rank));
  blocks->places.assign(tokens.group_positions(rank).size(), -1);
  int32_t place = 0;
  for (const BlockRows& rows : *blocks->rows) {
    for (int64_t i = rows.begin; i < rows.begin + rows.count; ++i) blocks->places[i] = place++;
  }
}

void RingSchedule::Fill(int ranks_per_node) {
  const TokenShard &queries = shard(), &keys = key_shard();
  const int rank = queries.group_index(), world_size = queries.num_groups();
  BURST_CHECK(ranks_per_node >= 0 && (ranks_per_node == 0 || world_size % ranks_per_node == 0))
      << world_size << " ranks in nodes of " << ranks_per_node;
  const int per_node = ranks_per_node == 0 ? world_size : ranks_per_node;
  FillSent(BlockOf::kKeys, keys, &kv_);
  FillSent(BlockOf::kQueries, queries, &queries_);
  std::vector<int64_t> query_lengths, key_lengths;
  for (int r = 0; r < world_size; ++r) {
    for_keys_of_.emplace_back(mask_, queries.group_positions(rank), KeysOf(r));
    for_queries_of_.emplace_back(mask_, QueriesOf(r), keys.group_positions(rank));
    query_lengths.push_back(static_cast<int64_t>(queries_sent_by(r).size()));
    key_lengths.push_back(static_cast<int64_t>(keys_sent_by(r).size()));
  }

  // sees[q * world_size + k] says whether some query of rank q sees a key of rank k.
  std::vector<bool> sees(world_size * world_size);
  for (int q = 0; q < world_size; ++q) {
    for (int k = 0; k < world_size; ++k) {
      sees[q * world_size + k] =
          mask_.AnyVisible(queries.group_positions(q), keys.group_positions(k));
    }
  }
  kv_.route = MakeRingRoute(rank, per_node, key_lengths, [&](int block, int host) {
    return static_cast<bool>(sees[host * world_size + block]);
  });
  queries_.route = MakeRingRoute(rank, per_node, query_lengths, [&](int block, int host) {
    return static_cast<bool>(sees[block * world_size + host]);
  });
}

}  // namespace burst
