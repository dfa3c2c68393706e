#include "burst/attention/ring/schedule.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/check.h"

namespace burst {
namespace {

absl::Status Validate(int64_t seqlen, const AttentionMask& mask, const DocumentStarts& documents) {
  if (mask.window < 0) {
    return absl::InvalidArgumentError(absl::StrCat("window ", mask.window, " is negative"));
  }
  for (const std::vector<int32_t>& starts : documents) {
    for (size_t i = 0; i < starts.size(); ++i) {
      if (starts[i] < 0 || starts[i] >= seqlen || (i > 0 && starts[i] <= starts[i - 1])) {
        return absl::InvalidArgumentError(
            absl::StrCat("document start ", starts[i], " (number ", i,
                         ") is out of order or beyond the sequence of ", seqlen, " tokens"));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<RingSchedule> RingSchedule::Create(TokenShard tokens, const AttentionMask& mask,
                                                  const DocumentStarts& documents,
                                                  int ranks_per_node) {
  const int rank = tokens.group_index(), world_size = tokens.num_groups();
  BURST_CHECK(ranks_per_node >= 0 && (ranks_per_node == 0 || world_size % ranks_per_node == 0))
      << world_size << " ranks in nodes of " << ranks_per_node;
  const absl::Status valid = Validate(tokens.seqlen(), mask, documents);
  if (!valid.ok()) return valid;

  const int per_node = ranks_per_node == 0 ? world_size : ranks_per_node;
  RingSchedule schedule(std::move(tokens));
  const TokenShard& shard = schedule.shard_;
  schedule.document_rows_ = static_cast<int64_t>(documents.size());
  std::vector<int64_t> lengths;
  for (int r = 0; r < world_size; ++r) {
    const std::vector<int32_t>&own = shard.group_positions(rank),
          &theirs = shard.group_positions(r);
    schedule.for_keys_of_.push_back(ComputeVisibleKeys(mask, documents, own, theirs));
    schedule.for_queries_of_.push_back(ComputeVisibleKeys(mask, documents, theirs, own));
    lengths.push_back(shard.group_length(r));
  }

  // sees[q * world_size + k]: some query of rank q sees a key of rank k.
  std::vector<bool> sees(world_size * world_size);
  for (int q = 0; q < world_size; ++q) {
    for (int k = 0; k < world_size; ++k) {
      sees[q * world_size + k] =
          SeesAny(mask, documents, shard.group_positions(q), shard.group_positions(k));
    }
  }
  schedule.kv_route_ = MakeRingRoute(rank, per_node, lengths, [&](int block, int host) {
    return static_cast<bool>(sees[host * world_size + block]);
  });
  schedule.query_route_ = MakeRingRoute(rank, per_node, lengths, [&](int block, int host) {
    return static_cast<bool>(sees[block * world_size + host]);
  });
  return schedule;
}

}  // namespace burst
