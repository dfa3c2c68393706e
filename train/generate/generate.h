// Generates text from a model, one token after the other, with a KV cache.
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
  double temperature = 0.8;  // 0: always take the likeliest token
  int64_t top_k = 0;         // sample among the k likeliest tokens; 0: all
  uint64_t seed = 1;
  // Each of these is applied to the tokens that the one before it leaves.
  double top_p = 1;  // the likeliest tokens with this sum of probabilities (arXiv 1904.09751)
  double min_p = 0;  // tokens with this share of the largest probability (arXiv 2407.01082)
  double repetition_penalty = 1;  // PenalizeRepetition
};

// Makes tokens that the text has less likely: a positive logit is divided by the penalty, a
// negative one multiplied (Keskar et al., arXiv 1909.05858). Tokens beyond the logits do not count.
void PenalizeRepetition(const std::vector<int32_t>& text, double penalty,
                        std::vector<float>* logits);

// Returns token number `index` of a text, a function of (logits, options, index).
int32_t SampleToken(absl::Span<const float> logits, const SamplingOptions& options, int64_t index);

struct GenerationOptions {
  SamplingOptions sampling;
  int64_t tokens = 0;         // the most tokens; the tokenizer's end-of-text ends a text earlier,
  std::vector<int32_t> ends;  // and so do these tokens
  int64_t context =
      0;  // tokens the model was trained on; a longer text continues from its last half
  int64_t window = 0;  // the window of attention; 0: none
};

// Collects text whose parts may end inside of a UTF-8 character.
class CharacterStream {
 public:
  // Returns the text that can be shown now: all but an incomplete character at the end.
  std::string Append(absl::string_view text);
  // Returns the rest, at the end.
  std::string Rest() { return std::exchange(held_, ""); }

 private:
  std::string held_;
};

// Cuts a text, which comes in pieces, before the first place that has `stop`.
class TextBefore {
 public:
  // An empty `stop` is nowhere.
  explicit TextBefore(std::string stop) : stop_(std::move(stop)) {}
  // Returns the text that can be shown now: all but what may be a part of `stop`.
  std::string Append(absl::string_view piece);
  bool ended() const { return ended_; }  // `stop` was found
  // Returns the rest, at the end.
  std::string Rest() { return std::exchange(held_, ""); }

 private:
  const std::string stop_;
  std::string held_;
  bool ended_ = false;
};

// Returns how many of a prompt's last tokens the model reads: all if `context` holds them, else
// half of `context`.
int64_t ReadTokens(int64_t prompt_tokens, int64_t context);

// The ranks that generate one text together. Each has the whole model, and the keys and values of
// its share of the tokens. `attention` spreads the tokens and is not tensor-parallel.
struct GenerationRanks {
  Communicator* comm;
  SequenceParallelAttention* attention;
  Mask mask;
};

// Generates the text after `prompt` (at least one token, all of the model's vocabulary). Calls
// `emit` with whole characters until it returns false. Generates only tokens that both the model
// and the tokenizer have. With `ranks` it is collective, with equal arguments on all; only rank 0
// calls `emit`.
absl::Status Generate(const Transformer& model, const Tokenizer& tokenizer,
                      const std::vector<int32_t>& prompt, const GenerationOptions& options,
                      const std::function<bool(absl::string_view)>& emit,
                      const std::optional<GenerationRanks>& ranks = std::nullopt);

}  // namespace burst
