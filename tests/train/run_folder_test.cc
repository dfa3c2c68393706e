#include "train/report/run_folder.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/testing/subprocess.h"
#include "train/config/config.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

absl::Status Make(const std::string& folder) {
  TrainConfig options;
  options.out = folder;
  options.device = DeviceChoice::kCpu;
  Launch launch;
  launch.cores = 1;
  const absl::StatusOr<ResolvedConfig> config = ResolveConfig(options, launch);
  EXPECT_TRUE(config.ok()) << config.status();
  return config.ok() ? RunFolder::Make(*config).status() : config.status();
}

// --out may be the wrong folder: a model's, or a project's.
TEST(RunFolder, ReplacesNothingThatIsNotARuns) {
  const struct {
    const char *name, *content, *refused;
  } cases[] = {
      {"config.json", R"({"model_type": "llama", "steps": 3})", "which is not of a run"},
      {"config.json", "no JSON", "which is not of a run"},
      {"metrics.jsonl", R"({"accuracy": 1})", "which is not of a run"},
      {"loss.svg", "<svg/>", "which is not of a run"},
      {"huggingface/config.json", "{}", "which is not of a run"},
      {"model.safetensors", "", "holds a model (model.safetensors)"},
      {"model.safetensors.index.json", "", "holds a model"},
      {"pytorch_model.bin", "", "holds a model"},
      {"notes.txt", "mine", nullptr},
  };
  for (const auto& c : cases) {
    SCOPED_TRACE(c.name);
    const std::string folder = FreshTestFolder(), path = absl::StrCat(folder, "/", c.name);
    fs::create_directories(fs::path(path).parent_path());
    std::ofstream(path) << c.content;
    const absl::Status status = Make(folder);
    EXPECT_EQ(ReadAll(path), c.content);
    if (c.refused == nullptr) {
      EXPECT_EQ(status, absl::OkStatus());
      continue;
    }
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_TRUE(absl::StartsWith(status.message(), "--out: " + folder + " holds ")) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), c.refused)) << status;
    const auto files = std::distance(fs::directory_iterator(folder), fs::directory_iterator());
    EXPECT_EQ(files, 1) << "nothing was made there";
  }
}

// A run that was killed before its first save is started again.
TEST(RunFolder, ARunWithoutCheckpointsIsBegunAgain) {
  const std::string folder = FreshTestFolder() + "/run";
  for (int i = 0; i < 2; ++i) EXPECT_EQ(Make(folder), absl::OkStatus());
  // This run was killed right after its first file.
  fs::remove(folder + "/metrics.jsonl");
  EXPECT_EQ(Make(folder), absl::OkStatus());
  EXPECT_TRUE(fs::exists(folder + "/metrics.jsonl"));
  // These are temporary files of every name that a run makes.
  std::vector<std::string> ours, others = {"notes.12-3.tmp", "checkpoint-x.safetensors.12-3.tmp"};
  for (const char* name : {"config.json", "metrics.jsonl", "loss.svg", "checkpoint.safetensors",
                           "checkpoint-4.safetensors", "best.safetensors"}) {
    ours.push_back(absl::StrCat(name, ".12-3.tmp"));
  }
  for (const auto* names : {&ours, &others}) {
    for (const std::string& name : *names) std::ofstream(folder + "/" + name) << "left";
  }
  EXPECT_EQ(Make(folder), absl::OkStatus());
  for (const std::string& name : ours) EXPECT_FALSE(fs::exists(folder + "/" + name)) << name;
  for (const std::string& name : others) EXPECT_TRUE(fs::exists(folder + "/" + name)) << name;
}

}  // namespace
}  // namespace burst
