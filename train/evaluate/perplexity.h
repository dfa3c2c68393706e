// Evaluates perplexity by position: how well a model predicts a token from 1, 128 or 100,000 tokens
// before it.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "train/data/corpus.h"
#include "train/evaluate/scorer.h"

namespace burst {

struct PerplexityOptions {
  int64_t seqlen = 0;
  int64_t sequences = 0;  // the most sequences; 0: all
  // The sequences begin with documents of at least seqlen + 1 tokens; else they are a trainer's,
  // which are spread over the data.
  bool documents = false;
  // Predicts the tokens also from the last / 2 to `last` tokens before them alone; 0: not.
  // Documents may become easier with position, so only the distance of the curves is due to the
  // context.
  int64_t last = 0;
};

// Checks the options against one another: InvalidArgument names the option.
absl::Status CheckPerplexity(const PerplexityOptions& options);

// JSON: sequences, seqlen, loss (nats per token), perplexity, ranges ([[first, last]] of the number
// of tokens before), by_range and, with `last`, by_range_of_last.
absl::StatusOr<Evaluation> EvaluatePerplexity(Scorer* scorer, const TokenSpan& data,
                                              const PerplexityOptions& options);

}  // namespace burst
