// Reads files of BPE tokenizers: tokenizer.json of the library tokenizers, GPT-2's encoder.json
// with vocab.bpe (also named vocab.json and merges.txt), and tiktoken's files of ranks. Tokenizers
// are byte-level (Llama 3, Qwen, GPT-2), or of characters with byte_fallback (Llama 2, Gemma).
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "train/tokenizer/text_form.h"

namespace burst {

struct AddedToken {
  std::string text;
  int32_t id = 0;
  bool special = false;                            // not part of a text, such as <|endoftext|>
  bool normalized = false;                         // found in the normalized text
  bool strips_left = false, strips_right = false;  // takes the spaces before it, or after it
};

struct BpeMerge {
  int32_t left = 0, right = 0, merged = 0;
};

struct BpeFile {
  TextForm form;
  bool of_bytes = true;             // pieces are merged from bytes; else from characters
  bool ignore_merges = false;       // a piece that equals a token becomes that token
  std::vector<std::string> tokens;  // the bytes of each id; an unused id has none
  std::vector<int32_t> piece_ids;   // ids of model.vocab whose text stands for bytes, increasing
  // Without of_bytes: the tokens of single characters, and of the bytes of other characters.
  std::vector<std::pair<std::string, int32_t>> characters;
  std::vector<int32_t> byte_ids;
  std::vector<BpeMerge> merges;  // in the order of their ranks
  std::vector<AddedToken> added;
};

// Parses a tokenizer.json. InvalidArgument names the field that is wrong or not supported.
absl::StatusOr<BpeFile> ParseTokenizerJson(absl::string_view text);

// Returns a tokenizer.json as AutoTokenizer of transformers completes it with other files of its
// folder. A file that the folder lacks is an empty text.
//
// The tokens and flags of added_tokens_decoder in tokenizer_config.json win. A token stays special
// if one of the files says so.
//
// Tokens that the config names, such as eos_token, become special. They are added if they are in
// the vocabulary. Other tokens are left out, because a model has no embedding for them. Without
// added_tokens_decoder the names of special_tokens_map.json win.
//
// InvalidArgument names the token that would get another id there, or has a flag that is not
// supported.
absl::StatusOr<std::string> WithTokensOfConfig(std::string tokenizer_json,
                                               absl::string_view tokenizer_config,
                                               absl::string_view special_tokens_map);

// Returns GPT-2's two files as the text of a tokenizer.json. Errors name `encoder_path` or
// `merges_path`.
absl::StatusOr<std::string> TokenizerJsonOfGpt2(const std::string& encoder_path,
                                                absl::string_view encoder,
                                                const std::string& merges_path,
                                                absl::string_view merges);

// Returns whether a file is tiktoken's: lines of a token in base64, a space and its rank.
bool IsTiktokenFile(absl::string_view text);

// Returns Meta's tokenizer.model of Llama 3, a file of tiktoken, as the text of a tokenizer.json.
// InvalidArgument names the line, or says that the tokenizer is another one: such a file holds
// neither its pattern nor its special tokens.
absl::StatusOr<std::string> TokenizerJsonOfTiktoken(absl::string_view text);

}  // namespace burst
