// Tests the options of a run that continues: its own ones, and what a file and the command line
// give.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "tests/train/config_arguments.h"
#include "train/config/config.h"

namespace burst {
namespace {

TEST(ResumedConfig, ResumeTakesTheRunsConfiguration) {
  const auto run = Resolve({"--steps=50", "--seed=3", "--ranks=4", "--batch=3"});
  ASSERT_TRUE(run.ok()) << run.status();
  const std::string folder = testing::TempDir();
  Write("config.json", run->ToJson());
  const auto resumed = Resolve({"--resume", "--out=" + folder, "--steps=60"});
  ASSERT_TRUE(resumed.ok()) << resumed.status();
  EXPECT_EQ(resumed->seed, 3);
  EXPECT_EQ(resumed->batch, 3);
  EXPECT_EQ(resumed->ranks, 4);
  EXPECT_EQ(resumed->steps, 60);
  EXPECT_TRUE(resumed->CheckResume(run->ToJson()).ok());
}

// The folder and the wish to continue may stand in the file.
TEST(ResumedConfig, AFileMayNameTheRunToContinue) {
  const std::string folder = testing::TempDir() + "/named";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  const auto run = Resolve({"--seed=3", "--keep=7"});
  ASSERT_TRUE(run.ok()) << run.status();
  Write("named/config.json", run->ToJson());
  const std::string out = R"({"out": ")" + folder + "\"";
  for (const auto& given :
       {std::vector<std::string>{"--config=" + Write("a.json", out + "}"), "--resume"},
        {"--config=" + Write("b.json", out + R"(, "resume": true})")}}) {
    const auto resumed = Resolve(given);
    ASSERT_TRUE(resumed.ok()) << resumed.status();
    EXPECT_TRUE(resumed->resume);
    EXPECT_EQ(resumed->seed, 3);
    EXPECT_EQ(resumed->keep, 7);
  }
  const std::string automatic = Write("c.json", out + R"(, "resume": "auto"})");
  EXPECT_FALSE(Resolve({"--config=" + automatic})->resume);
  Write("named/checkpoint-5.safetensors", "");
  EXPECT_TRUE(Resolve({"--config=" + automatic})->resume);
  EXPECT_EQ(Resolve({"--config=" + automatic})->seed, 3);
  EXPECT_FALSE(Resolve({"--config=" + automatic, "--noresume"})->resume);
  const auto nested = Resolve({"--config=" + Write("d.json", R"({"config": "a.json"})")});
  EXPECT_TRUE(absl::StrContains(nested.status().message(), "must not name another file"))
      << nested.status();
}

// A mesh that is given says how many ranks there are, or a launcher does.
TEST(ResumedConfig, ResumeOnAnotherMeshDropsTheRunsRanks) {
  const std::string folder = testing::TempDir() + "/mesh";
  std::filesystem::create_directories(folder);
  const auto run = Resolve({"--ranks=3", "--sp=3", "--accumulate=2", "--model=llama_tiny"});
  ASSERT_TRUE(run.ok()) << run.status();
  Write("mesh/config.json", run->ToJson());
  const auto resume = [&](std::vector<std::string> given, int processes = 1) {
    given.insert(given.end(), {"--resume", "--out=" + folder});
    return Resolve(given, Launch{processes, 8});
  };
  const struct {
    std::vector<std::string> given;
    int processes, ranks;
  } meshes[] = {
      {{"--dp=2"}, 1, 6},
      {{"--sp=2"}, 1, 2},
      {{"--tp=2", "--sp=1"}, 1, 2},
      {{"--pp=2"}, 1, 6},
      {{"--config=" + Write("mesh.json", R"({"dp": 4, "sp": 1})")}, 1, 4},
      {{"--sp=-1"}, 1, 3},  // says nothing about ranks
      {{"--ranks=4", "--sp=4"}, 1, 4},
      {{"--dp=2"}, 6, 6},
      {{"--sp=2"}, 2, 2},
  };
  for (const auto& mesh : meshes) {
    const auto resumed = resume(mesh.given, mesh.processes);
    ASSERT_TRUE(resumed.ok()) << mesh.given[0] << ": " << resumed.status();
    EXPECT_EQ(resumed->ranks, mesh.ranks) << mesh.given[0];
  }
  // A mesh that agrees with the run's --ranks keeps them.
  const auto wide = Resolve({"--ranks=4", "--model=llama_tiny"});
  ASSERT_TRUE(wide.ok()) << wide.status();
  const std::string other = testing::TempDir() + "/wide";
  std::filesystem::create_directories(other);
  Write("wide/config.json", wide->ToJson());
  const auto two_by_two = Resolve({"--dp=2", "--resume", "--out=" + other});
  ASSERT_TRUE(two_by_two.ok()) << two_by_two.status();
  EXPECT_EQ(two_by_two->ranks, 4);
  EXPECT_EQ(two_by_two->mesh.sequence, 2);
  const auto automatic = Resolve({"--ranks=-1", "--resume", "--out=" + other});
  ASSERT_TRUE(automatic.ok()) << automatic.status();
  EXPECT_EQ(automatic->ranks, 2);
  // The --ranks that are given now must agree, and those of the run if no mesh is given.
  EXPECT_FALSE(resume({"--ranks=3", "--sp=2"}).ok());
  EXPECT_FALSE(resume({"--dp=2"}, 2).ok());
  EXPECT_FALSE(resume({}, 2).ok());
}

TEST(ResumedConfig, ResumeAutoContinuesWhereThereIsACheckpoint) {
  const std::string folder = testing::TempDir() + "/auto";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  const auto run = Resolve({"--seed=3"});
  ASSERT_TRUE(run.ok()) << run.status();
  // The file of a run that was killed before its first save.
  Write("auto/config.json", run->ToJson());
  const auto resolve = [&] { return Resolve({"--resume=auto", "--out=" + folder}); };
  const auto starts = resolve();
  ASSERT_TRUE(starts.ok()) << starts.status();
  EXPECT_FALSE(starts->resume);
  EXPECT_EQ(starts->seed, 1);
  Write("auto/checkpoint-5.safetensors", "");
  const auto continues = resolve();
  ASSERT_TRUE(continues.ok()) << continues.status();
  EXPECT_TRUE(continues->resume);
  EXPECT_EQ(continues->seed, 3);
  for (const auto& [given, resumes] :
       {std::pair("--resume", true), std::pair("--resume=true", true),
        std::pair("--resume=1", true), std::pair("--resume=false", false),
        std::pair("--noresume", false)}) {
    const auto config = Resolve({given, "--out=" + folder});
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(config->resume, resumes) << given;
  }
}

TEST(ResumedConfig, ResumeRefusesAnotherRun) {
  const auto run = Resolve({});
  ASSERT_TRUE(run.ok()) << run.status();
  const std::string before = run->ToJson();
  for (const char* given :
       {"--seqlen=3", "--batch=3", "--accumulate=3", "--seed=3", "--packed", "--window=3",
        "--tokenizer=byte", "--weight_decay=3", "--beta1=0.3", "--beta2=0.3", "--eps=0.25",
        "--model.dropout=0.3", "--model.attention_dropout=0.3", "--model.attention_softcap=3",
        "--model.attention_sinks=true"}) {
    const auto after = Resolve({given});
    ASSERT_TRUE(after.ok()) << after.status();
    const absl::Status status = after->CheckResume(before);
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << given;
    const std::string option = given;
    EXPECT_TRUE(absl::StrContains(status.message(), option.substr(0, option.find('=')) + ": "))
        << status;
  }
  const auto after =
      Resolve({"--steps=2000", "--lr=1e-3", "--ranks=7", "--layout=striped", "--eval_every=1",
               "--sample=3", "--recompute=selective", "--recompute_segment=2", "--ffn_chunk=100"});
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_EQ(after->CheckResume(before), absl::OkStatus());
  // A run that was started when the option still took that value.
  const std::string older = absl::StrReplaceAll(before, {{"\"burst\"", "\"tp+sp\""}});
  EXPECT_NE(older, before);
  EXPECT_EQ(after->CheckResume(older), absl::OkStatus());
}

}  // namespace
}  // namespace burst
