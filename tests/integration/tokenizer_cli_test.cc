// Tokenizers of files from text to text: //train:tokenize, //train and //train:generate.
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/match.h"
#include "tests/integration/train_cli.h"
#include "tests/train/tokenizer_fixture.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

class TokenizerCli : public TrainCli {
 protected:
  void SetUp() override {
    TrainCli::SetUp();
    fs::copy(TokenizerFixture("tiny"), Path("tiny"));
    fs::copy(TokenizerFixture("tiny_gpt2"), Path("tiny_gpt2"));
  }

  Result Tokenize(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), ProgramPath("train/tokenize/tokenize"));
    return Subprocess(arguments, {folder_}).Wait();
  }
};

// The checkpoint needs no file beside it; a prompt's special tokens are tokens.
TEST_F(TokenizerCli, TrainsOnTextAndGenerates) {
  ExpectSuccess(Train({"--tokenizer=tiny_gpt2", "--steps=2", "--out=run"}));
  ExpectSuccess(Train({"--resume", "--steps=3", "--out=run"}));
  fs::remove_all(Path("tiny_gpt2"));
  const Result result =
      Generate({"--checkpoint=run", "--prompt=line<|endoftext|>caf\xC3\xA9", "--tokens=20"});
  ExpectSuccess(result);
  EXPECT_TRUE(absl::StartsWith(result.out, "line<|endoftext|>caf\xC3\xA9")) << result.out;
  ExpectError(Train({"--resume", "--steps=4", "--out=run"}), 2, {"--tokenizer", "tiny_gpt2"});
}

// Shards and the text that they were made of are the same run, but for the separator.
TEST_F(TokenizerCli, TrainsOnShards) {
  const Result made = Tokenize({"--data=text.txt", "--tokenizer=tiny", "--out=shards/"});
  ExpectSuccess(made);
  EXPECT_TRUE(absl::StrContains(made.out, " tokens of 1 documents in 1 shard: ")) << made.out;
  const std::vector<std::string> shards = {"--data=shards/train_*.bin", "--steps=2"};
  std::vector<std::string> arguments = shards;
  arguments.insert(arguments.end(), {"--out=with", "--tokenizer=shards", "--sample=5"});
  ExpectSuccess(Train(arguments));
  ExpectSuccess(Generate({"--checkpoint=with", "--tokens=3"}));
  // 404 tokens, by the header.
  const auto header = SplitCheckpoint(Checkpoint("with")).first["__metadata__"];
  const std::string model = header["model"];
  EXPECT_EQ(nlohmann::json::parse(model)["vocab"], 404);
  // A checkpoint without one takes any that fits.
  arguments = shards;
  arguments.push_back("--out=without");
  ExpectSuccess(Train(arguments));
  ExpectError(Generate({"--checkpoint=without"}), 1, {"--checkpoint", "give --tokenizer"});
  ExpectSuccess(Generate({"--checkpoint=without", "--tokenizer=shards", "--tokens=3"}));
  ExpectError(Generate({"--checkpoint=without", "--tokenizer=text.txt"}), 1,
              {"--tokenizer", "text.txt: it is not JSON"});
  arguments = shards;
  arguments.insert(arguments.end(), {"--out=other", "--tokenizer=tiny_gpt2"});
  ExpectError(Train(arguments), 1, {"--tokenizer", "381 tokens", "404"});
}

// A model of transformers' folder, exported by a run: the run's own text.
TEST_F(TokenizerCli, GeneratesFromAHuggingFaceDirectory) {
  ExpectSuccess(Train({"--tokenizer=tiny", "--steps=5", "--eval_every=0", "--out=run"}));
  const Result exported =
      Subprocess({ProgramPath("train/huggingface/export"), "run", "--out=home"}, {folder_}).Wait();
  ExpectSuccess(exported);
  const auto text = [&](const std::string& from, const std::string& more) {
    const Result result =
        Generate({"--checkpoint=" + from, "--prompt=line", "--tokens=20", "--temperature=0", more});
    ExpectSuccess(result);
    return result.out;
  };
  const std::string expected = text("run", "--ranks=1");
  EXPECT_EQ(text("home", "--tokenizer=tiny"), expected);
  ExpectError(Generate({"--checkpoint=home"}), 1, {"--checkpoint", "home", "give --tokenizer"});
  Write("home/tokenizer.json", "{");
  ExpectError(Generate({"--checkpoint=home"}), 1,
              {"--checkpoint", "home/tokenizer.json", "JSON", "give --tokenizer"});
  fs::remove(Path("home/tokenizer.json"));
  for (const auto& file : fs::directory_iterator(Path("tiny"))) {
    fs::copy(file, fs::path(Path("home")) / file.path().filename());
  }
  EXPECT_EQ(text("home", "--ranks=1"), expected);
  EXPECT_EQ(text("home", "--ranks=3"), expected);
  fs::resize_file(Path("home/model.safetensors"), 1000);
  ExpectError(Generate({"--checkpoint=home"}), 1,
              {"--checkpoint", "home/model.safetensors", "truncated"});
}

TEST_F(TokenizerCli, Errors) {
  ExpectError(Tokenize({"--data=text.txt", "--tokenizer=tiny"}), 2, {"--out"});
  ExpectError(Tokenize({"--data=text.txt", "--out=a"}), 2, {"--tokenizer"});
  ExpectError(Tokenize({"--data=none.txt", "--tokenizer=tiny", "--out=a"}), 1,
              {"--data", "none.txt"});
  ExpectError(Tokenize({"--data=text.txt", "--tokenizer=text.txt", "--out=a"}), 1,
              {"--tokenizer", "text.txt: it is not JSON"});
  Write("tiny/tokenizer.json", R"({"model":{"type":"WordPiece"}})");
  ExpectError(Train({"--tokenizer=tiny", "--out=run"}), 1,
              {"--tokenizer", "tiny/tokenizer.json", "not supported"});
  EXPECT_FALSE(fs::exists(Path("run")));
}

}  // namespace
}  // namespace burst
