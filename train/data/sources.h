// Finds the files that --data or --val_data means.
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
  bool json_lines = false;        // .jsonl, .jsonl.gz, .jsonl.zst
  std::vector<SourceFile> files;  // at least one

  // Returns the error with the option's name before it.
  absl::Status Error(const absl::Status& status) const;
  // Opens one of the files, which must be as it was when the sources were found.
  absl::StatusOr<InputFile> Open(const SourceFile& file) const;
};

// Finds sources. `path` is a file, a folder or a glob pattern. A folder means all files below it,
// in order of path, except where a file's or folder's name begins with a dot. Errors name the
// option.
absl::StatusOr<Sources> FindSources(absl::string_view option, const std::string& path);

// Returns a text that differs when the files, their order or their content differ. Waits for a
// moment if a file was changed within the clock's last tick, in which another change would not
// show.
std::string Fingerprint(const std::vector<const Sources*>& sources);

}  // namespace burst
