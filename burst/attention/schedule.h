// The ring's schedule: a pure function of (rank, world size, layout, sequence, mask). No
// communication, no device: every rank computes what every other rank will do, so all agree on which
// transfers happen.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "burst/attention/layout.h"
#include "burst/kernels/flash_attention.h"

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

  bool none() const { return pairs == 0; }
  KeyRanges ranges() const;  // points into begin and end
};

// Positions increasing in both.
VisibleKeys ComputeVisibleKeys(const AttentionMask& mask, const DocumentStarts& documents,
                               const std::vector<int32_t>& q_positions,
                               const std::vector<int32_t>& k_positions);

// Round t of a pass, as seen by one rank: the visiting block is that of rank `source`.
struct RingRound {
  int source = 0;        // (rank - t) mod G
  bool compute = false;  // some pair is visible
  bool receive = false;  // the block arrives from the previous rank during round t - 1
  bool send = false;     // the block goes on to the next rank during round t
  bool receive_gradient = false;  // the visiting block's gradient arrives before this round
  bool send_gradient = false;     // and leaves after it
};

class RingSchedule {
 public:
  // Errors: InvalidArgument for a negative length or window, documents out of order or out of range.
  static absl::StatusOr<RingSchedule> Create(int rank, int world_size, Layout layout,
                                             int64_t seqlen, const AttentionMask& mask,
                                             const DocumentStarts& documents = {});

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  int64_t seqlen() const { return seqlen_; }
  // Batch rows the documents were given for; 0: any.
  int64_t document_rows() const { return document_rows_; }

  const std::vector<int32_t>& positions(int rank) const { return positions_[rank]; }
  int64_t length(int rank) const { return static_cast<int64_t>(positions_[rank].size()); }
  int64_t max_length() const;

  // Keys of `source` seen by this rank's queries, and this rank's keys seen by those of `source`.
  const VisibleKeys& keys_of(int source) const { return keys_of_[source]; }
  const VisibleKeys& queries_of(int source) const { return queries_of_[source]; }

  // Rounds in which K, V travel (forward, and RingAttention's backward, where dK, dV follow).
  const std::vector<RingRound>& key_rounds() const { return key_rounds_; }
  // Rounds in which Q, dO, lse, delta travel and dQ follows (BurstAttention's backward).
  const std::vector<RingRound>& query_rounds() const { return query_rounds_; }

  // The diagonal's part of the key-value or query rounds is round 0; rounds 1.. are neighbours.
 private:
  RingSchedule() = default;

  int rank_ = 0;
  int world_size_ = 1;
  int64_t seqlen_ = 0;
  int64_t document_rows_ = 0;
  std::vector<std::vector<int32_t>> positions_;
  std::vector<VisibleKeys> keys_of_;
  std::vector<VisibleKeys> queries_of_;
  std::vector<RingRound> key_rounds_;
  std::vector<RingRound> query_rounds_;
};

}  // namespace burst
