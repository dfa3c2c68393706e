// A Hugging Face directory into a checkpoint, and a checkpoint into a Hugging Face directory, one
// tensor after the other: neither needs memory for a model.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace burst {

// Makes the folder `out` with checkpoint.safetensors, weights alone in float32, and the model's
// other files (KeepCompanions). FailedPrecondition if it holds checkpoints. Warns of weights in the
// directory that are not read.
absl::Status ImportHuggingFace(const std::string& directory, const std::string& out);

struct ExportOptions {
  std::string dtype;  // of the weights: float32, bfloat16, float16; empty: as they were imported,
                      // or float32
  int64_t file_bytes = 5'000'000'000;  // of tensors in a file, at most, unless one is larger
};

// Makes the directory `out` of a checkpoint of any step, which transformers loads. InvalidArgument
// for a model that none of its families has, or a number beyond float16; FailedPrecondition if
// `out` holds a model.
absl::Status ExportHuggingFace(const std::string& checkpoint, const std::string& out,
                               const ExportOptions& options);

}  // namespace burst
