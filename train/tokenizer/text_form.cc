#include "train/tokenizer/text_form.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "train/tokenizer/json_fields.h"
#include "train/tokenizer/places.h"
#include "train/tokenizer/unicode_normal.h"

namespace burst {
namespace {

using Json = nlohmann::json;

// GPT-2's pattern (Radford et al., 2019).
constexpr char kGpt2Pattern[] =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// Returns a pattern that matches exactly this text.
std::string Quoted(const std::string& text) {
  std::string pattern;
  for (const char c : text) {
    if (absl::ascii_isascii(c) && !absl::ascii_isalnum(c)) pattern += '\\';
    pattern += c;
  }
  return pattern;
}

class Reader {
 public:
  explicit Reader(bool of_bytes) : of_bytes_(of_bytes) {}

  absl::StatusOr<TextForm> Read(const Json& json) {
    BURST_RETURN_IF_ERROR(ReadNormalizer(Get(json, "normalizer")));
    const Json& pre_tokenizer = Get(json, "pre_tokenizer");
    std::vector<Json> parts;
    BURST_RETURN_IF_ERROR(Flatten(pre_tokenizer, &parts));
    if (of_bytes_) {
      if (parts.empty()) parts.push_back(Json());  // the error below names it
      const Json last = parts.back();
      parts.pop_back();
      for (const Json& part : parts) BURST_RETURN_IF_ERROR(ReadCut(part));
      BURST_RETURN_IF_ERROR(ReadByteLevel(last));
      if (form_.normalizer_marks.any()) {
        return InvalidField("normalizer: U+2581 for spaces is not supported with a ByteLevel");
      }
      return std::move(form_);
    }
    for (const Json& part : parts) BURST_RETURN_IF_ERROR(ReadOfMarks(part));
    if (!form_.normalizer_marks.replace && !form_.marks.replace) {
      return InvalidField("model.byte_fallback is supported with U+2581 for spaces only");
    }
    return std::move(form_);
  }

 private:
  static absl::Status Flatten(const Json& json, std::vector<Json>* parts) {
    if (json.is_null()) return absl::OkStatus();
    if (TypeOf(json) != "Sequence") {
      parts->push_back(json);
      return absl::OkStatus();
    }
    const Json& list = Get(json, "pretokenizers");
    if (!list.is_array()) return InvalidField("pre_tokenizer: a Sequence has no pretokenizers");
    for (const Json& part : list) BURST_RETURN_IF_ERROR(Flatten(part, parts));
    return absl::OkStatus();
  }

  absl::Status ReadNormalizer(const Json& json) {
    if (json.is_null()) return absl::OkStatus();
    const std::string type = TypeOf(json);
    if (type == "Sequence" && Get(json, "normalizers").is_array()) {
      for (const Json& part : Get(json, "normalizers")) {
        BURST_RETURN_IF_ERROR(ReadNormalizer(part));
      }
      return absl::OkStatus();
    }
    if (type == "NFC") {
      form_.nfc = true;
    } else if (type == "Prepend" && Get(json, "prepend") == std::string(kSpaceMark)) {
      if (form_.normalizer_marks.prefix != SpaceMarks::Prefix::kNone) {
        return InvalidField("normalizer: a second Prepend is not supported");
      }
      form_.normalizer_marks.prefix = SpaceMarks::Prefix::kEachPart;
    } else if (type == "Replace" && Get(Get(json, "pattern"), "String") == " " &&
               Get(json, "content") == std::string(kSpaceMark)) {
      form_.normalizer_marks.replace = true;
    } else {
      return InvalidField(
          "normalizer ", Shown(type),
          " is not supported; only NFC is, and U+2581 for spaces (Prepend, Replace)");
    }
    return absl::OkStatus();
  }

  // Reads a part that cuts a text before a ByteLevel.
  absl::Status ReadCut(const Json& json) {
    const std::string type = TypeOf(json);
    if (type == "Digits") {
      BURST_ASSIGN_OR_RETURN(const bool single,
                             GetBool(json, "individual_digits", false, "pre_tokenizer"));
      // The library tokenizers has its numbers from Rust, whose Unicode is newer than PCRE2's.
      constexpr char kNumber[] = "[\\p{N}\\x{11DE0}-\\x{11DE9}\\x{16FF4}-\\x{16FF6}]";
      form_.splits.push_back({absl::StrCat(kNumber, single ? "" : "+")});
      return absl::OkStatus();
    }
    if (type != "Split") {
      return InvalidField("pre_tokenizer ", Shown(type),
                          " is not supported; only Split, Digits and ByteLevel are");
    }
    BURST_ASSIGN_OR_RETURN(const bool inverted, GetBool(json, "invert", false, "pre_tokenizer"));
    const Json& behavior = Get(json, "behavior");
    const bool removes = behavior == "Removed";
    if (behavior != "Isolated" && !(removes && inverted)) {
      return InvalidField(
          "pre_tokenizer: a Split is supported with the behavior Isolated, or Removed and invert");
    }
    const Json& regex = Get(Get(json, "pattern"), "Regex");
    const Json& text = Get(Get(json, "pattern"), "String");
    const Json& pattern = regex.is_null() ? text : regex;
    if (!pattern.is_string() || pattern.get_ref<const std::string&>().empty()) {
      return InvalidField("pre_tokenizer: the Split has no pattern.Regex");
    }
    const std::string given = pattern;
    form_.splits.push_back({regex.is_null() ? Quoted(given) : given, removes});
    return absl::OkStatus();
  }

  absl::Status ReadByteLevel(const Json& json) {
    const std::string type = TypeOf(json);
    if (json.is_null()) {
      return InvalidField("pre_tokenizer must be a ByteLevel, alone or at the end; got none");
    }
    if (type != "ByteLevel") {
      return InvalidField("pre_tokenizer ", Shown(type),
                          " is not supported; only ByteLevel is, alone or after Split and Digits");
    }
    BURST_ASSIGN_OR_RETURN(const bool space,
                           GetBool(json, "add_prefix_space", true, "pre_tokenizer"));
    if (space) return InvalidField("pre_tokenizer.add_prefix_space is not supported");
    BURST_ASSIGN_OR_RETURN(const bool regex, GetBool(json, "use_regex", true, "pre_tokenizer"));
    if (regex) form_.splits.push_back({kGpt2Pattern});
    return absl::OkStatus();
  }

  // Reads a part of a tokenizer of characters: a Metaspace, or a Split at spaces, which are gone.
  absl::Status ReadOfMarks(const Json& json) {
    const std::string type = TypeOf(json);
    if (type == "Split" && form_.normalizer_marks.replace &&
        Get(Get(json, "pattern"), "String") == " ") {
      return absl::OkStatus();
    }
    if (type != "Metaspace" || Get(json, "replacement") != std::string(kSpaceMark)) {
      return InvalidField("pre_tokenizer ", Shown(type),
                          " is not supported with byte_fallback; only Metaspace is");
    }
    if (form_.marks.replace) {
      return InvalidField("pre_tokenizer: a second Metaspace is not supported");
    }
    BURST_ASSIGN_OR_RETURN(form_.cuts_at_marks, GetBool(json, "split", true, "pre_tokenizer"));
    BURST_ASSIGN_OR_RETURN(const bool adds,
                           GetBool(json, "add_prefix_space", true, "pre_tokenizer"));
    const Json& scheme = Get(json, "prepend_scheme");
    form_.marks = {/*replace=*/true, SpaceMarks::Prefix::kNone, /*prefix_once=*/true};
    if (scheme == "never" || (scheme.is_null() && !adds)) return absl::OkStatus();
    if (scheme != "first" && scheme != "always" && !scheme.is_null()) {
      return InvalidField("pre_tokenizer.prepend_scheme must be first, always or never");
    }
    form_.marks.prefix =
        scheme == "first" ? SpaceMarks::Prefix::kFirstPart : SpaceMarks::Prefix::kEachPart;
    return absl::OkStatus();
  }

  const bool of_bytes_;
  TextForm form_;
};

}  // namespace

void SpaceMarks::AppendForm(absl::string_view part, bool begins_text, bool begins_part,
                            absl::Span<size_t> places, std::string* out) const {
  if (part.empty()) return;
  // The first place is before the mark that is put before the part.
  MovePlaces(out->size(), TakePlaces(0, 1, &places));
  const bool begins = prefix == Prefix::kFirstPart ? begins_text : begins_part;
  const bool has_space = (replace && part[0] == ' ') || absl::StartsWith(part, kSpaceMark);
  if (prefix != Prefix::kNone && begins && !(prefix_once && has_space)) {
    absl::StrAppend(out, kSpaceMark);
  }
  for (size_t at = 0; at < part.size(); ++at) {
    const size_t end = replace ? std::min(part.find(' ', at), part.size()) : part.size();
    MovePlaces(out->size(), TakePlaces(at, end, &places));
    absl::StrAppend(out, part.substr(at, end - at));
    at = end;
    if (at == part.size()) break;
    MovePlaces(out->size(), TakePlaces(at, at + 1, &places));
    absl::StrAppend(out, kSpaceMark);
  }
  for (size_t& place : places) place = out->size();
}

void TextForm::AppendNormalized(absl::string_view part, bool begins_part, absl::Span<size_t> places,
                                std::string* out) const {
  std::string composed;
  if (nfc) {
    AppendNfc(part, places, &composed);
    part = composed;
  }
  normalizer_marks.AppendForm(part, /*begins_text=*/false, begins_part, places, out);
}

absl::StatusOr<TextForm> ReadTextForm(const Json& tokenizer_json, bool of_bytes) {
  return Reader(of_bytes).Read(tokenizer_json);
}

}  // namespace burst
