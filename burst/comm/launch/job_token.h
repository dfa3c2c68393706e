// The secret by which the processes of one job know each other (burst/comm/tcp/greeting.h).
//
//   BURST_TOKEN        the token itself, at least 16 characters, the same for all processes
//   BURST_TOKEN_FILE   a file that holds it, readable by its owner alone
//   neither, one host  rank 0 makes a random one and leaves it, while the job forms, in a file of
//                      mode 600, in a folder of mode 700 of this user: $XDG_RUNTIME_DIR, or
//                      /tmp/burst-<user id>. The others read it there
//   neither, else      an error
//
// What launchers themselves set (job numbers, ports, run ids) is no secret.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/comm/launch/process_launch.h"

namespace burst {

class JobToken {
 public:
  // The token of the launch's job, by the environment (`variable` is getenv, or replaces it in
  // tests). InvalidArgument, naming the variable, if it is missing, too short or readable by
  // others; FailedPrecondition if the folder is not safe.
  static absl::StatusOr<JobToken> Find(const ProcessLaunch& launch,
                                       const std::function<const char*(const char*)>& variable);
  // Checks the variables alone, which needs no file.
  static absl::Status Check(const ProcessLaunch& launch,
                            const std::function<const char*(const char*)>& variable);

  JobToken(JobToken&& other) noexcept;
  JobToken& operator=(JobToken&&) = delete;
  // Removes the file if this process made it.
  ~JobToken();

  // NotFound, with the file's path, while rank 0 has not made it. A file may be one that an earlier
  // job of the same name left, until rank 0 replaces it: read again after a failure.
  absl::StatusOr<std::string> Read() const;

 private:
  JobToken() = default;

  std::string token_;          // empty: in the file
  std::string folder_, name_;  // of the file
  ino_t made_ = 0;             // the file that this process made
};

}  // namespace burst
