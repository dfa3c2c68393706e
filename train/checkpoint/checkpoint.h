// A run's state in one file, or in a set of files (checkpoint_set.h). It holds the parameters by
// name, the optimizer's moments as adam.m.<name> and adam.v.<name>, and strings with everything
// else that continuing or generating needs. Matrices that Muon updates have no adam.v, except in
// files of older versions, which are read without it.
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
  int64_t step = 0;     // steps completed; 0: weights alone, from an import
  int64_t updates = 0;  // updates by AdamW: fewer than steps if some were skipped
  int64_t seqlen = 0;   // the length of sequences in training
  int64_t window = 0;   // the window of attention
  ModelConfig model;
  std::optional<Tokenizer> tokenizer;
  std::string config;              // TrainConfig as JSON
  std::string data_fingerprint;    // differs for other data
  std::optional<double> val_loss;  // the validation loss of these weights, if they were evaluated
  bool checksums = true;           // false: the file is of an older version, which had none
  std::string identity;            // CheckpointReader::identity, if a file was read
};

// Saves a run's state, atomically. ResourceExhausted means that the disk is full; an earlier file
// then stays. If ranks share the parameters, all of `group` call it, and rank 0 writes. If ranks
// divide the state (StateSharding), `group` has all of them, data parallel x tensor parallel
// (Mesh). Rank 0 then receives and writes a message at a time, with tensor parallelism a parameter
// at a time.
absl::Status SaveCheckpoint(const std::string& path, const CheckpointInfo& info,
                            const ParameterList& parameters, const AdamW& optimizer,
                            Communicator* group = nullptr);

// Writes a copy of the whole state (OwnState of a rank that has all of it), on any thread.
absl::Status WriteCheckpoint(const std::string& path, const CheckpointInfo& info,
                             const StateCopy& state);

// Writes the index of a set: `set` is a folder next to `path`, to which the ranks have written
// (checkpoint_set.h). Every reader of checkpoints also reads an index.
absl::Status WriteCheckpointIndex(const std::string& path, const CheckpointInfo& info,
                                  const std::string& set, int files);

// Writes weights alone, as a checkpoint of step 0, atomically. read(parameter, whole) fills each
// whole parameter of info.model, float32 on the CPU, one at a time.
using ReadParameter = std::function<absl::Status(const Parameter& parameter, const Tensor& whole)>;
absl::Status SaveWeights(const std::string& path, const CheckpointInfo& info,
                         const std::vector<Parameter>& parameters, const ReadParameter& read);

// Reads and checks the header only. Returns DataLoss if the file is damaged or is not a checkpoint
// of this or an older version.
absl::StatusOr<CheckpointInfo> ReadCheckpointInfo(const std::string& path);

// Reads and checks the whole file. Also returns DataLoss, with the tensor's name, if a checksum
// differs or a number is not finite.
absl::StatusOr<CheckpointInfo> VerifyCheckpoint(const std::string& path);

// Fills this rank's parts of the parameters, and the state of an optimizer if one is given, with
// the same checks. After an error the values are undefined. FailedPrecondition means that an
// optimizer is given and the file holds weights alone, or that the file's CheckpointInfo::identity
// is not the given one.
absl::Status LoadCheckpoint(const std::string& path, ParameterList* parameters, AdamW* optimizer,
                            const std::string& identity = "");

}  // namespace burst
