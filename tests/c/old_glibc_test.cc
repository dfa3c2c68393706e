// Tests what libburst.so brings along for glibc 2.28. This program is linked with the same
// functions.

#include "burst/c/old_glibc.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>

namespace burst {
namespace {

constexpr int64_t kSecond = 1'000'000'000;

int64_t Nanoseconds(const timespec& time) { return time.tv_sec * kSecond + time.tv_nsec; }
int64_t Now(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return Nanoseconds(now);
}
timespec At(int64_t nanoseconds) { return {nanoseconds / kSecond, nanoseconds % kSecond}; }

// Old and new versions have equal bits, so results do not depend on the version.
TEST(OldGlibc, FunctionsHaveTheBitsOfTheNewVersion) {
  void* const library = dlopen("libm.so.6", RTLD_NOW);
  ASSERT_NE(library, nullptr);
  const auto newest = [&](const char* name) {
    return reinterpret_cast<double (*)(double)>(dlsym(library, name));
  };
  double (*const exp_)(double) = newest("exp"), (*const exp2_)(double) = newest("exp2"),
                 (*const log_)(double) = newest("log");
  for (int i = -80000; i <= 80000; ++i) {
    const double x = i / 100.0 + 1e-5 * i * i / 80000;
    ASSERT_EQ(std::exp(x), exp_(x)) << x;
    ASSERT_EQ(std::exp2(x), exp2_(x)) << x;
    ASSERT_EQ(std::log(std::abs(x)), log_(std::abs(x))) << x;
  }
}

TEST(OldGlibc, FilesAreDescribed) {
  char path[] = "/tmp/old_glibc_XXXXXX";
  const int file = mkstemp(path);
  ASSERT_GE(file, 0);
  ASSERT_EQ(write(file, "12345", 5), 5);
  struct stat by_file = {}, by_path = {};
  ASSERT_EQ(fstat(file, &by_file), 0);
  ASSERT_EQ(fstatat(AT_FDCWD, path, &by_path, 0), 0);
  EXPECT_EQ(by_file.st_size, 5);
  EXPECT_EQ(by_path.st_size, 5);
  EXPECT_EQ(by_file.st_ino, by_path.st_ino);
  EXPECT_TRUE(S_ISREG(by_file.st_mode));
  close(file);
  unlink(path);
  errno = 0;
  EXPECT_EQ(fstat(file, &by_file), -1);
  EXPECT_EQ(errno, EBADF);
}

// Both clocks move between two readings, so the time lies between the bounds that they give.
TEST(OldGlibc, TimesMoveToTheRealClock) {
  for (const int64_t ahead : {int64_t{-5}, int64_t{0}, int64_t{1}, 7 * kSecond / 2, 90 * kSecond}) {
    const int64_t real = Now(CLOCK_REALTIME), until = Now(CLOCK_MONOTONIC) + ahead;
    const timespec moved = OnRealTime(CLOCK_MONOTONIC, At(until));
    const int64_t passed = Now(CLOCK_MONOTONIC) - (until - ahead);
    EXPECT_GE(moved.tv_nsec, 0);
    EXPECT_LT(moved.tv_nsec, kSecond);
    const int64_t error = Nanoseconds(moved) - real - ahead;
    EXPECT_LT(std::abs(error), passed + kSecond / 100);  // the clocks' rates differ slightly
  }
}

TEST(OldGlibc, WaitsEndInTime) {
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
  const int64_t until = Now(CLOCK_MONOTONIC) + kSecond / 50;
  const timespec time = At(until);
  pthread_mutex_lock(&mutex);
  EXPECT_EQ(pthread_cond_clockwait(&condition, &mutex, CLOCK_MONOTONIC, &time), ETIMEDOUT);
  EXPECT_GE(Now(CLOCK_MONOTONIC), until);
  pthread_mutex_unlock(&mutex);
}

}  // namespace
}  // namespace burst
