#include "train/tokenizer/bpe_file.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "burst/base/json.h"
#include "burst/base/status.h"
#include "train/data/utf8.h"
#include "train/tokenizer/byte_level.h"
#include "train/tokenizer/json_fields.h"

namespace burst {
namespace {

using Json = nlohmann::json;

constexpr size_t kMostAdded = 16 << 20;  // bytes of all added tokens
// Bytes; a search may look at all of them at every byte of a text.
constexpr size_t kLongestAdded = 1024;
constexpr char kGpt2EndOfTextName[] = "<|endoftext|>";

absl::StatusOr<int32_t> GetId(const Json& value, absl::string_view of) {
  constexpr int64_t kMostTokens = 1 << 24;
  if (!value.is_number_unsigned() || value.get<uint64_t>() >= kMostTokens) {
    return InvalidField(of, " has no id, a whole number below ", kMostTokens);
  }
  return value.get<int32_t>();
}

class Reader {
 public:
  absl::StatusOr<BpeFile> Read(absl::string_view text) {
    const absl::StatusOr<Json> json = ParseJson(text);
    if (!json.ok()) return json.status();
    if (!json->is_object()) return InvalidField("it must be a JSON object");
    const Json& model = Get(*json, "model");
    BURST_ASSIGN_OR_RETURN(const bool fallback, GetBool(model, "byte_fallback", false, "model"));
    // With a ByteLevel no character is without a token, so byte_fallback says nothing there.
    file_.of_bytes = !fallback || HasByteLevel(Get(*json, "pre_tokenizer"));
    BURST_ASSIGN_OR_RETURN(file_.form, ReadTextForm(*json, file_.of_bytes));
    const std::string decoder = TypeOf(Get(*json, "decoder"));
    if (file_.of_bytes && decoder != "ByteLevel" && !Get(*json, "decoder").is_null()) {
      return InvalidField("decoder ", Shown(decoder), " is not supported; only ByteLevel is");
    }
    BURST_RETURN_IF_ERROR(CheckModel(model));
    BURST_RETURN_IF_ERROR(ReadVocabulary(Get(model, "vocab"), Get(*json, "added_tokens")));
    BURST_RETURN_IF_ERROR(ReadMerges(Get(model, "merges")));
    return std::move(file_);
  }

 private:
  static bool HasByteLevel(const Json& pre_tokenizer) {
    const Json& parts = Get(pre_tokenizer, "pretokenizers");
    return TypeOf(pre_tokenizer) == "ByteLevel" ||
           (parts.is_array() && std::any_of(parts.begin(), parts.end(), HasByteLevel));
  }

  absl::Status CheckModel(const Json& model) {
    const std::string type = TypeOf(model);
    if (!model.is_object()) return InvalidField("it has no model");
    if (!type.empty() && type != "BPE") {
      return InvalidField("model ", Shown(type), " is not supported; only BPE is");
    }
    if (!Get(model, "dropout").is_null()) return InvalidField("model.dropout is not supported");
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      const Json& value = Get(model, key);
      if (!value.is_null() && value != "") return InvalidField("model.", key, " is not supported");
    }
    BURST_ASSIGN_OR_RETURN(file_.ignore_merges, GetBool(model, "ignore_merges", false, "model"));
    if (file_.ignore_merges && !file_.of_bytes) {
      return InvalidField("model.ignore_merges is not supported with byte_fallback");
    }
    return absl::OkStatus();
  }

  absl::Status ReadVocabulary(const Json& vocab, const Json& added) {
    if (!vocab.is_object() || vocab.empty())
      return InvalidField("model.vocab must be an object with tokens");
    if (!added.is_null() && !added.is_array()) return InvalidField("added_tokens must be a list");
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
      return InvalidField("the id ", largest, " is far beyond the ", known,
                          " tokens that there are");
    }
    file_.tokens.resize(largest + 1);
    std::vector<bool> used(largest + 1);
    for (const auto& [name, id] : ids_) {
      if (used[id]) return InvalidField("model.vocab: the id ", id, " has two tokens");
      used[id] = true;
      if (!file_.of_bytes) {
        ReadPieceOfCharacters(name, id);
        continue;
      }
      std::optional<std::string> bytes = BytesOfToken(name);
      if (bytes.has_value()) file_.piece_ids.push_back(id);
      file_.tokens[id] = bytes.has_value() ? *std::move(bytes) : name;
    }
    if (!file_.of_bytes) CutAtWords();
    std::sort(file_.piece_ids.begin(), file_.piece_ids.end());
    return PlaceAdded(used);
  }

  // Gives the added tokens their bytes. `used` says which ids model.vocab has. The library
  // tokenizers numbers added tokens itself, whatever the file says.
  absl::Status PlaceAdded(const std::vector<bool>& used) {
    absl::flat_hash_set<absl::string_view> texts;
    auto next = static_cast<int32_t>(ids_.size());
    for (const AddedToken& token : file_.added) {
      const std::string of = absl::StrCat("added_tokens: ", Shown(token.text));
      if (!texts.insert(token.text).second) {
        return InvalidField(of, " must be there once; got it twice; save the file with tokenizers");
      }
      const auto found = ids_.find(token.text);
      const bool is_new = found == ids_.end();
      const int32_t id = is_new ? next++ : found->second;
      if (token.id != id) {
        return InvalidField(of, " must have the id ", id, ", which tokenizers gives it; got ",
                            token.id, "; save the file with tokenizers");
      }
      if (is_new && used[id]) {
        return InvalidField(of, " must have an id of its own; got ", id, ", which a token of ",
                            "model.vocab has; number model.vocab without holes");
      }
      const std::string bytes =
          file_.of_bytes ? token.text : absl::StrReplaceAll(token.text, {{kSpaceMark, " "}});
      if (!is_new && file_.tokens[id] != bytes) {
        return InvalidField(of,
                            " is a token of model.vocab, where it stands for other bytes, which "
                            "is not supported");
      }
      file_.tokens[id] = bytes;
    }
    return absl::OkStatus();
  }

  // Reads "<0x0A>", which is a byte, or characters, among which U+2581 is a space.
  void ReadPieceOfCharacters(const std::string& name, int32_t id) {
    uint32_t byte = 0;
    if (name.size() == 6 && absl::StartsWith(name, "<0x") && name[5] == '>' &&
        name.find_first_not_of("0123456789ABCDEF", 3) == 5 &&
        absl::SimpleHexAtoi(name.substr(3, 2), &byte)) {
      file_.byte_ids.resize(256, -1);
      file_.byte_ids[byte] = id;
      file_.tokens[id] = std::string(1, static_cast<char>(byte));
      return;
    }
    size_t end = 0;
    if (!name.empty()) NextCodePoint(name, &end);
    if (end > 0 && end == name.size()) file_.characters.emplace_back(name, id);
    absl::string_view rest = name;
    while (absl::ConsumePrefix(&rest, kSpaceMark)) continue;
    reaches_to_a_space_ |= absl::StrContains(rest, kSpaceMark);
    file_.tokens[id] = absl::StrReplaceAll(name, {{kSpaceMark, " "}});
  }

  // Cuts text before spaces, if no token reaches from another character to a space.
  void CutAtWords() {
    const std::string other = absl::StrCat("[^", kSpaceMark, "]");
    if (file_.form.cuts_at_marks) {
      file_.form.splits = {{absl::StrCat(kSpaceMark, other, "*|", other, "+")}};
    } else if (!reaches_to_a_space_) {
      file_.form.splits = {{absl::StrCat(kSpaceMark, "*", other, "+|", kSpaceMark, "+")}};
    }
  }

  absl::StatusOr<AddedToken> ReadAdded(const Json& json) {
    AddedToken token;
    const Json& content = Get(json, "content");
    if (!content.is_string() || content.get_ref<const std::string&>().empty()) {
      return InvalidField("added_tokens: a token has no content");
    }
    token.text = content;
    const std::string of = absl::StrCat("added_tokens: ", Shown(token.text));
    if (token.text.size() > kLongestAdded) {
      return InvalidField(of, " has ", token.text.size(), " bytes, more than ", kLongestAdded);
    }
    added_bytes_ += token.text.size();
    if (added_bytes_ > kMostAdded) {
      return InvalidField("added_tokens: they have more than ", kMostAdded, " bytes");
    }
    BURST_ASSIGN_OR_RETURN(token.id, GetId(Get(json, "id"), of));
    BURST_ASSIGN_OR_RETURN(token.special, GetBool(json, "special", false, of));
    BURST_ASSIGN_OR_RETURN(token.normalized, GetBool(json, "normalized", !token.special, of));
    BURST_ASSIGN_OR_RETURN(token.strips_left, GetBool(json, "lstrip", false, of));
    BURST_ASSIGN_OR_RETURN(token.strips_right, GetBool(json, "rstrip", false, of));
    BURST_ASSIGN_OR_RETURN(const bool word, GetBool(json, "single_word", false, of));
    if (word) return InvalidField(of, ": single_word is not supported");
    return token;
  }

  absl::Status ReadMerges(const Json& merges) {
    if (!merges.is_array()) return InvalidField("model.merges must be a list");
    file_.merges.reserve(merges.size());
    for (const Json& merge : merges) {
      const auto bad = [&](absl::string_view why) {
        return InvalidField("model.merges: number ", file_.merges.size() + 1, " ", why);
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
  bool reaches_to_a_space_ = false;
  size_t added_bytes_ = 0;
  absl::flat_hash_map<std::string, int32_t> ids_;  // the ids of model.vocab
};

}  // namespace

absl::StatusOr<BpeFile> ParseTokenizerJson(absl::string_view text) { return Reader().Read(text); }

namespace {

// Completes the added tokens of a tokenizer.json.
class AddedTokens {
 public:
  // `json` must be an object.
  explicit AddedTokens(Json* json) : vocab_(Get(Get(*json, "model"), "vocab")) {
    Json& added = (*json)["added_tokens"];
    if (added.is_null()) added = Json::array();
    added_ = &added;
    for (const Json& token : added) {
      const Json& content = Get(token, "content");
      if (content.is_string()) places_.emplace(content.get<std::string>(), places_.size());
    }
  }
  // Whether they are a list of tokens with different texts. Only then call the other functions.
  bool are_readable() const { return added_->is_array() && places_.size() == added_->size(); }
  bool changed() const { return changed_; }

  // Adds a token of added_tokens_decoder, or changes its flags.
  absl::Status Decoder(int32_t id, const Json& flags) {
    const std::string content = Get(flags, "content");
    const std::string of = absl::StrCat("added_tokens_decoder: ", Shown(content));
    const auto [place, is_new] = places_.emplace(content, added_->size());
    if (is_new) added_->push_back({{"id", id}, {"content", content}});
    Json& token = (*added_)[place->second];
    if (Get(token, "id") != id) {
      return InvalidField(of, " must have the id of tokenizer.json, ", Get(token, "id").dump(),
                          "; got ", id, "; save the folder with transformers");
    }
    BURST_ASSIGN_OR_RETURN(const bool special, GetBool(flags, "special", false, of));
    return SetFlags(flags, special, of, &token);
  }

  // Makes a token special that has a name: its text, or an object with its flags, which count only
  // where it is new.
  absl::Status Named(const char* name, const Json& given) {
    const Json& content = given.is_object() ? Get(given, "content") : given;
    if (!content.is_string() || content == "") return absl::OkStatus();
    const std::string text = content, of = absl::StrCat(name, ": ", Shown(text));
    const auto found = places_.find(text);
    if (found != places_.end()) {
      Json& token = (*added_)[found->second];
      BURST_ASSIGN_OR_RETURN(const bool was_special, GetBool(token, "special", false, of));
      token["special"] = true;
      changed_ |= !was_special;
      return absl::OkStatus();
    }
    const Json& id = Get(vocab_, text.c_str());
    if (!id.is_number_integer()) return absl::OkStatus();
    places_.emplace(text, added_->size());
    added_->push_back({{"id", id}, {"content", text}});
    return SetFlags(given, /*special=*/true, of, &added_->back());
  }

 private:
  absl::Status SetFlags(const Json& flags, bool special, const std::string& of, Json* token) {
    const Json before = *token;
    for (const char* flag : {"lstrip", "rstrip", "single_word"}) {
      BURST_ASSIGN_OR_RETURN((*token)[flag], GetBool(flags, flag, false, of));
    }
    if ((*token)["single_word"] == true) {
      return InvalidField(of, ": single_word is not supported");
    }
    BURST_ASSIGN_OR_RETURN(const bool was_special, GetBool(before, "special", false, of));
    (*token)["special"] = special || was_special;
    BURST_ASSIGN_OR_RETURN((*token)["normalized"], GetBool(flags, "normalized", !special, of));
    changed_ |= *token != before;
    return absl::OkStatus();
  }

  const Json& vocab_;
  Json* added_;
  absl::flat_hash_map<std::string, size_t> places_;  // by the text
  bool changed_ = false;
};

}  // namespace

absl::StatusOr<std::string> WithTokensOfConfig(std::string tokenizer_json,
                                               absl::string_view tokenizer_config,
                                               absl::string_view special_tokens_map) {
  const Json config = ParseJson(tokenizer_config).value_or(Json());
  const Json& decoder = Get(config, "added_tokens_decoder");
  Json json = ParseJson(tokenizer_json).value_or(Json());
  if (!json.is_object()) return tokenizer_json;
  if (!decoder.is_null() && !decoder.is_object()) {
    return InvalidField("added_tokens_decoder must be an object");
  }
  AddedTokens added(&json);
  if (!added.are_readable()) return tokenizer_json;  // reading it names the error
  std::map<int32_t, const Json*> by_id;
  for (const auto& [key, token] : decoder.items()) {
    int32_t id = 0;
    if (!absl::SimpleAtoi(key, &id) || !Get(token, "content").is_string()) {
      return InvalidField("added_tokens_decoder: ", Shown(key), " has no id or no content");
    }
    by_id[id] = &token;
  }
  for (const auto& [id, flags] : by_id) BURST_RETURN_IF_ERROR(added.Decoder(id, *flags));
  Json map;
  if (decoder.is_null()) map = ParseJson(special_tokens_map).value_or(Json());
  for (const char* name : {"bos_token", "eos_token", "unk_token", "sep_token", "pad_token",
                           "cls_token", "mask_token"}) {
    const Json& of_map = Get(map, name);
    BURST_RETURN_IF_ERROR(added.Named(name, of_map.is_null() ? Get(config, name) : of_map));
  }
  for (const char* name : {"additional_special_tokens", "extra_special_tokens"}) {
    const Json& of_map = Get(map, name);
    const Json& tokens = of_map.is_null() ? Get(config, name) : of_map;
    if (!tokens.is_structured()) continue;  // a list, or an object of names and tokens
    for (const Json& token : tokens) BURST_RETURN_IF_ERROR(added.Named(name, token));
  }
  return added.changed() ? json.dump() : tokenizer_json;
}

absl::StatusOr<std::string> TokenizerJsonOfGpt2(const std::string& encoder_path,
                                                absl::string_view encoder,
                                                const std::string& merges_path,
                                                absl::string_view merges) {
  absl::StatusOr<Json> vocab = ParseJson(encoder);
  if (!vocab.ok()) return InvalidField(encoder_path, ": ", vocab.status().message());
  if (!vocab->is_object()) return InvalidField(encoder_path, ": it must be a JSON object");
  Json pairs = Json::array(), added = Json::array();
  int64_t number = 0;
  for (absl::string_view line : absl::StrSplit(merges, '\n')) {
    ++number;
    line = absl::StripSuffix(line, "\r");
    // The first line is a comment. '#' also begins merges.
    if (line.empty() || (number == 1 && absl::StartsWith(line, "#version"))) continue;
    const std::vector<std::string> parts = absl::StrSplit(line, ' ');
    if (parts.size() != 2) {
      return InvalidField(merges_path, ": line ", number,
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
