// A folder of files that are made once from the data and read by every process and every later run.
//
// A file's name is a hash of all inputs that it was made from, so other inputs make another file.
// One process makes it under a lock, which its death frees, and the others wait. A damaged file is
// made anew. The folder keeps the kKept files that were used last. It may be removed when no run is
// starting.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "burst/cli/file_lock.h"
#include "train/data/checked_file.h"

namespace burst {

class DataCache {
 public:
  static constexpr int kKept = 8;

  // Errors about the folder begin with "--data_cache: ".
  explicit DataCache(std::string folder) : folder_(std::move(folder)) {}

  // The result of a function that writes the payload: its size, and the description.
  struct Content {
    int64_t payload_bytes = 0;
    std::string description;
  };
  using Make = std::function<absl::StatusOr<Content>(CheckedFileWriter* payload)>;
  // Checks that a file is the one that the caller needs. DataLoss makes it anew.
  using Check = std::function<absl::Status(const CheckedFile& file)>;

  // Returns the file of this key, which names all inputs of its content. Makes a missing file on
  // all cores. Any number of processes and hosts may call it at once. If the file cannot be made,
  // it removes the folders that it made, unless another process uses them.
  absl::StatusOr<std::unique_ptr<const CheckedFile>> Get(absl::string_view key, const Check& check,
                                                         const Make& make) const;

 private:
  absl::StatusOr<FileLock> Lock(const std::string& name, std::vector<std::string>* made) const;
  absl::Status MakeFile(const std::string& name, const Make& make) const;
  void RemoveLeftovers(const std::string& name) const;
  void RemoveOldest() const;
  std::string Path(absl::string_view name, absl::string_view suffix) const;

  std::string folder_;
};

}  // namespace burst
