// The mesh of ranks, data parallel x pipeline stages x sequence parallel x tensor parallel: `data`
// groups of `stages` groups of `sequence` groups of `tensor` ranks. Each data-parallel group has a
// share of the batch, and each of its stages has a part of the model's layers. The tensor groups of
// a stage share every sequence. The ranks of a tensor group share the layers' weights. Ranks that
// send each other the most are neighbors, because neighbors have the fastest links:
//
//   rank = ((data_rank * stages + stage) * sequence + sequence_rank) * tensor + tensor_rank
//
// Gradients are reduced over the ranks of a stage, in all data-parallel groups. For weights that a
// tensor group shares, only ranks with the same tensor_rank take part.
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
  int tensor = 1;

  int world_size() const { return data * stages * sequence * tensor; }
  int data_rank(int rank) const { return rank / (stages * sequence * tensor); }
  int stage(int rank) const { return rank / (sequence * tensor) % stages; }
  int sequence_rank(int rank) const { return rank / tensor % sequence; }
  int tensor_rank(int rank) const { return rank % tensor; }
  // Among the ranks of its stage, of which there are data * sequence * tensor: a mesh without
  // stages.
  int stage_size() const { return data * sequence * tensor; }
  int rank_in_stage(int rank) const {
    return (data_rank(rank) * sequence + sequence_rank(rank)) * tensor + tensor_rank(rank);
  }
};

// The ranks that share a sequence with this one and have the same tensor_rank, mesh.sequence of
// them. Collective, in a world of mesh.world_size() ranks.
inline absl::StatusOr<std::unique_ptr<Communicator>> SplitSequence(const Mesh& mesh,
                                                                   Communicator& world) {
  BURST_CHECK_EQ(world.world_size(), mesh.world_size());
  const int rank = world.rank(), first = rank - mesh.sequence_rank(rank) * mesh.tensor;
  return world.Split(first, mesh.sequence_rank(rank));
}

// This rank's tensor group, of mesh.tensor ranks. Collective as above.
inline absl::StatusOr<std::unique_ptr<Communicator>> SplitTensor(const Mesh& mesh,
                                                                 Communicator& world) {
  BURST_CHECK_EQ(world.world_size(), mesh.world_size());
  return world.Split(world.rank() / mesh.tensor, mesh.tensor_rank(world.rank()));
}

}  // namespace burst
