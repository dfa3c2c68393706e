#include "burst/base/host_memory.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

namespace burst {
namespace {

namespace fs = std::filesystem;

// Writes the files of a machine.
class HostMemory : public ::testing::Test {
 protected:
  void SetUp() override {
    fs::remove_all(root_);
    Write("proc/meminfo", "MemTotal:       1000 kB\nMemFree:  10 kB\nMemAvailable:    800 kB\n");
  }
  void Write(const std::string& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  int64_t Free() const { return FreeHostMemory(root_.string() + "/"); }

  const fs::path root_ = fs::path(::testing::TempDir()) / "machine";
};

TEST_F(HostMemory, IsTheSystemsWithoutLimits) {
  EXPECT_EQ(Free(), 800 * 1024);
  Write("proc/self/cgroup", "0::/job\n");
  Write("sys/fs/cgroup/job/memory.max", "max\n");
  Write("sys/fs/cgroup/job/memory.current", "5000\n");
  EXPECT_EQ(Free(), 800 * 1024);
}

TEST_F(HostMemory, IsUnlimitedWhereNothingIsSaid) {
  fs::remove_all(root_ / "proc");
  EXPECT_EQ(Free(), std::numeric_limits<int64_t>::max());
}

TEST_F(HostMemory, IsLimitedByControlGroups) {
  Write("proc/self/cgroup", "0::/slice/job\n");
  Write("sys/fs/cgroup/slice/job/memory.max", "500000\n");
  Write("sys/fs/cgroup/slice/job/memory.current", "200000\n");
  EXPECT_EQ(Free(), 300000);
  Write("sys/fs/cgroup/slice/job/memory.stat", "anon 7\ninactive_file 50000\nactive_file 6000\n");
  EXPECT_EQ(Free(), 356000) << "caches are free";
  Write("sys/fs/cgroup/slice/memory.max", "400000\n");
  Write("sys/fs/cgroup/slice/memory.current", "390000\n");
  EXPECT_EQ(Free(), 10000) << "the group around it";
  Write("sys/fs/cgroup/memory.max", "1000\n");  // a container's limit, seen from inside
  Write("sys/fs/cgroup/memory.current", "3000\n");
  EXPECT_EQ(Free(), 0);
}

TEST_F(HostMemory, IsLimitedByControlGroupsOfVersion1) {
  Write("proc/self/cgroup", "12:cpu:/\n4:memory:/job\n");
  Write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "500000\n");
  Write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "100000\n");
  EXPECT_EQ(Free(), 400000);
}

TEST(FreeHostMemory, IsOfThisMachine) {
  EXPECT_GT(FreeHostMemory(), 1 << 20);
  EXPECT_LT(FreeHostMemory(), sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE));
}

}  // namespace
}  // namespace burst
