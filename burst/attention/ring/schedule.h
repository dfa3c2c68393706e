// The ring's schedule for this rank: the mask between its tokens and those of every other rank, and
// the routes of the blocks. A pure function of shards and a mask, without communication. Every rank
// computes what every other rank will do, so all agree on which transfers happen.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "burst/attention/kernel_mask.h"
#include "burst/attention/ring/call_plan.h"
#include "burst/attention/ring/route.h"
#include "burst/mask/mask.h"
#include "burst/sequence/token_shard.h"

namespace burst {

enum class BlockOf;  // keys or queries; schedule.cc has the values

class RingSchedule {
 public:
  // `ranks_per_node`: ranks of the ring on each node, which divide shard.num_groups(); 0: a flat
  // ring. InvalidArgument for a mask that does not fit the sequence.
  static absl::StatusOr<RingSchedule> Create(TokenShard tokens, Mask mask, int ranks_per_node = 0);

  // Cross-attention: the queries are tokens of one sequence, the keys of another. InvalidArgument
  // also if the two are not for the same rank of the same ring.
  static absl::StatusOr<RingSchedule> Create(TokenShard queries, TokenShard keys, Mask mask,
                                             int ranks_per_node = 0);

  // Attention of the first `tokens` tokens alone, which see no others (Mask::Prefix). Not for
  // cross-attention.
  RingSchedule Prefix(int64_t tokens) const;

  // The tokens of each rank of the ring. A rank of the ring may be a group of ranks (Ulysses).
  const TokenShard& shard() const { return shard_; }  // the queries
  const TokenShard& key_shard() const { return keys_.has_value() ? *keys_ : shard_; }
  bool is_cross() const { return keys_.has_value(); }  // the keys are of another sequence
  int ranks_per_node() const { return kv_.route.ranks_per_node; }  // all ranks in a flat ring
  int64_t rows() const { return mask_.rows(); }                    // Mask::rows

  // Blocks of K and V: the forward, and RingAttention's backward with dK, dV.
  const RingRoute& kv_route() const { return kv_.route; }
  // Blocks of Q, dO, lse and delta: BurstAttention's backward with dQ.
  const RingRoute& query_route() const { return queries_.route; }

  // The keys, and queries, that rank `source` sends: positions, increasing. All of the rank's
  // tokens, unless the others need only few of them, as under a window or with packed documents.
  const std::vector<int32_t>& keys_sent_by(int source) const;
  const std::vector<int32_t>& queries_sent_by(int source) const;
  // The places of this rank's sent tokens in its block. Null: it sends all of it.
  const std::vector<BlockRows>* key_rows() const { return kv_.rows ? &*kv_.rows : nullptr; }
  const std::vector<BlockRows>* query_rows() const {
    return queries_.rows ? &*queries_.rows : nullptr;
  }

  // The most pairs that a rank computes where queries stay, and where keys stay. 0: not counted,
  // because the mask has no documents.
  int64_t busiest_by_queries() const { return queries_.busiest; }
  int64_t busiest_by_keys() const { return kv_.busiest; }

  // The place of each of this rank's tokens among the sent ones, or -1, where key_rows and
  // query_rows are not null. Memory of the device.
  const int32_t* key_places(DeviceType device) const {
    return kv_.places_on.On(device, kv_.places);
  }
  const int32_t* query_places(DeviceType device) const {
    return queries_.places_on.On(device, queries_.places);
  }

  // The positions of the keys, or of the queries, that a step with the block of rank `source`
  // reads. These are all of this rank's own, or those that `source` sends. Memory of the device.
  const int32_t* key_positions(int source, DeviceType device) const {
    return kv_.positions[source].On(device, KeysOf(source));
  }
  const int32_t* query_positions(int source, DeviceType device) const {
    return queries_.positions[source].On(device, QueriesOf(source));
  }

  // The mask of this rank's queries with the keys that rank `source` sends, or with its own.
  const KernelMask& for_keys_of(int source) const { return for_keys_of_[source]; }
  // The mask of the queries that rank `source` sends, or its own, with this rank's keys.
  const KernelMask& for_queries_of(int source) const { return for_queries_of_[source]; }

  // The calls of a forward or backward, made at the first use and kept.
  const CallPlan& calls(const CallPlanKey& key) const;

 private:
  // Blocks of keys, or of queries: what travels, and how.
  struct Blocks {
    RingRoute route;
    std::vector<std::optional<std::vector<int32_t>>> sent;  // by rank; null: all it has
    std::optional<std::vector<BlockRows>> rows;             // this rank's rows; null: all
    std::vector<int32_t> places;                            // with rows: of its tokens in the rows
    KernelArray<int32_t> places_on;                         // a device
    int64_t busiest = 0;                                    // the most pairs of a rank's tokens
    std::vector<KernelArray<int32_t>> positions;            // by rank, of what a step reads
  };
  // The plans of calls. Threads may share them.
  struct Plans {
    std::mutex mutex;
    std::map<CallPlanKey, CallPlan> made;
  };

  RingSchedule(TokenShard shard, std::optional<TokenShard> keys, Mask mask)
      : mask_(std::move(mask)), shard_(std::move(shard)), keys_(std::move(keys)) {}
  // The tokens that a step reads.
  const std::vector<int32_t>& KeysOf(int source) const;
  const std::vector<int32_t>& QueriesOf(int source) const;
  // From the tokens: masks and routes.
  void Fill(int ranks_per_node);
  void FillSent(BlockOf block, const TokenShard& tokens, Blocks* blocks) const;

  Mask mask_;
  TokenShard shard_;
  std::optional<TokenShard> keys_;  // if they are of another sequence
  std::vector<KernelMask> for_keys_of_, for_queries_of_;
  Blocks kv_, queries_;
  // Copies share it: plans hold indices, which are right for all of them.
  std::shared_ptr<Plans> plans_ = std::make_shared<Plans>();
};

}  // namespace burst
