// Finds models with weights, which --model names by a folder and from which a run starts. Imports a
// Hugging Face directory as such a folder.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "model/config.h"
#include "model/parameters.h"
#include "train/checkpoint/checkpoint.h"
#include "train/data/tokenizer.h"

namespace burst {

struct Pretrained {
  // A checkpoint of this program (its file), or a Hugging Face directory.
  enum class Kind { kCheckpoint, kHuggingFace };
  Kind kind = Kind::kHuggingFace;
  std::string path;
  ModelConfig model;
  int64_t window = 0;  // the window of attention; 0: none
  // Names of the directory's other files with weights, which are not read.
  std::vector<std::string> unread = {};
  std::string identity = {};  // a checkpoint's; the same checkpoint must be loaded later
  std::vector<std::string> ignored = {};  // fields of config.json that do not count
};

// Returns a warning that names the files of weights that are not read, or "" if all are read.
std::string UnreadWeights(const Pretrained& pretrained);

// Finds a model. `folder` is a Hugging Face directory, or the folder of an import or a run, of
// which the newest checkpoint counts. Reads the model's description, without the fields `ignored`
// of a directory's config.json; errors name the file.
absl::StatusOr<Pretrained> FindPretrained(const std::string& folder,
                                          const std::vector<std::string>& ignored = {});

// Fills this rank's part of the parameters of such a model, on its device. The model of a directory
// may have grown by tokens (HuggingFaceDirectory::Load).
absl::Status LoadPretrained(const Pretrained& pretrained, ParameterList* parameters);

// Returns the model's own tokenizer, from the checkpoint or else from the model's files. NotFound
// names the folder without a tokenizer; other errors say why it cannot be read.
absl::StatusOr<Tokenizer> TokenizerOf(const Pretrained& pretrained);

// Returns a text that differs for other weights. It opens the model's files.
absl::StatusOr<std::string> FingerprintOf(const Pretrained& pretrained);

// Copies a model's other files (config.json, the tokenizer's files) to FOLDER/huggingface, where an
// export finds them. They stay as they are, but config.json loses its ignored fields.
absl::Status KeepCompanions(const Pretrained& pretrained, const std::string& folder);

// Returns the folder of a checkpoint's companions, which may be missing.
std::string CompanionsOf(const std::string& checkpoint);

// Returns the tokens that a checkpoint's model takes: those of its run's sequences. A run that
// began with trained weights has their context, if it is longer.
int64_t ContextOf(const std::string& checkpoint, const CheckpointInfo& info);

// The names of a model's companions but config.json: its tokenizer's files and their settings.
absl::Span<const char* const> CompanionNames();

// Copies config.json and the companions that takes(name) is true for, with their permissions, from
// `from` to `to`. Leaves out a link that leads out of `from`, and says so on stderr.
absl::Status CopyCompanions(const std::string& from, const std::string& to,
                            absl::FunctionRef<bool(absl::string_view)> takes);

// Makes the folder `out` with checkpoint.safetensors, weights alone in float32, and the model's
// other files (KeepCompanions). One tensor is in memory at a time. FailedPrecondition if it holds
// checkpoints. Warns of weights in the directory that are not read. config.json is read without the
// fields `ignored`.
absl::Status ImportHuggingFace(const std::string& directory, const std::string& out,
                               const std::vector<std::string>& ignored = {});

}  // namespace burst
