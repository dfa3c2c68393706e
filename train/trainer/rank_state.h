// The state of one rank of a run: its groups in the mesh, its part of the model, and its optimizer.
//
// Every rank owns its tokens of every sequence, and a whole replica of the model. With tensor
// parallelism it owns its part of a replica, in a pipeline the layers of its stage. With --zero
// ranks with equal parameters divide the state (ShardedState).
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/attention/sequence_parallel_attention.h"
#include "burst/comm/communicator.h"
#include "burst/tensor/tensor.h"
#include "model/transformer.h"
#include "train/config/config.h"
#include "train/data/batch.h"
#include "train/optimizer/adamw.h"
#include "train/optimizer/state_exchange.h"
#include "train/pipeline/pipeline.h"
#include "train/run/setup.h"

namespace burst {

struct RankState {
  // Creates the state and draws a new model's weights; other models have undefined weights until
  // Load. Collective. `setup` and `comm` must outlive the result.
  static absl::StatusOr<std::unique_ptr<RankState>> Create(const TrainingSetup& setup,
                                                           Communicator* comm);

  // Loads the checkpoint of a resumed run, or the weights that a new run starts from. Collective.
  absl::Status Load();

  // Returns the tokens of a step, over all ranks.
  int64_t step_tokens() const { return config.accumulate * config.batch * config.seqlen; }
  // Returns the bytes that this rank keeps between steps.
  ParameterList::KeptBytes kept_bytes() const;
  // Completes the reduction of the gradients. norm, [1] float64, becomes the whole gradient's norm.
  absl::Status FinishGradients(const Tensor& norm);
  // Returns whether this rank's weights and optimizer state are finite.
  bool IsFinite() const;
  // Returns whether the condition holds on some rank. Collective.
  absl::StatusOr<bool> OnAnyRank(bool condition) const;

  const TrainingSetup& setup;
  const ResolvedConfig& config;
  Communicator* const comm;  // all ranks
  // The ranks of this rank's groups; null if it is alone, and `sequence` is null if it equals comm.
  std::unique_ptr<Communicator> sequence, tensor;
  std::unique_ptr<Communicator> own_stage;  // only in a pipeline
  Communicator* stage;                      // the ranks with the same layers: own_stage, or comm
  std::unique_ptr<SequenceParallelAttention> attention;
  std::unique_ptr<Transformer> model;
  std::unique_ptr<Pipeline> pipeline;       // null: one stage
  std::unique_ptr<StateExchange> exchange;  // ShardedState with --zero, else GradientReducer
  std::unique_ptr<AdamW> optimizer;

 private:
  RankState(const TrainingSetup& setup, Communicator* comm);
  absl::Status MakeGroups();
  absl::Status MakeAttention();
  absl::Status MakeModel();
  absl::Status MakeExchange();
  absl::Status MakeOptimizer();
};

// Gives this rank's part of the batches of a run.
class LocalBatches {
 public:
  // `rank` must outlive the object.
  explicit LocalBatches(const RankState& rank) : rank_(rank) {}

  // Returns the share of this rank's group of `count` sequences: [first, second). It may be empty.
  std::pair<int64_t, int64_t> Share(int64_t count) const;

  // Returns this rank's tokens of its group's sequences, which passed CheckTokens, on its device.
  absl::StatusOr<SequenceBatch> PartOf(const GlobalBatch& sequences);

 private:
  const RankState& rank_;
  LayerSchedules schedules_;  // for every batch, unless packed
};

}  // namespace burst
