// SentencePiece's library behind plain types. Its header declares its own absl::string_view, so a
// file cannot include both it and abseil.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace sentencepiece {
class SentencePieceProcessor;
}

namespace burst {

// A loaded model, which is immutable and which any thread may use.
class SentencePieceLibrary {
 public:
  enum class Kind { kText, kByte, kControl, kUnknown };

  SentencePieceLibrary();
  ~SentencePieceLibrary();

  // Loads the bytes of a tokenizer.model. Returns an error's text, or an empty one.
  std::string Load(const std::string& model);

  int size() const;
  Kind kind(int id) const;
  const std::string& piece(int id) const;
  int Find(const std::string& piece) const;  // -1: none
  int end_of_text() const;                   // </s>; -1: none
  int begin_of_text() const;                 // <s>; -1: none

  // Appends the tokens of a text. Returns an error's text, or an empty one.
  std::string Encode(const char* text, size_t bytes, std::vector<int32_t>* tokens) const;

 private:
  std::unique_ptr<sentencepiece::SentencePieceProcessor> processor_;
};

}  // namespace burst
