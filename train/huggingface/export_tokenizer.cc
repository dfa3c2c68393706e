#include "train/huggingface/export_tokenizer.h"

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"
#include "train/tokenizer/byte_level.h"

namespace burst {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kEndOfText[] =
    "<|endoftext|>";  // of bytes and characters, which have no name for it

int32_t EndOf(const Tokenizer& tokenizer) {
  const int32_t separator = tokenizer.marks().separator;
  return separator >= 0 ? separator : tokenizer.end_of_text();
}

int32_t BeginOf(const Tokenizer& tokenizer) {
  const absl::StatusOr<std::vector<int32_t>> beginning = tokenizer.Beginning();
  return beginning.ok() && beginning->size() == 1 ? (*beginning)[0] : -1;
}

// Returns the tokenizer.json of bytes or characters: BPE without merges.
std::string JsonOfSymbols(const Tokenizer& tokenizer) {
  const bool bytes = tokenizer.kind() == Tokenizer::Kind::kByte;
  const auto size = static_cast<int32_t>(bytes ? 256 : tokenizer.code_points().size());
  Json vocab = Json::object();
  for (int32_t i = 0; i < size; ++i) {
    vocab[bytes ? ByteLevelCharacter(static_cast<uint8_t>(i)) : tokenizer.Decode({i})] = i;
  }
  Json added = Json::array();
  if (tokenizer.end_of_text() >= 0) {
    added.push_back({{"id", tokenizer.end_of_text()}, {"content", kEndOfText}});
    for (const char* key : {"single_word", "lstrip", "rstrip", "normalized"}) {
      added[0][key] = false;
    }
    added[0]["special"] = true;
  }
  const Json byte_level = {{"type", "ByteLevel"},
                           {"add_prefix_space", false},
                           {"trim_offsets", true},
                           {"use_regex", false}};
  Json json = {{"version", "1.0"}, {"truncation", nullptr}, {"padding", nullptr}};
  json["added_tokens"] = added;
  json["normalizer"] = nullptr;
  json["pre_tokenizer"] = bytes ? byte_level : Json();
  json["post_processor"] = nullptr;
  json["decoder"] = bytes ? byte_level : Json{{"type", "Fuse"}};
  json["model"] = {{"type", "BPE"}, {"dropout", nullptr}, {"unk_token", nullptr}};
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    json["model"][key] = nullptr;
  }
  for (const char* key : {"fuse_unk", "byte_fallback", "ignore_merges"}) json["model"][key] = false;
  json["model"]["vocab"] = std::move(vocab);
  json["model"]["merges"] = Json::array();
  return absl::StrCat(json.dump(), "\n");
}

}  // namespace

absl::Status WriteTokenizer(const Tokenizer& tokenizer, const std::string& folder) {
  const auto path = [&](const char* name) {
    return (std::filesystem::path(folder) / name).string();
  };
  const bool of_file = tokenizer.of_file() != nullptr;
  const char* const name = of_file ? tokenizer.file_name() : "tokenizer.json";
  BURST_RETURN_IF_ERROR(
      WriteFileAtomically(path(name), of_file ? tokenizer.file() : JsonOfSymbols(tokenizer)));
  const bool sentencepiece = tokenizer.kind() == Tokenizer::Kind::kSentencePiece;
  Json config = {{"tokenizer_class", sentencepiece ? "LlamaTokenizer" : "PreTrainedTokenizerFast"},
                 {"clean_up_tokenization_spaces", false}};
  if (!sentencepiece) {  // which names its tokens itself
    const int32_t begin = BeginOf(tokenizer), end = EndOf(tokenizer);
    if (begin >= 0) config["bos_token"] = tokenizer.Decode({begin});
    if (end >= 0) config["eos_token"] = of_file ? tokenizer.Decode({end}) : kEndOfText;
  }
  return WriteFileAtomically(path("tokenizer_config.json"), absl::StrCat(config.dump(2), "\n"));
}

std::string TokenFields(const Tokenizer& tokenizer) {
  const auto number = [](int32_t token) { return token >= 0 ? Json(token) : Json(); };
  return Json{{"bos_token_id", number(BeginOf(tokenizer))},
              {"eos_token_id", number(EndOf(tokenizer))}}
      .dump();
}

}  // namespace burst
