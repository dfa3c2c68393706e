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

// A text in the form that pieces are made of: normalized, if the tokenizer does that.
struct FormedText {
  // An added token, which stands for the bytes [begin, end).
  struct Added {
    size_t begin, end;
    int32_t token;
  };

  std::string text;
  std::vector<Added> added;  // in the order of the text

  // Returns the first added token that begins at or after `at`, or added.end().
  std::vector<Added>::const_iterator NextAdded(size_t at) const;
  // Appends a token's text. Places of it become places of this text.
  void AppendAdded(absl::string_view its_text, int32_t token, absl::Span<size_t> places);
};

// Encodes text on one thread.
class FileEncoder {
 public:
  static constexpr size_t kMore = absl::string_view::npos;

  virtual ~FileEncoder() = default;

  // Appends the tokens of a whole text.
  absl::Status Encode(absl::string_view text, std::vector<int32_t>* tokens);

  // Appends the form of `text` and its added tokens. `text` may be a part; `begins` says that it
  // begins the whole text.
  void AppendNormalized(absl::string_view text, bool begins, FormedText* out) const {
    AppendWithPlaces(text, begins, {}, out);
  }
  // Does AppendNormalized, and makes places of `text`, in increasing order, places of `out->text`.
  // What is put before a character belongs to it. A place in a character that changes moves behind
  // it.
  virtual void AppendWithPlaces(absl::string_view text, bool begins, absl::Span<size_t> places,
                                FormedText* out) const = 0;

  // Returns whether the form of text[0, at), followed by the form of the rest, is the form of the
  // whole.
  bool MayCut(absl::string_view text, size_t at) const {
    return at == text.size() || NextCut(text, at, at + 1) == at;
  }
  // Returns the first place in [at, end) where text may be cut, or npos. `end` is at most the
  // text's size. It looks at Reach() bytes on both sides of a place.
  virtual size_t NextCut(absl::string_view text, size_t at, size_t end) const;
  virtual size_t Reach() const { return 1; }

  // Appends the tokens of the pieces of a formed text that begin in [begin, limit), where `begin`
  // is the end of a piece. Returns the end of the last one (`begin` if there is none). The pieces
  // depend on no byte before `begin`. A text that is not `complete` ends at a cut. If the pieces
  // depend on bytes that would follow it, returns kMore; the caller then drops the appended tokens.
  virtual absl::StatusOr<size_t> EncodePieces(const FormedText& text, size_t begin, size_t limit,
                                              bool complete, std::vector<int32_t>* tokens) = 0;
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
  // Returns the number of bytes that the token at text.text[at] stands for.
  size_t Length(int32_t token, const FormedText& text, size_t at) const;
  virtual std::unique_ptr<FileEncoder> MakeEncoder(Specials specials) const = 0;

 private:
  // Does it for a token that is not an added one. `text` begins with its bytes.
  virtual size_t PieceLength(int32_t token, absl::string_view text) const = 0;
};

}  // namespace burst
