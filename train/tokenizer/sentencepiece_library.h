// SentencePiece's library behind plain types: its header declares an absl::string_view of its own,
// so that no file can include it and abseil.
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

// Immutable once loaded; any thread may use it.
class SentencePieceLibrary {
 public:
  enum class Kind { kText, kByte, kControl, kUnknown };

  SentencePieceLibrary();
  ~SentencePieceLibrary();

  // The bytes of a tokenizer.model. Returns what is wrong; empty: nothing.
  std::string Load(const std::string& model);

  int size() const;
  Kind kind(int id) const;
  const std::string& piece(int id) const;
  int Find(const std::string& piece) const;  // -1: none
  int end_of_text() const;                   // </s>; -1: none
  int begin_of_text() const;                 // <s>; -1: none

  // Appends the tokens of a text. Returns what is wrong; empty: nothing.
  std::string Encode(const char* text, size_t bytes, std::vector<int32_t>* tokens) const;

 private:
  std::unique_ptr<sentencepiece::SentencePieceProcessor> processor_;
};

}  // namespace burst
