// Tokenizers that need no vocabulary file: bytes, and the characters of the text at hand.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace burst {

// InvalidArgument that says which byte of a text is none.
absl::Status NotUtf8(int64_t offset);

class Tokenizer {
 public:
  enum class Kind { kByte, kChar };

  // 256 tokens. With end_of_text, one more that ends a document.
  static Tokenizer Byte(bool end_of_text);
  // The distinct Unicode code points of `texts`, sorted. InvalidArgument for text that is not UTF-8
  // (naming the offset) or has more than 65,535 different characters.
  static absl::StatusOr<Tokenizer> Char(absl::Span<const absl::string_view> texts,
                                        bool end_of_text);
  // The code points that were seen, [kCodePoints] (utf8.h).
  static absl::StatusOr<Tokenizer> OfCharacters(const std::vector<bool>& seen, bool end_of_text);

  Kind kind() const { return kind_; }
  const char* name() const { return kind_ == Kind::kByte ? "byte" : "char"; }
  int64_t vocab() const { return size_ + (has_end_of_text_ ? 1 : 0); }
  // -1 without one.
  int32_t end_of_text() const { return has_end_of_text_ ? static_cast<int32_t>(size_) : -1; }

  // char: of each token, increasing; byte: none.
  const std::vector<uint32_t>& code_points() const { return code_points_; }

  // Appends the tokens of `text`. InvalidArgument for a character that the vocabulary lacks.
  absl::Status Encode(absl::string_view text, std::vector<uint16_t>* tokens) const;
  // End-of-text and ids beyond the vocabulary decode to nothing.
  std::string Decode(absl::Span<const int32_t> tokens) const;

  // For checkpoints: everything needed to make the same tokenizer again.
  std::string ToJson() const;
  static absl::StatusOr<Tokenizer> FromJson(absl::string_view json);

 private:
  Tokenizer(Kind kind, std::vector<uint32_t> code_points, bool end_of_text);

  Kind kind_;
  bool has_end_of_text_;
  int64_t size_;                       // tokens without end-of-text
  std::vector<uint32_t> code_points_;  // char: of each token, increasing
};

}  // namespace burst
