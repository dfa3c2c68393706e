#include "burst/attention/ring/schedule.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "burst/base/status.h"

namespace burst {
namespace {

absl::Status ValidateSpans(int64_t seqlen, const DocumentStarts& documents, const Spans& spans) {
  if (documents.size() > 1 && spans.size() > 1 && documents.size() != spans.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("documents of ", documents.size(), " rows, but spans of ", spans.size()));
  }
  for (size_t row = 0; row < spans.size(); ++row) {
    int32_t last = 0;
    for (const Span& span : spans[row]) {
      const std::string text = absl::StrCat("span [", span.begin, ", ", span.end, ") of row ", row);
      if (span.begin < last || span.end <= span.begin || span.end > seqlen) {
        return absl::InvalidArgumentError(absl::StrCat(
            text, " is empty, out of order or beyond the sequence of ", seqlen, " tokens"));
      }
      last = span.end;
      for (size_t i = 0; i < documents.size(); ++i) {
        if (spans.size() > 1 && documents.size() > 1 && i != row) continue;
        const auto next = std::upper_bound(documents[i].begin(), documents[i].end(), span.begin);
        if (next == documents[i].end() || *next >= span.end) continue;
        return absl::InvalidArgumentError(
            absl::StrCat(text, " goes beyond its document, which ends at ", *next));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status ValidateMask(int64_t seqlen, const AttentionMask& mask,
                          const DocumentStarts& documents, const Spans& spans) {
  if (mask.window < 0) {
    return absl::InvalidArgumentError(absl::StrCat("window ", mask.window, " is negative"));
  }
  BURST_RETURN_IF_ERROR(CheckDocuments(seqlen, documents));
  return ValidateSpans(seqlen, documents, spans);
}

}  // namespace

absl::StatusOr<RingSchedule> RingSchedule::Create(TokenShard tokens, const AttentionMask& mask,
                                                  const DocumentStarts& documents,
                                                  int ranks_per_node, const Spans& spans) {
  BURST_RETURN_IF_ERROR(ValidateMask(tokens.seqlen(), mask, documents, spans));
  RingSchedule schedule(std::move(tokens), mask, documents, spans);
  schedule.Fill(ranks_per_node);
  return schedule;
}

absl::StatusOr<RingSchedule> RingSchedule::CreateSliced(TokenShard shard, MaskSlices slices,
                                                        int ranks_per_node) {
  BURST_RETURN_IF_ERROR(CheckSlices(shard.seqlen(), slices));
  RingSchedule schedule(std::move(shard), {/*causal=*/false, /*window=*/0}, {}, {});
  schedule.slices_ = std::move(slices);
  schedule.Fill(ranks_per_node);
  return schedule;
}

absl::StatusOr<RingSchedule> RingSchedule::CreateCross(TokenShard queries, TokenShard keys,
                                                       int ranks_per_node) {
  if (queries.group_index() != keys.group_index() || queries.num_groups() != keys.num_groups() ||
      queries.group().size != keys.group().size ||
      queries.group().group_rank != keys.group().group_rank) {
    return absl::InvalidArgumentError(
        absl::StrCat("the queries are for rank ", queries.group_index(), " of ",
                     queries.num_groups(), ", the keys for rank ", keys.group_index(), " of ",
                     keys.num_groups(), ", or their groups of ranks differ"));
  }
  RingSchedule schedule(std::move(queries), {/*causal=*/false, /*window=*/0}, {}, {});
  schedule.keys_ = std::move(keys);
  schedule.Fill(ranks_per_node);
  return schedule;
}

absl::StatusOr<RingSchedule> RingSchedule::CreateInChunks(TokenShard tokens, int64_t chunk,
                                                          const AttentionMask& mask,
                                                          const DocumentStarts& documents,
                                                          const Spans& spans) {
  BURST_RETURN_IF_ERROR(ValidateMask(tokens.seqlen(), mask, documents, spans));
  for (int rank = 0; rank < tokens.num_groups(); ++rank) {
    const std::vector<int32_t>& positions = tokens.group_positions(rank);
    for (size_t i = 0; i < positions.size(); ++i) {
      const size_t first = i / chunk * chunk;
      if (positions.size() % chunk == 0 && positions[first] % chunk == 0 &&
          positions[i] - positions[first] == static_cast<int64_t>(i - first)) {
        continue;
      }
      return absl::InvalidArgumentError(
          absl::StrCat("the tokens of rank ", rank, " are no whole chunks of ", chunk));
    }
  }
  RingSchedule schedule(std::move(tokens), mask, documents, spans);
  const TokenShard& shard = schedule.shard_;
  schedule.chunks_ =
      ComputeChunkMasks(mask, documents, spans, shard.local_positions(), shard.seqlen(), chunk);
  schedule.kv_.route.ranks_per_node = schedule.queries_.route.ranks_per_node = shard.num_groups();
  return schedule;
}

RingSchedule RingSchedule::Prefix(int64_t tokens) const {
  BURST_CHECK(mask_.causal && spans_.empty() && slices_.empty() && !is_cross());
  DocumentStarts documents = documents_;
  for (std::vector<int32_t>& starts : documents) {
    starts.erase(std::lower_bound(starts.begin(), starts.end(), tokens), starts.end());
  }
  RingSchedule prefix(shard_.Prefix(tokens), mask_, documents, /*spans=*/{});
  prefix.Fill(ranks_per_node());
  return prefix;
}

BlockMask RingSchedule::MaskBetween(const std::vector<int32_t>& queries,
                                    const std::vector<int32_t>& keys) const {
  if (!slices_.empty()) return ComputeVisibleKeys(slices_, queries, keys);
  return {{ComputeVisibleKeys(mask_, documents_, spans_, queries, keys)}};
}

bool RingSchedule::SeesAnyOf(int query_rank, int key_rank) const {
  const auto &queries = shard().group_positions(query_rank),
             &keys = key_shard().group_positions(key_rank);
  if (!slices_.empty()) return SeesAny(slices_, queries, keys);
  return SeesAny(mask_, documents_, spans_, queries, keys);
}

const std::vector<int32_t>& RingSchedule::keys_sent_by(int source) const {
  return kv_.sent[source].has_value() ? *kv_.sent[source] : key_shard().group_positions(source);
}

const std::vector<int32_t>& RingSchedule::queries_sent_by(int source) const {
  return queries_.sent[source].has_value() ? *queries_.sent[source]
                                           : shard().group_positions(source);
}

void RingSchedule::FillSent(BlockOf block, const TokenShard& tokens, Blocks* blocks) const {
  blocks->sent.resize(tokens.num_groups());
  if (!slices_.empty() || is_cross() || tokens.num_groups() == 1) return;
  for (int r = 0; r < tokens.num_groups(); ++r) {
    blocks->sent[r] = NeededElsewhere(block, mask_, documents_, spans_, tokens.seqlen(),
                                      tokens.group_positions(r));
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
    for_keys_of_.push_back(MaskBetween(queries.group_positions(rank),
                                       r == rank ? keys.group_positions(r) : keys_sent_by(r)));
    for_queries_of_.push_back(MaskBetween(
        r == rank ? queries.group_positions(r) : queries_sent_by(r), keys.group_positions(rank)));
    query_lengths.push_back(static_cast<int64_t>(queries_sent_by(r).size()));
    key_lengths.push_back(static_cast<int64_t>(keys_sent_by(r).size()));
  }

  // sees[q * world_size + k]: some query of rank q sees a key of rank k.
  std::vector<bool> sees(world_size * world_size);
  for (int q = 0; q < world_size; ++q) {
    for (int k = 0; k < world_size; ++k) sees[q * world_size + k] = SeesAnyOf(q, k);
  }
  kv_.route = MakeRingRoute(rank, per_node, key_lengths, [&](int block, int host) {
    return static_cast<bool>(sees[host * world_size + block]);
  });
  queries_.route = MakeRingRoute(rank, per_node, query_lengths, [&](int block, int host) {
    return static_cast<bool>(sees[block * world_size + host]);
  });
}

}  // namespace burst
