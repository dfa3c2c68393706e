// The ranks of a pipeline. Each has a stage, a part of the model's layers (PipelinePart). It sends
// its layers' output to the rank of the next stage, and receives the output's gradient back.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/attention/sequence_parallel_attention.h"
#include "burst/comm/communicator.h"
#include "burst/comm/mesh.h"
#include "model/transformer.h"
#include "train/pipeline/pass_times.h"

namespace burst {

class Pipeline {
 public:
  // Collective in `world`, of mesh.world_size() ranks and mesh.stages > 1 stages. tied: the first
  // and the last stage have a copy each of the embeddings.
  static absl::StatusOr<std::unique_ptr<Pipeline>> Create(const Mesh& mesh, int chunks, bool tied,
                                                          Communicator* world);

  ~Pipeline();

  int stage() const { return stage_; }
  // This rank's micro-batches and sequences, of every stage: ranked by stage.
  Communicator* stages() const { return stages_.get(); }
  // The first and the last stage, if they have the embeddings in common; null otherwise, and on
  // other ranks.
  Communicator* tied() const { return tied_.get(); }

  struct MicroBatch {
    SequenceBatch batch;
    DropoutKey dropout;
  };
  using MicroBatchOf = std::function<absl::StatusOr<MicroBatch>(int number)>;

  // Runs the forward and backward passes of `micro_batches`, by the schedule (PipelineActions).
  // Each number that it gives to micro_batch is below micro_batches, and is asked for once a chunk.
  // Adds to the gradients of the model's parameters. `loss`, [1] float64, becomes this rank's part
  // of the sum of their losses: zero on all stages but the last. Fills `times` with the passes of
  // this call and forgets earlier ones. Collective among stages().
  absl::Status ForwardBackward(const Transformer& model, SequenceParallelAttention& attention,
                               int micro_batches, const MicroBatchOf& micro_batch,
                               double loss_scale, const Tensor& loss, PassTimes* times);

  // The loss of a batch, unscaled and without a gradient; a scalar on the last stage, null on
  // others. Collective among stages().
  absl::StatusOr<Tensor> Loss(const Transformer& model, SequenceParallelAttention& attention,
                              const SequenceBatch& batch);

 private:
  // Messages between this rank and one of a neighboring stage. What goes forward and what comes
  // back have a channel each, and no other message is on these.
  class Link;
  struct Pass;  // a micro-batch's through a chunk, from its forward to its backward

  Pipeline(const Mesh& mesh, int chunks, int rank);

  absl::Status Forward(const Transformer& model, SequenceParallelAttention& attention, int chunk,
                       const MicroBatch& micro_batch, double loss_scale, Pass* pass,
                       PassTimes* times);
  absl::Status Backward(const Transformer& model, int chunk, Pass* pass, PassTimes* times);
  absl::Status WaitForSends();

  const int stage_, num_stages_, chunks_;
  std::unique_ptr<Communicator> stages_, tied_;
  std::unique_ptr<Link> from_previous_, to_next_;  // null: there is none
};

}  // namespace burst
