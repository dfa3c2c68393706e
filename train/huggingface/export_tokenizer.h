// Writes a run's own tokenizer for transformers.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "train/data/tokenizer.h"

namespace burst {

// Writes tokenizer.json (or tokenizer.model) and tokenizer_config.json into the folder, which
// AutoTokenizer of transformers loads.
absl::Status WriteTokenizer(const Tokenizer& tokenizer, const std::string& folder);

// Returns fields of a config.json as JSON: bos_token_id and eos_token_id, null where there is none.
std::string TokenFields(const Tokenizer& tokenizer);

}  // namespace burst
