#include "train/tokenizer/bpe_file.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "burst/base/json.h"
#include "burst/base/status.h"
#include "train/tokenizer/byte_level.h"

namespace burst {
namespace {

using Json = nlohmann::json;

// GPT-2's pattern (Radford et al., 2019).
constexpr char kGpt2Pattern[] =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";
constexpr size_t kMostAdded = 16 << 20;  // bytes of all added tokens
// Bytes; a search may look at all of them at every byte of a text.
constexpr size_t kLongestAdded = 1024;
constexpr char kGpt2EndOfTextName[] = "<|endoftext|>";

template <typename... What>
absl::Status Invalid(const What&... what) {
  return absl::InvalidArgumentError(absl::StrCat(what...));
}

// Shortens a string of a file for an error.
std::string Shown(absl::string_view text) {
  constexpr size_t kMost = 40;
  Json shown = std::string(text.substr(0, kMost));
  return shown.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace);
}

// Returns a member of an object, or null if it is absent.
const Json& Get(const Json& json, const char* key) {
  static const Json kNull;
  if (!json.is_object()) return kNull;
  const auto found = json.find(key);
  return found == json.end() ? kNull : *found;
}

absl::StatusOr<bool> GetBool(const Json& json, const char* key, bool otherwise,
                             absl::string_view of) {
  const Json& value = Get(json, key);
  if (value.is_null()) return otherwise;
  if (!value.is_boolean()) return Invalid(of, ".", key, " must be true or false");
  return value.get<bool>();
}

std::string TypeOf(const Json& json) {
  const Json& type = Get(json, "type");
  return type.is_string() ? type.get<std::string>() : "";
}

absl::StatusOr<int32_t> GetId(const Json& value, absl::string_view of) {
  constexpr int64_t kMostTokens = 1 << 24;
  if (!value.is_number_unsigned() || value.get<uint64_t>() >= kMostTokens) {
    return Invalid(of, " has no id, a whole number below ", kMostTokens);
  }
  return value.get<int32_t>();
}

class Reader {
 public:
  absl::StatusOr<BpeFile> Read(absl::string_view text) {
    const absl::StatusOr<Json> json = ParseJson(text);
    if (!json.ok()) return json.status();
    if (!json->is_object()) return Invalid("it must be a JSON object");
    BURST_RETURN_IF_ERROR(ReadNormalizer(Get(*json, "normalizer")));
    BURST_RETURN_IF_ERROR(ReadPreTokenizer(Get(*json, "pre_tokenizer")));
    const std::string decoder = TypeOf(Get(*json, "decoder"));
    if (decoder != "ByteLevel" && !Get(*json, "decoder").is_null()) {
      return Invalid("decoder ", Shown(decoder), " is not supported; only ByteLevel is");
    }
    const Json& model = Get(*json, "model");
    BURST_RETURN_IF_ERROR(CheckModel(model));
    BURST_RETURN_IF_ERROR(ReadVocabulary(Get(model, "vocab"), Get(*json, "added_tokens")));
    BURST_RETURN_IF_ERROR(ReadMerges(Get(model, "merges")));
    return std::move(file_);
  }

 private:
  absl::Status ReadNormalizer(const Json& normalizer) {
    if (normalizer.is_null()) return absl::OkStatus();
    const std::string type = TypeOf(normalizer);
    if (type == "Sequence" && Get(normalizer, "normalizers").is_array()) {
      for (const Json& part : Get(normalizer, "normalizers")) {
        BURST_RETURN_IF_ERROR(ReadNormalizer(part));
      }
      return absl::OkStatus();
    }
    if (type != "NFC") {
      return Invalid("normalizer ", Shown(type), " is not supported; only NFC is");
    }
    file_.nfc = true;
    return absl::OkStatus();
  }

  // Reads the pre-tokenizer: a ByteLevel with or without GPT-2's pattern, or a Split and a
  // ByteLevel without it.
  absl::Status ReadPreTokenizer(const Json& json) {
    if (TypeOf(json) != "Sequence") return ReadByteLevel(json);
    const Json& parts = Get(json, "pretokenizers");
    if (!parts.is_array() || parts.empty() || parts.size() > 2) {
      return Invalid("pre_tokenizer is supported with a Split and a ByteLevel only");
    }
    if (parts.size() == 2) BURST_RETURN_IF_ERROR(ReadSplit(parts[0]));
    return ReadByteLevel(parts.back());
  }

  absl::Status ReadSplit(const Json& json) {
    const std::string type = TypeOf(json);
    if (type != "Split") {
      return Invalid("pre_tokenizer ", Shown(type),
                     " is not supported; only Split and ByteLevel are");
    }
    const Json& behavior = Get(json, "behavior");
    if (behavior != "Isolated") {
      return Invalid("pre_tokenizer: a Split is supported with the behavior Isolated only");
    }
    const Json& regex = Get(Get(json, "pattern"), "Regex");
    if (!regex.is_string() || regex.get_ref<const std::string&>().empty()) {
      return Invalid("pre_tokenizer: the Split has no pattern.Regex");
    }
    file_.pattern = regex;
    return absl::OkStatus();
  }

  absl::Status ReadByteLevel(const Json& json) {
    const std::string type = TypeOf(json);
    if (type != "ByteLevel") {
      return Invalid("pre_tokenizer ", Shown(type),
                     " is not supported; only ByteLevel is, after a ", "Split or alone");
    }
    BURST_ASSIGN_OR_RETURN(const bool space,
                           GetBool(json, "add_prefix_space", true, "pre_tokenizer"));
    if (space) return Invalid("pre_tokenizer.add_prefix_space is not supported");
    BURST_ASSIGN_OR_RETURN(const bool regex, GetBool(json, "use_regex", true, "pre_tokenizer"));
    if (!regex) return absl::OkStatus();
    if (!file_.pattern.empty()) {
      return Invalid("pre_tokenizer: a Split and a ByteLevel with use_regex are not supported");
    }
    file_.pattern = kGpt2Pattern;
    return absl::OkStatus();
  }

  absl::Status CheckModel(const Json& model) {
    const std::string type = TypeOf(model);
    if (!model.is_object()) return Invalid("it has no model");
    if (!type.empty() && type != "BPE") {
      return Invalid("model ", Shown(type), " is not supported; only BPE is");
    }
    for (const char* key : {"dropout", "unk_token"}) {
      if (!Get(model, key).is_null()) return Invalid("model.", key, " is not supported");
    }
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      const Json& value = Get(model, key);
      if (!value.is_null() && value != "") return Invalid("model.", key, " is not supported");
    }
    BURST_ASSIGN_OR_RETURN(const bool fallback, GetBool(model, "byte_fallback", false, "model"));
    if (fallback) {
      return Invalid(
          "model.byte_fallback is SentencePiece's, not byte-level; give tokenizer.model");
    }
    BURST_ASSIGN_OR_RETURN(file_.ignore_merges, GetBool(model, "ignore_merges", false, "model"));
    return absl::OkStatus();
  }

  absl::Status ReadVocabulary(const Json& vocab, const Json& added) {
    if (!vocab.is_object() || vocab.empty())
      return Invalid("model.vocab must be an object with tokens");
    if (!added.is_null() && !added.is_array()) return Invalid("added_tokens must be a list");
    int32_t largest = -1;
    ids_.reserve(vocab.size());
    for (const auto& [name, value] : vocab.items()) {
      BURST_ASSIGN_OR_RETURN(const int32_t id,
                             GetId(value, absl::StrCat("model.vocab: ", Shown(name))));
      ids_.emplace(name, id);
      largest = std::max(largest, id);
    }
    for (const Json& token : added) {
      BURST_ASSIGN_OR_RETURN(AddedToken read, ReadAdded(token));
      largest = std::max(largest, read.id);
      file_.added.push_back(std::move(read));
    }
    // A file may leave out some ids. The bound keeps a small file from asking for much memory.
    const int64_t known = static_cast<int64_t>(vocab.size() + file_.added.size());
    if (largest > 2 * known + 1000) {
      return Invalid("the id ", largest, " is far beyond the ", known, " tokens that there are");
    }
    file_.tokens.resize(largest + 1);
    std::vector<bool> used(largest + 1);
    for (const auto& [name, id] : ids_) {
      if (used[id]) return Invalid("model.vocab: the id ", id, " has two tokens");
      used[id] = true;
      std::optional<std::string> bytes = BytesOfToken(name);
      if (bytes.has_value()) file_.piece_ids.push_back(id);
      file_.tokens[id] = bytes.has_value() ? *std::move(bytes) : name;
    }
    std::sort(file_.piece_ids.begin(), file_.piece_ids.end());
    for (const AddedToken& token : file_.added) {
      const auto found = ids_.find(token.text);
      if (found != ids_.end() ? found->second != token.id : used[token.id]) {
        return Invalid("added_tokens: the id ", token.id, " of ", Shown(token.text),
                       " is not the one that model.vocab says");
      }
      used[token.id] = true;
      file_.tokens[token.id] = token.text;
    }
    return absl::OkStatus();
  }

  absl::StatusOr<AddedToken> ReadAdded(const Json& json) {
    AddedToken token;
    const Json& content = Get(json, "content");
    if (!content.is_string() || content.get_ref<const std::string&>().empty()) {
      return Invalid("added_tokens: a token has no content");
    }
    token.text = content;
    const std::string of = absl::StrCat("added_tokens: ", Shown(token.text));
    if (token.text.size() > kLongestAdded) {
      return Invalid(of, " has ", token.text.size(), " bytes, more than ", kLongestAdded);
    }
    added_bytes_ += token.text.size();
    if (added_bytes_ > kMostAdded) {
      return Invalid("added_tokens: they have more than ", kMostAdded, " bytes");
    }
    BURST_ASSIGN_OR_RETURN(token.id, GetId(Get(json, "id"), of));
    BURST_ASSIGN_OR_RETURN(token.special, GetBool(json, "special", false, of));
    for (const char* key : {"single_word", "lstrip", "rstrip"}) {
      BURST_ASSIGN_OR_RETURN(const bool set, GetBool(json, key, false, of));
      if (set) return Invalid(of, ": ", key, " is not supported");
    }
    return token;
  }

  absl::Status ReadMerges(const Json& merges) {
    if (!merges.is_array()) return Invalid("model.merges must be a list");
    file_.merges.reserve(merges.size());
    for (const Json& merge : merges) {
      const auto bad = [&](absl::string_view why) {
        return Invalid("model.merges: number ", file_.merges.size() + 1, " ", why);
      };
      std::string left, right;
      if (merge.is_string()) {
        const std::vector<std::string> parts = absl::StrSplit(merge.get<std::string>(), ' ');
        if (parts.size() != 2) return bad("is not two tokens with a space between them");
        left = parts[0], right = parts[1];
      } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
                 merge[1].is_string()) {
        left = merge[0], right = merge[1];
      } else {
        return bad("is not two tokens");
      }
      BpeMerge read;
      for (const auto& [name, id] : {std::pair<std::string, int32_t*>{left, &read.left},
                                     {right, &read.right},
                                     {left + right, &read.merged}}) {
        const auto found = ids_.find(name);
        if (found == ids_.end()) {
          return bad(absl::StrCat("needs ", Shown(name), ", which is not in model.vocab"));
        }
        *id = found->second;
      }
      file_.merges.push_back(read);
    }
    return absl::OkStatus();
  }

  BpeFile file_;
  size_t added_bytes_ = 0;
  absl::flat_hash_map<std::string, int32_t> ids_;  // the ids of model.vocab
};

}  // namespace

absl::StatusOr<BpeFile> ParseTokenizerJson(absl::string_view text) { return Reader().Read(text); }

absl::StatusOr<std::string> TokenizerJsonOfGpt2(const std::string& encoder_path,
                                                absl::string_view encoder,
                                                const std::string& merges_path,
                                                absl::string_view merges) {
  absl::StatusOr<Json> vocab = ParseJson(encoder);
  if (!vocab.ok()) return Invalid(encoder_path, ": ", vocab.status().message());
  if (!vocab->is_object()) return Invalid(encoder_path, ": it must be a JSON object");
  Json pairs = Json::array(), added = Json::array();
  int64_t number = 0;
  for (absl::string_view line : absl::StrSplit(merges, '\n')) {
    ++number;
    line = absl::StripSuffix(line, "\r");
    // The first line is a comment. '#' also begins merges.
    if (line.empty() || (number == 1 && absl::StartsWith(line, "#version"))) continue;
    const std::vector<std::string> parts = absl::StrSplit(line, ' ');
    if (parts.size() != 2) {
      return Invalid(merges_path, ": line ", number,
                     " is not two tokens with a space between them");
    }
    pairs.push_back(parts);
  }
  const auto end_of_text = vocab->find(kGpt2EndOfTextName);
  if (end_of_text != vocab->end()) {
    added.push_back({{"id", *end_of_text}, {"content", kGpt2EndOfTextName}, {"special", true}});
  }
  const Json byte_level = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}};
  const Json json = {{"version", "1.0"},
                     {"added_tokens", added},
                     {"normalizer", nullptr},
                     {"pre_tokenizer", byte_level},
                     {"decoder", {{"type", "ByteLevel"}}},
                     {"model", {{"type", "BPE"}, {"vocab", *std::move(vocab)}, {"merges", pairs}}}};
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace burst
