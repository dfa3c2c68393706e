// Reads the special tokens that a tokenizer.json puts before a text.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace burst {

// Returns the tokens before a single text (BOS) by the file's post_processor: TemplateProcessing,
// Bert's and Roberta's, also within a Sequence. Without a post_processor there are none. Tokens
// after the text are left out. InvalidArgument names the field that is not supported.
absl::StatusOr<std::vector<int32_t>> TemplateBeginning(absl::string_view tokenizer_json);

}  // namespace burst
