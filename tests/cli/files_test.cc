#include "burst/cli/files.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/testing/subprocess.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> Names(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

// Two writers of one name each write to their own file. So the name always has the whole content of
// one of them.
TEST(AtomicFile, WritersOfOneNameDoNotMix) {
  const std::string folder = FreshTestFolder(), path = folder + "/file";
  auto a = AtomicFile::Create(path), b = AtomicFile::Create(path);
  ASSERT_TRUE(a.ok() && b.ok()) << a.status() << b.status();
  ASSERT_TRUE(a->Write("aaaa", 4).ok() && b->Write("bb", 2).ok());
  EXPECT_FALSE(fs::exists(path));
  ASSERT_TRUE(a->Commit().ok());
  EXPECT_EQ(ReadAll(path), "aaaa");
  ASSERT_TRUE(b->Commit().ok());
  EXPECT_EQ(ReadAll(path), "bb");
  EXPECT_EQ(Names(folder), std::vector<std::string>{"file"});
}

TEST(AtomicFile, ProcessesOfOneNameDoNotMix) {
  const std::string folder = FreshTestFolder(), path = folder + "/file";
  const std::string contents[] = {std::string(300000, 'a'), std::string(200000, 'b')};
  std::vector<pid_t> writers;
  for (const std::string& content : contents) {
    writers.push_back(fork());
    if (writers.back() != 0) continue;
    for (int i = 0; i < 100; ++i) {
      if (!WriteFileAtomically(path, content).ok()) _exit(1);
    }
    _exit(0);
  }
  size_t running = writers.size(), seen = 0;
  while (running > 0) {
    if (fs::exists(path)) {  // and from then on always
      const std::string content = ReadAll(path);
      EXPECT_TRUE(content == contents[0] || content == contents[1]) << content.size();
      ++seen;
    }
    int status;
    if (waitpid(-1, &status, WNOHANG) <= 0) continue;
    EXPECT_EQ(status, 0);
    --running;
  }
  EXPECT_GT(seen, 0u);
  EXPECT_EQ(Names(folder), std::vector<std::string>{"file"});
}

TEST(AtomicFile, NotCommittedItLeavesNothing) {
  const std::string folder = FreshTestFolder();
  {
    auto file = AtomicFile::Create(folder + "/file");
    ASSERT_TRUE(file.ok());
    EXPECT_EQ(Names(folder).size(), 1u);
  }
  EXPECT_EQ(Names(folder).size(), 0u);
  EXPECT_FALSE(AtomicFile::Create(folder + "/missing/file").ok());
}

TEST(AtomicFile, LeftoversOfTheKilledAreRemovedAndNothingElse) {
  const std::string folder = FreshTestFolder(), path = folder + "/file";
  const pid_t killed = fork();
  if (killed == 0) {
    auto file = AtomicFile::Create(path);
    kill(getpid(), SIGKILL);
  }
  waitpid(killed, nullptr, 0);
  ASSERT_EQ(Names(folder).size(), 1u);
  std::ofstream(path + ".tmp") << "an older version's";
  const std::vector<std::string> others = {"file",          "file.12.tmp",   "file.a-1.tmp",
                                           "file2.1-2.tmp", "other.1-2.tmp", "file.1-2.tmpx"};
  for (const std::string& name : others) std::ofstream(absl::StrCat(folder, "/", name)) << "mine";
  const auto is_file = [](absl::string_view name) { return name == "file"; };
  ASSERT_EQ(RemoveTemporaries(folder, is_file), absl::OkStatus());
  std::vector<std::string> expected = others;
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(Names(folder), expected);
  EXPECT_FALSE(RemoveTemporaries(folder + "/missing", is_file).ok());
}

TEST(ReadFile, RegularFilesUpToALimit) {
  const std::string folder = FreshTestFolder(), path = folder + "/file", pipe = folder + "/pipe";
  std::ofstream(path) << "1234";
  EXPECT_EQ(*ReadFile(path, 4), "1234");
  EXPECT_EQ(ReadFile(path, 3).status().message(), path + " holds 4 bytes; at most 3 are read");
  EXPECT_TRUE(absl::IsNotFound(ReadFile(folder + "/missing").status()));
  ASSERT_EQ(mkfifo(pipe.c_str(), 0644), 0);
  EXPECT_EQ(ReadFile(pipe).status().message(), pipe + " is a pipe, not a file");
  EXPECT_EQ(ReadFile(folder).status().message(), folder + " is a folder, not a file");
  fs::create_symlink("/dev/zero", folder + "/zero");
  EXPECT_EQ(ReadFile(folder + "/zero").status().message(),
            folder + "/zero is a device, not a file");
  // This is a file of the kernel, which says that it holds 0 bytes.
  EXPECT_FALSE(ReadFile("/proc/self/status")->empty());
  EXPECT_EQ(ReadFile("/proc/self/status", 10).status().message(),
            "/proc/self/status holds more than 10 bytes; no more are read");
}

TEST(CopyFileAtomically, KeepsThePermissions) {
  const std::string folder = FreshTestFolder(), from = folder + "/from", to = folder + "/to";
  std::ofstream(from) << "content";
  for (const unsigned mode : {0600u, 0400u, 0644u, 0755u}) {
    fs::permissions(from, fs::perms(mode));
    ASSERT_EQ(CopyFileAtomically(from, to, 100), absl::OkStatus());
    EXPECT_EQ(fs::status(to).permissions(), fs::perms(mode));
    EXPECT_EQ(ReadAll(to), "content");
  }
  EXPECT_FALSE(CopyFileAtomically(from, to, 3).ok());
}

TEST(LinkAtomically, GivesAFileAnotherName) {
  const std::string folder = FreshTestFolder(), a = folder + "/a", b = folder + "/b";
  std::ofstream(a) << "one";
  ASSERT_EQ(LinkAtomically(a, b), absl::OkStatus());
  EXPECT_TRUE(fs::equivalent(a, b));
  ASSERT_EQ(LinkAtomically(a, b), absl::OkStatus()) << "again";
  ASSERT_TRUE(WriteFileAtomically(a, "two").ok());
  EXPECT_EQ(ReadAll(b), "one");
  ASSERT_EQ(LinkAtomically(a, b), absl::OkStatus()) << "in place of another";
  EXPECT_EQ(ReadAll(b), "two");
  EXPECT_EQ(Names(folder), (std::vector<std::string>{"a", "b"}));
  EXPECT_TRUE(absl::IsNotFound(LinkAtomically(folder + "/missing", b)));
  EXPECT_EQ(ReadAll(b), "two");
}

}  // namespace
}  // namespace burst
