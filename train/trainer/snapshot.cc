#include "train/trainer/snapshot.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <utility>
#include <vector>

#include "burst/base/parallel.h"
#include "burst/cli/process.h"

namespace burst {
namespace {

constexpr std::chrono::milliseconds kPollInterval{20};
constexpr unsigned kMostSeconds = 600;  // limit for the saving process, which nobody else ends

// Closes the connections that the child inherited, because others notice by them that the parent
// has ended. A launcher that waits for the end of its processes' output then does not wait for the
// child.
void LeaveConnections() {
  std::vector<int> connections;
  DIR* const folder = opendir("/proc/self/fd");
  if (folder == nullptr) return;
  while (const dirent* entry = readdir(folder)) {
    const int fd = std::atoi(entry->d_name);
    struct stat about = {};
    if (fd != dirfd(folder) && fstat(fd, &about) == 0 && !S_ISREG(about.st_mode)) {
      connections.push_back(fd);
    }
  }
  closedir(folder);
  for (const int fd : connections) close(fd);
  for (int fd = 0; fd <= STDERR_FILENO; ++fd) dup2(open("/dev/null", O_RDWR), fd);
}

}  // namespace

SnapshotOnSignal::SnapshotOnSignal(std::function<absl::Status()> save, std::function<bool()> busy)
    : save_(std::move(save)),
      busy_(std::move(busy)),
      thread_(StartWithoutSignals([this] { Watch(); })) {}

SnapshotOnSignal::~SnapshotOnSignal() {
  done_.store(true);
  thread_.join();
  AwaitSave();
}

void SnapshotOnSignal::BeginSave() {
  BeginChange();
  AwaitSave();
}

void SnapshotOnSignal::AwaitSave() {
  while (child_ > 0 && waitpid(child_, nullptr, 0) < 0 && errno == EINTR) {
  }
  child_ = 0;
}

bool SnapshotOnSignal::LockedAndIdle() {
  if (!mutex_.try_lock()) return false;
  if (!busy_()) return true;
  mutex_.unlock();
  return false;
}

void SnapshotOnSignal::Watch() {
  while (!done_.load()) {
    std::this_thread::sleep_for(kPollInterval);
    if (InterruptSignal() == 0) continue;
    // The fork waits while the state changes. It does not happen if this process itself saves
    // first.
    while (!LockedAndIdle()) {
      if (done_.load()) return;
      std::this_thread::sleep_for(kPollInterval);
    }
    if (!done_.load()) Save();
    mutex_.unlock();
    return;
  }
}

void SnapshotOnSignal::Save() {
  child_ = fork();
  if (child_ != 0) return;  // in the parent, or if the fork failed
  setsid();
  alarm(kMostSeconds);
  LeaveConnections();
  const ScopedThreadPool one_thread(1);
  _exit(save_().ok() ? 0 : 1);
}

}  // namespace burst
