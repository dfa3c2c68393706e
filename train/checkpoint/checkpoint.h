// A run's state in one file, or in a set of files (checkpoint_set.h). It holds the parameters by
// name, AdamW's moments as adam.m.<name> and adam.v.<name>, and strings with everything else that
// continuing or generating needs.
//
// Data order and dropout are functions of (seed, step), so no generator state is saved. The file
// holds whole parameters, so it does not depend on how many ranks wrote it.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/comm/communicator.h"
#include "model/config.h"
#include "model/parameters.h"
#include "train/checkpoint/state_copy.h"
#include "train/data/tokenizer.h"
#include "train/optimizer/adamw.h"

namespace burst {

struct CheckpointInfo {
  int64_t step = 0;     // steps completed; 0: weights alone, which no step of a run has made
  int64_t updates = 0;  // of AdamW: fewer when steps were skipped
  int64_t seqlen = 0;   // trained on
  int64_t window = 0;   // of attention
  ModelConfig model;
  std::optional<Tokenizer> tokenizer;
  std::string config;              // TrainConfig as JSON
  std::string data_fingerprint;    // tells other data from the same
  std::optional<double> val_loss;  // of these weights, if they were evaluated
  bool checksums = true;           // false: the file is of an older version, which had none
  std::string identity;            // of a file that was read: CheckpointReader::identity
};

// Atomic; ResourceExhausted when the disk is full, and what was there before stays. With parameters
// that are spread over ranks, `group` is theirs: all call it, and rank 0 writes. Where ranks divide
// the state (StateSharding), `group` is all of them, data parallel x tensor parallel (Mesh): rank 0
// receives a message at a time and writes it; with tensor parallelism, a parameter at a time.
absl::Status SaveCheckpoint(const std::string& path, const CheckpointInfo& info,
                            const ParameterList& parameters, const AdamW& optimizer,
                            Communicator* group = nullptr);

// Writes a copy of the whole state (OwnState of a rank that has all of it). May be called on any
// thread.
absl::Status WriteCheckpoint(const std::string& path, const CheckpointInfo& info,
                             const StateCopy& state);

// Writes the index of a set: `set` is a folder next to `path`, to which the ranks have written
// (checkpoint_set.h). Everything that reads a checkpoint reads an index too.
absl::Status WriteCheckpointIndex(const std::string& path, const CheckpointInfo& info,
                                  const std::string& set, int files);

// Writes weights alone, as of step 0: read(parameter, whole) fills each of the parameters (those of
// info.model, whole), float32 on the CPU, one at a time. Atomic, as SaveCheckpoint.
using ReadParameter = std::function<absl::Status(const Parameter& parameter, const Tensor& whole)>;
absl::Status SaveWeights(const std::string& path, const CheckpointInfo& info,
                         const std::vector<Parameter>& parameters, const ReadParameter& read);

// Reads and checks the header only. DataLoss for a file that is damaged or was not written by
// SaveCheckpoint, of this or an older version.
absl::StatusOr<CheckpointInfo> ReadCheckpointInfo(const std::string& path);

// Reads all of it. DataLoss as above, also when a checksum does not agree or a number is not
// finite, naming the tensor.
absl::StatusOr<CheckpointInfo> VerifyCheckpoint(const std::string& path);

// Fills the parameters, this rank's parts of them, and the optimizer's state where one is given,
// with the same checks of what it reads. After an error their values are undefined.
// FailedPrecondition if an optimizer is given and the file holds weights alone, or if the file is
// not the one whose CheckpointInfo::identity is given.
absl::Status LoadCheckpoint(const std::string& path, ParameterList* parameters, AdamW* optimizer,
                            const std::string& identity = "");

}  // namespace burst
