#include "train/data/json_line.h"

#include <cstdint>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "burst/base/json.h"

namespace burst {
namespace {

constexpr char kCounted[] = "counted";

// Keeps the text of an object's key, and drops all other values as they are read.
class DocumentHandler {
 public:
  explicit DocumentHandler(const LineFormat& format) : format_(format) {}

  bool null() { return Other(); }
  bool boolean(bool) { return Other(); }
  bool number_integer(int64_t) { return Other(); }
  bool number_unsigned(uint64_t value) {
    if (depth_ == 3 && is_counted_) bounds_.push_back(value);
    return depth_ == 3 && is_counted_ ? Value() : Other();
  }
  bool number_float(double, const std::string&) { return Other(); }
  bool binary(nlohmann::json::binary_t&) { return false; }
  bool string(std::string& value) {
    if (!Other()) return false;
    if (depth_ != 1 || !is_field_) return true;
    has_text_ = true;
    document_.text = std::move(value);
    return true;
  }
  bool start_object(size_t) {
    if (depth_ > 0 && !Other()) return false;
    return Open();
  }
  bool start_array(size_t) {
    if (!Value()) return false;
    if (is_counted_ && depth_ == 1) document_.masked = true;
    if (is_counted_ && depth_ > 2) are_ranges_ = false;
    return Open();
  }
  bool end_object() { return Close(); }
  bool end_array() {
    if (is_counted_ && depth_ == 3) {
      are_ranges_ &= bounds_.size() % 2 == 0;
      if (bounds_.size() / 2 != ++ranges_) are_ranges_ = false;
    }
    return Close();
  }
  bool key(std::string& key) {
    if (depth_ != 1) return true;
    is_field_ = key == format_.field;
    is_counted_ = key == kCounted;
    if (is_counted_) document_.masked = false, are_ranges_ = true, ranges_ = 0, bounds_.clear();
    return true;
  }
  bool parse_error(size_t at, const std::string&, const nlohmann::detail::exception&) {
    return Refuse(absl::StrCat("it is not JSON at byte ", at));
  }

  absl::StatusOr<LineDocument> Take() {
    if (!error_.empty()) return absl::InvalidArgumentError(error_);
    if (!has_text_) {
      return absl::InvalidArgumentError(
          absl::StrCat("it has no text with the key '", format_.field, "' (--field)"));
    }
    if (!document_.masked) return std::move(document_);
    for (size_t i = 0; i + 1 < bounds_.size(); i += 2) {
      document_.counted.push_back(
          {static_cast<int64_t>(bounds_[i]), static_cast<int64_t>(bounds_[i + 1])});
    }
    for (size_t i = 0; i < bounds_.size(); ++i) {
      are_ranges_ &=
          bounds_[i] <= document_.text.size() && (i == 0 || bounds_[i - 1] <= bounds_[i]);
    }
    if (are_ranges_) return std::move(document_);
    return absl::InvalidArgumentError(absl::StrCat(
        "'", kCounted, "' must be a list of ranges [begin, end] of bytes of the text, ",
        "increasing; write it by //train:chats"));
  }

 private:
  bool Refuse(std::string error) {
    error_ = std::move(error);
    return false;
  }

  // A value that is not a part of ranges.
  bool Other() {
    if (is_counted_ && depth_ > 1) are_ranges_ = false;
    return Value();
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
  bool has_text_ = false, is_field_ = false, is_counted_ = false;
  bool are_ranges_ = true;        // whether the value of kCounted has the form of ranges
  std::vector<uint64_t> bounds_;  // their numbers
  size_t ranges_ = 0;
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

absl::Status CheckHasLines(const LineFormat& format, bool json_lines) {
  const LineFormat usual;
  if (json_lines) return absl::OkStatus();
  const bool bad_lines = format.bad_lines != usual.bad_lines;
  if (!bad_lines && format.field == usual.field) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      bad_lines ? "--bad_lines" : "--field",
      ": must be left out unless --data is .jsonl files; got ",
      bad_lines ? NameOf(format.bad_lines, kBadLines) : format.field, "; leave it out"));
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
