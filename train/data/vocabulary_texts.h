// Encodes texts of any size by a file's tokenizer, into the payload of a file of the data cache.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "train/data/checked_file.h"
#include "train/data/json_line.h"
#include "train/data/sources.h"
#include "train/data/text_encoder.h"
#include "train/data/tokenizer.h"

namespace burst {

// Encodes texts like EncodeTexts (text_encoder.h), which has the rules of documents, but by a
// file's tokenizer. A document of a single text starts with the token that holds its first
// character that is not blank. A line of JSON, with any tokenizer, is a document: its text under
// the key `lines.field`, and the end-of-text token. Prints which lines were left out.
absl::StatusOr<EncodedTexts> EncodeVocabularyTexts(const std::vector<const Sources*>& sources,
                                                   const Tokenizer& tokenizer,
                                                   CheckedFileWriter* payload,
                                                   const LineFormat& lines = {},
                                                   int64_t piece_bytes = int64_t{1} << 20);

// Returns a tokenizer of the bytes or characters of lines of JSON (TokenizerOfTexts).
absl::StatusOr<Tokenizer> TokenizerOfLines(const std::vector<const Sources*>& sources,
                                           Tokenizer::Kind kind, const LineFormat& lines,
                                           const Tokenizer* given);

}  // namespace burst
