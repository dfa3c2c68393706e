// Reads files of byte-level BPE tokenizers: tokenizer.json of the library tokenizers (Llama 3,
// Qwen, GPT-2), and GPT-2's encoder.json with vocab.bpe (also named vocab.json and merges.txt).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace burst {

struct AddedToken {
  std::string text;
  int32_t id = 0;
  bool special = false;  // not part of a text, such as <|endoftext|>
};

struct BpeMerge {
  int32_t left = 0, right = 0, merged = 0;
};

struct BpeFile {
  std::string pattern;              // cuts text into pieces; empty: a text is one piece
  bool nfc = false;                 // text is first brought to normal form C
  bool ignore_merges = false;       // a piece that equals a token becomes that token
  std::vector<std::string> tokens;  // the bytes of each id; an unused id has none
  std::vector<int32_t> piece_ids;   // ids of model.vocab whose text stands for bytes, increasing
  std::vector<BpeMerge> merges;     // in the order of their ranks
  std::vector<AddedToken> added;
};

// Parses a tokenizer.json. InvalidArgument names the field that is wrong or not supported.
absl::StatusOr<BpeFile> ParseTokenizerJson(absl::string_view text);

// Returns GPT-2's two files as the text of a tokenizer.json. Errors name `encoder_path` or
// `merges_path`.
absl::StatusOr<std::string> TokenizerJsonOfGpt2(const std::string& encoder_path,
                                                absl::string_view encoder,
                                                const std::string& merges_path,
                                                absl::string_view merges);

}  // namespace burst
