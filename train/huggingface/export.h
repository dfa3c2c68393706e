// Converts a checkpoint into a Hugging Face directory, one tensor after the other, without memory
// for a whole model.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "burst/base/enum_names.h"

namespace burst {

// The dtype of the weights in a Hugging Face directory.
enum class WeightDType { kAuto, kFloat32, kBFloat16, kFloat16 };

// The names of torch. auto: as imported, else float32.
inline constexpr EnumName<WeightDType> kWeightDTypes[] = {{WeightDType::kAuto, "auto"},
                                                          {WeightDType::kFloat32, "float32"},
                                                          {WeightDType::kBFloat16, "bfloat16"},
                                                          {WeightDType::kFloat16, "float16"}};

struct ExportOptions {
  WeightDType dtype = WeightDType::kAuto;
  bool average = false;                // the averaged weights of --ema
  int64_t file_bytes = 5'000'000'000;  // the most bytes of tensors in a file, unless one is larger
};

// Makes the directory `out`, which transformers loads, from a checkpoint of any step. It has the
// run's tokenizer. The other files of an imported model stay as they are, unless the run has
// another tokenizer, to which they do not belong. InvalidArgument means that none of the families
// has the model, that the checkpoint has no average, or that a number is beyond float16.
// FailedPrecondition means that `out` holds a model or a tokenizer.
absl::Status ExportHuggingFace(const std::string& checkpoint, const std::string& out,
                               const ExportOptions& options);

}  // namespace burst
