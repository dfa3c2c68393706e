// The ring's schedule: a pure function of (rank, world size, layout, sequence, mask). No
// communication, no device: every rank computes what every other rank will do, so all agree on
// which transfers happen.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "burst/attention/ring/route.h"
#include "burst/kernels/flash_attention.h"
#include "burst/sequence/layout.h"
#include "burst/tensor/tensor.h"

namespace burst {

// Which keys a query may see, in global positions.
struct AttentionMask {
  bool causal = true;
  // Sliding window: keys less than `window` positions away, the query's own included (with causal:
  // the last `window` keys). 0: no limit.
  int64_t window = 0;
};

// Packed documents: for each batch row the global positions where a document starts, increasing; a
// query sees keys of its own document only. Position 0 always starts one. Empty: no boundaries.
using DocumentStarts = std::vector<std::vector<int32_t>>;

// The keys of one rank that the queries of one rank see, as the kernels take them.
struct VisibleKeys {
  std::vector<int32_t> begin, end;  // [rows, q_len]; rows is 1, or batch with documents
  int64_t rows = 1;
  int64_t q_len = 0;
  int64_t pairs = 0;  // (query, key) pairs seen, summed over rows
  bool all = false;   // every query sees every key

  mutable Tensor on_gpu;  // [2, rows, q_len]: begin and end, copied there at their first use

  bool none() const { return pairs == 0; }
  // For the kernels of a device: points into begin and end, or into their copy on the GPU. There
  // is one copy, since a schedule serves one rank on one device.
  KeyRanges ranges(DeviceType device = DeviceType::kCpu) const;
};

// Both lists of positions are increasing.
VisibleKeys ComputeVisibleKeys(const AttentionMask& mask, const DocumentStarts& documents,
                               const std::vector<int32_t>& q_positions,
                               const std::vector<int32_t>& k_positions);

// A rank of the ring may be a group of ranks that hold its tokens between them: rank
// r * size + m of the world is member m of the group that is the ring's rank r. Ulysses needs it.
struct RankGroup {
  int size = 1;
  int member = 0;
};

// A run of a member's tokens among those of its group: for 0 <= i < count, token first + i of the
// member is token begin + i * step of the group.
struct TokenRun {
  int64_t first, begin, count, step;
};

class RingSchedule {
 public:
  // `layout` spreads the tokens over all ranks: world_size groups times their size.
  // `ranks_per_node`: of the ring's ranks, 0 for a flat ring; it divides world_size.
  // InvalidArgument for a negative length or window, or documents that are out of order or range.
  static absl::StatusOr<RingSchedule> Create(int rank, int world_size, Layout layout,
                                             int64_t seqlen, const AttentionMask& mask,
                                             const DocumentStarts& documents = {},
                                             const RankGroup& group = {}, int ranks_per_node = 0);

  int rank() const { return rank_; }
  int world_size() const { return static_cast<int>(positions_.size()); }
  int ranks_per_node() const { return ranks_per_node_; }  // world_size() for a flat ring
  int64_t seqlen() const { return seqlen_; }
  // Batch rows the documents were given for; 0: the same mask for every row.
  int64_t document_rows() const { return document_rows_; }

  // Global positions of the tokens that this rank itself holds, increasing. Without groups they are
  // positions(rank()).
  const std::vector<int32_t>& held() const { return held(group_.member); }
  // The same for each member of its group, and where the member's tokens are among the group's.
  const RankGroup& group() const { return group_; }
  const std::vector<int32_t>& held(int member) const { return held_[member]; }
  const std::vector<TokenRun>& runs(int member) const { return runs_[member]; }

  // Global positions of the tokens of a rank of the ring, increasing.
  const std::vector<int32_t>& positions(int rank) const { return positions_[rank]; }
  int64_t length(int rank) const { return static_cast<int64_t>(positions_[rank].size()); }
  int64_t length() const { return length(rank_); }
  int64_t max_length() const;

  // Keys of rank `source` that this rank's queries see.
  const VisibleKeys& keys_of(int source) const { return keys_of_[source]; }
  // This rank's keys that the queries of rank `source` see.
  const VisibleKeys& seen_by(int source) const { return seen_by_[source]; }

  // K and V travel: the forward, and RingAttention's backward with dK, dV.
  const RingRoute& kv_route() const { return kv_route_; }
  // Q, dO, lse and delta travel: BurstAttention's backward with dQ.
  const RingRoute& query_route() const { return query_route_; }

 private:
  RingSchedule() = default;

  int rank_ = 0;
  int ranks_per_node_ = 1;
  int64_t seqlen_ = 0;
  int64_t document_rows_ = 0;
  RankGroup group_;
  std::vector<std::vector<int32_t>> positions_, held_;
  std::vector<std::vector<TokenRun>> runs_;
  std::vector<VisibleKeys> keys_of_, seen_by_;
  RingRoute kv_route_, query_route_;
};

}  // namespace burst
