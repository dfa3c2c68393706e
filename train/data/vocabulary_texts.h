// Texts of any size to tokens of a file's tokenizer, in the payload of a file of the data cache.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "train/data/checked_file.h"
#include "train/data/sources.h"
#include "train/data/text_encoder.h"
#include "train/data/tokenizer.h"

namespace burst {

// The same as EncodeTexts (text_encoder.h), which has the rules of documents, for a tokenizer that
// is given; where it has an end-of-text token. A document of a single text starts with the token
// that holds its first character that is not blank.
absl::StatusOr<EncodedTexts> EncodeVocabularyTexts(const std::vector<const Sources*>& sources,
                                                   const Tokenizer& tokenizer,
                                                   CheckedFileWriter* payload,
                                                   int64_t piece_bytes = int64_t{1} << 20);

}  // namespace burst
