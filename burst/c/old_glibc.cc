// Functions by which libburst.so, linked against a newer glibc, loads with glibc 2.28.
//
// The linker takes the old versions of the functions in old_glibc.bzl. The functions here are not
// in glibc 2.28, or have an old version in a library that must also give newer functions (libm).
// Each is hidden, so only this library uses it.
#include "burst/c/old_glibc.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>

namespace burst {

timespec OnRealTime(clockid_t clock, const timespec& until) {
  constexpr int64_t kSecond = 1'000'000'000;
  timespec now, real;
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &real);
  const int64_t nanoseconds = until.tv_nsec - now.tv_nsec + real.tv_nsec + kSecond;
  return {until.tv_sec - now.tv_sec + real.tv_sec + nanoseconds / kSecond - 1,
          nanoseconds % kSecond};
}

}  // namespace burst

#define BURST_HIDDEN __attribute__((visibility("hidden")))

extern "C" {

// From glibc 2.29 on, the versions of these functions do not set errno. The numbers are the same.
#define BURST_OLD_VERSION(function)                               \
  double Old_##function(double);                                  \
  __asm__(".symver Old_" #function "," #function "@GLIBC_2.2.5"); \
  BURST_HIDDEN double New_##function(double) __asm__(#function);  \
  double New_##function(double x) { return Old_##function(x); }
BURST_OLD_VERSION(exp)
BURST_OLD_VERSION(exp2)
BURST_OLD_VERSION(log)

// libstdc++ counts references without atomic operations where this is true.
BURST_HIDDEN char __libc_single_threaded = 0;

BURST_HIDDEN int fstat(int file, struct stat* result) noexcept {
  return static_cast<int>(syscall(SYS_fstat, file, result));
}
BURST_HIDDEN int fstat64(int file, struct stat64* result) noexcept {
  return static_cast<int>(syscall(SYS_fstat, file, result));
}
BURST_HIDDEN int fstatat(int folder, const char* path, struct stat* result, int flags) noexcept {
  return static_cast<int>(syscall(SYS_newfstatat, folder, path, result, flags));
}

// This function is for libstdc++'s random_device, which nothing here uses.
BURST_HIDDEN uint32_t arc4random() noexcept {
  uint32_t number = 0;
  (void)!getrandom(&number, sizeof(number), 0);
  return number;
}

// The C library's own function, where it has one (from 2.30 on), does not mind a clock that is set.
BURST_HIDDEN int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                                        clockid_t clock, const timespec* until) {
  static const auto own = reinterpret_cast<decltype(&pthread_cond_clockwait)>(
      dlsym(RTLD_DEFAULT, "pthread_cond_clockwait"));
  if (own != nullptr) return own(condition, mutex, clock, until);
  const timespec real = burst::OnRealTime(clock, *until);
  return pthread_cond_timedwait(condition, mutex, &real);
}
BURST_HIDDEN int pthread_mutex_clocklock(pthread_mutex_t* mutex, clockid_t clock,
                                         const timespec* until) noexcept {
  static const auto own = reinterpret_cast<decltype(&pthread_mutex_clocklock)>(
      dlsym(RTLD_DEFAULT, "pthread_mutex_clocklock"));
  if (own != nullptr) return own(mutex, clock, until);
  const timespec real = burst::OnRealTime(clock, *until);
  return pthread_mutex_timedlock(mutex, &real);
}

}  // extern "C"
