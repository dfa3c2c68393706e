// Whether files are text, before they are taken for it.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "train/data/sources.h"

namespace burst {

// What the first bytes of a file are, if they are known to be no UTF-8 text: "gzip", "Parquet",
// "UTF-16 text", and what to do with it. Both empty: nothing is known against it.
struct KnownFormat {
  std::string name, advice;
};
KnownFormat FormatOf(absl::string_view beginning);

// InvalidArgument, naming the option, the file, what it is and what to do, for the first file that
//
// - begins like a format that is not text (FormatOf),
// - has a NUL in the blocks that are read, or more than one byte in 1,000 that is not UTF-8, unless
//   the tokenizer takes `any_bytes`,
// - is JSON where every file is: a list of objects, or objects with the key `field` in a file that
//   is not named .jsonl.
//
// Reads up to three blocks of 64 KiB of a file: its beginning, middle and end.
absl::Status CheckIsText(const Sources& sources, bool any_bytes, const std::string& field);

}  // namespace burst
