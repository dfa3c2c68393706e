// Tests where the token of a job comes from, and which files and folders are believed.
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
#include "burst/comm/tcp/socket_folder.h"
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

  absl::StatusOr<std::string> Find(int rank, bool several_hosts) const {
    return FindJobToken(LaunchOf(rank, several_hosts), Get(variables_));
  }

  void ExpectRefused(const std::string& part, bool several_hosts = false) const {
    const absl::Status status = Find(0, several_hosts).status();
    EXPECT_FALSE(status.ok());
    EXPECT_TRUE(absl::StrContains(status.message(), part)) << status;
  }

  std::string folder_;
  Variables variables_;
};

TEST_F(JobTokenTest, FromTheEnvironment) {
  variables_["BURST_TOKEN"] = "sixteen or more characters";
  for (bool several_hosts : {false, true}) {
    const auto token = Find(1, several_hosts);
    ASSERT_TRUE(token.ok()) << token.status();
    EXPECT_EQ(*token, "sixteen or more characters");
  }
  EXPECT_TRUE(fs::is_empty(folder_));
  variables_["BURST_TOKEN"] = "fifteen letters";
  ExpectRefused("BURST_TOKEN holds 15 characters");
}

TEST_F(JobTokenTest, WhatIsEasyToGuessIsRefused) {
  for (const std::string& token :
       {std::string(16, 'a'), std::string(16, ' '), std::string(400, '0'),
        std::string("abababababababab"), std::string("aaaaaaaaaaabcdea")}) {
    variables_["BURST_TOKEN"] = token;
    ExpectRefused("BURST_TOKEN is easy to guess: a token has 6 different characters or more");
    ExpectRefused("BURST_TOKEN is easy to guess", /*several_hosts=*/true);
  }
  variables_.erase("BURST_TOKEN");
  variables_["BURST_TOKEN_FILE"] = Write("token", std::string(32, 'x'), 0600);
  ExpectRefused("BURST_TOKEN_FILE is easy to guess");
}

TEST_F(JobTokenTest, FromAFileThatIsPrivate) {
  variables_["BURST_TOKEN_FILE"] = Write("token", "0123456789abcdef\n", 0600);
  const auto token = Find(1, true);
  ASSERT_TRUE(token.ok()) << token.status();
  EXPECT_EQ(*token, "0123456789abcdef");

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

TEST_F(JobTokenTest, OneHostNeedsNone) {
  const auto token = Find(1, false);
  ASSERT_TRUE(token.ok()) << token.status();
  EXPECT_EQ(*token, "");
}

// Folders that other users could have made, or can read, are not used.
TEST_F(JobTokenTest, AFolderForSocketsIsTheUsersAlone) {
  EXPECT_EQ(SocketFolder::Default(Get(variables_)), folder_);
  EXPECT_TRUE(SocketFolder::Open(folder_).ok());
  EXPECT_TRUE(SocketFolder::Open(folder_ + "/new").ok());
  struct stat about;
  ASSERT_EQ(lstat((folder_ + "/new").c_str(), &about), 0);
  EXPECT_EQ(about.st_mode & 07777, 0700u);
  fs::create_symlink(folder_ + "/new", folder_ + "/link");
  Write("file", "", 0600);
  for (const char* name : {"link", "file", "new"}) {
    chmod((folder_ + "/new").c_str(), 0755);
    const absl::Status status = SocketFolder::Open(folder_ + "/" + name).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << name;
    EXPECT_TRUE(absl::StrContains(status.message(), "is not a folder that is this user's alone"));
  }
  EXPECT_FALSE(SocketFolder::Open(folder_ + "/not/there").ok());
}

// Without a folder of the user in the environment, the folder is in /tmp.
TEST_F(JobTokenTest, AFolderInTmp) {
  for (const char* runtime : {"", "/nonexistent", "/tmp"}) {
    variables_["XDG_RUNTIME_DIR"] = runtime;
    EXPECT_EQ(SocketFolder::Default(Get(variables_)), absl::StrCat("/tmp/burst-", geteuid()));
  }
}

}  // namespace
}  // namespace burst
