// The mesh of ranks, data parallel x sequence parallel: `data` groups of `sequence` ranks. The
// ranks of a group share one batch and form a ring over its sequences; each group has its own
// batch. The ranks of a group are consecutive, because neighbours have the fastest links:
//
//   rank = data_rank * sequence + sequence_rank
//
// Gradients are reduced over all ranks, by the communicator of the whole world.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "burst/base/check.h"
#include "burst/comm/communicator.h"

namespace burst {

struct Mesh {
  int data = 1;
  int sequence = 1;

  int world_size() const { return data * sequence; }
  int data_rank(int rank) const { return rank / sequence; }
  int sequence_rank(int rank) const { return rank % sequence; }
};

// This rank's group of `sequence` ranks, its ring. Collective, in a world of mesh.world_size()
// ranks.
inline absl::StatusOr<std::unique_ptr<Communicator>> SplitSequence(const Mesh& mesh,
                                                                   Communicator& world) {
  BURST_CHECK_EQ(world.world_size(), mesh.world_size());
  return world.Split(mesh.data_rank(world.rank()), mesh.sequence_rank(world.rank()));
}

}  // namespace burst
