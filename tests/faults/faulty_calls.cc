// A library for LD_PRELOAD that makes one call of the system go wrong:
//
//   FAULT="write:checkpoint:2:ENOSPC"   the 2nd write to a file whose path holds "checkpoint" fails
//   call: write (pwrite and fflush too), fsync (fdatasync too), rename, or name: each of open (of a
//         file to be made), fsync, rename, link, unlink and mkdir
//   how:  ENOSPC, EIO, tear (half is written, then EIO), kill (SIGKILL before the call)
//
//   CLOCK_JUMP=-86400                   the wall clock jumps by so many seconds at every 10th look
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

template <typename Function>
Function* Next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

struct Fault {
  std::string call, path, how;
  int number = 0;

  Fault() {
    const char* text = std::getenv("FAULT");
    if (text == nullptr) return;
    const std::string spec = text;
    const size_t a = spec.find(':'), b = spec.find(':', a + 1), c = spec.find(':', b + 1);
    call = spec.substr(0, a);
    path = spec.substr(a + 1, b - a - 1);
    number = std::atoi(spec.substr(b + 1, c - b - 1).c_str());
    how = spec.substr(c + 1);
  }
};

std::string PathOf(int fd) {
  char path[PATH_MAX] = {};
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  const ssize_t length = readlink(link.c_str(), path, sizeof(path) - 1);
  return length > 0 ? std::string(path, length) : std::string();
}

// Returns whether this call gets the fault. It does not return if the fault kills.
bool IsTheOne(const char* call, const std::string& path) {
  static const Fault* const fault = new Fault;
  static std::atomic<int> calls{0};
  const bool names = std::strcmp(call, "write") != 0 && fault->call == "name";
  if ((fault->call != call && !names) || path.find(fault->path) == std::string::npos) return false;
  if (++calls != fault->number) return false;
  if (fault->how == "kill") kill(getpid(), SIGKILL);
  errno = fault->how == "ENOSPC" ? ENOSPC : EIO;
  return true;
}

bool Tears() {
  const char* text = std::getenv("FAULT");
  return std::strstr(text, ":tear") != nullptr;
}

}  // namespace

extern "C" {

ssize_t write(int fd, const void* data, size_t bytes) {
  static auto* const next = Next<ssize_t(int, const void*, size_t)>("write");
  if (fd <= STDERR_FILENO || !IsTheOne("write", PathOf(fd))) return next(fd, data, bytes);
  if (Tears()) next(fd, data, bytes / 2);
  errno = Tears() ? EIO : errno;
  return -1;
}

ssize_t pwrite(int fd, const void* data, size_t bytes, off_t at) {
  static auto* const next = Next<ssize_t(int, const void*, size_t, off_t)>("pwrite");
  if (!IsTheOne("write", PathOf(fd))) return next(fd, data, bytes, at);
  if (Tears()) next(fd, data, bytes / 2, at);
  errno = Tears() ? EIO : errno;
  return -1;
}

int fflush(FILE* file) {
  static auto* const next = Next<int(FILE*)>("fflush");
  const bool fails =
      file != nullptr && fileno(file) > STDERR_FILENO && IsTheOne("write", PathOf(fileno(file)));
  return fails ? EOF : next(file);
}

int fsync(int fd) {
  static auto* const next = Next<int(int)>("fsync");
  return IsTheOne("fsync", PathOf(fd)) ? -1 : next(fd);
}

int fdatasync(int fd) {
  static auto* const next = Next<int(int)>("fdatasync");
  return IsTheOne("fsync", PathOf(fd)) ? -1 : next(fd);
}

int rename(const char* from, const char* to) {
  static auto* const next = Next<int(const char*, const char*)>("rename");
  return IsTheOne("rename", to) ? -1 : next(from, to);
}

int link(const char* from, const char* to) {
  static auto* const next = Next<int(const char*, const char*)>("link");
  return IsTheOne("link", to) ? -1 : next(from, to);
}

int unlink(const char* path) {
  static auto* const next = Next<int(const char*)>("unlink");
  return IsTheOne("unlink", path) ? -1 : next(path);
}

int mkdir(const char* path, mode_t mode) {
  static auto* const next = Next<int(const char*, mode_t)>("mkdir");
  return IsTheOne("mkdir", path) ? -1 : next(path, mode);
}

int open(const char* path, int flags, ...) {
  static auto* const next = Next<int(const char*, int, ...)>("open");
  mode_t mode = 0;
  if ((flags & O_CREAT) != 0) {
    va_list more;
    va_start(more, flags);
    mode = va_arg(more, mode_t);
    va_end(more);
    if (IsTheOne("open", path)) return -1;
  }
  return next(path, flags, mode);
}

int clock_gettime(clockid_t clock, struct timespec* now) {
  static auto* const next = Next<int(clockid_t, struct timespec*)>("clock_gettime");
  static const char* const jump = std::getenv("CLOCK_JUMP");
  static std::atomic<int> looks{0};
  const int result = next(clock, now);
  if (result == 0 && clock == CLOCK_REALTIME && jump != nullptr) {
    now->tv_sec += (looks++ / 10) * std::atol(jump);
  }
  return result;
}

}  // extern "C"
