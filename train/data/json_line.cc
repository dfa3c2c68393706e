#include "train/data/json_line.h"

#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "burst/base/enum_names.h"
#include "burst/base/json.h"

namespace burst {
namespace {

constexpr EnumName<BadLines> kBadLines[] = {{BadLines::kError, "error"}, {BadLines::kSkip, "skip"}};

// Keeps the text of an object's key, and drops all other values as they are read.
class DocumentHandler {
 public:
  explicit DocumentHandler(const LineFormat& format) : format_(format) {}

  bool null() { return Value(); }
  bool boolean(bool) { return Value(); }
  bool number_integer(int64_t) { return Value(); }
  bool number_unsigned(uint64_t) { return Value(); }
  bool number_float(double, const std::string&) { return Value(); }
  bool binary(nlohmann::json::binary_t&) { return false; }
  bool string(std::string& value) {
    if (!Value()) return false;
    if (depth_ != 1 || !is_field_) return true;
    has_text_ = true;
    document_.text = std::move(value);
    return true;
  }
  bool start_object(size_t) {
    if (depth_ > 0 && !Value()) return false;
    return Open();
  }
  bool start_array(size_t) { return Value() && Open(); }
  bool end_object() { return Close(); }
  bool end_array() { return Close(); }
  bool key(std::string& key) {
    if (depth_ == 1) is_field_ = key == format_.field;
    return true;
  }
  bool parse_error(size_t at, const std::string&, const nlohmann::detail::exception&) {
    return Refuse(absl::StrCat("it is not JSON at byte ", at));
  }

  absl::StatusOr<LineDocument> Take() {
    if (!error_.empty()) return absl::InvalidArgumentError(error_);
    if (has_text_) return std::move(document_);
    return absl::InvalidArgumentError(
        absl::StrCat("it has no text with the key '", format_.field, "' (--field)"));
  }

 private:
  bool Refuse(std::string error) {
    error_ = std::move(error);
    return false;
  }

  // A value of the field's key replaces an earlier one.
  bool Value() {
    if (depth_ == 0) return Refuse("it must be a JSON object");
    if (depth_ == 1 && is_field_) has_text_ = false;
    return true;
  }
  bool Open() {
    if (depth_ == kMaxJsonDepth) {
      return Refuse(absl::StrCat("the JSON is nested more than ", kMaxJsonDepth, " deep"));
    }
    ++depth_;
    return true;
  }
  bool Close() {
    --depth_;
    return true;
  }

  const LineFormat& format_;
  LineDocument document_;
  bool has_text_ = false, is_field_ = false;
  int depth_ = 0;
  std::string error_;
};

// Returns the number of a \uXXXX at `at`, or -1.
int64_t Escaped(absl::string_view text, size_t at) {
  if (text.size() < at + 6 || text[at] != '\\' || text[at + 1] != 'u') return -1;
  const std::string digits(text.substr(at + 2, 4));
  if (digits.find_first_not_of("0123456789abcdefABCDEF") != std::string::npos) return -1;
  return std::strtol(digits.c_str(), nullptr, 16);
}

// Replaces what Python's json reads and JSON lacks, by as many bytes. Half of a surrogate pair
// becomes U+FFFD, a number that is not finite 0.
std::string AsJson(absl::string_view line) {
  std::string text(line);
  bool in_string = false;
  for (size_t at = 0; at < text.size(); ++at) {
    if (!in_string) {
      in_string = text[at] == '"';
      for (const absl::string_view number : {"NaN", "-Infinity", "Infinity"}) {
        if (!absl::StartsWith(absl::string_view(text).substr(at), number)) continue;
        text.replace(at, number.size(), std::string(number.size() - 1, ' ') + "0");
      }
    } else if (text[at] == '"') {
      in_string = false;
    } else if (text[at] == '\\') {
      const int64_t first = Escaped(text, at), second = Escaped(text, at + 6);
      const bool high = 0xD800 <= first && first < 0xDC00;
      const bool pair = high && 0xDC00 <= second && second < 0xE000;
      if (!pair && 0xD800 <= first && first < 0xE000) text.replace(at + 2, 4, "fffd");
      at += pair ? 11 : first >= 0 ? 5 : 1;
    }
  }
  return text;
}

}  // namespace

const char* Name(BadLines bad_lines) { return NameOf(bad_lines, kBadLines); }

absl::StatusOr<BadLines> ParseBadLines(absl::string_view text) {
  return ParseName(text, kBadLines);
}

absl::StatusOr<LineDocument> ParseLine(absl::string_view line, const LineFormat& format) {
  DocumentHandler strict(format);
  if (nlohmann::json::sax_parse(line.begin(), line.end(), &strict)) return strict.Take();
  DocumentHandler handler(format);
  const std::string text = AsJson(line);
  nlohmann::json::sax_parse(text, &handler);
  return handler.Take();
}

}  // namespace burst
