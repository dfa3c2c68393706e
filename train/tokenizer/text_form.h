// Reads how a tokenizer.json forms and cuts a text before its pieces are merged: the fields
// normalizer and pre_tokenizer of the library tokenizers.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace burst {

// SentencePiece's mark of a space, U+2581.
inline constexpr absl::string_view kSpaceMark = "\xE2\x96\x81";

struct TextForm {
  // A regular expression that cuts a text into its matches and what is between them.
  struct Split {
    std::string pattern;
    bool must_match = false;  // text between matches would be removed, and is an error
  };
  // Each cuts the pieces of the one before it. None: a text is one piece.
  std::vector<Split> splits;

  bool nfc = false;           // text is first brought to normal form C
  bool marks_spaces = false;  // a space becomes kSpaceMark
  // Where kSpaceMark is put before a text. The parts of a text are between added tokens.
  enum class Prefix { kNone, kFirstPart, kEachPart };
  Prefix prefix = Prefix::kNone;
  bool prefix_once = false;  // a part that begins with a space gets no prefix
  bool has_normalizer = false;
  bool cuts_at_marks = false;  // every kSpaceMark begins a piece

  bool changes_text() const { return nfc || marks_spaces || prefix != Prefix::kNone; }
};

// Reads the fields. `of_bytes` says that pieces are merged from bytes, which a ByteLevel stands
// for; else from characters, as SentencePiece does. InvalidArgument names what is not supported.
absl::StatusOr<TextForm> ReadTextForm(const nlohmann::json& tokenizer_json, bool of_bytes);

}  // namespace burst
