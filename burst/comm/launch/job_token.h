// The secret by which the processes of one job know each other (burst/comm/tcp/greeting.h).
//
//   BURST_TOKEN        the token itself, at least 16 characters, the same for all processes
//   BURST_TOKEN_FILE   a file that holds it, readable by its owner alone
//   neither, one host  none is needed: the ranks meet in a folder that is the user's alone
//                      (burst/comm/tcp/socket_folder.h)
//   neither, else      an error
//
// The values that launchers set themselves (job numbers, ports, run ids) are not secret.
#pragma once

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/comm/launch/process_launch.h"

namespace burst {

// The token of the launch's job, by the environment (`variable` is getenv, or replaces it in
// tests); empty where none is needed. InvalidArgument, naming the variable, if it is missing, too
// short, too easy to guess or readable by others.
absl::StatusOr<std::string> FindJobToken(const ProcessLaunch& launch,
                                         const std::function<const char*(const char*)>& variable);

}  // namespace burst
