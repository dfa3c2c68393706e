// Reads how a tokenizer.json forms and cuts a text before its pieces are merged: the fields
// normalizer and pre_tokenizer of the library tokenizers.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace burst {

// SentencePiece's mark of a space, U+2581.
inline constexpr absl::string_view kSpaceMark = "\xE2\x96\x81";

// How kSpaceMark stands for spaces.
struct SpaceMarks {
  // Where a mark is put before a part of a text. Parts are between added tokens.
  enum class Prefix { kNone, kFirstPart, kEachPart };

  bool replace = false;  // a space becomes a mark
  Prefix prefix = Prefix::kNone;
  bool prefix_once = false;  // a part that begins with a space gets no prefix

  bool any() const { return replace || prefix != Prefix::kNone; }
  // Appends the form of a part. `begins_text` and `begins_part` say that the text or the part
  // begins here. Places of the part become places of `*out`.
  void AppendForm(absl::string_view part, bool begins_text, bool begins_part,
                  absl::Span<size_t> places, std::string* out) const;
};

struct TextForm {
  // A regular expression that cuts a text into its matches and what is between them.
  struct Split {
    std::string pattern;
    bool must_match = false;  // text between matches would be removed, and is an error
  };
  // Each cuts the pieces of the one before it. None: a text is one piece.
  std::vector<Split> splits;

  // The normalizer: normal form C, then marks. Some added tokens are found after it.
  bool nfc = false;
  SpaceMarks normalizer_marks;
  SpaceMarks marks;            // of the pre_tokenizer, where all added tokens are known
  bool cuts_at_marks = false;  // every kSpaceMark begins a piece

  bool normalizes() const { return nfc || normalizer_marks.any(); }
  // Appends the normalized form of a part. Arguments are AppendForm's.
  void AppendNormalized(absl::string_view part, bool begins_part, absl::Span<size_t> places,
                        std::string* out) const;
};

// Reads the fields. `of_bytes` says that pieces are merged from bytes, which a ByteLevel stands
// for; else from characters, as SentencePiece does. InvalidArgument names what is not supported.
absl::StatusOr<TextForm> ReadTextForm(const nlohmann::json& tokenizer_json, bool of_bytes);

}  // namespace burst
