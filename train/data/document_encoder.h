// Encodes documents with the tokenizer of a file (train/tokenizer), or lines of JSON with any
// tokenizer. All threads of the caller's pool take pieces of files. The tokens do not depend on the
// pieces (docs/decisions/0011-tokens-do-not-depend-on-pieces.md). Files of lines may be packed by
// gzip or zstd.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "train/data/json_line.h"
#include "train/data/progress.h"
#include "train/data/sources.h"
#include "train/data/tokenizer.h"

namespace burst {

// Says what counts as a document of a file.
enum class DocumentsAre {
  kFiles,       // the file is a document
  kBlankLines,  // blocks between blank lines, encoded as one text. A document starts with the token
                // that holds its first character that is not blank
  kJsonLines,   // every line is a JSON object with a text
};

struct DocumentFormat {
  DocumentsAre documents = DocumentsAre::kFiles;
  LineFormat lines;  // with kJsonLines
};

// Lines that were left out because they are not documents (BadLines::kSkip).
struct SkippedLines {
  int64_t lines = 0;
  std::string first;  // the error of the first one

  void Add(const SkippedLines& more);
  // Returns a sentence for the user; empty if no line was left out.
  std::string Describe() const;
};

// The tokens of a piece, in the order of the texts.
struct EncodedPiece {
  std::vector<int32_t> tokens;
  std::vector<int64_t> starts;   // indices into `tokens` at which a document starts; tokens.size()
                                 // for a document whose first token comes later, or is missing
  std::vector<uint8_t> counted;  // whether each token counts in the loss; empty: all do
  std::vector<bool> masked;      // whether each document has a mask; with `counted`
  int64_t bytes = 0;             // bytes of text, unpacked
  SkippedLines skipped;
};

// Calls `sink` with one piece after the other, never at the same time, and stops at its first
// error. Empty files have no pieces. Errors name the option of the sources, the file and the place.
// Adds the files' bytes to `progress`. Tests give a small `piece_bytes`.
absl::Status EncodeDocuments(const Sources& sources, const Tokenizer& tokenizer,
                             const DocumentFormat& format, Progress* progress,
                             const std::function<absl::Status(const EncodedPiece&)>& sink,
                             int64_t piece_bytes = int64_t{1} << 20);

}  // namespace burst
