// Texts of any size to tokens, on all threads of the caller's pool, with a few MiB of memory each.
//
// Texts are cut into pieces. A first pass surveys them: which characters there are, how many, and
// what a piece is to the documents that begin and end in it. Then every piece knows its place in
// the stream of tokens, and a second pass encodes them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "train/data/checked_file.h"
#include "train/data/sources.h"
#include "train/data/tokenizer.h"

namespace burst {

// The tokens of --data or of --val_data in the payload of a file.
struct EncodedText {
  int64_t tokens_at = 0;  // byte offset
  int64_t tokens = 0;
  int64_t starts_at = 0;  // byte offset of int64 positions where a document starts, increasing
  int64_t starts = 0;
};

struct EncodedTexts {
  Tokenizer tokenizer;
  std::vector<EncodedText> parts;  // one for each source
  int64_t payload_bytes = 0;
  int token_bytes = 2;  // tokens are uint16, or 4: int32
};

// The error where all files are empty; `files`: how many are not.
absl::Status CheckHasText(const Sources& sources, int64_t files);
// "encoding my.txt", for a progress bar.
std::string EncodingWhat(const Sources& sources);

// The tokenizer of bytes, of the characters that were `seen`, or of those of `given`, which must be
// all that were seen. With an end-of-text if documents are `separate` or `given` has one. Errors
// name the option.
absl::StatusOr<Tokenizer> TokenizerOfTexts(const Sources& sources, Tokenizer::Kind kind,
                                           const std::vector<bool>& seen, bool separate,
                                           const Tokenizer* given);

// Tokens are bytes or characters: the characters of all sources make the vocabulary, unless it is
// `given`. One document a file, ended by the tokenizer's end-of-text, which it has if a source has
// several files that are not empty; or a single file of documents between blank lines. An empty
// file adds nothing. Errors name the option, the file and the place. Writes the payload, and shows
// progress. `piece_bytes`: at least 4; tests give few.
absl::StatusOr<EncodedTexts> EncodeTexts(const std::vector<const Sources*>& sources,
                                         Tokenizer::Kind kind, CheckedFileWriter* payload,
                                         int64_t piece_bytes = int64_t{1} << 20,
                                         const Tokenizer* given = nullptr);

}  // namespace burst
