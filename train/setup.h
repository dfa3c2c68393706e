// What the ranks of a run agree on before it starts; ranks of one process share it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "train/checkpoint/checkpoint.h"
#include "train/config/config.h"
#include "train/data/corpus.h"

namespace burst {

struct TrainingSetup {
  ResolvedConfig config;  // the model's vocab known
  TrainingData data;
  std::string data_fingerprint;
  int64_t sample = 0;                     // tokens to generate at the end; 0 without a tokenizer
  std::optional<CheckpointInfo> resumed;  // the checkpoint to continue from
};

// Loads the data, fits the model's vocabulary to it, and finds the run to resume.
absl::StatusOr<TrainingSetup> PrepareTraining(const ResolvedConfig& config);

}  // namespace burst
