#include "train/checkpoint/kept_checkpoints.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "burst/cli/files.h"
#include "model/transformer.h"
#include "tests/testing/subprocess.h"
#include "train/checkpoint/checkpoint.h"
#include "train/optimizer/adamw.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

using Write = std::function<absl::Status(const std::string& path)>;

// Returns a writer of a text in place of a checkpoint.
Write Text(const std::string& text) {
  return [text](const std::string& path) { return WriteFileAtomically(path, text); };
}

// Returns the text of each file by its name.
std::map<std::string, std::string> Content(const std::string& folder) {
  std::map<std::string, std::string> content;
  for (const auto& entry : fs::directory_iterator(folder)) {
    content[entry.path().filename().string()] = ReadAll(entry.path().string());
  }
  return content;
}

using Files = std::map<std::string, std::string>;

CheckpointInfo Resumed(int64_t step) {
  CheckpointInfo info;
  info.step = step;
  return info;
}

TEST(KeptCheckpoints, KeepsTheNewestAndTheBest) {
  const std::string folder = FreshTestFolder();
  EXPECT_FALSE(HoldsCheckpoints(folder));
  KeptCheckpoints kept(folder, 3, nullptr);
  const std::optional<double> losses[] = {std::nullopt, 3.0, 2.0, std::nullopt, 2.5, 2.0};
  for (int64_t i = 0; i < 6; ++i) {
    ASSERT_EQ(kept.Save(10 * i + 10, losses[i], Text(absl::StrCat("of ", 10 * i + 10))),
              absl::OkStatus());
    EXPECT_TRUE(HoldsCheckpoints(folder));
    EXPECT_EQ(kept.newest_step(), 10 * i + 10);
    EXPECT_EQ(fs::exists(BestCheckpointPath(folder)), i > 0);
  }
  EXPECT_TRUE(kept.has_links());
  EXPECT_EQ(Content(folder), (Files{{"best.safetensors", "of 30"},
                                    {"checkpoint-40.safetensors", "of 40"},
                                    {"checkpoint-50.safetensors", "of 50"},
                                    {"checkpoint.safetensors", "of 60"}}));
}

TEST(KeptCheckpoints, AFailedSaveLosesNothing) {
  const std::string folder = FreshTestFolder();
  KeptCheckpoints kept(folder, 2, nullptr);
  ASSERT_TRUE(kept.Save(1, 2.0, Text("one")).ok());
  ASSERT_TRUE(kept.Save(2, 1.0, Text("two")).ok());
  for (int attempt = 0; attempt < 2; ++attempt) {
    const absl::Status status = kept.Save(3, 0.5, [](const std::string& path) {
      auto file = AtomicFile::Create(path);
      EXPECT_TRUE(file.ok() && file->Write("thr", 3).ok());
      return absl::ResourceExhaustedError("full");
    });
    EXPECT_EQ(status, absl::ResourceExhaustedError("full"));
    EXPECT_EQ(kept.newest_step(), 2);
    const Files files = Content(folder);
    EXPECT_EQ(files.at("checkpoint.safetensors"), "two");
    EXPECT_EQ(files.at("checkpoint-1.safetensors"), "one");
    EXPECT_EQ(files.at("best.safetensors"), "two");
  }
  ASSERT_TRUE(kept.Save(4, std::nullopt, Text("four")).ok());
  EXPECT_EQ(Content(folder), (Files{{"best.safetensors", "two"},
                                    {"checkpoint-2.safetensors", "two"},
                                    {"checkpoint.safetensors", "four"}}));
}

// The kill comes before or after the new checkpoint is written. The newest is the previous or the
// new one, and the older ones exist. The next save puts all in order.
TEST(KeptCheckpoints, AKillInASaveLosesNothing) {
  const std::string folder = FreshTestFolder();
  const auto start = [&] {
    for (const auto& entry : fs::directory_iterator(folder)) fs::remove(entry);
    KeptCheckpoints kept(folder, 2, nullptr);
    EXPECT_TRUE(kept.Save(1, std::nullopt, Text("1")).ok());
    EXPECT_TRUE(kept.Save(2, std::nullopt, Text("2")).ok());
  };
  int killed = 0;
  for (const bool before_write : {true, false}) {
    start();
    const pid_t child = fork();
    if (child == 0) {
      const CheckpointInfo resumed = Resumed(2);
      KeptCheckpoints continued(folder, 2, &resumed);
      continued
          .Save(3, 1.0,
                [&](const std::string& path) {
                  if (before_write) kill(getpid(), SIGKILL);
                  const absl::Status status = WriteFileAtomically(path, "3");
                  kill(getpid(), SIGKILL);
                  return status;
                })
          .IgnoreError();
      _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    killed += WIFSIGNALED(status);
    const Files files = Content(folder);
    EXPECT_EQ(files.at("checkpoint.safetensors"), before_write ? "2" : "3");
    EXPECT_EQ(files.at("checkpoint-2.safetensors"), "2");
    EXPECT_EQ(files.at("checkpoint-1.safetensors"), "1");
    CheckpointInfo resumed = Resumed(before_write ? 2 : 3);
    if (!before_write) resumed.val_loss = 1.0;
    KeptCheckpoints continued(folder, 2, &resumed);
    ASSERT_TRUE(continued.Save(4, std::nullopt, Text("4")).ok());
    Files expected = {{"checkpoint.safetensors", "4"}};
    if (before_write) {
      expected["checkpoint-2.safetensors"] = "2";
    } else {  // the best did not have its name yet
      expected["checkpoint-3.safetensors"] = expected["best.safetensors"] = "3";
    }
    EXPECT_EQ(Content(folder), expected);
  }
  EXPECT_EQ(killed, 2);
}

// A process that the run forked also saves. The names follow from the steps in the files.
TEST(KeptCheckpoints, ASaveByAnotherObjectIsSeen) {
  const std::string folder = FreshTestFolder();
  ModelConfig config;
  config.layers = config.heads = 1;
  config.width = 2;
  config.ffn = config.vocab = 3;
  auto model = Transformer::Create(config, DType::kFloat32, /*seed=*/1);
  ASSERT_TRUE(model.ok()) << model.status();
  const ParameterList& parameters = (*model)->parameters();
  const AdamW optimizer({}, parameters.numel(), DType::kFloat32, {});
  const auto save = [&](KeptCheckpoints* kept, int64_t step) {
    CheckpointInfo info;
    info.step = step;
    info.seqlen = 1;
    info.model = config;
    info.val_loss = 10.0 - static_cast<double>(step);
    return kept->Save(step, info.val_loss, [&](const std::string& path) {
      return SaveCheckpoint(path, info, parameters, optimizer);
    });
  };
  KeptCheckpoints parent(folder, 3, nullptr), child(folder, 3, nullptr);
  ASSERT_EQ(save(&child, 1), absl::OkStatus());
  ASSERT_EQ(save(&parent, 2), absl::OkStatus());
  ASSERT_EQ(save(&child, 3), absl::OkStatus());
  ASSERT_EQ(save(&parent, 4), absl::OkStatus());
  const std::pair<std::string, int64_t> files[] = {{OlderCheckpointPath(folder, 2), 2},
                                                   {OlderCheckpointPath(folder, 3), 3},
                                                   {CheckpointPath(folder), 4},
                                                   {BestCheckpointPath(folder), 4}};
  for (const auto& [path, step] : files) {
    const auto info = VerifyCheckpoint(path);
    ASSERT_TRUE(info.ok()) << info.status();
    EXPECT_EQ(info->step, step) << path;
  }
  EXPECT_EQ(Content(folder).size(), 4u);
}

// A run continued from an older checkpoint makes the later steps again.
TEST(KeptCheckpoints, StepsBeyondTheResumedOneAreForgottenAfterTheNextSave) {
  const std::string folder = FreshTestFolder();
  KeptCheckpoints kept(folder, 4, nullptr);
  for (int64_t step = 1; step <= 5; ++step) {
    ASSERT_TRUE(kept.Save(step, std::nullopt, Text(absl::StrCat(step))).ok());
  }
  fs::rename(OlderCheckpointPath(folder, 3), CheckpointPath(folder));
  const CheckpointInfo resumed = Resumed(3);
  KeptCheckpoints continued(folder, 4, &resumed);
  EXPECT_TRUE(fs::exists(OlderCheckpointPath(folder, 4))) << "not before there is a newer one";
  ASSERT_TRUE(continued.Save(4, std::nullopt, Text("4 again")).ok());
  EXPECT_EQ(Content(folder), (Files{{"checkpoint-2.safetensors", "2"},
                                    {"checkpoint-3.safetensors", "3"},
                                    {"checkpoint.safetensors", "4 again"}}));
}

TEST(KeptCheckpoints, OtherFilesAreLeftAlone) {
  const std::string folder = FreshTestFolder();
  const Files others = {{"checkpoint-01.safetensors", "a"},
                        {"checkpoint-x.safetensors", "b"},
                        {"checkpoint-1.safetensors.bak", "c"},
                        {"checkpoint-.safetensors", "d"}};
  for (const auto& [name, text] : others) std::ofstream(folder + "/" + name) << text;
  EXPECT_FALSE(HoldsCheckpoints(folder));
  KeptCheckpoints kept(folder, 1, nullptr);
  ASSERT_TRUE(kept.Save(1, std::nullopt, Text("1")).ok());
  ASSERT_TRUE(kept.Save(2, std::nullopt, Text("2")).ok());
  Files expected = others;
  expected["checkpoint.safetensors"] = "2";
  EXPECT_EQ(Content(folder), expected);
  EXPECT_FALSE(HoldsCheckpoints(folder + "/missing"));
}

}  // namespace
}  // namespace burst
