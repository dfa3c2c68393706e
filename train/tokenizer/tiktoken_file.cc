#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "train/tokenizer/bpe_file.h"
#include "train/tokenizer/byte_level.h"
#include "train/tokenizer/json_fields.h"

namespace burst {
namespace {

using Json = nlohmann::json;

// Llama 3's pattern and special tokens (Llama Team, arXiv 2407.21783, and the released tokenizer).
constexpr size_t kLlama3Ranks = 128000;
constexpr int kLlama3Specials = 256;
constexpr char kLlama3Pattern[] =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*)"
    R"(|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kLlama3Names[] = {"<|begin_of_text|>",
                                        "<|end_of_text|>",
                                        "<|reserved_special_token_0|>",
                                        "<|reserved_special_token_1|>",
                                        "<|finetune_right_pad_id|>",
                                        "<|step_id|>",
                                        "<|start_header_id|>",
                                        "<|end_header_id|>",
                                        "<|eom_id|>",
                                        "<|eot_id|>",
                                        "<|python_tag|>",
                                        "<|image|>"};

// Reads a line: the bytes of a token, and its rank.
bool ReadRank(absl::string_view line, std::string* bytes, uint32_t* rank) {
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(line, absl::MaxSplits(' ', 1));
  return !parts.first.empty() && absl::Base64Unescape(parts.first, bytes) && !bytes->empty() &&
         absl::SimpleAtoi(parts.second, rank);
}

std::string NameOf(absl::string_view bytes) {
  std::string name;
  for (const char byte : bytes) name += ByteLevelCharacter(static_cast<uint8_t>(byte));
  return name;
}

// Returns the pairs of tokens that become another one, in the order of its rank.
Json Merges(const std::vector<std::string>& tokens) {
  absl::flat_hash_map<absl::string_view, size_t> ranks;
  for (size_t i = 0; i < tokens.size(); ++i) ranks.emplace(tokens[i], i);
  Json merges = Json::array();
  for (const std::string& token : tokens) {
    std::vector<std::pair<size_t, size_t>> pairs;
    for (size_t cut = 1; cut < token.size(); ++cut) {
      const auto left = ranks.find(absl::string_view(token).substr(0, cut)),
                 right = ranks.find(absl::string_view(token).substr(cut));
      if (left == ranks.end() || right == ranks.end()) continue;
      pairs.emplace_back(left->second, right->second);
    }
    std::sort(pairs.begin(), pairs.end());
    for (const auto& [left, right] : pairs) {
      merges.push_back({NameOf(tokens[left]), NameOf(tokens[right])});
    }
  }
  return merges;
}

}  // namespace

bool IsTiktokenFile(absl::string_view text) {
  std::string bytes;
  uint32_t rank = 0;
  return ReadRank(text.substr(0, text.find('\n')), &bytes, &rank);
}

absl::StatusOr<std::string> TokenizerJsonOfTiktoken(absl::string_view text) {
  std::vector<std::string> tokens;
  Json vocab = Json::object();
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    if (line.empty()) continue;
    std::string bytes;
    uint32_t rank = 0;
    if (!ReadRank(line, &bytes, &rank) || rank != tokens.size()) {
      return InvalidField("line ", tokens.size() + 1, " must be a token in base64 and the rank ",
                          tokens.size(), "; got ", Shown(line));
    }
    vocab[NameOf(bytes)] = rank;
    tokens.push_back(std::move(bytes));
  }
  if (tokens.size() != kLlama3Ranks) {
    return InvalidField("a file of tiktoken must be Llama 3's, of ", kLlama3Ranks, " ranks; got ",
                        tokens.size(), " ranks; give the model's tokenizer.json");
  }
  Json added = Json::array();
  for (int i = 0; i < kLlama3Specials; ++i) {
    constexpr int kNamed = std::size(kLlama3Names);
    const std::string name = i < kNamed
                                 ? kLlama3Names[i]
                                 : absl::StrCat("<|reserved_special_token_", i - kNamed + 2, "|>");
    added.push_back({{"id", tokens.size() + i},
                     {"content", name},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", true}});
  }
  const Json split = {{"type", "Split"},
                      {"pattern", {{"Regex", kLlama3Pattern}}},
                      {"behavior", "Isolated"},
                      {"invert", false}};
  const Json byte_level = {{"type", "ByteLevel"},
                           {"add_prefix_space", false},
                           {"trim_offsets", true},
                           {"use_regex", false}};
  const Json begin = {{"SpecialToken", {{"id", kLlama3Names[0]}, {"type_id", 0}}}};
  const Json sequence = {{"Sequence", {{"id", "A"}, {"type_id", 0}}}};
  const Json begin_token = {
      {"id", kLlama3Names[0]}, {"ids", {kLlama3Ranks}}, {"tokens", {kLlama3Names[0]}}};
  const Json json = {
      {"version", "1.0"},
      {"truncation", nullptr},
      {"padding", nullptr},
      {"added_tokens", added},
      {"normalizer", nullptr},
      {"pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", {split, byte_level}}}},
      {"post_processor",
       {{"type", "TemplateProcessing"},
        {"single", {begin, sequence}},
        {"pair", {begin, sequence, begin, sequence}},
        {"special_tokens", {{kLlama3Names[0], begin_token}}}}},
      {"decoder", byte_level},
      {"model",
       {{"type", "BPE"},
        {"dropout", nullptr},
        {"unk_token", nullptr},
        {"continuing_subword_prefix", nullptr},
        {"end_of_word_suffix", nullptr},
        {"fuse_unk", false},
        {"byte_fallback", false},
        {"ignore_merges", true},
        {"vocab", std::move(vocab)},
        {"merges", Merges(tokens)}}}};
  return json.dump();
}

}  // namespace burst
