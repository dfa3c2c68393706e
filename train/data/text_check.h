// Checks that files are text before they are read as text.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "train/data/sources.h"

namespace burst {

// The format of a file's first bytes, if it is not UTF-8 text: "gzip", "Parquet", "UTF-16 text",
// and what to do with the file. Both are empty for other files.
struct KnownFormat {
  std::string name, advice;
};
KnownFormat FormatOf(absl::string_view beginning);

// Returns InvalidArgument, which names the option, the file, its format and what to do, for the
// first file that
//
// - begins like a format that is not text (FormatOf),
// - has a NUL in the blocks that are read, or more than one byte in 1,000 that is not UTF-8, unless
//   the tokenizer takes `any_bytes`,
// - is JSON where every file is: a list of objects, or objects with the key `field` in a file that
//   is not named .jsonl.
//
// Reads up to three blocks of 64 KiB of a file: its beginning, middle and end. It reads the first
// block of lines of JSON, after unpacking.
absl::Status CheckIsText(const Sources& sources, bool any_bytes, const std::string& field);

}  // namespace burst
