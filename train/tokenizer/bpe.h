// Encodes pieces of text by byte-pair encoding over bytes or characters (Sennrich et al., arXiv
// 1508.07909).
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "train/tokenizer/bpe_file.h"

namespace burst {

// A vocabulary that any thread may use, through its own BpeMerger.
class BpeVocabulary {
 public:
  // Creates a vocabulary. InvalidArgument means that a byte has no token.
  static absl::StatusOr<BpeVocabulary> Create(const BpeFile& file);

  // Appends the tokens that a piece is merged from: its bytes, or its characters and the bytes of
  // characters without a token.
  void AppendSymbols(absl::string_view piece, std::vector<int32_t>* symbols) const;
  // Returns the token of exactly these bytes, if pieces may skip the merges; -1: none.
  int32_t WholePiece(absl::string_view bytes) const;

  struct Result {
    uint32_t rank = UINT32_MAX;  // the lowest rank is merged first
    int32_t token = -1;
  };
  // Returns the token that two neighbors become, and its rank. If the pair stays, the rank is the
  // largest.
  Result Merge(int32_t left, int32_t right) const {
    const auto found = merges_.find(Key(left, right));
    return found == merges_.end() ? Result{} : found->second;
  }

 private:
  static uint64_t Key(int32_t left, int32_t right) {
    return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
  }

  bool of_bytes_ = true;
  std::array<int32_t, 256> byte_tokens_;
  absl::flat_hash_map<std::string, int32_t> characters_;  // without of_bytes_
  absl::flat_hash_map<uint64_t, Result> merges_;
  absl::flat_hash_map<std::string, int32_t> pieces_;  // empty unless pieces may skip the merges
};

// Merges for one thread, and remembers the tokens of short pieces.
class BpeMerger {
 public:
  explicit BpeMerger(const BpeVocabulary& vocabulary) : vocabulary_(vocabulary) {}

  // Appends the tokens of a piece. As long as neighbors can be merged, it merges the pair of the
  // lowest rank, the leftmost first.
  void Append(absl::string_view piece, std::vector<int32_t>* tokens);

 private:
  struct Known {
    uint32_t begin = 0, count = 0;  // a range of known_tokens_
  };

  void MergeShort(absl::string_view piece, std::vector<int32_t>* tokens);
  void MergeLong(absl::string_view piece, std::vector<int32_t>* tokens);

  const BpeVocabulary& vocabulary_;
  absl::flat_hash_map<std::string, Known> known_;
  std::vector<int32_t> known_tokens_;
  std::vector<int32_t> symbols_;
  std::vector<BpeVocabulary::Result> results_;  // the merge of each symbol with the next one
};

}  // namespace burst
