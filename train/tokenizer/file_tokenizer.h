// A tokenizer that a file describes: byte-level BPE (bpe_tokenizer.h) or SentencePiece
// (sentencepiece_tokenizer.h). Text is encoded in pieces, so that several threads can work on one
// (docs/decisions/0011-tokens-do-not-depend-on-pieces.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace burst {

// Says whether a special token's text means that token, or is only text. A special token in a
// document is part of the document. SentencePiece puts its space before the whole text, with
// kAreTokensAndSpaced also after each such token (transformers' "legacy").
enum class Specials { kAreText, kAreTokens, kAreTokensAndSpaced };

// Encodes text on one thread.
class FileEncoder {
 public:
  static constexpr size_t kMore = absl::string_view::npos;

  virtual ~FileEncoder() = default;

  // Appends the tokens of a whole text.
  absl::Status Encode(absl::string_view text, std::vector<int32_t>* tokens);

  // Appends the form of `text` that pieces are made of: normalized, if the tokenizer does that.
  // `text` may be a part; `begins` says that it begins the whole text. If the second of two parts
  // begins with an ASCII character, their form is the first one's form followed by the second
  // one's.
  void AppendNormalized(absl::string_view text, bool begins, std::string* out) const {
    AppendWithPlaces(text, begins, {}, out);
  }
  // Does AppendNormalized, and makes places of `text`, in increasing order, places of `*out`. What
  // is put before a character belongs to it. A place in a character of `*out` moves behind it.
  virtual void AppendWithPlaces(absl::string_view text, bool begins, absl::Span<size_t> places,
                                std::string* out) const = 0;

  // Appends the tokens of the pieces of a normalized text that begin in [begin, limit), where
  // `begin` is the end of a piece. Returns the end of the last one (`begin` if there is none). The
  // pieces depend on no byte before `begin`. Unless `text` is `complete`, returns kMore if they
  // depend on bytes that would follow it; the caller then drops the appended tokens.
  virtual absl::StatusOr<size_t> EncodePieces(absl::string_view text, size_t begin, size_t limit,
                                              bool complete, std::vector<int32_t>* tokens) = 0;

 protected:
  // Removes the places before `end` from the beginning of `*places`. Returns them, counted from
  // `begin`.
  static absl::Span<size_t> TakePlaces(size_t begin, size_t end, absl::Span<size_t>* places);
};

// An immutable tokenizer that any thread may use, through its own FileEncoder, which keeps it
// alive.
class FileTokenizer {
 public:
  virtual ~FileTokenizer() = default;

  virtual int64_t vocab() const = 0;
  // Returns the token that separates documents; -1: none.
  virtual int32_t end_of_text() const = 0;
  // Returns the token that the file names for the beginning of a text; -1: none.
  virtual int32_t begin_of_text() const { return -1; }
  // Returns the token's bytes in decoded text. They are empty for unused ids and ids beyond the
  // vocabulary.
  virtual absl::string_view Bytes(int32_t token) const = 0;
  // Returns the number of bytes of the normalized text that the token stands for. `text` begins
  // with them.
  virtual size_t Length(int32_t token, absl::string_view text) const = 0;
  virtual std::unique_ptr<FileEncoder> MakeEncoder(Specials specials) const = 0;
};

}  // namespace burst
