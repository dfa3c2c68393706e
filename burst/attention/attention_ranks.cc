#include "burst/attention/attention_ranks.h"

#include <utility>

#include "burst/base/status.h"

namespace burst {

absl::StatusOr<Ring*> AttentionRanks::RingOf(int ranks_per_node) {
  if (ranks_per_node == size()) ranks_per_node = 0;
  const auto found = rings_.find(ranks_per_node);
  if (found != rings_.end()) return found->second.ring.get();
  NodeRing made;
  if (ranks_per_node > 0) {
    BURST_ASSIGN_OR_RETURN(made.between_nodes, comm_->Split(/*color=*/0, /*key=*/comm_->rank()));
  }
  made.ring = std::make_unique<Ring>(comm_, made.between_nodes.get());
  return rings_.emplace(ranks_per_node, std::move(made)).first->second.ring.get();
}

absl::StatusOr<AttentionRanks::Groups*> AttentionRanks::GroupsOf(int size) {
  const auto found = groups_.find(size);
  if (found != groups_.end()) return &found->second;
  const int group = comm_->rank() / size, group_rank = comm_->rank() % size;
  Groups made;
  BURST_ASSIGN_OR_RETURN(made.within, comm_->Split(/*color=*/group, /*key=*/group_rank));
  BURST_ASSIGN_OR_RETURN(made.across, comm_->Split(/*color=*/group_rank, /*key=*/group));
  made.ring = std::make_shared<AttentionRanks>(made.across.get());
  return &groups_.emplace(size, std::move(made)).first->second;
}

}  // namespace burst
