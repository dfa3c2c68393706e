// Evaluates a model by questions whose answers are texts: several choices, or the last word.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "train/data/tokenizer.h"
#include "train/evaluate/scorer.h"
#include "train/generate/prompt.h"

namespace burst {

// A context and the texts that may follow it.
struct Question {
  std::string context;
  std::vector<std::string> choices;
  int64_t answer = 0;  // the index of the right choice; a last word is the only one
};

// Reads lines of JSON: {"context": TEXT, "choices": [TEXT, ...], "answer": INDEX}, or as LAMBADA
// has them {"text": TEXT}, whose last word is to be found. Errors name the line. All lines are of
// one kind.
absl::StatusOr<std::vector<Question>> ParseQuestions(absl::string_view lines);

// JSON: questions, accuracy, and by question `losses`, a sum over the tokens of each choice. The
// tokens of context and choice together are split where the context's own tokens would end, as
// lm-evaluation-harness does.
//
// choices    accuracy: the answer has the least loss; accuracy_by_length: the least loss per
//            character (acc and acc_norm of lm-evaluation-harness)
// last word  accuracy: greedy generation gives the word; perplexity: exp of the mean loss of a word
absl::StatusOr<Evaluation> EvaluateChoices(Scorer* scorer, const std::vector<Question>& questions,
                                           const Tokenizer& tokenizer, const PromptRules& rules);

}  // namespace burst
