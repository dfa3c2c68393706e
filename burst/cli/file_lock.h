// A lock on a file, which one process holds at a time.
//
//   BURST_ASSIGN_OR_RETURN(const FileLock lock, FileLock::TryAcquire("runs/one/.lock"));
//
// The kernel releases the lock when its holder dies. The file stays, because removing it would let
// two processes lock two files of one name. While the lock is held, the file has a line about the
// holder. The lock is advisory (flock). On NFS it holds between hosts.
#pragma once

#include <functional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace burst {

class FileLock {
 public:
  // Makes the file where it is missing. Unavailable, naming the holder, while another process (or
  // another FileLock of this one) holds it; Unimplemented where the file system has no locks.
  // NotFound means that its folder is gone.
  static absl::StatusOr<FileLock> TryAcquire(const std::string& path);

  // Called while another process holds the lock: at once, then every second. `holder` describes it,
  // for example "pid 12 on node7, since (date and time) UTC: train --out=a". `seconds` is the time
  // waited so far. An error ends the waiting.
  using Waiting = std::function<absl::Status(const std::string& holder, double seconds)>;
  // Waits until the lock is free. Returns the error of `waiting`, or any error of TryAcquire except
  // Unavailable.
  static absl::StatusOr<FileLock> Acquire(const std::string& path, const Waiting& waiting);

  // Returns FailedPrecondition if the path no longer leads to the locked file: another process can
  // then lock the file that is there now.
  absl::Status CheckStillThere() const;

  FileLock(FileLock&& other);
  FileLock& operator=(FileLock&&) = delete;
  ~FileLock();

 private:
  FileLock(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  // Whether it is now this one's.
  absl::StatusOr<bool> Lock();
  std::string Holder() const;

  int fd_ = -1;
  std::string path_;
};

}  // namespace burst
