// A byte-level BPE tokenizer: text is cut at added tokens, then by a pattern into pieces, and each
// piece is merged from its bytes (docs/decisions/0011-tokens-do-not-depend-on-pieces.md).
//
// Text is any bytes. Valid UTF-8 has the tokens that tiktoken and tokenizers give it. A run of
// bytes that are not UTF-8 ends the text before it and is a piece of its own.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "train/tokenizer/bpe.h"
#include "train/tokenizer/bpe_file.h"
#include "train/tokenizer/file_tokenizer.h"
#include "train/tokenizer/split_pattern.h"

namespace burst {

// Immutable; any thread may use it, through a BpeEncoder of its own.
class BpeTokenizer : public FileTokenizer, public std::enable_shared_from_this<BpeTokenizer> {
 public:
  // InvalidArgument names the field that is wrong or not supported.
  static absl::StatusOr<std::shared_ptr<const BpeTokenizer>> FromTokenizerJson(
      absl::string_view text);

  int64_t vocab() const override { return static_cast<int64_t>(file_.tokens.size()); }
  int32_t end_of_text() const override { return end_of_text_; }  // found by its name
  absl::string_view Bytes(int32_t token) const override {
    return token < 0 || token >= vocab() ? absl::string_view() : file_.tokens[token];
  }
  size_t Length(int32_t token, absl::string_view) const override { return Bytes(token).size(); }
  std::unique_ptr<FileEncoder> MakeEncoder(Specials specials) const override;
  bool normalizes() const { return file_.nfc; }

 private:
  friend class BpeEncoder;
  // Added tokens to look for in a text.
  struct AddedTokens {
    // A beginning of tokens' texts. Its continuations by one byte follow each other, bytes
    // increase.
    struct Node {
      int32_t first = 0, count = 0;  // of the continuations
      int32_t token = -1;            // whose text it is
      uint8_t byte = 0;              // its last one
    };
    std::vector<Node> nodes;  // empty: no tokens; else the first is of the empty text
    size_t longest = 0;       // of the texts
    bool begins[256] = {};    // first bytes

    // If two have the same text, the last counts.
    void Take(std::vector<std::pair<std::string, int32_t>> added);
    // The longest that `text` begins with: its token, -1 where none does, and its length. Takes a
    // step for each byte that one of them shares with the text, however many they are.
    std::pair<int32_t, size_t> Longest(absl::string_view text) const;
  };

  BpeTokenizer(BpeFile file, BpeVocabulary vocabulary)
      : file_(std::move(file)), vocabulary_(std::move(vocabulary)) {}

  BpeFile file_;
  BpeVocabulary vocabulary_;
  std::shared_ptr<const SplitPattern> pattern_;  // none: a text is one piece
  AddedTokens not_special_, all_;
  int32_t end_of_text_ = -1;
};

class BpeEncoder : public FileEncoder {
 public:
  BpeEncoder(std::shared_ptr<const BpeTokenizer> tokenizer, Specials specials);

  void AppendNormalized(absl::string_view text, bool begins, std::string* out) const override;
  absl::StatusOr<size_t> EncodePieces(absl::string_view text, size_t begin, size_t limit,
                                      bool complete, std::vector<int32_t>* tokens) override;

 private:
  // A part of the text that pieces do not reach across.
  struct Part {
    enum class Kind { kText, kBroken, kAdded } kind = Kind::kText;
    size_t end = 0;
    bool complete = true;  // false: it goes on in what follows the text
    int32_t token = -1;
  };
  struct Found {
    size_t begin, length;
    int32_t token;
  };
  static Part RunAt(absl::string_view text, size_t begin, bool complete);
  Part PartAt(absl::string_view text, size_t begin, bool complete);
  Found FindAdded(absl::string_view text, size_t begin, size_t end) const;

  const std::shared_ptr<const BpeTokenizer> tokenizer_;
  const BpeTokenizer::AddedTokens& added_;
  BpeMerger merger_;
  std::unique_ptr<PatternMatcher> matcher_;
  Part run_;  // of UTF-8, or not, in the text that is being encoded
};

}  // namespace burst
