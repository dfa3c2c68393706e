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

// Marks the tokens whose counterparts, queries or keys, are not all among the neighbors that the
// rank has. `starts` are the starts of the row's documents, or null.
void MarkRow(BlockOf block, const IntervalMask& mask, const Positions* starts, bool has_spans,
             int64_t seqlen, const Positions& positions, std::vector<bool>* needed) {
  constexpr int64_t kInfinity = std::numeric_limits<int32_t>::max();
  const int64_t window = mask.window > 0 ? std::min(mask.window, kInfinity) : kInfinity;
  const auto n = static_cast<int64_t>(positions.size());
  size_t next_document = 0;
  int64_t document_begin = 0, document_end = seqlen;
  for (int64_t first = 0; first < n;) {
    int64_t last = first + 1;  // [first, last): positions without a gap
    while (last < n && positions[last] == positions[last - 1] + 1) ++last;
    for (int64_t i = first; i < last; ++i) {
      const int64_t t = positions[i];
      if (starts != nullptr) {
        while (next_document < starts->size() && (*starts)[next_document] <= t) {
          document_begin = (*starts)[next_document++];
        }
        document_end = next_document < starts->size() ? (*starts)[next_document] : seqlen;
      }
      int64_t begin = document_begin, end = document_end;  // range of possible counterparts
      if (!has_spans) {
        begin = std::max(begin, t - window + 1);
        end = std::min(end, t + window);
        // Later tokens see a key, and a query sees earlier ones.
        if (mask.causal && block == BlockOf::kKeys) begin = t;
        if (mask.causal && block == BlockOf::kQueries) end = t + 1;
      }
      if (begin < positions[first] || end > positions[last - 1] + 1) (*needed)[i] = true;
    }
    first = last;
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
// needed, they are in many pieces, or the mask is one of slices. Takes O(positions) for each row.
std::optional<Positions> NeededElsewhere(BlockOf block, const Mask& mask, int64_t seqlen,
                                         const Positions& positions) {
  const IntervalMask* const intervals = mask.intervals();
  if (intervals == nullptr || (intervals->documents.empty() && intervals->window == 0)) {
    return std::nullopt;
  }
  const DocumentStarts& documents = intervals->documents;
  const Spans& spans = intervals->spans;
  std::vector<bool> needed(positions.size());
  for (int64_t row = 0; row < intervals->rows(); ++row) {
    const Positions* const starts =
        documents.empty() ? nullptr : &documents[documents.size() == 1 ? 0 : row];
    const bool has_spans = !spans.empty() && !spans[spans.size() == 1 ? 0 : row].empty();
    MarkRow(block, *intervals, starts, has_spans, seqlen, positions, &needed);
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
  const int rank = tokens.group_index();
  if (!blocks->sent[rank].has_value()) return;
  blocks->rows = FindRows(*blocks->sent[rank], tokens.group_positions(rank));
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
