// AttentionSchedule: what a schedule says whatever the strategy, and the schedule of the strategy.
#pragma once

#include <cstdint>
#include <utility>
#include <variant>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/attention/exact_schedule.h"
#include "burst/attention/ring/schedule.h"
#include "burst/base/check.h"
#include "burst/sequence/token_shard.h"

namespace burst {

class AttentionSchedule {
 public:
  explicit AttentionSchedule(RingSchedule ring) : form_(std::move(ring)) {}
  explicit AttentionSchedule(ExactSchedule exact) : form_(std::move(exact)) {}

  // The tokens of each rank of a ring. A rank of the ring may be a group of ranks (Ulysses).
  const TokenShard& shard() const {  // the queries
    return ring() != nullptr ? ring()->shard() : exact()->shard();
  }
  const TokenShard& key_shard() const { return ring() != nullptr ? ring()->key_shard() : shard(); }
  // Whether the keys are of another sequence than the queries.
  bool is_cross() const { return ring() != nullptr && ring()->is_cross(); }
  // Batch rows that the mask describes; 1: the same mask for all.
  int64_t rows() const { return ring() != nullptr ? ring()->rows() : exact()->rows(); }

  // RingSchedule::Prefix, of a ring's schedule.
  AttentionSchedule Prefix(int64_t tokens) const {
    BURST_CHECK(ring() != nullptr);
    return AttentionSchedule(ring()->Prefix(tokens));
  }

  // Null: another attention's.
  const RingSchedule* ring() const { return std::get_if<RingSchedule>(&form_); }
  const ExactSchedule* exact() const { return std::get_if<ExactSchedule>(&form_); }

 private:
  std::variant<RingSchedule, ExactSchedule> form_;
};

}  // namespace burst
