// Tokenizers without a file, of bytes or of a text's characters, and tokenizers of a file
// (train/tokenizer).
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

// Returns InvalidArgument that names the byte of a text that is not UTF-8.
absl::Status NotUtf8(int64_t offset);

class Tokenizer {
 public:
  enum class Kind { kByte, kChar, kBpe, kSentencePiece };

  // Returns a tokenizer of 256 bytes. With end_of_text, one more token ends a document.
  static Tokenizer Byte(bool end_of_text);
  // Returns a tokenizer of the distinct Unicode code points of `texts`, sorted. InvalidArgument
  // names the offset that is not UTF-8, or says that there are more than 65,535 characters.
  static absl::StatusOr<Tokenizer> Char(absl::Span<const absl::string_view> texts,
                                        bool end_of_text);
  // Returns a tokenizer of the seen code points, [kCodePoints] (utf8.h).
  static absl::StatusOr<Tokenizer> OfCharacters(const std::vector<bool>& seen, bool end_of_text);

  // Loads a tokenizer.model (SentencePiece) or a tokenizer.json (byte-level BPE), or a folder. In a
  // folder these two come first, then GPT-2's two files: encoder.json and vocab.bpe, or vocab.json
  // and merges.txt. A tokenizer.json counts for a tokenizer.model that lacks tokens which files of
  // the folder add.
  // Errors name the file and the fault.
  static absl::StatusOr<Tokenizer> Load(const std::string& path);

  Kind kind() const { return kind_; }
  const char* name() const;
  int64_t vocab() const { return size_ + (has_end_of_text_ ? 1 : 0); }
  // Returns the end-of-text token; -1 without one.
  int32_t end_of_text() const;

  // Returns the special tokens that the file puts before a text (BOS): by the template of a
  // tokenizer.json, or the one that a tokenizer.model names. InvalidArgument means that a template
  // is not supported.
  absl::StatusOr<std::vector<int32_t>> Beginning() const;

  // Says how documents are marked in the texts of a run, as its checkpoints record.
  struct Marks {
    bool begins = false;     // Beginning() comes before each document
    int32_t separator = -1;  // the token that ends documents, if it is not end_of_text()
  };
  const Marks& marks() const { return marks_; }
  void set_marks(const Marks& marks) { marks_ = marks; }

  // Returns the code point of each token, increasing; none for bytes.
  const std::vector<uint32_t>& code_points() const { return code_points_; }

  // Returns the tokenizer of a file; null for bytes and characters.
  const std::shared_ptr<const FileTokenizer>& of_file() const { return of_file_; }
  // Return the content of that file, and its name in a folder: tokenizer.json (made from GPT-2's
  // two files if these were given) or tokenizer.model.
  const std::string& file() const { return *file_; }
  const char* file_name() const;

  // Appends the tokens of `text`. InvalidArgument for a character that the vocabulary lacks.
  absl::Status Encode(absl::string_view text, std::vector<int32_t>* tokens,
                      Specials specials = Specials::kAreText) const;
  // Decodes tokens, the inverse of Encode. Ids beyond the vocabulary give no text, nor does
  // end-of-text, but the special tokens of a tokenizer.json have a text. SentencePiece puts a space
  // before a text, which stays.
  std::string Decode(absl::Span<const int32_t> tokens) const;

  // Returns JSON for checkpoints from which the same tokenizer can be made.
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
  std::vector<uint32_t> code_points_;  // the character of each token, increasing
  std::shared_ptr<const FileTokenizer> of_file_;
  std::shared_ptr<const std::string> file_;
  Marks marks_;
};

}  // namespace burst
