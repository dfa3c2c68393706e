#include "train/data/tokenizer.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "burst/base/json.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"
#include "train/data/utf8.h"
#include "train/tokenizer/bpe_file.h"
#include "train/tokenizer/bpe_tokenizer.h"
#include "train/tokenizer/json_fields.h"
#include "train/tokenizer/prompt_template.h"
#include "train/tokenizer/sentencepiece_tokenizer.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMaxCharTokens = 65535;  // a token is 16 bits

void AppendUtf8(uint32_t c, std::string* text) {
  const auto append = [&](uint32_t byte) { text->push_back(static_cast<char>(byte)); };
  const auto continuation = [&](int shift) { append(0x80 | ((c >> shift) & 0x3F)); };
  if (c < 0x80) {
    append(c);
  } else if (c < 0x800) {
    append(0xC0 | c >> 6), continuation(0);
  } else if (c < 0x10000) {
    append(0xE0 | c >> 12), continuation(6), continuation(0);
  } else {
    append(0xF0 | c >> 18), continuation(12), continuation(6), continuation(0);
  }
}

// Returns the code points of the tokens of a tokenizer.json that //train:export wrote for a
// tokenizer of characters; none for another file. Sets whether it has an end-of-text token.
std::vector<uint32_t> CharactersOf(absl::string_view tokenizer_json, bool* end_of_text) {
  const nlohmann::json json = ParseJson(tokenizer_json).value_or(nlohmann::json());
  const nlohmann::json &model = Get(json, "model"), &vocab = Get(model, "vocab"),
                       &merges = Get(model, "merges"), &added = Get(json, "added_tokens");
  const bool is_own = TypeOf(model) == "BPE" && vocab.is_object() && merges.is_array() &&
                      merges.empty() && TypeOf(Get(json, "decoder")) == "Fuse" &&
                      Get(json, "normalizer").is_null() && Get(json, "pre_tokenizer").is_null() &&
                      !GetBool(model, "byte_fallback", false, "model").value_or(true);
  *end_of_text = added.is_array() && added.size() == 1 && Get(added[0], "id") == vocab.size();
  if (!is_own || (!*end_of_text && !added.empty())) return {};
  std::vector<uint32_t> code_points;
  for (const auto& [text, id] : vocab.items()) {  // in the order of UTF-8, which is the ids' order
    size_t end = 0;
    const uint32_t code_point = text.empty() ? kCodePoints : NextCodePoint(text, &end);
    if (code_point == kCodePoints || end != text.size() || id != code_points.size()) return {};
    code_points.push_back(code_point);
  }
  return code_points;
}

// A token that a file of a folder adds to the folder's tokenizer.
struct FolderToken {
  std::string file, text;
  int64_t id;
  bool strips;  // the spaces next to it
};

// Returns the tokens that a folder's files add: added_tokens.json, {"TOKEN": ID}, and the lists of
// tokenizer.json and tokenizer_config.json. Skips what is not a token.
absl::StatusOr<std::vector<FolderToken>> FolderTokens(const std::string& folder) {
  std::vector<FolderToken> tokens;
  const auto add = [&](const std::string& file, const nlohmann::json& text, int64_t id,
                       const nlohmann::json& flags) {
    const bool strips = Get(flags, "lstrip") == true || Get(flags, "rstrip") == true;
    if (text.is_string()) tokens.push_back({file, text, id, strips});
  };
  for (const char* name : {"added_tokens.json", "tokenizer.json", "tokenizer_config.json"}) {
    const std::string file = (fs::path(folder) / name).string();
    std::error_code error;
    if (!fs::exists(file, error)) continue;
    BURST_ASSIGN_OR_RETURN(const std::string text, ReadFile(file, kMaxTokenizerBytes));
    const nlohmann::json json = ParseJson(text).value_or(nlohmann::json());
    if (!json.is_object()) continue;
    if (name == absl::string_view("added_tokens.json")) {
      for (const auto& [token, id] : json.items()) {
        if (id.is_number_integer()) add(file, token, id, {});
      }
      continue;
    }
    for (const nlohmann::json& token : Get(json, "added_tokens")) {
      const nlohmann::json& id = Get(token, "id");
      if (id.is_number_integer()) add(file, Get(token, "content"), id, token);
    }
    for (const auto& [key, token] : Get(json, "added_tokens_decoder").items()) {
      int64_t id = 0;
      if (absl::SimpleAtoi(key, &id)) add(file, Get(token, "content"), id, token);
    }
  }
  return tokens;
}

absl::Status LacksToken(const FolderToken& token) {
  return absl::InvalidArgumentError(absl::StrCat(
      token.file, ": must have tokens that the folder's tokenizer finds in the same places; got ",
      Shown(token.text), " as ", token.id, "; save the folder with a tokenizer.json"));
}

// Refuses a folder whose vocab.json is another family's, because no file of it has the pattern.
absl::Status CheckIsGpt2(const std::string& folder) {
  const std::string path = (fs::path(folder) / "tokenizer_config.json").string();
  std::error_code error;
  if (!fs::exists(path, error)) return absl::OkStatus();
  BURST_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kMaxTokenizerBytes));
  const nlohmann::json config = ParseJson(text).value_or(nlohmann::json());
  if (Get(config, "add_prefix_space") == true) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": add_prefix_space must be false; got true; give another tokenizer"));
  }
  const nlohmann::json& kind = Get(config, "tokenizer_class");
  if (!kind.is_string()) return absl::OkStatus();
  const std::string name = kind;
  for (const char* same : {"GPT2", "Roberta", "Bart", "CodeGen"}) {
    if (absl::StartsWith(name, absl::StrCat(same, "Tokenizer"))) return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(path, ": tokenizer_class must be GPT2Tokenizer or of its kind; got ",
                   Shown(name), "; save the folder with a tokenizer.json"));
}

}  // namespace

absl::Status NotUtf8(int64_t offset) {
  return absl::InvalidArgumentError(
      absl::StrCat("byte ", offset, " is not valid UTF-8; --tokenizer=byte takes any bytes"));
}

Tokenizer::Tokenizer(Kind kind, std::vector<uint32_t> code_points, bool end_of_text)
    : kind_(kind),
      has_end_of_text_(end_of_text),
      size_(kind == Kind::kByte ? 256 : static_cast<int64_t>(code_points.size())),
      code_points_(std::move(code_points)) {}

Tokenizer::Tokenizer(Kind kind, std::shared_ptr<const FileTokenizer> of_file, std::string file)
    : kind_(kind),
      has_end_of_text_(false),
      size_(of_file->vocab()),
      of_file_(std::move(of_file)),
      file_(std::make_shared<const std::string>(std::move(file))) {}

Tokenizer Tokenizer::Byte(bool end_of_text) { return Tokenizer(Kind::kByte, {}, end_of_text); }

absl::StatusOr<Tokenizer> Tokenizer::Char(absl::Span<const absl::string_view> texts,
                                          bool end_of_text) {
  std::vector<bool> seen(kCodePoints);
  for (absl::string_view text : texts) {
    for (size_t position = 0; position < text.size();) {
      const size_t start = position;
      const uint32_t code_point = NextCodePoint(text, &position);
      if (code_point == kCodePoints) return NotUtf8(static_cast<int64_t>(start));
      seen[code_point] = true;
    }
  }
  return OfCharacters(seen, end_of_text);
}

absl::StatusOr<Tokenizer> Tokenizer::OfCharacters(const std::vector<bool>& seen, bool end_of_text) {
  std::vector<uint32_t> code_points;
  for (uint32_t c = 0; c < seen.size(); ++c) {
    if (seen[c]) code_points.push_back(c);
  }
  if (static_cast<int64_t>(code_points.size()) > kMaxCharTokens) {
    return absl::InvalidArgumentError(absl::StrCat("the text has ", code_points.size(),
                                                   " different characters, more than ",
                                                   kMaxCharTokens, "; use --tokenizer=byte"));
  }
  return Tokenizer(Kind::kChar, std::move(code_points), end_of_text);
}

absl::StatusOr<Tokenizer> Tokenizer::OfTokenizerJson(std::string text) {
  absl::StatusOr<std::shared_ptr<const BpeTokenizer>> bpe = BpeTokenizer::FromTokenizerJson(text);
  if (bpe.ok()) return Tokenizer(Kind::kBpe, *std::move(bpe), std::move(text));
  bool end_of_text = false;
  std::vector<uint32_t> characters = CharactersOf(text, &end_of_text);
  if (characters.empty() || characters.size() > kMaxCharTokens) return bpe.status();
  return Tokenizer(Kind::kChar, std::move(characters), end_of_text);
}

absl::StatusOr<Tokenizer> Tokenizer::OfTokenizerModel(std::string model) {
  BURST_ASSIGN_OR_RETURN(std::shared_ptr<const SentencePieceTokenizer> tokenizer,
                         SentencePieceTokenizer::FromModel(model));
  return Tokenizer(Kind::kSentencePiece, std::move(tokenizer), std::move(model));
}

absl::StatusOr<Tokenizer> Tokenizer::Load(const std::string& path) {
  std::error_code error;  // reading reports a path that cannot be followed
  const auto in_folder = [&](const char* name) { return (fs::path(path) / name).string(); };
  const auto named = [](const std::string& file, const absl::Status& status) {
    return absl::Status(status.code(), absl::StrCat(file, ": ", status.message()));
  };
  const bool is_folder = fs::is_directory(path, error);
  const auto of_json = [&](const std::string& file, std::string json) -> absl::StatusOr<Tokenizer> {
    const std::string config = in_folder("tokenizer_config.json");
    if (is_folder && fs::exists(config, error)) {
      BURST_ASSIGN_OR_RETURN(const std::string text, ReadFile(config, kMaxTokenizerBytes));
      const std::string map = in_folder("special_tokens_map.json");
      std::string map_text;
      if (fs::exists(map, error)) {
        BURST_ASSIGN_OR_RETURN(map_text, ReadFile(map, kMaxTokenizerBytes));
      }
      absl::StatusOr<std::string> merged = WithTokensOfConfig(std::move(json), text, map_text);
      if (!merged.ok()) return named(config, merged.status());
      json = *std::move(merged);
    }
    absl::StatusOr<Tokenizer> tokenizer = OfTokenizerJson(std::move(json));
    return tokenizer.ok() ? tokenizer : named(file, tokenizer.status());
  };
  std::string file = path;
  if (is_folder) {
    constexpr const char* kGpt2Files[][2] = {{"encoder.json", "vocab.bpe"},
                                             {"vocab.json", "merges.txt"}};
    file = in_folder("tokenizer.model");
    if (!fs::exists(file, error)) file = in_folder("tokenizer.json");
    for (const auto& names : kGpt2Files) {
      const std::string encoder = in_folder(names[0]), merges = in_folder(names[1]);
      if (fs::exists(file, error) || !fs::exists(encoder, error)) continue;
      BURST_RETURN_IF_ERROR(CheckIsGpt2(path));
      BURST_ASSIGN_OR_RETURN(const std::string encoder_text, ReadFile(encoder, kMaxTokenizerBytes));
      BURST_ASSIGN_OR_RETURN(const std::string merges_text, ReadFile(merges, kMaxTokenizerBytes));
      BURST_ASSIGN_OR_RETURN(std::string json,
                             TokenizerJsonOfGpt2(encoder, encoder_text, merges, merges_text));
      BURST_ASSIGN_OR_RETURN(Tokenizer tokenizer,
                             of_json(absl::StrCat(encoder, " with ", names[1]), std::move(json)));
      BURST_ASSIGN_OR_RETURN(const std::vector<FolderToken> added, FolderTokens(path));
      for (const FolderToken& token : added) {
        if (token.id >= tokenizer.vocab()) return LacksToken(token);
      }
      return tokenizer;
    }
    if (!fs::exists(file, error)) {
      return absl::NotFoundError(absl::StrCat(
          "the folder ", path,
          " holds no tokenizer.model, no tokenizer.json, nor encoder.json with vocab.bpe"));
    }
  }
  BURST_ASSIGN_OR_RETURN(std::string text, ReadFile(file, kMaxTokenizerBytes));
  if (absl::StartsWith(text, "version https://git-lfs")) {
    return absl::InvalidArgumentError(absl::StrCat(
        file, ": must be a tokenizer; got a pointer to one of Git LFS; run git lfs pull"));
  }
  // A JSON object begins with a brace. The fields of a protocol buffer do not.
  const bool is_json = absl::StartsWith(absl::StripLeadingAsciiWhitespace(text), "{");
  if (!is_json && IsTiktokenFile(text)) {
    absl::StatusOr<std::string> json = TokenizerJsonOfTiktoken(text);
    if (!json.ok()) return named(file, json.status());
    return OfTokenizerJson(*std::move(json));
  }
  if (is_json || !absl::EndsWith(file, ".model")) return of_json(file, std::move(text));
  const auto model = SentencePieceTokenizer::FromModel(text);
  if (!model.ok()) return named(file, model.status());
  if (is_folder) {
    BURST_ASSIGN_OR_RETURN(const std::vector<FolderToken> added, FolderTokens(path));
    const auto lacking = std::find_if(added.begin(), added.end(), [&](const FolderToken& token) {
      return token.strips || !(*model)->IsAdded(token.text, token.id);
    });
    if (lacking != added.end()) {
      const std::string json_file = in_folder("tokenizer.json");
      if (!fs::exists(json_file, error)) return LacksToken(*lacking);
      BURST_ASSIGN_OR_RETURN(text, ReadFile(json_file, kMaxTokenizerBytes));
      return of_json(json_file, std::move(text));
    }
  }
  return Tokenizer(Kind::kSentencePiece, *model, std::move(text));
}

const char* Tokenizer::name() const {
  switch (kind_) {
    case Kind::kByte:
      return "byte";
    case Kind::kChar:
      return "char";
    case Kind::kBpe:
      return "bpe";
    case Kind::kSentencePiece:
      return "sentencepiece";
  }
  return "";
}

const char* Tokenizer::file_name() const {
  return kind_ == Kind::kSentencePiece ? "tokenizer.model" : "tokenizer.json";
}

int32_t Tokenizer::end_of_text() const {
  if (of_file_ != nullptr) return of_file_->end_of_text();
  return has_end_of_text_ ? static_cast<int32_t>(size_) : -1;
}

absl::StatusOr<std::vector<int32_t>> Tokenizer::Beginning() const {
  if (kind_ == Kind::kBpe) return TemplateBeginning(*file_);
  std::vector<int32_t> tokens;
  if (of_file_ != nullptr && of_file_->begin_of_text() >= 0) {
    tokens.push_back(of_file_->begin_of_text());
  }
  return tokens;
}

absl::Status Tokenizer::Encode(absl::string_view text, std::vector<int32_t>* tokens,
                               Specials specials) const {
  if (of_file_ != nullptr) return of_file_->MakeEncoder(specials)->Encode(text, tokens);
  if (kind_ == Kind::kByte) {
    for (char c : text) tokens->push_back(static_cast<unsigned char>(c));
    return absl::OkStatus();
  }
  for (size_t position = 0; position < text.size();) {
    const size_t start = position;
    const uint32_t code_point = NextCodePoint(text, &position);
    if (code_point == kCodePoints) return NotUtf8(static_cast<int64_t>(start));
    const auto it = std::lower_bound(code_points_.begin(), code_points_.end(), code_point);
    if (it == code_points_.end() || *it != code_point) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "the character '%s' (U+%04X) at byte %d is not one of the %d of the training text",
          text.substr(start, position - start), code_point, start, size_));
    }
    tokens->push_back(static_cast<int32_t>(it - code_points_.begin()));
  }
  return absl::OkStatus();
}

std::string Tokenizer::Decode(absl::Span<const int32_t> tokens) const {
  std::string text;
  for (int32_t token : tokens) {
    if (token < 0 || token >= size_) continue;
    if (of_file_ != nullptr) {
      absl::StrAppend(&text, of_file_->Bytes(token));
    } else if (kind_ == Kind::kByte) {
      text.push_back(static_cast<char>(token));
    } else {
      AppendUtf8(code_points_[token], &text);
    }
  }
  return text;
}

std::string Tokenizer::ToJson() const {
  nlohmann::json json = {{"kind", name()}, {"end_of_text", has_end_of_text_}};
  if (kind_ == Kind::kChar) json["code_points"] = code_points_;
  if (kind_ == Kind::kBpe) json["tokenizer_json"] = *file_;
  if (kind_ == Kind::kSentencePiece) json["tokenizer_model"] = absl::Base64Escape(*file_);
  if (marks_.begins) json["begins"] = true;
  if (marks_.separator >= 0) json["separator"] = marks_.separator;
  return json.dump();
}

absl::StatusOr<Tokenizer> Tokenizer::FromJson(absl::string_view text) {
  const nlohmann::json json = ParseJson(text).value_or(nlohmann::json());
  const auto invalid = [] { return absl::DataLossError("not a tokenizer's description"); };
  if (!json.is_object() || !json.contains("kind") || !json.contains("end_of_text") ||
      !json["end_of_text"].is_boolean()) {
    return invalid();
  }
  const bool end_of_text = json["end_of_text"];
  if (json["kind"] == "byte") return Byte(end_of_text);
  const bool is_bpe = json["kind"] == "bpe";
  if (is_bpe || json["kind"] == "sentencepiece") {
    const char* key = is_bpe ? "tokenizer_json" : "tokenizer_model";
    if (!json.contains(key) || !json[key].is_string()) return invalid();
    std::string file = json[key];
    if (!is_bpe && !absl::Base64Unescape(std::string(file), &file)) return invalid();
    absl::StatusOr<Tokenizer> tokenizer =
        is_bpe ? OfTokenizerJson(std::move(file)) : OfTokenizerModel(std::move(file));
    if (!tokenizer.ok()) {
      return absl::DataLossError(absl::StrCat("its tokenizer: ", tokenizer.status().message()));
    }
    Marks marks;
    marks.begins = json.value("begins", nlohmann::json()) == true;
    const nlohmann::json separator = json.value("separator", nlohmann::json());
    if (separator.is_number_unsigned() &&
        separator.get<uint64_t>() < static_cast<uint64_t>(tokenizer->vocab())) {
      marks.separator = separator;
    } else if (!separator.is_null()) {
      return invalid();
    }
    tokenizer->set_marks(marks);
    return tokenizer;
  }
  if (json["kind"] != "char" || !json.contains("code_points") || !json["code_points"].is_array()) {
    return invalid();
  }
  std::vector<uint32_t> code_points;
  for (const auto& element : json["code_points"]) {
    if (!element.is_number_unsigned() || element.get<uint64_t>() >= kCodePoints) return invalid();
    const uint32_t code_point = element;
    if (IsSurrogate(code_point)) return invalid();
    if (!code_points.empty() && code_points.back() >= code_point) return invalid();
    code_points.push_back(code_point);
  }
  const int64_t size = static_cast<int64_t>(code_points.size());
  if (size == 0 || size > kMaxCharTokens) return invalid();
  return Tokenizer(Kind::kChar, std::move(code_points), end_of_text);
}

}  // namespace burst
