// Hugging Face directories that are damaged or unsuitable are refused by name.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "burst/base/status.h"
#include "model/transformer.h"
#include "tests/testing/subprocess.h"
#include "tests/train/huggingface_fixture.h"
#include "train/checkpoint/kept_checkpoints.h"
#include "train/huggingface/directory.h"
#include "train/huggingface/pretrained.h"

namespace burst {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using namespace std::string_literals;  // NOLINT

TEST_F(HuggingFaceTest, PipesDevicesAndLongFilesAreRefused) {
  Fake("mistral").Write(Path("from"));
  const std::string config = Path("from/config.json");
  const auto refused = [&](const std::string& why) {
    const absl::Status status = ImportHuggingFace(Path("from"), Path("in"));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(config + why));
    EXPECT_THAT(std::string(FindPretrained(Path("from")).status().message()), HasSubstr(why));
  };
  fs::resize_file(config, (1 << 20) + 1);
  refused(" holds 1048577 bytes; at most 1048576 are read");
  fs::remove(config);
  ASSERT_EQ(mkfifo(config.c_str(), 0644), 0);
  refused(" is a pipe, not a file");
  fs::remove(config);
  fs::create_symlink("/dev/zero", config);
  refused(" is a device, not a file");
}

TEST_F(HuggingFaceTest, TensorsThatDoNotFitAreNamed) {
  const std::string q = "model.layers.1.self_attn.q_proj.weight";
  using Change = std::function<void(FakeDirectory&)>;
  struct Case {
    Change change;
    std::vector<std::string> says;
  };
  int number = 0;
  for (const Case& c : std::vector<Case>{
           {[&](FakeDirectory& d) { d.tensors.erase(q); }, {"'" + q + "' is missing"}},
           {[&](FakeDirectory& d) { d.Rename(q, "model.layers.1.self_attn.q.weight"); },
            {"'" + q + "' is missing"}},
           {[&](FakeDirectory& d) { d.tensors["model.layers.2.x"] = d.tensors[q]; },
            {"'model.layers.2.x' does not belong to a model"}},
           {[&](FakeDirectory& d) {
              d.tensors[q].shape = {8, 32};
            },
            {"'" + q + "' is [8, 32]", "must be [16, 16]"}},
           {[&](FakeDirectory& d) { d.tensors[q].dtype = "I32"; },
            {"'" + q + "' is of the dtype I32", "BF16"}},
           {[&](FakeDirectory& d) {
              d.tensors[q].dtype = "F8_E4M3";
              d.tensors[q].bytes.resize(256);
            },
            {"'" + q + "' is of the dtype F8_E4M3", "weight_block_size"}},
           {[&](FakeDirectory& d) {
              d.MakeFloat8(4, 8);
              d.tensors.erase(q + "_scale_inv");
            },
            {"'" + q + "_scale_inv' is missing"}},
           {[&](FakeDirectory& d) {
              d.MakeFloat8(4, 8);
              d.config["quantization_config"]["weight_block_size"] = {8, 8};
            },
            {"_scale_inv' is [", "it must be ["}},
           {[&](FakeDirectory& d) {
              d.MakeFloat8(4, 8);
              d.config["quantization_config"]["activation_scheme"] = "static";
            },
            {"quantization_config.activation_scheme is \"static\"", "dynamic"}},
           {[&](FakeDirectory& d) {
              d.config["quantization_config"] = {{"quant_method", "gptq"}, {"bits", 4}};
            },
            {"quantization_config.quant_method is \"gptq\"", "fp8"}},
           {[&](FakeDirectory& d) { d.config["num_hidden_layers"] = 1; },
            {"'model.layers.1.", "does not belong to a model"}},
           {[&](FakeDirectory& d) { d.config["num_hidden_layers"] = 16777216; },
            {"fewer than the model has layers"}},
           {[&](FakeDirectory& d) { d.config["hidden_size"] = 32; }, {"must be [11, 32]"}},
           {[&](FakeDirectory& d) { d.config["unheard_of"] = 1; }, {"unheard_of"}},
       }) {
    FakeDirectory fake = Fake("llama");
    c.change(fake);
    const std::string folder = Path(std::to_string(number++));
    fake.WriteFiles(folder, 2);
    const absl::Status status = HuggingFaceDirectory::Open(folder).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(folder));
    for (const std::string& part : c.says) {
      EXPECT_THAT(std::string(status.message()), HasSubstr(part));
    }
  }
}

TEST_F(HuggingFaceTest, DamagedDirectoriesAreNamed) {
  const std::string folder = Path("model"), index = folder + "/model.safetensors.index.json";
  const auto expect_refused = [&](const std::string& says) {
    const absl::Status status = HuggingFaceDirectory::Open(folder).status();
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(std::string(status.message()), HasSubstr(folder));
    EXPECT_THAT(std::string(status.message()), HasSubstr(says));
    fs::remove_all(folder);
    Fake("llama").WriteFiles(folder, 3);
  };
  expect_refused("config.json");  // the folder is empty
  Fake("llama").WriteConfig(folder);
  fs::remove(index);
  expect_refused("model.safetensors");
  fs::remove(folder + "/part-1.safetensors");
  expect_refused("part-1.safetensors");
  SetContent(folder + "/part-1.safetensors",
             Content(folder + "/part-1.safetensors").substr(0, 900));
  expect_refused("part-1.safetensors: truncated");
  SetContent(folder + "/part-1.safetensors", Content(folder + "/part-0.safetensors"));
  expect_refused("is in two files");
  SetContent(index, "{");
  expect_refused("index.json");
  SetContent(index, "[]");
  expect_refused("holds no weight_map");
  SetContent(index, R"({"weight_map": {"a": 3}})");
  expect_refused("names no file");
  for (const char* file : {"../model.safetensors", "/etc/passwd", "config.json"}) {
    SetContent(index, nlohmann::json{{"weight_map", {{"a", file}}}}.dump());
    expect_refused("something else than safetensors files next to it");
  }
  SetContent(index, R"({"weight_map": {}})");
  expect_refused("holds 0 tensors");
  EXPECT_TRUE(HuggingFaceDirectory::Open(folder).ok());
}

TEST_F(HuggingFaceTest, NumbersThatAreNotFiniteAreNamed) {
  FakeDirectory fake = Fake("qwen3");
  const std::string name = "model.layers.0.mlp.up_proj.weight";
  const uint32_t infinity = 0x7F800000;
  std::memcpy(&fake.tensors[name].bytes[40], &infinity, sizeof(infinity));
  fake.Write(Path("model"));
  const absl::Status status = ImportHuggingFace(Path("model"), Path("in"));
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr(name));
  EXPECT_FALSE(HoldsCheckpoints(Path("in")));
}

}  // namespace
}  // namespace burst
