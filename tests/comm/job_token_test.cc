// Where the token of a job comes from, and which files are believed.
#include "burst/comm/launch/job_token.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/testing/subprocess.h"

namespace burst {
namespace {

namespace fs = std::filesystem;
using Variables = std::map<std::string, std::string>;

std::function<const char*(const char*)> Get(const Variables& variables) {
  return [&variables](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  };
}

ProcessLaunch LaunchOf(int rank, bool several_hosts) {
  ProcessLaunch launch;
  launch.launcher = "torchrun";
  launch.rank = rank;
  launch.world_size = 2;
  launch.several_hosts = several_hosts;
  launch.job = "test";
  launch.port = 1234;
  return launch;
}

class JobTokenTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = FreshTestFolder();
    chmod(folder_.c_str(), 0700);
    variables_["XDG_RUNTIME_DIR"] = folder_;
  }

  std::string Write(const std::string& name, const std::string& content, mode_t mode) const {
    const std::string path = folder_ + "/" + name;
    std::ofstream(path) << content;
    chmod(path.c_str(), mode);
    return path;
  }

  absl::StatusOr<JobToken> Find(int rank, bool several_hosts) const {
    return JobToken::Find(LaunchOf(rank, several_hosts), Get(variables_));
  }

  void ExpectRefused(const std::string& part, bool several_hosts = false) const {
    const absl::Status status = Find(0, several_hosts).status();
    EXPECT_FALSE(status.ok());
    EXPECT_TRUE(absl::StrContains(status.message(), part)) << status;
    EXPECT_EQ(JobToken::Check(LaunchOf(0, several_hosts), Get(variables_)), status);
  }

  std::string folder_;
  Variables variables_;
};

TEST_F(JobTokenTest, FromTheEnvironment) {
  variables_["BURST_TOKEN"] = "sixteen or more characters";
  for (bool several_hosts : {false, true}) {
    const auto token = Find(1, several_hosts);
    ASSERT_TRUE(token.ok()) << token.status();
    EXPECT_EQ(*token->Read(), "sixteen or more characters");
  }
  EXPECT_TRUE(fs::is_empty(folder_));
  variables_["BURST_TOKEN"] = "fifteen letters";
  ExpectRefused("BURST_TOKEN holds 15 characters");
}

TEST_F(JobTokenTest, FromAFileThatIsPrivate) {
  variables_["BURST_TOKEN_FILE"] = Write("token", "0123456789abcdef\n", 0600);
  const auto token = Find(1, true);
  ASSERT_TRUE(token.ok()) << token.status();
  EXPECT_EQ(*token->Read(), "0123456789abcdef");

  for (const mode_t mode : {0640, 0604, 0660, 0602}) {
    chmod(variables_["BURST_TOKEN_FILE"].c_str(), mode);
    ExpectRefused("chmod 600");
  }
  variables_["BURST_TOKEN_FILE"] = Write("short", "0123456789abcde\n", 0600);
  ExpectRefused("BURST_TOKEN_FILE holds 15 characters");
  variables_["BURST_TOKEN_FILE"] = Write("long", std::string(1 << 20, 'x'), 0600);
  ExpectRefused("BURST_TOKEN_FILE holds 4097 characters");
  variables_["BURST_TOKEN_FILE"] = folder_;
  ExpectRefused("must be this user's own file");
  variables_["BURST_TOKEN_FILE"] = folder_ + "/missing";
  ExpectRefused("No such file");
}

TEST_F(JobTokenTest, SeveralHostsNeedOne) {
  ExpectRefused("BURST_TOKEN is not set: the 2 processes of torchrun run on several hosts", true);
}

TEST_F(JobTokenTest, RankZeroOfOneHostMakesOne) {
  const auto early = Find(1, false);
  ASSERT_TRUE(early.ok());
  EXPECT_EQ(early->Read().status().code(), absl::StatusCode::kNotFound);
  std::string first;
  {
    const auto zero = Find(0, false);
    ASSERT_TRUE(zero.ok()) << zero.status();
    first = *zero->Read();
    EXPECT_EQ(first.size(), 64u);
    EXPECT_EQ(*early->Read(), first);
    for (const auto& file : fs::directory_iterator(folder_)) {
      EXPECT_EQ(file.status().permissions(), fs::perms(0600)) << file.path();
    }
    // A process of the same name that was started again replaces it, and is not robbed of it.
    const auto again = Find(0, false);
    EXPECT_NE(*again->Read(), first);
    EXPECT_EQ(*early->Read(), *again->Read());
    EXPECT_FALSE(fs::is_empty(folder_));
  }
  EXPECT_TRUE(fs::is_empty(folder_)) << "it is removed";
}

// What others could have put there is not read.
TEST_F(JobTokenTest, FilesAndFoldersOfOthersAreNotBelieved) {
  const auto zero = Find(0, false), one = Find(1, false);
  ASSERT_TRUE(one->Read().ok());
  const fs::path file = fs::directory_iterator(folder_)->path();
  chmod(file.c_str(), 0644);
  EXPECT_FALSE(one->Read().ok());
  chmod(file.c_str(), 0600);
  EXPECT_TRUE(one->Read().ok());
  fs::rename(file, folder_ + "/elsewhere");
  fs::create_symlink(folder_ + "/elsewhere", file);
  EXPECT_FALSE(one->Read().ok());
  chmod(folder_.c_str(), 0755);
  EXPECT_FALSE(one->Read().ok());
  chmod(folder_.c_str(), 0700);
}

// Without a folder of the user's own in the environment: one in /tmp.
TEST_F(JobTokenTest, AFolderInTmp) {
  const std::string in_tmp = absl::StrCat("/tmp/burst-", geteuid());
  for (const char* runtime : {"", "/nonexistent", "/tmp"}) {
    variables_["XDG_RUNTIME_DIR"] = runtime;
    const auto zero = Find(0, false);
    ASSERT_TRUE(zero.ok()) << zero.status();
    EXPECT_TRUE(zero->Read().ok());
    struct stat about;
    ASSERT_EQ(lstat(in_tmp.c_str(), &about), 0);
    EXPECT_EQ(about.st_mode & 07777, 0700u);
  }
}

}  // namespace
}  // namespace burst
