// Data parallel x sequence parallel: `data` groups of `sequence` ranks. The ranks of a group share
// one batch and form a ring over its sequences; the groups work on different batches. Ranks of a
// group are next to each other, where the links are fastest:
//
//   rank = data_rank * sequence + sequence_rank
//
// Gradients are summed over all ranks, so the world itself does that.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "burst/base/check.h"
#include "burst/base/status.h"
#include "burst/comm/communicator.h"

namespace burst {

struct Mesh {
  int data = 1;
  int sequence = 1;

  int world_size() const { return data * sequence; }
  int data_rank(int rank) const { return rank / sequence; }
  int sequence_rank(int rank) const { return rank % sequence; }
};

// This rank's group of `sequence` ranks, its ring, and the group of `data` ranks that hold the same
// part of their sequences.
struct MeshGroups {
  std::unique_ptr<Communicator> sequence;
  std::unique_ptr<Communicator> data;
};

// Collective, in a world of mesh.world_size() ranks.
inline absl::StatusOr<MeshGroups> SplitMesh(const Mesh& mesh, Communicator& world) {
  BURST_CHECK_EQ(world.world_size(), mesh.world_size());
  const int data_rank = mesh.data_rank(world.rank());
  const int sequence_rank = mesh.sequence_rank(world.rank());
  MeshGroups groups;
  BURST_ASSIGN_OR_RETURN(groups.sequence, world.Split(data_rank, sequence_rank));
  BURST_ASSIGN_OR_RETURN(groups.data, world.Split(sequence_rank, data_rank));
  return groups;
}

}  // namespace burst
