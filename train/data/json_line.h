// A document that is a line of JSON: an object with a text.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "burst/base/enum_names.h"

namespace burst {

enum class BadLines { kError, kSkip };  // what happens to lines that are not documents
inline constexpr EnumName<BadLines> kBadLines[] = {{BadLines::kError, "error"},
                                                   {BadLines::kSkip, "skip"}};

// Says how lines of JSON are read. The options of //train and //train:tokenize set it.
struct LineFormat {
  std::string field = "text";  // the key of the text
  BadLines bad_lines = BadLines::kError;
};
// Returns InvalidArgument that names the option if the format is given for data that is not lines
// of JSON, where it has no effect.
absl::Status CheckHasLines(const LineFormat& format, bool json_lines);
inline constexpr char kFieldHelp[] = "Take the text of .jsonl lines from this key.";
inline constexpr char kBadLinesHelp[] =
    "Stop at .jsonl lines that are not documents (error), or count them and go on (skip).";

struct LineDocument {
  // A range of bytes of the text.
  struct Range {
    int64_t begin = 0, end = 0;
  };

  std::string text;  // UTF-8
  // Whether only some of the tokens count in the loss: those that hold bytes of `counted`, whose
  // ranges increase and do not overlap. Special tokens of such a text are tokens.
  bool masked = false;
  std::vector<Range> counted;
};

// Reads a line as Python's json does: half of a surrogate pair becomes U+FFFD, the last one of
// equal keys counts, and NaN and Infinity are numbers. Keys other than `field` are not kept, except
// `counted`, [[begin, end], ...], if it is such a list (//train:chats writes it).
// InvalidArgument says what is wrong, and at which byte of the line if it is not JSON.
absl::StatusOr<LineDocument> ParseLine(absl::string_view line, const LineFormat& format);

}  // namespace burst
