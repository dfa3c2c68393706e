// Runs a program as a user would, for tests of command lines.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace burst {

inline std::string ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Returns the path of a program among the test's data, such as "train/train".
inline std::string ProgramPath(const std::string& path) {
  return std::string(std::getenv("TEST_SRCDIR")) + "/" + std::getenv("TEST_WORKSPACE") + "/" + path;
}

// Makes an empty folder, named after the test case.
inline std::string FreshTestFolder() {
  namespace fs = std::filesystem;
  const testing::TestInfo* test = testing::UnitTest::GetInstance()->current_test_info();
  std::string name = std::string(test->test_suite_name()) + "." + test->name();
  std::replace(name.begin(), name.end(), '/', '_');
  const std::string folder = (fs::path(testing::TempDir()) / name).lexically_normal().string();
  fs::remove_all(folder);
  fs::create_directories(folder);
  return folder;
}

struct Result {
  int exit_code = -1;  // -1: a signal ended the program
  int signal = 0;
  std::string out, err;
};

class Subprocess {
 public:
  struct Options {
    std::string folder;  // the working directory, which also gets the output
    bool mpi = false;    // the program uses Open MPI
    std::string name =
        "";  // ends the names of the output files, if the folder has several programs
  };

  Subprocess(const std::vector<std::string>& command, const Options& options) : options_(options) {
    pid_ = fork();
    if (pid_ != 0) return;
    setenv("BUILD_WORKING_DIRECTORY", options.folder.c_str(), 1);
    Redirect(STDOUT_FILENO, options.folder + "/stdout" + options.name);
    Redirect(STDERR_FILENO, options.folder + "/stderr" + options.name);
    if (options.mpi) {
      // Open MPI must run as root, too, as in a container. Its sockets need a short path.
      setenv("OMPI_ALLOW_RUN_AS_ROOT", "1", 1);
      setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1", 1);
      setenv("TMPDIR", "/tmp", 1);
      setenv("HOME", "/tmp", 0);  // Open MPI 5 must have one
      // Open MPI itself leaks at exit and synchronizes out of the thread sanitizer's sight.
      setenv("ASAN_OPTIONS", "detect_leaks=0", 1);
      setenv("TSAN_OPTIONS", "ignore_noninstrumented_modules=1", 1);
    }
    std::vector<char*> argv;
    for (const std::string& argument : command) argv.push_back(const_cast<char*>(argument.c_str()));
    argv.push_back(nullptr);
    execvp(argv[0], argv.data());
    _exit(127);
  }

  ~Subprocess() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }

  pid_t pid() const { return pid_; }
  // Sends a signal, but not after the program has ended: kill(0, ...) would signal this process.
  void Signal(int number) const {
    if (pid_ > 0) kill(pid_, number);
  }

  // Makes writes beyond `bytes` of a file fail from now on, as on a full disk.
  void LimitFiles(int64_t bytes) const {
    const rlimit limit = {static_cast<rlim_t>(bytes), RLIM_INFINITY};
    if (pid_ > 0) prlimit(pid_, RLIMIT_FSIZE, &limit, nullptr);
  }

  // Returns whether the program has ended. Wait tells how.
  bool Ended() {
    if (pid_ > 0 && waitpid(pid_, &status_, WNOHANG) == pid_) pid_ = 0;
    return pid_ == 0;
  }

  // Stops the program. Returns true once it stands still, false if it has ended.
  bool Stop() {
    if (pid_ <= 0) return false;
    kill(pid_, SIGSTOP);
    waitpid(pid_, &status_, WUNTRACED);
    if (!WIFSTOPPED(status_)) pid_ = 0;
    return pid_ > 0;
  }

  Result Wait() {
    if (pid_ > 0) waitpid(pid_, &status_, 0);
    pid_ = 0;
    Result result;
    if (WIFEXITED(status_)) result.exit_code = WEXITSTATUS(status_);
    if (WIFSIGNALED(status_)) result.signal = WTERMSIG(status_);
    result.out = ReadAll(options_.folder + "/stdout" + options_.name);
    result.err = ReadAll(options_.folder + "/stderr" + options_.name);
    return result;
  }

 private:
  static void Redirect(int fd, const std::string& path) {
    dup2(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644), fd);
  }

  const Options options_;
  pid_t pid_;
  int status_ = 0;
};

}  // namespace burst
