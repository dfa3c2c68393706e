// Byte-pair encoding of pieces of text (Sennrich et al., arXiv 1508.07909), over bytes.
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

// Any thread may use it, through a BpeMerger of its own.
class BpeVocabulary {
 public:
  // InvalidArgument unless every byte has a token.
  static absl::StatusOr<BpeVocabulary> Create(const BpeFile& file);

  int32_t byte_token(uint8_t byte) const { return byte_tokens_[byte]; }
  // The token that is these bytes, where pieces may skip the merges; -1: none.
  int32_t WholePiece(absl::string_view bytes) const;

  struct Result {
    uint32_t rank = UINT32_MAX;  // the lowest goes first
    int32_t token = -1;
  };
  // The token that two neighbors become, and its rank; the largest rank if the pair stays.
  Result Merge(int32_t left, int32_t right) const {
    const auto found = merges_.find(Key(left, right));
    return found == merges_.end() ? Result{} : found->second;
  }

 private:
  static uint64_t Key(int32_t left, int32_t right) {
    return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
  }

  std::array<int32_t, 256> byte_tokens_;
  absl::flat_hash_map<uint64_t, Result> merges_;
  absl::flat_hash_map<std::string, int32_t> pieces_;  // empty unless pieces may skip the merges
};

// One thread's: remembers the tokens of short pieces.
class BpeMerger {
 public:
  explicit BpeMerger(const BpeVocabulary& vocabulary) : vocabulary_(vocabulary) {}

  // Appends the tokens of a piece: as long as neighbors can be merged, those of the lowest rank
  // are, the leftmost first.
  void Append(absl::string_view piece, std::vector<int32_t>* tokens);

 private:
  struct Known {
    uint32_t begin = 0, count = 0;  // in known_tokens_
  };

  void MergeShort(absl::string_view piece, std::vector<int32_t>* tokens);
  void MergeLong(absl::string_view piece, std::vector<int32_t>* tokens);

  const BpeVocabulary& vocabulary_;
  absl::flat_hash_map<std::string, Known> known_;
  std::vector<int32_t> known_tokens_;
  std::vector<int32_t> symbols_;
  std::vector<BpeVocabulary::Result> results_;  // of each symbol with the next one
};

}  // namespace burst
