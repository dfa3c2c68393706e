// Text from a model, one token after the other, with a KV cache.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "model/transformer.h"
#include "train/data/tokenizer.h"
#include "train/generate/sampling.h"

namespace burst {

struct GenerationOptions {
  SamplingOptions sampling;
  int64_t tokens = 0;   // to generate at most; end-of-text ends earlier
  int64_t context = 0;  // tokens the model was trained on; a longer text goes on from its last half
  int64_t window = 0;   // of attention; 0: none
};

// The prompt's tokens; for an empty one a line break, or the first token of the vocabulary.
absl::StatusOr<std::vector<int32_t>> EncodePrompt(const Tokenizer& tokenizer,
                                                  absl::string_view prompt);

// Calls `emit` with the text of each token after `prompt` (at least one token).
absl::Status Generate(const Transformer& model, const Tokenizer& tokenizer,
                      const std::vector<int32_t>& prompt, const GenerationOptions& options,
                      const std::function<void(absl::string_view)>& emit);

}  // namespace burst
