// The mesh of ranks, data parallel x sequence parallel: `data` groups of `sequence` ranks. The
// ranks of a group, the sequence group, share every sequence of one batch; each group has its own
// batch. The ranks of a group are consecutive, because neighbors have the fastest links:
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

// This rank's sequence group, of mesh.sequence ranks. Collective, in a world of mesh.world_size()
// ranks.
inline absl::StatusOr<std::unique_ptr<Communicator>> SplitSequence(const Mesh& mesh,
                                                                   Communicator& world) {
  BURST_CHECK_EQ(world.world_size(), mesh.world_size());
  return world.Split(mesh.data_rank(world.rank()), mesh.sequence_rank(world.rank()));
}

}  // namespace burst
