// Encodes texts of any size on all threads of the caller's pool, with a few MiB of memory each.
//
// Texts are cut into pieces. A first pass surveys them: which characters there are, how many, and
// which documents begin and end in a piece. Then every piece's place in the stream of tokens is
// known, and a second pass encodes the pieces.
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
  int64_t marks_at = 0;  // byte offset of the packed marks (token_marks.h); 0: all tokens count
};

struct EncodedTexts {
  Tokenizer tokenizer;
  std::vector<EncodedText> parts;  // one for each source
  int64_t payload_bytes = 0;
  int token_bytes = 2;  // tokens are uint16, or 4: int32
};

// Returns an error if all files are empty. `files` is the number of files that are not.
absl::Status CheckHasText(const Sources& sources, int64_t files);
// Returns "encoding my.txt", for a progress bar.
std::string EncodingWhat(const Sources& sources);

// Returns a tokenizer of bytes, of the `seen` characters, or of `given`'s characters, which must
// include all seen ones. It has an end-of-text token if documents are `separate` or `given` has
// one. Errors name the option.
absl::StatusOr<Tokenizer> TokenizerOfTexts(const Sources& sources, Tokenizer::Kind kind,
                                           const std::vector<bool>& seen, bool separate,
                                           const Tokenizer* given);

// Encodes texts as bytes or characters. The characters of all sources make the vocabulary, unless
// it is `given`. A single file has documents between blank lines. If a source has several files
// that are not empty, each file is a document that ends with the end-of-text token. Errors name the
// option, the file and the place. Writes the payload, and shows progress. `piece_bytes` is at least
// 4; tests give few.
absl::StatusOr<EncodedTexts> EncodeTexts(const std::vector<const Sources*>& sources,
                                         Tokenizer::Kind kind, CheckedFileWriter* payload,
                                         int64_t piece_bytes = int64_t{1} << 20,
                                         const Tokenizer* given = nullptr);

}  // namespace burst
