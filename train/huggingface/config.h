// Reads and writes config.json of a Hugging Face directory.
//
// families/ has a file for each family. An error names a field that is unknown, or whose value this
// program does not compute. Fields for training, sampling or other programs are ignored:
// families.cc lists them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "model/config.h"

namespace burst {

struct HuggingFaceConfig {
  ModelConfig model;   // with defaults, without dropout; context: max_position_embeddings
  int64_t window = 0;  // the window of attention, but for full_layers; 0: none
  std::string dtype;   // the weights' dtype: "float32", "bfloat16", "float16"; empty: not given
  // Rows and columns of a float8 weight that share a scale; 0: no weight is float8.
  int64_t scale_rows = 0, scale_cols = 0;
  // model_type, which decides the tensors' names; empty: the first family that has such models.
  std::string type = {};

  bool HasWindow(int64_t layer) const { return window > 0 && !model.IsFull(layer); }
};

// Parses a config.json. InvalidArgument names the field, its value and valid values.
absl::StatusOr<HuggingFaceConfig> ParseHuggingFaceConfig(absl::string_view json);

// Returns a config.json that ParseHuggingFaceConfig reads as `config`, of its type if that has such
// models. InvalidArgument means that none of the families has; it names the properties that the
// closest one lacks.
absl::StatusOr<std::string> MakeHuggingFaceConfig(const HuggingFaceConfig& config);

// Returns the fields in which a model computes something else than another; "" if none. The rates
// of dropout and the initial values do not count.
std::string ComputedDifference(const HuggingFaceConfig& config, const HuggingFaceConfig& other);

// Returns the config.json without these fields, such as "a", or "rope_scaling.a" within an object.
// InvalidArgument names a field that it does not have.
absl::StatusOr<std::string> WithoutFields(absl::string_view json,
                                          const std::vector<std::string>& fields);

// Returns a config.json with the fields of `other` that it lacks and that change no result, such as
// the numbers of tokens.
absl::StatusOr<std::string> WithHarmlessFields(absl::string_view json, absl::string_view other);

// Returns the config.json for weights of another dtype. Without a dtype, a config.json means
// float32.
absl::StatusOr<std::string> WithDType(absl::string_view json, absl::string_view dtype);

// Returns the config.json with another max_position_embeddings, for a model that was trained on
// longer texts. The original context and the factor of its RoPE stay.
absl::StatusOr<std::string> WithContext(absl::string_view json, int64_t context);

}  // namespace burst
