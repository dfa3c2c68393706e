// Reads from a model's files which tokens come before a text, and which tokens end it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "train/data/tokenizer.h"

namespace burst {

struct PromptRules {
  std::vector<int32_t> begin;  // tokens before a prompt that does not have them: BOS
  std::vector<int32_t> ends;   // tokens that end a text, in addition to the tokenizer's end of text
  Specials specials = Specials::kAreTokens;  // the meaning of special tokens' text in a prompt
};

// Reads the rules of a Hugging Face directory, any of whose files may be missing:
//
// begin     the template of tokenizer.json; for a tokenizer.model without one, its BOS if
//           tokenizer_config.json has add_bos_token, or if there is no tokenizer_config.json
// ends      eos_token_id of generation_config.json and of config.json, a number or a list, and the
//           eos_token of tokenizer_config.json
// specials  legacy of tokenizer_config.json: a tokenizer.model puts its space after every control
//           token, too
//
// transformers has the same rules, but takes `ends` from one of the files. InvalidArgument names
// the file and the field. Without `with_begin`, `begin` is not read.
absl::StatusOr<PromptRules> ReadPromptRules(const std::string& folder, const Tokenizer& tokenizer,
                                            bool with_begin);

// Returns the rules of the directory from which a checkpoint's run or import began (CompanionsOf).
// A run that made its own model has the rules of its documents, by its tokenizer's marks.
absl::StatusOr<PromptRules> RulesOfCheckpoint(const std::string& checkpoint,
                                              const Tokenizer& tokenizer, bool with_begin);

// Returns the prompt's tokens; a special token's text means that token. An empty prompt gives
// `begin`, else the end of text, which separates documents, else a line break, else the first
// token.
absl::StatusOr<std::vector<int32_t>> EncodePrompt(const Tokenizer& tokenizer,
                                                  absl::string_view prompt,
                                                  const PromptRules& rules = {});

}  // namespace burst
