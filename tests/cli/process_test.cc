#include "burst/cli/process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <vector>

namespace burst {
namespace {

// Runs the body in a new process and returns its exit code.
int ExitCodeOf(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// Without standard files, a program would open files as 0, 1 and 2, and print into them.
TEST(RunProgram, NoFileGetsTheNumbersOfStandardFiles) {
  struct stat nowhere = {};
  ASSERT_EQ(stat("/dev/null", &nowhere), 0);
  const std::vector<std::vector<int>> cases = {{0}, {1}, {2}, {0, 1}, {1, 2}, {0, 1, 2}, {}};
  for (const std::vector<int>& closed : cases) {
    EXPECT_EQ(ExitCodeOf([&] {
                for (const int fd : closed) close(fd);
                RunProgram([](int, char**) { return 0; }, 0, nullptr);
                for (const int fd : closed) {
                  struct stat info = {};
                  if (fstat(fd, &info) != 0 || info.st_rdev != nowhere.st_rdev) return 1;
                }
                return open("/proc/self/status", O_RDONLY) > 2 ? 0 : 2;
              }),
              0)
        << closed.size();
  }
}

}  // namespace
}  // namespace burst
