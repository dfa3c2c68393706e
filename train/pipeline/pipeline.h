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
#include "burst/device/device_spans.h"
#include "model/transformer.h"
#include "train/data/batch.h"

namespace burst {

class Pipeline {
 public:
  // Creates a pipeline. Collective in `world`, of mesh.world_size() ranks and mesh.stages > 1
  // stages. `tied` says that the first and the last stage each have a copy of the embeddings.
  static absl::StatusOr<std::unique_ptr<Pipeline>> Create(const Mesh& mesh, int chunks, bool tied,
                                                          Communicator* world);

  ~Pipeline();

  int stage() const { return stage_; }
  // Returns the ranks of all stages that share this rank's micro-batches and sequences, in order of
  // stage.
  Communicator* stages() const { return stages_.get(); }
  // Returns the first and the last stage if they share the embeddings; null otherwise, and on other
  // ranks.
  Communicator* tied() const { return tied_.get(); }

  using MicroBatchOf = std::function<absl::StatusOr<MicroBatch>(int number)>;

  // Runs the forward and backward passes of `micro_batches`, by the schedule (PipelineActions).
  // Each argument of micro_batch is below micro_batches, and is asked for once a chunk. Adds to the
  // gradients of the model's parameters. `loss`, [1] float64, becomes this rank's part of the sum
  // of their losses: zero on all stages but the last. Fills `times` with the passes of this call
  // and forgets earlier ones. Collective among stages().
  absl::Status ForwardBackward(const Transformer& model, SequenceParallelAttention& attention,
                               int micro_batches, const MicroBatchOf& micro_batch,
                               const LossTerms& terms, const Tensor& loss, DeviceSpans* times);

  // Returns the loss of a batch, unscaled and without a gradient: a scalar on the last stage, null
  // on others. Collective among stages().
  absl::StatusOr<Tensor> Loss(const Transformer& model, SequenceParallelAttention& attention,
                              const SequenceBatch& batch);

 private:
  // Carries messages between this rank and a rank of a neighboring stage. Each direction has its
  // own channel, without other messages.
  class Link;
  struct Pass;  // a micro-batch in a chunk, from its forward to its backward

  Pipeline(const Mesh& mesh, int chunks, int rank);

  absl::Status Forward(const Transformer& model, SequenceParallelAttention& attention, int chunk,
                       const MicroBatch& micro_batch, const LossTerms& terms, Pass* pass,
                       DeviceSpans* times);
  absl::Status Backward(const Transformer& model, int chunk, Pass* pass, DeviceSpans* times);
  absl::Status WaitForSends();

  const int stage_, num_stages_, chunks_;
  std::unique_ptr<Communicator> stages_, tied_;
  std::unique_ptr<Link> from_previous_, to_next_;  // null: no such stage
};

}  // namespace burst
