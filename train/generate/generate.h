// Text from a model, one token after the other, with a KV cache.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "model/transformer.h"
#include "train/data/tokenizer.h"

namespace burst {

struct SamplingOptions {
  double temperature = 0.8;  // 0: always the likeliest
  int64_t top_k = 0;         // only among the k likeliest; 0: all
  uint64_t seed = 1;
};

// Token number `index` of a text: a function of (logits, options, index).
int32_t SampleToken(absl::Span<const float> logits, const SamplingOptions& options, int64_t index);

struct GenerationOptions {
  SamplingOptions sampling;
  int64_t tokens = 0;  // to generate at most; end-of-text ends earlier
  int64_t context =
      0;  // tokens the model was trained on; a longer text continues from its last half
  int64_t window = 0;  // of attention; 0: none
};

// The prompt's tokens; for an empty one a line break, or the first token of the vocabulary.
absl::StatusOr<std::vector<int32_t>> EncodePrompt(const Tokenizer& tokenizer,
                                                  absl::string_view prompt);

// Calls `emit` with the text of each token after `prompt` (at least one token), until it returns
// false.
absl::Status Generate(const Transformer& model, const Tokenizer& tokenizer,
                      const std::vector<int32_t>& prompt, const GenerationOptions& options,
                      const std::function<bool(absl::string_view)>& emit);

}  // namespace burst
