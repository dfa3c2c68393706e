// Tokenizes by SentencePiece's own library (Kudo and Richardson, arXiv 1808.06226): tokenizer.model
// of Llama 2, Mistral, Gemma. The tokens equal the library's Encode of the whole text.
//
// Pieces of text are words. The library's tokens never reach from another character to a space,
// unless the vocabulary says otherwise (then a text is one piece). A space equals the U+2581 that
// the library writes for it.
//
// A text may have any bytes. A byte that is not UTF-8 becomes U+FFFD, as in the library.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "train/tokenizer/file_tokenizer.h"
#include "train/tokenizer/sentencepiece_library.h"

namespace burst {

class SentencePieceTokenizer : public FileTokenizer,
                               public std::enable_shared_from_this<SentencePieceTokenizer> {
 public:
  // Makes a tokenizer of a tokenizer.model. InvalidArgument for other bytes. Also for a model that
  // changes the text (normalization, extra spaces) or has characters without tokens (no byte
  // fallback). Spaces after words are refused, too, because such text could not be decoded.
  static absl::StatusOr<std::shared_ptr<const SentencePieceTokenizer>> FromModel(
      absl::string_view model);

  int64_t vocab() const override { return static_cast<int64_t>(bytes_.size()); }
  int32_t end_of_text() const override { return end_of_text_; }
  int32_t begin_of_text() const override { return library_.begin_of_text(); }
  // Returns a token's bytes: a space for U+2581; one byte for a byte's token. The first token of a
  // text has the space that the library adds. Control tokens (<s>) have no bytes.
  absl::string_view Bytes(int32_t token) const override {
    return token < 0 || token >= vocab() ? absl::string_view() : bytes_[token];
  }
  std::unique_ptr<FileEncoder> MakeEncoder(Specials specials) const override;
  // Returns whether a text is this token wherever it occurs, as an added token of transformers: a
  // control token, <unk>, or a symbol that the model's maker defined. The library puts its space
  // before a symbol that begins a text, and finds no symbol with spaces.
  bool IsAdded(absl::string_view text, int64_t token) const;

 private:
  friend class SentencePieceEncoder;

  SentencePieceTokenizer() = default;
  size_t PieceLength(int32_t token, absl::string_view text) const override;

  SentencePieceLibrary library_;
  std::vector<std::string> bytes_;
  std::vector<bool> is_defined_;                           // by token: the model's maker defined it
  std::vector<std::pair<std::string, int32_t>> controls_;  // text and id, also of <unk>
  int32_t end_of_text_ = -1;
  bool adds_space_ = false;  // before the text
  bool pieces_are_words_ = true;
};

class SentencePieceEncoder : public FileEncoder {
 public:
  SentencePieceEncoder(std::shared_ptr<const SentencePieceTokenizer> tokenizer, Specials specials)
      : tokenizer_(std::move(tokenizer)), specials_(specials) {}

  void AppendWithPlaces(absl::string_view text, bool begins, absl::Span<size_t> places,
                        FormedText* out) const override;
  absl::StatusOr<size_t> EncodePieces(const FormedText& text, size_t begin, size_t limit,
                                      bool complete, std::vector<int32_t>* tokens) override;

 private:
  struct Known {
    uint32_t begin = 0, count = 0;  // a range of known_tokens_
  };
  struct Control {
    size_t begin, length;
    int32_t token;
  };
  Control FindControl(absl::string_view text, size_t begin, std::vector<size_t>* found) const;
  size_t EndOfWord(absl::string_view text, size_t begin) const;
  absl::Status AppendWord(absl::string_view word, std::vector<int32_t>* tokens);
  absl::Status Ask(absl::string_view word, std::vector<int32_t>* tokens) const;

  const std::shared_ptr<const SentencePieceTokenizer> tokenizer_;
  const Specials specials_;
  absl::flat_hash_map<std::string, Known> known_;  // short words
  std::vector<int32_t> known_tokens_;
};

}  // namespace burst
