#include "burst/attention/ring/schedule.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "burst/base/status.h"

namespace burst {

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
  return plans_->Of(key, [&] {
    const bool queries_travel = key.pass == RingPass::kBurstBackward;
    const Blocks& travels = queries_travel ? queries_ : kv_;
    return MakeCallPlan(key, travels.route, queries_travel ? for_queries_of_ : for_keys_of_,
                        /*sends_all=*/!travels.rows.has_value());
  });
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
