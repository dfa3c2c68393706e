// AttentionRanks: what the attentions of one communicator share, whatever their options: the
// groups that it is split into, and the buffers of its rings. Attentions call one at a time.
#pragma once

#include <map>
#include <memory>

#include "absl/status/statusor.h"
#include "burst/attention/ring/ring.h"
#include "burst/comm/communicator.h"

namespace burst {

class AttentionRanks {
 public:
  // `comm` must outlive the object; null: a single rank.
  explicit AttentionRanks(Communicator* comm) : comm_(comm) {}
  AttentionRanks(const AttentionRanks&) = delete;
  AttentionRanks& operator=(const AttentionRanks&) = delete;

  Communicator* comm() const { return comm_; }
  int size() const { return comm_ == nullptr ? 1 : comm_->world_size(); }

  // The ring of all ranks, in nodes of `ranks_per_node`, which divides their number; 0: flat.
  // Collective at the first call of a number.
  absl::StatusOr<Ring*> RingOf(int ranks_per_node);

  // Groups of `size` neighboring ranks, which divides their number: this rank's, and the ranks that
  // have its place in all groups. Collective at the first call of a size. Not of a null `comm`.
  struct Groups {
    std::unique_ptr<Communicator> within, across;
    std::shared_ptr<AttentionRanks> ring;  // the ring of `across`
  };
  absl::StatusOr<Groups*> GroupsOf(int size);

 private:
  struct NodeRing {
    std::unique_ptr<Communicator> between_nodes;  // null: one node
    std::unique_ptr<Ring> ring;
  };

  Communicator* const comm_;
  std::map<int, NodeRing> rings_;  // by ranks per node
  std::map<int, Groups> groups_;   // by size
};

}  // namespace burst
