// Tokenizers: two that need no vocabulary file, bytes and the characters of the text at hand; and
// those of a file (train/tokenizer).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "train/tokenizer/file_tokenizer.h"

namespace burst {

// InvalidArgument that names the byte of a text that is not UTF-8.
absl::Status NotUtf8(int64_t offset);

class Tokenizer {
 public:
  enum class Kind { kByte, kChar, kBpe, kSentencePiece };

  // 256 tokens. With end_of_text, one more that ends a document.
  static Tokenizer Byte(bool end_of_text);
  // The distinct Unicode code points of `texts`, sorted. InvalidArgument for text that is not UTF-8
  // (naming the offset) or has more than 65,535 different characters.
  static absl::StatusOr<Tokenizer> Char(absl::Span<const absl::string_view> texts,
                                        bool end_of_text);
  // The code points that were seen, [kCodePoints] (utf8.h).
  static absl::StatusOr<Tokenizer> OfCharacters(const std::vector<bool>& seen, bool end_of_text);

  // A tokenizer.model (SentencePiece) or a tokenizer.json (byte-level BPE), or a folder with one of
  // them, of which the first counts, or with GPT-2's two files: encoder.json and vocab.bpe, or
  // vocab.json and merges.txt. Errors name the file and what is wrong.
  static absl::StatusOr<Tokenizer> Load(const std::string& path);

  Kind kind() const { return kind_; }
  const char* name() const;
  int64_t vocab() const { return size_ + (has_end_of_text_ ? 1 : 0); }
  // -1 without one.
  int32_t end_of_text() const;

  // The special tokens that its file puts before a text (BOS): by the template of a tokenizer.json,
  // or the one that a tokenizer.model names. InvalidArgument for a template that is not supported.
  absl::StatusOr<std::vector<int32_t>> Beginning() const;

  // How the texts that a run learned from mark their documents, as its checkpoints say.
  struct Marks {
    bool begins = false;     // Beginning() comes before each
    int32_t separator = -1;  // a token that ends them, if it is not end_of_text()
  };
  const Marks& marks() const { return marks_; }
  void set_marks(const Marks& marks) { marks_ = marks; }

  // char: of each token, increasing; byte: none.
  const std::vector<uint32_t>& code_points() const { return code_points_; }

  // The tokenizer of a file; null for byte and char.
  const std::shared_ptr<const FileTokenizer>& of_file() const { return of_file_; }
  // The content of that file, and its name in a folder: tokenizer.json (made of GPT-2's two files
  // where these were given) or tokenizer.model.
  const std::string& file() const { return *file_; }
  const char* file_name() const;

  // Appends the tokens of `text`. InvalidArgument for a character that the vocabulary lacks.
  absl::Status Encode(absl::string_view text, std::vector<int32_t>* tokens,
                      Specials specials = Specials::kAreText) const;
  // Ids beyond the vocabulary decode to nothing, and so does end-of-text, except that the special
  // tokens of a tokenizer.json have a text: with them, too, it is the inverse of Encode.
  // SentencePiece's Decode puts a space before a text, which stays.
  std::string Decode(absl::Span<const int32_t> tokens) const;

  // For checkpoints: everything needed to make the same tokenizer again.
  std::string ToJson() const;
  static absl::StatusOr<Tokenizer> FromJson(absl::string_view json);

 private:
  Tokenizer(Kind kind, std::vector<uint32_t> code_points, bool end_of_text);
  Tokenizer(Kind kind, std::shared_ptr<const FileTokenizer> of_file, std::string file);
  static absl::StatusOr<Tokenizer> OfTokenizerJson(std::string text);
  static absl::StatusOr<Tokenizer> OfTokenizerModel(std::string model);

  Kind kind_;
  bool has_end_of_text_;               // in addition to the tokens of `size_`
  int64_t size_;                       // tokens without end-of-text
  std::vector<uint32_t> code_points_;  // char: of each token, increasing
  std::shared_ptr<const FileTokenizer> of_file_;
  std::shared_ptr<const std::string> file_;
  Marks marks_;
};

}  // namespace burst
