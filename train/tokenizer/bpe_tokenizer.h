// A BPE tokenizer: text is cut at added tokens, then by patterns into pieces, and each piece is
// merged from its bytes or characters (docs/decisions/0011-tokens-do-not-depend-on-pieces.md).
//
// A text may have any bytes. Valid UTF-8 has the tokens that tiktoken and tokenizers give it. A run
// of bytes that are not UTF-8 ends the text before it and is a separate piece.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "train/tokenizer/bpe.h"
#include "train/tokenizer/bpe_file.h"
#include "train/tokenizer/file_tokenizer.h"
#include "train/tokenizer/split_pattern.h"

namespace burst {

// An immutable tokenizer that any thread may use, through its own BpeEncoder.
class BpeTokenizer : public FileTokenizer, public std::enable_shared_from_this<BpeTokenizer> {
 public:
  // Makes a tokenizer. InvalidArgument names the field that is wrong or not supported.
  static absl::StatusOr<std::shared_ptr<const BpeTokenizer>> FromTokenizerJson(
      absl::string_view text);

  int64_t vocab() const override { return static_cast<int64_t>(file_.tokens.size()); }
  int32_t end_of_text() const override { return end_of_text_; }  // it is found by its name
  absl::string_view Bytes(int32_t token) const override {
    return token < 0 || token >= vocab() ? absl::string_view() : file_.tokens[token];
  }
  std::unique_ptr<FileEncoder> MakeEncoder(Specials specials) const override;

 private:
  friend class BpeEncoder;
  // Added tokens to look for in a text.
  struct AddedTokens {
    // A common beginning of tokens' texts. Its continuations by one byte are consecutive, in
    // increasing order of bytes.
    struct Node {
      int32_t first = 0, count = 0;  // the range of continuations
      int32_t token = -1;            // the token with this text
      uint8_t byte = 0;              // the last byte
    };
    std::vector<Node> nodes;  // empty: no tokens; else the first node is the empty text
    size_t longest = 0;       // the length of the longest text
    bool begins[256] = {};    // which bytes begin a text
    bool has[256] = {};       // which bytes are in a text
    bool of_texts = false;    // whether some token is not special
    bool strip = false;       // whether some token takes the spaces next to it

    // Takes tokens and their texts. InvalidArgument means that they are not supported together.
    absl::Status Take(std::vector<std::pair<std::string, const AddedToken*>> added);
    // Returns the longest token with which `text` begins (-1: none), and its length. Takes a step
    // for each byte that some token shares with the text, whatever the number of tokens.
    std::pair<int32_t, size_t> Longest(absl::string_view text) const;
  };

  BpeTokenizer(BpeFile file, BpeVocabulary vocabulary)
      : file_(std::move(file)), vocabulary_(std::move(vocabulary)) {}

  absl::Status TakeAdded();
  size_t PieceLength(int32_t token, absl::string_view text) const override;

  BpeFile file_;
  BpeVocabulary vocabulary_;
  std::vector<std::shared_ptr<const SplitPattern>> patterns_;  // of file_.form.splits
  absl::flat_hash_map<int32_t, const AddedToken*> added_;
  // Tokens that are found before a text is normalized, and those that are found after it.
  AddedTokens raw_, normalized_;
  int32_t end_of_text_ = -1;
};

class BpeEncoder : public FileEncoder {
 public:
  BpeEncoder(std::shared_ptr<const BpeTokenizer> tokenizer, Specials specials);

  void AppendWithPlaces(absl::string_view text, bool begins, absl::Span<size_t> places,
                        FormedText* out) const override;
  size_t NextCut(absl::string_view text, size_t at, size_t end) const override;
  size_t Reach() const override;
  absl::StatusOr<size_t> EncodePieces(const FormedText& text, size_t begin, size_t limit,
                                      bool complete, std::vector<int32_t>* tokens) override;

 private:
  // Calls body(begin, end, token) for each added token of a text, with the spaces that it takes,
  // and with -1 for each part between them.
  template <typename Body>
  void ForEachPart(const BpeTokenizer::AddedTokens& added, absl::string_view text,
                   const Body& body) const;

  bool IsApartFromSpaces(absl::string_view text, size_t at, size_t taken) const;
  bool IsApartFromNormalized(absl::string_view text, size_t at) const;

  // Appends the tokens of the first piece that the matchers from `first` on cut off the text, and
  // returns its length or kMore.
  absl::StatusOr<size_t> AppendPiece(absl::string_view text, size_t first, bool complete,
                                     std::vector<int32_t>* tokens);

  const std::shared_ptr<const BpeTokenizer> tokenizer_;
  const Specials specials_;
  BpeMerger merger_;
  std::vector<PatternMatcher> matchers_;
};

}  // namespace burst
