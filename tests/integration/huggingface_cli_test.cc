// Tests //train:export, //train:import and --model=FOLDER as users run them. A run's model is
// exported, imported again, and trained further.
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/integration/train_cli.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

// A small model with the fields of a Qwen3.
constexpr char kModel[] =
    R"({"layers":2,"width":16,"heads":4,"kv_heads":2,"head_dim":6,"ffn":32,"qk_norm":true})";

constexpr char kTokenizer[] = "{\"model\": \"of another program\"}";

class HuggingFaceCli : public TrainCli {
 protected:
  Result Run(const std::string& program, std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), ProgramPath("train/tools/" + program));
    return Subprocess(arguments, {folder_}).Wait();
  }

  // Returns the loss of the first step of a new run that starts from a folder.
  double FirstLoss(const std::string& model, const std::vector<std::string>& more = {}) const {
    const std::string run = absl::StrCat("from-", Names("", "from-", "").size());
    std::vector<std::string> arguments = {"--model=" + model, "--out=" + run, "--steps=1",
                                          "--eval_every=0"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    ExpectSuccess(Train(arguments));
    return Metrics(run).at(0)["loss"];
  }
};

TEST_F(HuggingFaceCli, ThereAndBackAndTrainedFurther) {
  ExpectSuccess(
      Train({absl::StrCat("--model=", kModel), "--steps=60", "--eval_every=0", "--out=run"}));
  ExpectSuccess(Run("export", {"run", "--out=home"}));
  const auto config = nlohmann::json::parse(ReadAll(Path("home/config.json")));
  EXPECT_EQ(config["model_type"], "qwen3");
  EXPECT_EQ(config["head_dim"], 6);
  Write("home/tokenizer.json", kTokenizer);
  ExpectSuccess(Run("import", {"home", "--out=in"}));
  EXPECT_EQ(ReadAll(Path("in/huggingface/tokenizer.json")), kTokenizer);

  // All are the run's model, bit for bit. A random model is not.
  const double loss = FirstLoss("run/");
  const std::string chars = "--tokenizer=char";
  EXPECT_EQ(FirstLoss("home", {chars}), loss);
  EXPECT_EQ(FirstLoss("in", {chars}), loss);
  EXPECT_LT(loss, FirstLoss(kModel) - 0.3);
  // Ranks that share the model have its loss to rounding.
  EXPECT_NEAR(FirstLoss("home", {"--tp=2", chars}), loss, 1e-5 * loss);
  // Without a tokenizer that can be read, the model's tokens are unknown.
  for (const char* model : {"home", "in"}) {
    ExpectError(
        Train({absl::StrCat("--model=", model), "--out=none", "--steps=1"}), 1,
        {"--tokenizer", "tokenizer.json", "must be a ByteLevel", "its own tokens", "give", "char"});
  }
  EXPECT_FALSE(fs::exists(Path("none")));

  // A run from a folder keeps the model's files, and is like any other run.
  ExpectSuccess(Train({"--model=home", chars, "--out=more", "--steps=2", "--eval_every=0"}));
  EXPECT_EQ(ReadAll(Path("more/huggingface/tokenizer.json")), kTokenizer);
  const auto resume = [&](const std::string& run) {
    return Subprocess({ProgramPath("train/train"), "--resume", "--out=" + run, "--steps=4"},
                      {folder_})
        .Wait();
  };
  fs::copy(Path("more"), Path("later"), fs::copy_options::recursive);
  ExpectSuccess(resume("more"));
  // The run continues without the folder that it began with, because the checkpoint has the model.
  fs::rename(Path("home"), Path("elsewhere"));
  const Result later = resume("later");
  ExpectSuccess(later);
  EXPECT_TRUE(absl::StrContains(later.out, "home, which is gone")) << later.out;
  EXPECT_TRUE(SplitCheckpoint(Checkpoint("later")).second ==
              SplitCheckpoint(Checkpoint("more")).second);
  fs::rename(Path("elsewhere"), Path("home"));
  // A run on shorter sequences does not shorten what the model takes.
  ExpectSuccess(
      Train({"--model=home", chars, "--out=short", "--seqlen=16", "--steps=1", "--eval_every=0"}));
  ExpectSuccess(Run("export", {"short", "--out=home4"}));
  const auto text_of = [&](const char* checkpoint) {
    const Result result =
        Run("generate", {absl::StrCat("--checkpoint=", checkpoint), "--prompt=line 1 of a text",
                         "--tokens=30", "--temperature=0"});
    EXPECT_FALSE(absl::StrContains(result.err, "are read")) << result.err;
    return result.out;
  };
  const std::string continued = text_of("short");
  EXPECT_EQ(continued.size(), 16 + 30 + 1u);  // characters, the last one a line break
  EXPECT_EQ(continued, text_of("home4"));
  // An export has the tokenizer of its run, not of the model that the run began with.
  ExpectSuccess(Run("export", {"more", "--out=home2"}));
  ExpectSuccess(Run("export", {"run", "--out=home3"}));
  EXPECT_EQ(ReadAll(Path("home2/tokenizer.json")), ReadAll(Path("home3/tokenizer.json")));
  EXPECT_EQ(ReadAll(Path("home2/config.json")), ReadAll(Path("home/config.json")));
}

TEST_F(HuggingFaceCli, TheWindowOfAModelIsTheRuns) {
  ExpectSuccess(Train({"--steps=1", "--eval_every=0", "--out=run", "--window=7"}));
  ExpectSuccess(Run("export", {"run", "--out=home"}));
  EXPECT_EQ(nlohmann::json::parse(ReadAll(Path("home/config.json")))["sliding_window"], 7);
  const std::string chars = "--tokenizer=char";
  const double loss = FirstLoss("home", {chars});
  EXPECT_EQ(FirstLoss("home", {chars, "--window=7"}), loss);
  EXPECT_NE(FirstLoss("home", {chars, "--window=0"}), loss);
  EXPECT_EQ(FirstLoss("run"), loss);
}

TEST_F(HuggingFaceCli, ErrorsAreOneSentence) {
  ExpectError(Run("import", {}), 2, {"--directory"});
  ExpectError(Run("import", {"home"}), 2, {"--out"});
  ExpectError(Run("import", {"home", "--out=in"}), 1, {"home/config.json"});
  ExpectError(Run("export", {"--out=home"}), 2, {"--checkpoint"});
  ExpectError(Run("export", {"run", "--out=home", "--file_mb=0"}), 2, {"--file_mb"});
  ExpectError(Run("export", {"run", "--out=home", "--dtype=int8"}), 2, {"--dtype", "float16; got"});
  ExpectError(Run("export", {"run", "--out=home"}), 1, {"run"});
  fs::create_directories(Path("empty"));
  ExpectError(Train({"--model=empty"}), 2, {"--model", "empty/config.json"});
  Write("empty/config.json", R"({"model_type": "llama", "vocab_size": 5})");
  ExpectError(Train({"--model=empty"}), 2, {"--model", "empty", "num_hidden_layers is missing"});
  ExpectSuccess(Train({"--steps=1", "--eval_every=0", "--out=run"}));
  ExpectSuccess(Run("export", {"run", "--out=home"}));
  ExpectError(Run("export", {"run", "--out=home"}), 1, {"--out", "holds config.json already"});
  fs::create_directories(Path("other"));
  Write("other/tokenizer.json", "mine");
  ExpectError(Run("export", {"run", "--out=other"}), 1, {"--out", "holds tokenizer.json already"});
  ExpectError(Train({"--model=home", "--model.attention_sinks"}), 2,
              {"--model.attention_sinks", "home", "have no sinks"});
  ExpectSuccess(Train({"--steps=1", "--eval_every=0", "--model.attention_sinks", "--out=sinks"}));
  ExpectError(Run("export", {"sinks", "--out=home2"}), 1, {"attention_sinks"});
  ExpectSuccess(Run("import", {"home", "--out=in"}));
  ExpectError(Train({"--resume", "--out=in"}), 2, {"--resume", "holds no run to continue"});
  fs::resize_file(Path("home/model.safetensors"), 1000);
  ExpectError(Train({"--model=home", "--tokenizer=char", "--out=none", "--steps=1"}), 1,
              {"--model", "home/model.safetensors", "truncated"});
}

// A set of several ranks' files is exported like one file, and a run starts from it.
// What an export has written is gone if it fails. Files of others stay.
TEST_F(HuggingFaceCli, AFailedExportCanBeRepeated) {
  ExpectSuccess(Train({"--steps=1", "--eval_every=0", "--out=run"}));
  for (const bool is_new : {true, false}) {
    if (!is_new) {
      fs::create_directory(Path("home"));
      Write("home/notes.txt", "mine");
    }
    const Result failed = Subprocess({"/bin/sh", "-c", "ulimit -f 40; exec \"$0\" \"$@\"",
                                      ProgramPath("train/tools/export"), "run", "--out=home"},
                                     {folder_})
                              .Wait();
    ExpectError(failed, 1, {"home/", "File too large"});
    EXPECT_EQ(fs::exists(Path("home")), !is_new);
    EXPECT_EQ(Names("home", "", ""), std::vector<std::string>(is_new ? 0 : 1, "notes.txt"));
  }
  ExpectSuccess(Run("export", {"run", "--out=home"}));
}

TEST_F(HuggingFaceCli, ASetIsExportedAndStartedFrom) {
  const std::vector<std::string> options = {"--steps=4", "--eval_every=0", "--ranks=2"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), options.begin(), options.end());
    return more;
  };
  ExpectSuccess(Train(with({"--out=one"})));
  ExpectSuccess(Train(with({"--out=set", "--zero=1"})));  // the same bits
  ASSERT_TRUE(std::filesystem::exists(Path("set/checkpoint-4.set")));
  for (const char* run : {"one", "set"}) {
    ExpectSuccess(Run("export", {run, absl::StrCat("--out=home_", run)}));
    ExpectSuccess(Train(with({absl::StrCat("--model=", run), absl::StrCat("--out=from_", run)})));
  }
  EXPECT_TRUE(ReadAll(Path("home_one/model.safetensors")) ==
              ReadAll(Path("home_set/model.safetensors")));
  ExpectSameWeights("from_one", "from_set");
}

}  // namespace
}  // namespace burst
