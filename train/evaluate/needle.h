// Evaluates whether a model finds a needle in a haystack: a sentence with a number, at some depth
// of a long text, for which the text's end asks (github.com/gkamradt/LLMTest_NeedleInAHaystack).
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "train/data/corpus.h"
#include "train/data/tokenizer.h"
#include "train/evaluate/scorer.h"
#include "train/generate/prompt.h"

namespace burst {

struct NeedleOptions {
  std::vector<int64_t> lengths;  // tokens
  std::vector<int64_t> depths;   // percent of the haystack before the needle
  int64_t trials = 0;            // of each length and depth
  uint64_t seed = 0;
};

// A haystack's tokens: BOS, text, the needle, text, the question, and from `answer` on the answer.
struct Haystack {
  std::vector<int32_t> tokens;
  int64_t answer = 0;
};

// Returns a haystack of `length` tokens, a function of its arguments. The needle begins after the
// sentence that ends last before `depth` percent of the text. InvalidArgument means that the data
// or `length` is too short, or that the tokenizer cannot write the needle.
absl::StatusOr<Haystack> MakeHaystack(const TokenSpan& text, const Tokenizer& tokenizer,
                                      const PromptRules& rules, int64_t length, int64_t depth,
                                      uint64_t seed, uint64_t trial);

// A trial finds the needle if greedy generation gives the whole answer. JSON: lengths, depths,
// trials, found ([depths][lengths] shares of trials) and loss (of the answer, nats per token).
absl::StatusOr<Evaluation> EvaluateNeedle(Scorer* scorer, const TokenSpan& text,
                                          const Tokenizer& tokenizer, const PromptRules& rules,
                                          const NeedleOptions& options);

}  // namespace burst
