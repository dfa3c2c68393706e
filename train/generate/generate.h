// Text from a model, one token after the other, with a KV cache.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "burst/attention/sequence_parallel_attention.h"
#include "burst/comm/communicator.h"
#include "model/transformer.h"
#include "train/data/tokenizer.h"
#include "train/generate/prompt.h"

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
  int64_t tokens = 0;         // to generate at most; the tokenizer's end-of-text ends earlier,
  std::vector<int32_t> ends;  // and so do these tokens
  int64_t context =
      0;  // tokens the model was trained on; a longer text continues from its last half
  int64_t window = 0;  // of attention; 0: none
};

// Text that comes in parts which may end inside of a UTF-8 character.
class CharacterStream {
 public:
  // Returns the text that can be shown now: all but a character at the end whose last bytes are
  // missing.
  std::string Append(absl::string_view text);
  // Returns the rest, at the end.
  std::string Rest() { return std::exchange(held_, ""); }

 private:
  std::string held_;
};

// How many of the last tokens of a prompt the model reads: all that `context` holds, or half of it.
int64_t ReadTokens(int64_t prompt_tokens, int64_t context);

// Ranks that generate one text together: each has the whole model, and the keys and values of its
// share of the tokens, as `attention` spreads them (not a tensor-parallel one).
struct GenerationRanks {
  Communicator* comm;
  SequenceParallelAttention* attention;
  Mask mask;
};

// Calls `emit` with the text after `prompt` (at least one token, all of the model's vocabulary), as
// soon as its characters are whole, until it returns false. It generates tokens that both the
// model and the tokenizer have. With `ranks` collective, with the same arguments on all; only
// rank 0 calls `emit`.
absl::Status Generate(const Transformer& model, const Tokenizer& tokenizer,
                      const std::vector<int32_t>& prompt, const GenerationOptions& options,
                      const std::function<bool(absl::string_view)>& emit,
                      const std::optional<GenerationRanks>& ranks = std::nullopt);

}  // namespace burst
