// The values on which the ranks of a run agree before it starts. Ranks of one process share them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/comm/communicator.h"
#include "train/checkpoint/checkpoint.h"
#include "train/config/config.h"
#include "train/data/batch.h"
#include "train/data/corpus.h"
#include "train/report/run_folder.h"

namespace burst {

struct TrainingSetup {
  ResolvedConfig config;  // with the model's vocab
  TrainingData data;
  std::string data_fingerprint;
  int64_t sample = 0;                     // tokens to generate at the end; 0 without a tokenizer
  std::optional<CheckpointInfo> resumed;  // the checkpoint to continue from
  bool finished = false;                  // the run is complete
  std::string plan;                       // a step's expected cost, for people; empty: unknown
  // Set if the GPUs are simulated. The run then only takes steps: it never makes weights, and
  // writes nothing.
  std::shared_ptr<PlannedSequences> simulated;
  std::optional<RunLock> lock;  // the run folder's lock, in rank 0's process; none: not yet locked
};

// Loads the data, and fits the model's vocabulary to it.
absl::StatusOr<TrainingSetup> PrepareTraining(const ResolvedConfig& config);

// With --resume, finds the run and checks that it can continue. Its folder must be locked.
absl::Status FindResumed(TrainingSetup* setup);

// Makes all ranks agree on a failure: the lowest rank that failed keeps its status, and all others
// become Cancelled. Collective.
absl::Status AgreeOn(const absl::Status& status, Communicator* comm);
// Agrees like AgreeOn on a failure that ends the run: one rank returns it, and the others wait
// until it ends them.
absl::Status AgreeOrWait(const absl::Status& status, Communicator* comm);

// Returns why a run cannot continue from the checkpoint `path`, and names another one of its
// folder.
absl::Status CannotResume(const absl::Status& error, const std::string& path);

}  // namespace burst
