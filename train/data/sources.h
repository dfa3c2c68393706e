// The files that --data or --val_data means.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "train/data/input_file.h"

namespace burst {

struct SourceFile {
  std::string path;
  FileIdentity identity;
};

struct Sources {
  std::string option;             // "data" or "val_data", for errors
  bool shards = false;            // .bin
  bool json_lines = false;        // .jsonl
  std::vector<SourceFile> files;  // at least one

  // The error with the option's name before it.
  absl::Status Error(const absl::Status& status) const;
  // A file of theirs, which must be as it was when they were found.
  absl::StatusOr<InputFile> Open(const SourceFile& file) const;
};

// `path`: a file, a folder (all files below it, in order of path, but for those whose name or
// folder's name begins with a dot) or a glob pattern. Errors name the option.
absl::StatusOr<Sources> FindSources(absl::string_view option, const std::string& path);

// A text that is another one when the files, their order or their content are others. Waits for a
// moment where a file was changed within the clock's last tick: another change within that tick
// would not show.
std::string Fingerprint(const std::vector<const Sources*>& sources);

}  // namespace burst
