// config.json of a Hugging Face directory, read and written.
//
// Read are the families llama (2, 3, 3.1, 3.2), mistral, qwen2 (and 2.5), qwen3 (dense) and gpt2. A
// field that is not known, or whose value means what this program does not compute, is an error
// that names it. What only concerns training (dropout, initial values) or other programs (tokens'
// numbers, caches) is read over: config.cc lists it.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "model/config.h"

namespace burst {

struct HuggingFaceConfig {
  ModelConfig model;   // with defaults, without dropout; context: max_position_embeddings
  int64_t window = 0;  // of attention in every layer; 0: none
  std::string dtype;   // of the weights, "float32", "bfloat16", "float16"; empty: it does not say
};

// InvalidArgument naming the field, its value and what would be valid.
absl::StatusOr<HuggingFaceConfig> ParseHuggingFaceConfig(absl::string_view json);

// The text of a config.json, which ParseHuggingFaceConfig reads as `config`. InvalidArgument for a
// model that none of the families has.
absl::StatusOr<std::string> MakeHuggingFaceConfig(const HuggingFaceConfig& config);

// Writes config.json for weights of another dtype. A config.json that does not name one means
// float32.
absl::StatusOr<std::string> WithDType(absl::string_view json, absl::string_view dtype);

// Returns the config.json with another max_position_embeddings, of a model that was trained on
// longer texts. The context that its RoPE was first made for stays.
absl::StatusOr<std::string> WithContext(absl::string_view json, int64_t context);

}  // namespace burst
