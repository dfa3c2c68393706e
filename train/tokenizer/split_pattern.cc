#include "train/tokenizer/split_pattern.h"

#include <algorithm>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "burst/base/check.h"
#include "burst/base/host_memory.h"
#include "burst/base/status.h"
#include "train/data/utf8.h"
#include "train/tokenizer/unicode_additions.h"

namespace burst {
namespace {

constexpr size_t kLongestPattern = 10000;

// Unicode's White_Space. PCRE2's \s also has U+180E.
constexpr char kSpaces[] =
    "\\x09-\\x0d\\x20\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}"
    "\\x{205f}\\x{3000}";

absl::Status NotSupported(absl::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat("its pattern has ", what, ", which is not supported"));
}

// Returns the ranges that later versions of Unicode added to a category ("L", "Lu").
std::string Additions(absl::string_view category) {
  std::string ranges;
  for (const UnicodeAddition& addition : kUnicodeAdditions) {
    if (!absl::StartsWith(addition.category, category)) continue;
    absl::StrAppendFormat(&ranges, "\\x{%x}-\\x{%x}", addition.first, addition.last);
  }
  return ranges;
}

// Properties \p{...} that have the same characters in PCRE2 and Oniguruma, with Additions. Scripts
// do not: PCRE2's contain the characters that several scripts share.
constexpr absl::string_view kProperties[] = {"L",  "Lu", "Ll", "Lt", "Lm", "Lo", "M",  "Me",
                                             "N",  "Nd", "Nl", "No", "P",  "Pc", "Pd", "Ps",
                                             "Pe", "Pi", "Pf", "Po", "S",  "Sm", "Sc", "Sk",
                                             "So", "Z",  "Zs", "Zl", "Zp", "Cc", "Co", "Any"};

// Writes the classes of characters that PCRE2 takes differently as lists of characters.
class Translator {
 public:
  explicit Translator(absl::string_view pattern) : in_(pattern) {}

  absl::StatusOr<std::string> Translate() {
    if (absl::StrContains(in_, "(*")) return NotSupported("a verb (*...)");
    if (absl::StrContains(in_, "(?i")) BURST_RETURN_IF_ERROR(CheckCaseless());
    while (at_ < in_.size()) {
      const char c = in_[at_];
      if (c == '\\') {
        BURST_RETURN_IF_ERROR(Escape());
        continue;
      }
      if (c == '[' && in_class_) return NotSupported("a class inside of a class");
      if (in_class_ && absl::StartsWith(in_.substr(at_), "&&")) {
        return NotSupported("an intersection of classes");
      }
      if (!in_class_) BURST_RETURN_IF_ERROR(CheckOutsideOfClasses());
      if (c == '$' && !in_class_) {  // the end of a line
        out_ += "(?m:$)", ++at_;
        continue;
      }
      out_ += c, ++at_;
      if (c == '[') {
        in_class_ = true;
        // A bracket that comes first does not end the class.
        if (at_ < in_.size() && in_[at_] == '^') out_ += in_[at_++];
        if (at_ < in_.size() && in_[at_] == ']') return NotSupported("a class that begins with ]");
      }
      if (c == ']') in_class_ = false;
    }
    return std::move(out_);
  }

 private:
  // Refuses what Oniguruma finds otherwise without case: U+00DF and ss are the same there.
  absl::Status CheckCaseless() const {
    for (const absl::string_view letters : {"ss", "st", "ff", "fi", "fl"}) {
      if (!absl::StrContains(absl::AsciiStrToLower(in_), letters)) continue;
      return NotSupported(absl::StrCat("the letters ", letters, " with (?i"));
    }
    if (absl::c_all_of(in_, absl::ascii_isascii) && !absl::StrContains(in_, "\\x")) {
      return absl::OkStatus();
    }
    return NotSupported("characters that are not ASCII, or \\x, with (?i");
  }

  // Refuses what Oniguruma reads otherwise: anchors at the start, flags, and repetitions {n,m} that
  // begin with a comma or that a + or ? follows.
  absl::Status CheckOutsideOfClasses() const {
    const absl::string_view rest = in_.substr(at_);
    if (rest[0] == '^') return NotSupported("the anchor ^");
    if (absl::StartsWith(rest, "(?#")) return NotSupported("a comment");
    if (absl::StartsWith(rest, "(?")) {
      const size_t end =
          rest.find_first_not_of("-abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ", 2);
      const absl::string_view flags = rest.substr(2, end - 2);
      const bool are_flags = end < rest.size() && (rest[end] == ':' || rest[end] == ')');
      if (are_flags && flags.find_first_not_of("i-") != absl::string_view::npos) {
        return NotSupported(absl::StrCat("the flags (?", flags, ")"));
      }
      if (are_flags && rest[end] == ')' && at_ > 0) {
        return NotSupported(absl::StrCat("the flags (?", flags, ") behind its beginning"));
      }
    }
    if (rest[0] != '{') return absl::OkStatus();
    const size_t end = rest.find_first_not_of("0123456789,", 1);
    if (end == absl::string_view::npos || rest[end] != '}') return absl::OkStatus();
    const bool has_comma = absl::StrContains(rest.substr(0, end), ",");
    const absl::string_view after = rest.substr(end + 1, 1);
    const bool goes_on = after == "+" || (after == "?" && !has_comma);
    if (goes_on || rest[1] == ',') {
      return NotSupported(absl::StrCat("the repetition ", rest.substr(0, end + 1 + goes_on)));
    }
    return absl::OkStatus();
  }

  absl::Status Escape() {
    const char kind = at_ + 1 < in_.size() ? in_[at_ + 1] : '\0';
    // Oniguruma's \w has other characters, its \h is a digit, its \v is one character. A piece is
    // matched by itself, so \A and \G would match at every piece. Few others are the same.
    constexpr absl::string_view kSame = "pPsSdDrntfx";
    if (absl::ascii_isalnum(kind) && !absl::StrContains(kSame, kind)) {
      return NotSupported(absl::StrCat("\\", absl::string_view(&kind, 1)));
    }
    if (kind == 'd' || kind == 'D') {
      at_ += 2;
      return Class(absl::StrCat("\\p{Nd}", Additions("Nd")), kind == 'D', "\\D");
    }
    if (kind == 's' || kind == 'S') {
      at_ += 2;
      return Class(kSpaces, kind == 'S', "\\S");
    }
    if (kind == 'p' || kind == 'P') {
      if (!absl::StartsWith(in_.substr(at_ + 2), "{")) return NotSupported("a \\p without a {");
      const size_t end = in_.find('}', at_) + 1;
      if (end == 0) return NotSupported("a \\p without its }");
      const absl::string_view name = in_.substr(at_ + 3, end - at_ - 4);
      if (!absl::c_linear_search(kProperties, name)) {
        return NotSupported(absl::StrCat("the property \\p{", name, "}"));
      }
      const std::string additions = Additions(name);
      if (!additions.empty()) {
        at_ = end;
        return Class(absl::StrCat("\\p{", name, "}", additions), kind == 'P', "\\P");
      }
    }
    size_t end = std::min(at_ + 2, in_.size());
    // From 80 on, Oniguruma's \x with two digits is a byte of UTF-8.
    const bool is_high = kind == 'x' && end + 1 < in_.size() &&
                         absl::ascii_isxdigit(in_[end + 1]) &&
                         absl::StrContains("89abcdefABCDEF", in_[end]);
    if (is_high) return NotSupported(in_.substr(at_, 4));
    if (kind == 'x' && in_.substr(end, 1) == "{")
      end = std::min(in_.find('}', end), in_.size() - 1) + 1;
    absl::StrAppend(&out_, in_.substr(at_, end - at_));
    at_ = end;
    return absl::OkStatus();
  }

  absl::Status Class(absl::string_view members, bool negated, absl::string_view name) {
    if (in_class_ && negated) return NotSupported(absl::StrCat(name, " inside of a class"));
    if (in_class_) {
      absl::StrAppend(&out_, members);
    } else {
      absl::StrAppend(&out_, negated ? "[^" : "[", members, "]");
    }
    return absl::OkStatus();
  }

  absl::string_view in_;
  size_t at_ = 0;
  bool in_class_ = false;
  std::string out_;
};

PCRE2_SPTR Bytes(absl::string_view text) { return reinterpret_cast<PCRE2_SPTR>(text.data()); }

constexpr char kNoMemory[] = "out of memory: none for the tokenizer's pattern";

}  // namespace

absl::StatusOr<std::shared_ptr<const SplitPattern>> SplitPattern::Compile(
    absl::string_view pattern) {
  if (pattern.empty()) return absl::InvalidArgumentError("its pattern is empty");
  if (pattern.size() > kLongestPattern) {
    return absl::InvalidArgumentError(
        absl::StrCat("its pattern has ", pattern.size(), " bytes, more than ", kLongestPattern));
  }
  BURST_ASSIGN_OR_RETURN(const std::string translated, Translator(pattern).Translate());
  int error = 0;
  size_t place = 0;
  pcre2_code* code =
      pcre2_compile(Bytes(translated), translated.size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &place, nullptr);
  if (code == nullptr) {
    unsigned char message[256];
    pcre2_get_error_message(error, message, sizeof(message));
    return absl::InvalidArgumentError(absl::StrCat("its pattern is not a regular expression: ",
                                                   reinterpret_cast<const char*>(message)));
  }
  std::shared_ptr<SplitPattern> result(new SplitPattern(code));
  uint32_t lookbehind = 0;
  pcre2_pattern_info(code, PCRE2_INFO_MAXLOOKBEHIND, &lookbehind);
  if (lookbehind > 0) return NotSupported("a part that looks at what is before it");
  // If code cannot be made at run time, PCRE2 interprets the pattern.
  result->has_jit_ = pcre2_jit_compile(code, PCRE2_JIT_COMPLETE | PCRE2_JIT_PARTIAL_HARD) == 0;
  return std::shared_ptr<const SplitPattern>(std::move(result));
}

PatternMatcher::PatternMatcher(std::shared_ptr<const SplitPattern> pattern)
    : pattern_(std::move(pattern)),
      data_(pcre2_match_data_create(1, nullptr)),
      context_(pcre2_match_context_create(nullptr)) {
  if (data_ == nullptr || context_ == nullptr) OutOfMemory(kNoMemory);
  if (!pattern_->has_jit()) return;
  constexpr size_t kFirst = 32 << 10, kMost = 1 << 20;  // bytes
  stack_.reset(pcre2_jit_stack_create(kFirst, kMost, nullptr));
  if (stack_ == nullptr) OutOfMemory(kNoMemory);
  pcre2_jit_stack_assign(context_.get(), nullptr, stack_.get());
}

int PatternMatcher::Match(absl::string_view text, size_t begin, uint32_t options, uint32_t steps) {
  pcre2_set_match_limit(context_.get(), steps);
  if (pattern_->has_jit()) {
    return pcre2_jit_match(pattern_->code(), Bytes(text), text.size(), begin, options, data_.get(),
                           context_.get());
  }
  return pcre2_match(pattern_->code(), Bytes(text), text.size(), begin,
                     options | PCRE2_NO_UTF_CHECK, data_.get(), context_.get());
}

absl::StatusOr<int> PatternMatcher::MatchInTime(absl::string_view text, size_t begin,
                                                uint32_t options) {
  // PCRE2 does not say how many steps a match took, but whether a limit was enough.
  uint32_t steps = kFirstSteps;
  int result = Match(text, begin, options, steps);
  while (result == PCRE2_ERROR_MATCHLIMIT && steps < kMostSteps) {
    steps_ += steps;
    if (steps_ > kFreeSteps + kStepsPerByte * bytes_) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "the tokenizer's pattern takes too long: more than ", kStepsPerByte, " steps a byte"));
    }
    steps = std::min(8 * steps, kMostSteps);
    result = Match(text, begin, options, steps);
  }
  return result;
}

absl::StatusOr<size_t> PatternMatcher::FirstPiece(absl::string_view text, bool complete) {
  const uint32_t options = complete ? 0 : PCRE2_PARTIAL_HARD;
  const size_t* match = pcre2_get_ovector_pointer(data_.get());
  matched_ = false;
  BURST_ASSIGN_OR_RETURN(int result, MatchInTime(text, 0, options));
  if (result >= 0 && match[0] == 0 && match[1] == 0) {
    // As in tokenizers, an empty match where a piece begins does not count, but the next one.
    size_t begin = 0;
    NextCodePoint(text, &begin);
    BURST_ASSIGN_OR_RETURN(result, MatchInTime(text, begin, options));
  }
  if (result == PCRE2_ERROR_NOMATCH && complete) bytes_ += static_cast<int64_t>(text.size());
  if (result == PCRE2_ERROR_NOMATCH) return complete ? text.size() : kMore;
  if (result == PCRE2_ERROR_PARTIAL) return kMore;
  // 0 means more groups than were asked for.
  if (result < 0) {
    unsigned char message[256];
    pcre2_get_error_message(result, message, sizeof(message));
    return absl::ResourceExhaustedError(absl::StrCat("the tokenizer's pattern takes too long: ",
                                                     reinterpret_cast<const char*>(message)));
  }
  if (match[0] > match[1]) return absl::ResourceExhaustedError("the tokenizer's pattern uses \\K");
  matched_ = match[0] == 0;
  const size_t length = matched_ ? match[1] : match[0];
  BURST_CHECK(length > 0 && length <= text.size()) << length;
  bytes_ += static_cast<int64_t>(length);
  return length;
}

}  // namespace burst
