// Models that --model names by a folder: one with weights, from which a run starts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "model/config.h"
#include "model/parameters.h"
#include "train/data/tokenizer.h"

namespace burst {

struct Pretrained {
  // A checkpoint of this program (its file), or a Hugging Face directory.
  enum class Kind { kCheckpoint, kHuggingFace };
  Kind kind = Kind::kHuggingFace;
  std::string path;
  ModelConfig model;
  int64_t window = 0;  // of attention; 0: none
  // Names of the directory's other files with weights, which are not read.
  std::vector<std::string> unread = {};
  std::string identity = {};  // of a checkpoint, which must be the one that is loaded
};

// Returns a warning that names the files of weights that are not read, or "" if all are read.
std::string UnreadWeights(const Pretrained& pretrained);

// `folder`: a Hugging Face directory, or the folder of an import or a run, of which the newest
// checkpoint counts. Reads what describes the model; errors name the file.
absl::StatusOr<Pretrained> FindPretrained(const std::string& folder);

// Fills this rank's part of the parameters of such a model, on its device.
absl::Status LoadPretrained(const Pretrained& pretrained, ParameterList* parameters);

// The model's own tokenizer: what a checkpoint holds, else the files that came with the model.
// NotFound, naming the folder, where there is none; other errors say why it cannot be read.
absl::StatusOr<Tokenizer> TokenizerOf(const Pretrained& pretrained);

// Tells the model's weights from others, at the cost of opening its files.
absl::StatusOr<std::string> FingerprintOf(const Pretrained& pretrained);

// Copies a model's other files (config.json, the tokenizer's files) unchanged to
// FOLDER/huggingface, where an export finds them.
absl::Status KeepCompanions(const Pretrained& pretrained, const std::string& folder);

// The folder of a checkpoint's companions, which may not be there.
std::string CompanionsOf(const std::string& checkpoint);

// Copies the files of that kind that `from` has to `to`, but for config.json if `with_config` is
// false, with their permissions. What a link leads out of `from` to is left out, and stderr says
// so.
absl::Status CopyCompanions(const std::string& from, const std::string& to, bool with_config);

}  // namespace burst
