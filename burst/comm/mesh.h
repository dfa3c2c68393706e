// The mesh of ranks, data parallel x pipeline stages x sequence parallel: `data` groups of `stages`
// groups of `sequence` ranks. Each data-parallel group has a share of the batch; each of its stages
// has a part of the model's layers; the ranks of a stage, the sequence group, share every sequence.
// They are consecutive, because neighbors have the fastest links:
//
//   rank = (data_rank * stages + stage) * sequence + sequence_rank
//
// Gradients are reduced over the ranks of a stage, in all data-parallel groups.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "burst/base/check.h"
#include "burst/comm/communicator.h"

namespace burst {

struct Mesh {
  int data = 1;
  int sequence = 1;
  int stages = 1;

  int world_size() const { return data * stages * sequence; }
  int data_rank(int rank) const { return rank / (stages * sequence); }
  int stage(int rank) const { return rank / sequence % stages; }
  int sequence_rank(int rank) const { return rank % sequence; }
  // Among the ranks of its stage, of which there are data * sequence: a mesh without stages.
  int stage_size() const { return data * sequence; }
  int rank_in_stage(int rank) const { return data_rank(rank) * sequence + sequence_rank(rank); }
};

// This rank's sequence group, of mesh.sequence ranks. Collective, in a world of mesh.world_size()
// ranks.
inline absl::StatusOr<std::unique_ptr<Communicator>> SplitSequence(const Mesh& mesh,
                                                                   Communicator& world) {
  BURST_CHECK_EQ(world.world_size(), mesh.world_size());
  return world.Split(world.rank() / mesh.sequence, mesh.sequence_rank(world.rank()));
}

}  // namespace burst
