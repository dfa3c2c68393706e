// Tests tokenizers of files from text to text, with //train:tokenize, //train and //train:generate.
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
    arguments.insert(arguments.begin(), ProgramPath("train/tools/tokenize"));
    return Subprocess(arguments, {folder_}).Wait();
  }
};

// The checkpoint needs no other file. A prompt's special tokens are tokens.
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

// Shards and their text give the same run, except for the separator.
TEST_F(TokenizerCli, TrainsOnShards) {
  const Result made = Tokenize({"--data=text.txt", "--tokenizer=tiny", "--out=shards/"});
  ExpectSuccess(made);
  EXPECT_TRUE(absl::StrContains(made.out, " tokens of 1 documents in 1 shard: ")) << made.out;
  const std::vector<std::string> shards = {"--data=shards/train_*.bin", "--steps=2"};
  std::vector<std::string> arguments = shards;
  arguments.insert(arguments.end(), {"--out=with", "--tokenizer=shards", "--sample=5"});
  ExpectSuccess(Train(arguments));
  ExpectSuccess(Generate({"--checkpoint=with", "--tokens=3"}));
  // The header says 404 tokens.
  const auto header = SplitCheckpoint(Checkpoint("with")).first["__metadata__"];
  const std::string model = header["model"];
  EXPECT_EQ(nlohmann::json::parse(model)["vocab"], 404);
  // A checkpoint without a tokenizer takes any tokenizer that fits.
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

// A run exports a model as a Hugging Face directory, which generates the run's own text.
TEST_F(TokenizerCli, GeneratesFromAHuggingFaceDirectory) {
  ExpectSuccess(Train({"--tokenizer=tiny", "--steps=5", "--eval_every=0", "--out=run"}));
  const Result exported =
      Subprocess({ProgramPath("train/tools/export"), "run", "--out=home"}, {folder_}).Wait();
  ExpectSuccess(exported);
  const auto text = [&](const std::string& from, const std::string& more) {
    const Result result =
        Generate({"--checkpoint=" + from, "--prompt=line", "--tokens=20", "--temperature=0", more});
    ExpectSuccess(result);
    return result.out;
  };
  const std::string expected = text("run", "--ranks=1");
  EXPECT_EQ(text("home", "--tokenizer=tiny"), expected);
  EXPECT_EQ(text("home", "--ranks=2"), expected) << "the run's tokenizer is exported";
  fs::remove(Path("home/tokenizer.json"));
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

// The export of a run on characters or bytes is generated from and trained on, as the run is.
TEST_F(TokenizerCli, ExportsOfRunsWithoutAFileAreRead) {
  for (const std::string tokenizer : {"char", "byte"}) {
    const std::string run = "run-" + tokenizer, home = "home-" + tokenizer;
    ExpectSuccess(
        Train({"--tokenizer=" + tokenizer, "--steps=5", "--eval_every=0", "--out=" + run}));
    ExpectSuccess(
        Subprocess({ProgramPath("train/tools/export"), run, "--out=" + home}, {folder_}).Wait());
    std::vector<std::string> texts, weights;
    for (const std::string& from : {run, home}) {
      const Result text =
          Generate({"--checkpoint=" + from, "--prompt=line", "--tokens=20", "--temperature=0"});
      ExpectSuccess(text);
      texts.push_back(text.out);
      const std::string out = "of-" + from;
      ExpectSuccess(Train({"--model=" + from, "--steps=2", "--eval_every=0", "--out=" + out}));
      weights.push_back(Weights(out));
    }
    EXPECT_EQ(texts[1], texts[0]);
    EXPECT_TRUE(weights[1] == weights[0]) << tokenizer;
  }
}

// A model with weights is trained on its own tokens, from a directory or a checkpoint.
TEST_F(TokenizerCli, TheTokenizerOfAModelIsTheRuns) {
  ExpectSuccess(Train({"--tokenizer=tiny", "--steps=2", "--eval_every=0", "--out=run"}));
  const auto run = [&](const std::string& program, std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), ProgramPath("train/tools/" + program));
    ExpectSuccess(Subprocess(arguments, {folder_}).Wait());
  };
  run("export", {"run", "--out=home"});
  fs::remove(Path("home/tokenizer.json"));
  ExpectError(Train({"--model=home", "--steps=1", "--out=none"}), 1,
              {"--tokenizer", "home holds no tokenizer.model", "its own tokens", "give"});
  for (const auto& file : fs::directory_iterator(Path("tiny"))) {
    fs::copy(file, fs::path(Path("home")) / file.path().filename());
  }
  run("import", {"home", "--out=in"});
  const auto weights = [&](const std::string& model, const std::string& more) {
    const std::string out = absl::StrCat("of-", Names("", "of-", "").size());
    ExpectSuccess(Train({"--model=" + model, "--steps=3", "--eval_every=0", "--out=" + out, more}));
    return Weights(out);
  };
  const std::string expected = weights("run", "--tokenizer=tiny");
  for (const char* model : {"run", "home", "in"}) {
    EXPECT_TRUE(weights(model, "--tokenizer=auto") == expected) << model;
  }
  EXPECT_FALSE(weights("home", "--tokenizer=char") == expected);
  // A resumed run keeps the tokenizer, also when the folder is gone.
  ExpectSuccess(
      Train({"--model=home", "--steps=2", "--eval_every=0", "--schedule=constant", "--out=parts"}));
  fs::rename(Path("home"), Path("gone"));
  ExpectSuccess(
      Subprocess({ProgramPath("train/train"), "--resume", "--out=parts", "--steps=3"}, {folder_})
          .Wait());
  fs::rename(Path("gone"), Path("home"));
  ExpectSuccess(
      Train({"--model=home", "--steps=3", "--eval_every=0", "--schedule=constant", "--out=whole"}));
  ExpectSameWeights("parts", "whole");
  // Shards have their tokens.
  ExpectSuccess(Tokenize({"--data=text.txt", "--tokenizer=tiny", "--out=shards"}));
  ExpectSuccess(Train({"--model=in", "--data=shards/*.bin", "--steps=1", "--out=of-shards"}));
}

// A model learns where documents end from shards, from a folder and from lines of JSON.
TEST_F(TokenizerCli, APackedModelStopsAtTheEndOfADocument) {
  const std::vector<std::string> texts = {"red? Answer: blue.", "one? Answer: two.",
                                          "ring? Answer: ranks."};
  std::string lines;
  fs::create_directories(Path("docs"));
  for (int i = 0; i < 240; ++i) {
    const std::string& text = texts[i * 7919 % 1000 % 3];
    lines += nlohmann::json{{"text", text}}.dump() + "\n";
    Write(absl::StrCat("docs/", 1000 + i), text);
  }
  Write("docs.jsonl", lines);
  ExpectSuccess(Tokenize({"--data=docs", "--tokenizer=tiny", "--out=shards"}));
  for (const std::string data : {"shards/*.bin", "docs", "docs.jsonl"}) {
    SCOPED_TRACE(data);
    const std::string out = absl::StrCat("run-", Names("", "run-", "").size());
    ExpectSuccess(Train({"--data=" + data, "--tokenizer=tiny", "--packed", "--steps=150",
                         "--lr=2e-2", "--batch=8", "--eval_every=0", "--out=" + out}));
    for (const std::string& text : texts) {
      const std::string question = text.substr(0, text.find('?') + 1);
      const Result result = Generate(
          {"--checkpoint=" + out, "--prompt=" + question, "--temperature=0", "--tokens=60"});
      ExpectSuccess(result);
      EXPECT_EQ(result.out, text + "\n");
    }
  }
  // Data with only end-of-text tokens is refused.
  std::string empty;
  for (int i = 0; i < 500; ++i) empty += "{\"text\": \"\"}\n";
  Write("empty.jsonl", empty);
  for (const char* packed : {"--packed", "--nopacked"}) {
    ExpectError(Train({"--data=empty.jsonl", "--tokenizer=tiny", packed, "--out=none"}), 1,
                {"--data", "must teach something", "end-of-text tokens (401)"});
  }
}

// A validation loss is of tokens that count. Fixed places that hold none are refused at the start.
TEST_F(TokenizerCli, EvaluationsWithoutATargetAreRefused) {
  const nlohmann::json row = {{"text", std::string(990, 'a') + std::string(10, 'b')},
                              {"counted", nlohmann::json::array({{990, 1000}})}};
  std::string lines;
  for (int i = 0; i < 4; ++i) absl::StrAppend(&lines, row.dump(), "\n");
  Write("prompts.jsonl", lines);
  const std::vector<std::string> arguments = {"--data=prompts.jsonl",
                                              "--val_data=prompts.jsonl",
                                              "--tokenizer=tiny",
                                              "--steps=2",
                                              "--batch=1",
                                              "--out=prompts"};
  const auto train = [&](const std::string& more) {
    std::vector<std::string> all = arguments;
    all.push_back(more);
    return Train(all);
  };
  ExpectError(train("--eval_batches=1"), 1, {"--eval_batches", "counts in the loss"});
  ExpectSuccess(train("--eval_batches=0"));
}

// Lines that are not documents are left out and counted, in train and in tokenize.
TEST_F(TokenizerCli, BadLinesAreLeftOut) {
  std::string lines;
  for (int i = 0; i < 60; ++i) lines += nlohmann::json{{"text", "a line of text"}}.dump() + "\n";
  Write("docs.jsonl", "{\"text\": null}\n" + lines + "{\"text\"\n");
  const std::string error = "docs.jsonl: line 1: it has no text with the key 'text'";
  const std::string left_out = "left out 2 lines that are not documents";
  const std::vector<std::string> train = {"--data=docs.jsonl", "--steps=1", "--eval_every=0"};
  ExpectError(Train(train), 1, {"--data", error});
  ExpectError(Tokenize({"--data=docs.jsonl", "--tokenizer=tiny", "--out=s"}), 1, {"--data", error});
  std::vector<std::string> skips = train;
  skips.insert(skips.end(), {"--bad_lines=skip", "--tokenizer=tiny", "--out=run"});
  for (const Result& result : {Train(skips), Tokenize({"--data=docs.jsonl", "--tokenizer=tiny",
                                                       "--out=s", "--bad_lines=skip"})}) {
    ExpectSuccess(result);
    EXPECT_TRUE(absl::StrContains(result.out, left_out)) << result.out;
    EXPECT_TRUE(absl::StrContains(result.out, error)) << result.out;
  }
  ExpectError(Train(train), 1, {"--data", error});  // the cache has the tokens of the other lines
  // Options for lines are refused with data that has no lines of JSON.
  for (const char* option : {"--bad_lines=skip", "--field=body"}) {
    const std::string name = std::string(option).substr(0, std::string(option).find('='));
    ExpectError(Train({option, "--steps=1"}), 1, {name, ".jsonl", "leave it out"});
    ExpectError(Tokenize({"--data=text.txt", "--tokenizer=tiny", "--out=none", option}), 1,
                {name, ".jsonl", "leave it out"});
  }
}

// Prompts have any length, and the tokenizer has more tokens than the model.
TEST_F(TokenizerCli, PromptsThatAModelCannotReadAreTold) {
  ExpectSuccess(Train({"--tokenizer=tiny_gpt2", "--steps=2", "--eval_every=0", "--out=run"}));
  ExpectSuccess(
      Subprocess({ProgramPath("train/tools/export"), "run", "--out=home"}, {folder_}).Wait());
  fs::copy(Path("tiny/tokenizer.json"), Path("home/tokenizer.json"),
           fs::copy_options::overwrite_existing);  // 404 tokens, the model 381
  const auto generate = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.end(), {"--tokens=40", "--temperature=0"});
    return Generate(arguments);
  };
  const Result more = generate({"--checkpoint=home", "--prompt=line"});
  EXPECT_EQ(more.exit_code, 0) << more.err;
  EXPECT_TRUE(absl::StrContains(more.err, "tokenizer has 404 tokens and the model 381"))
      << more.err;
  ExpectError(generate({"--checkpoint=home", "--prompt=a<|endoftext|>"}), 1,
              {"--prompt", "which has 381", "the token 401 ('<|endoftext|>') of the 404"});
  // A warning names a prompt that is longer than the context, from a file and from standard input.
  std::string text;
  for (int i = 0; i < 300; ++i) absl::StrAppend(&text, "line ", i, "\n");
  Write("prompt.txt", text);
  const Result long_one = generate({"--checkpoint=run", "--prompt_file=prompt.txt"});
  EXPECT_EQ(long_one.exit_code, 0) << long_one.err;
  EXPECT_TRUE(
      absl::StrContains(long_one.err, "the model's context 32: the last 16 of them are read"))
      << long_one.err;
  EXPECT_TRUE(absl::StartsWith(long_one.out, text)) << long_one.out;
  Write("short.txt", "line");
  const Result file = generate({"--checkpoint=run", "--prompt_file=short.txt"});
  ExpectSuccess(file);
  EXPECT_EQ(file.out, generate({"--checkpoint=run", "--prompt=line"}).out);
  const std::string program = ProgramPath("train/tools/generate");
  const Result input =
      Subprocess({"/bin/sh", "-c",
                  "printf line | '" + program +
                      "' --checkpoint=run --prompt_file=- --tokens=40 --temperature=0"},
                 {folder_})
          .Wait();
  ExpectSuccess(input);
  EXPECT_EQ(input.out, file.out);
  ExpectError(generate({"--checkpoint=run", "--prompt_file=none.txt"}), 1,
              {"--prompt_file", "none.txt"});
  ExpectError(generate({"--checkpoint=run", "--prompt_file=short.txt", "--prompt=line"}), 2,
              {"--prompt_file", "--prompt"});
  ExpectError(generate({"--checkpoint=run", "--bos=often"}), 2, {"--bos", "often"});
  ExpectError(generate({"--checkpoint=run", "--bos"}), 1, {"--bos", "puts nothing before"});
}

// Shards with BOS make a run whose prompts begin with BOS.
TEST_F(TokenizerCli, BosInShardsIsBosInPrompts) {
  nlohmann::json json = nlohmann::json::parse(ReadAll(Path("tiny/tokenizer.json")));
  json["post_processor"] = nlohmann::json::parse(
      R"({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}},
          {"Sequence": {"id": "A", "type_id": 0}}], "special_tokens": {"x": {"ids": [400]}}})");
  Write("tiny/tokenizer.json", json.dump());
  fs::create_directories(Path("docs"));
  for (int i = 0; i < 300; ++i) {
    Write(absl::StrCat("docs/", 1000 + i), i % 2 == 0 ? "a ring of ranks" : "one line of text");
  }
  ExpectError(Tokenize({"--data=docs", "--tokenizer=tiny_gpt2", "--bos", "--out=none"}), 1,
              {"--bos", "puts none", "--nobos"});
  for (const bool bos : {false, true}) {
    const std::string name = bos ? "with" : "without";
    ExpectSuccess(Tokenize(
        {"--data=docs", "--tokenizer=tiny", absl::StrCat("--bos=", bos), "--out=shards-" + name}));
    ExpectSuccess(
        Train({"--data=shards-" + name + "/*.bin", "--tokenizer=shards-" + name, "--packed",
               "--steps=150", "--lr=2e-2", "--batch=8", "--eval_every=0", "--out=" + name}));
    const auto generate = [&](const std::string& more) {
      const Result result =
          Generate({"--checkpoint=" + name, "--prompt=", "--temperature=0", "--tokens=60", more});
      ExpectSuccess(result);
      return result.out;
    };
    const std::string text = generate("--seed=1");
    EXPECT_TRUE(text == "a ring of ranks\n" || text == "one line of text\n") << text;
    // With --bos it also comes once.
    if (bos) {
      EXPECT_EQ(generate("--bos"), text);
    }
    const Result prompt =
        Generate({"--checkpoint=" + name, "--prompt=one", "--temperature=0", "--tokens=60"});
    EXPECT_EQ(prompt.out, "one line of text\n");
  }
}

// A summary that standard output does not take is lost, which is an error.
TEST_F(TokenizerCli, LostSummariesAreErrors) {
  ExpectSuccess(Train({"--tokenizer=tiny", "--steps=1", "--eval_every=0", "--out=run"}));
  const std::vector<std::string> commands[] = {
      {"tokenize", "--data=text.txt", "--tokenizer=tiny", "--out=shards"},
      {"export", "run", "--out=home"},
      {"import", "home", "--out=in"}};
  const std::pair<const char*, const char*> outputs[] = {{"> /dev/full", "No space left"},
                                                         {">&-", "it is closed"}};
  for (const auto& [output, cause] : outputs) {
    for (std::vector<std::string> command : commands) {
      command[0] = ProgramPath("train/tools/" + command[0]);
      fs::remove_all(Path(command.back().substr(6)));
      command.insert(command.begin(), {"/bin/sh", "-c", absl::StrCat("\"$0\" \"$@\" ", output)});
      ExpectError(Subprocess(command, {folder_}).Wait(), 1, {"standard output", cause});
    }
  }
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
              {"--tokenizer", "tiny/tokenizer.json", "must be a ByteLevel"});
  EXPECT_FALSE(fs::exists(Path("run")));
}

}  // namespace
}  // namespace burst
