// The values on which the ranks of a run agree before it starts; ranks of one process share them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/comm/communicator.h"
#include "train/checkpoint/checkpoint.h"
#include "train/config/config.h"
#include "train/data/corpus.h"
#include "train/report/run_folder.h"

namespace burst {

struct TrainingSetup {
  ResolvedConfig config;  // the model's vocab known
  TrainingData data;
  std::string data_fingerprint;
  int64_t sample = 0;                     // tokens to generate at the end; 0 without a tokenizer
  std::optional<CheckpointInfo> resumed;  // the checkpoint to continue from
  bool finished = false;                  // it has made all steps, and what follows them
  std::string plan;                       // what a step should take, for people; empty: unknown
  // On simulated GPUs: the model's weights are never made, and nothing is written. Only steps.
  bool simulated = false;
  std::optional<RunLock> lock;  // on its folder, in rank 0's process; none: not yet locked
};

// Loads the data, and fits the model's vocabulary to it.
absl::StatusOr<TrainingSetup> PrepareTraining(const ResolvedConfig& config);

// With --resume: finds the run to continue, and checks that it can be. Once its folder is locked.
absl::Status FindResumed(TrainingSetup* setup);

// Collective: the lowest rank that failed keeps its status, all others become Cancelled.
absl::Status AgreeOn(const absl::Status& status, Communicator* comm);
// Like AgreeOn, for a failure that ends the run: one rank returns it, and the others wait until it
// ends them.
absl::Status AgreeOrWait(const absl::Status& status, Communicator* comm);

// Why the checkpoint `path` cannot be continued from, and which other one of its folder can.
absl::Status CannotResume(const absl::Status& error, const std::string& path);

}  // namespace burst
