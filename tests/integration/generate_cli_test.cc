// Tests //train:generate, //train:chat and //train:evaluate as users run them, on models that
// //train made.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/integration/train_cli.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

TEST_F(TrainCli, GenerationIsAFunctionOfItsSeed) {
  ExpectSuccess(Train({"--steps=30", "--lr=1e-2", "--eval_every=0", "--out=run"}));
  const std::vector<std::string> base = {"--checkpoint=run", "--tokens=80"};
  const auto text = [&](std::vector<std::string> more) {
    more.insert(more.begin(), base.begin(), base.end());
    const Result result = Generate(more);
    ExpectSuccess(result);
    return result.out;
  };
  const std::string once = text({"--prompt=line ", "--seed=3"});
  EXPECT_TRUE(absl::StartsWith(once, "line ")) << once;
  EXPECT_EQ(text({"--prompt=line ", "--seed=3"}), once);
  EXPECT_NE(text({"--prompt=line ", "--seed=4"}), once);
  EXPECT_EQ(text({"--temperature=0", "--seed=1"}), text({"--temperature=0", "--seed=2"}));
  EXPECT_EQ(text({"--top_k=1", "--seed=1"}), text({"--temperature=0"}));
  // Ranks share the keys and values. The text grows beyond the 32 tokens of training, so that its
  // end is read again. It begins with fewer tokens than ranks, and with many.
  for (const char* prompt : {"--prompt=l", "--prompt=line 12 of a text\nline"}) {
    const std::string alone = text({"--temperature=0", prompt});
    EXPECT_EQ(text({"--temperature=0", prompt, "--ranks=2"}), alone);
    EXPECT_EQ(text({"--temperature=0", prompt, "--ranks=3", "--layout=striped"}), alone);
  }
  // With ranks as processes, rank 0 writes. The errors are --ranks that do not fit the launch, and
  // an error of all ranks.
  const auto processes = [&](std::vector<std::string> more) {
    std::vector<std::string> command = {ProgramPath("tests/faults/launcher.sh"), "torchrun", "2",
                                        "5", ProgramPath("train/tools/generate")};
    command.insert(command.end(), base.begin(), base.end());
    command.insert(command.end(), more.begin(), more.end());
    return Subprocess(command, {folder_}).Wait();
  };
  const std::string prompt = "--prompt=line 12 of a text\nline";
  const Result together = processes({"--temperature=0", prompt, "--layout=striped"});
  ExpectSuccess(together);
  EXPECT_EQ(together.out, text({"--temperature=0", prompt}));
  ExpectError(processes({"--ranks=3"}), 2, {"--ranks", "3", "2 processes", "torchrun"});
  ExpectError(processes({"--prompt=\xE2\x82\xAC"}), 1, {"--prompt", "U+20AC"});
  ExpectError(Generate({"--checkpoint=run", "--ranks=0"}), 2, {"--ranks", "0", "at least 1"});
  ExpectError(Generate({"--checkpoint=run", "--ranks=5000"}), 2, {"--ranks", "5000", "at most"});
  ExpectError(Generate({"--checkpoint=run", "--layout=round"}), 2, {"--layout", "round"});
  ExpectError(Generate({"--checkpoint=run", "--layout=striped"}), 2, {"--layout", "--ranks=1"});
  ExpectError(Generate({"--checkpoint=run", "--device=cpu", "--precision=tf32"}), 2,
              {"--precision", "tf32", "bf16"});
  ExpectError(Generate({"--checkpoint=run", "--prompt=\xE2\x82\xAC"}), 1, {"--prompt", "U+20AC"});
  ExpectError(Generate({"--checkpoint=run", "--temperature=-1"}), 2, {"--temperature"});
  ExpectError(Generate({"--checkpoint=run", "--top_k=-1"}), 2, {"--top_k"});
  ExpectError(Generate({"--checkpoint=run", "--tokens=-1"}), 2, {"--tokens"});
}

// Every line of --prompts has the text that --prompt gives, on any number of ranks.
TEST_F(TrainCli, PromptsAreLines) {
  ExpectSuccess(Train({"--steps=30", "--lr=1e-2", "--eval_every=0", "--out=run"}));
  const std::vector<std::string> prompts = {"line ", "l", "line 12 of a \ntext\nline 12 of a text"};
  Write("prompts.jsonl", absl::StrCat(nlohmann::json(prompts[0]).dump(), "\n\n",
                                      nlohmann::json{{"id", 7}, {"prompt", prompts[1]}}.dump(),
                                      "\r\n", nlohmann::json(prompts[2]).dump()));
  const std::vector<std::string> base = {"--checkpoint=run", "--tokens=40", "--temperature=0"};
  const auto generate = [&](std::vector<std::string> more) {
    more.insert(more.begin(), base.begin(), base.end());
    return Generate(more);
  };
  std::string expected;
  for (const std::string& prompt : prompts) {
    const std::string text = generate({"--prompt=" + prompt}).out;
    ASSERT_TRUE(absl::StartsWith(text, prompt)) << text;
    const size_t end = text.size() - 1;  // a line break
    nlohmann::ordered_json row;
    row["prompt"] = prompt;
    row["text"] = text.substr(prompt.size(), end - prompt.size());
    absl::StrAppend(&expected, row.dump(), "\n");
  }
  const Result all = generate({"--prompts=prompts.jsonl"});
  EXPECT_EQ(all.exit_code, 0);
  EXPECT_EQ(all.out, expected);
  EXPECT_TRUE(absl::StrContains(all.err, "the prompt has 36 tokens")) << all.err;
  EXPECT_EQ(generate({"--prompts=prompts.jsonl", "--ranks=2"}).out, expected);

  // A line's number is added to the seed, so that equal lines have different texts.
  Write("equal.jsonl", "\"l\"\n\"l\"\n\"l\"\n");
  const Result equal = generate({"--prompts=equal.jsonl", "--temperature=2", "--seed=5"});
  std::istringstream drawn(equal.out);
  int number = 0;
  for (std::string line; std::getline(drawn, line); ++number) {
    const std::string text = nlohmann::json::parse(line)["text"];
    EXPECT_EQ("l" + text + "\n",
              generate({"--prompt=l", "--temperature=2", absl::StrCat("--seed=", 5 + number)}).out);
  }
  EXPECT_EQ(number, 3);

  // The pieces of a text are the text. It ends before --stop.
  const Result pieces = generate({"--prompts=prompts.jsonl", "--stream", "--stop=f a"});
  std::istringstream lines(pieces.out);
  std::string joined;
  std::vector<std::string> texts;
  for (std::string line; std::getline(lines, line);) {
    const auto row = nlohmann::json::parse(line);
    if (row.contains("piece")) {
      joined += row["piece"];
      continue;
    }
    EXPECT_EQ(row["text"], joined);
    texts.push_back(std::exchange(joined, ""));
    EXPECT_FALSE(absl::StrContains(texts.back(), "f a"));
  }
  EXPECT_EQ(texts.size(), 3u);

  // With ranks as processes, rank 0 reads and writes the lines.
  const auto processes = [&](const std::string& file) {
    return Subprocess({ProgramPath("tests/faults/launcher.sh"), "torchrun", "2", "5",
                       ProgramPath("train/tools/generate"), base[0], base[1], base[2],
                       "--prompts=" + file},
                      {folder_})
        .Wait();
  };
  EXPECT_EQ(processes("prompts.jsonl").out, expected);
  ExpectError(processes("-"), 1, {"--prompts", "one process"});
  EXPECT_TRUE(absl::StrContains(processes("none.jsonl").err, "none.jsonl"));

  Write("bad.jsonl", "\"line\"\n{\"prompt\": 1}\n");
  const Result bad = generate({"--prompts=bad.jsonl", "--ranks=2"});
  ExpectError(bad, 1, {"--prompts", "bad.jsonl: line 2", "a text 'prompt'"});
  Write("unknown.jsonl", "\"\u20ac\"");
  ExpectError(generate({"--prompts=unknown.jsonl"}), 1, {"unknown.jsonl: line 1", "U+20AC"});
  ExpectError(generate({"--prompts=none.jsonl"}), 1, {"--prompts", "none.jsonl"});
  ExpectError(generate({"--prompts=a", "--prompt=b"}), 2, {"--prompts", "--prompt"});
  ExpectError(generate({"--stream"}), 2, {"--stream", "--prompts"});
  ExpectError(generate({"--layout=balanced", "--ranks=2"}), 2, {"--layout", "balanced"});
}

// //train:chat answers with the model's text after the rendered messages.
TEST_F(TrainCli, AChatIsTheTextAfterItsMessages) {
  ExpectSuccess(Train({"--steps=30", "--lr=1e-2", "--eval_every=0", "--out=run"}));
  Write("chat.jinja", "{% for m in messages %}{{ m.content }}\n{% endfor %}");
  Write("lines", "line 12\n/new\nline 7\ntext\n");
  const auto text = [&](const char* seed, const std::string& prompt) {
    const Result result = Generate({"--checkpoint=run", "--tokens=9", seed, "--prompt=" + prompt});
    return result.out.substr(prompt.size());
  };
  const std::string second = text("--seed=6", "line 7\n");
  const std::string expected =
      text("--seed=5", "line 12\n") + second + text("--seed=7", "line 7\n" + second + "text\n");
  const std::string program = ProgramPath("train/tools/chat");
  const Result result =
      Subprocess({"/bin/sh", "-c", "\"$0\" \"$@\" < \"$BUILD_WORKING_DIRECTORY/lines\"", program,
                  "--checkpoint=run", "--template=chat.jinja", "--tokens=9", "--seed=5"},
                 {folder_})
          .Wait();
  ExpectSuccess(result);
  EXPECT_EQ(result.out, expected);
  const Result failed =
      Subprocess({"/bin/sh", "-c", "\"$0\" \"$@\" < \"$BUILD_WORKING_DIRECTORY/lines\"", program,
                  "--checkpoint=none", "--template=chat.jinja"},
                 {folder_})
          .Wait();
  ExpectError(failed, 1, {"--checkpoint", "none"});
}

// Text that standard output does not take is lost, which is an error.
TEST_F(TrainCli, LostTextsAreErrors) {
  ExpectSuccess(Train({"--steps=1", "--out=run"}));
  Write("prompts.jsonl", "\"line\"\n");
  const auto generate = [&](const std::string& prompt, const std::string& output) {
    return Subprocess(
               {"/bin/sh", "-c", "\"$0\" \"$@\" " + output, ProgramPath("train/tools/generate"),
                "--checkpoint=run", "--tokens=2000", prompt},
               {folder_})
        .Wait();
  };
  for (const char* prompt : {"--prompt=line", "--prompts=prompts.jsonl"}) {
    ExpectError(generate(prompt, "> /dev/full"), 1, {"standard output", "No space left"});
    ExpectError(generate(prompt, ">&-"), 1, {"standard output", "it is closed"});
  }
  // Who reads the beginning alone has enough.
  const Result head = generate("--prompt=line", "| head -c 4");
  ExpectSuccess(head);
  EXPECT_EQ(head.out, "line");
}

// The perplexity of the validation data is the trainer's, on any number of ranks.
TEST_F(TrainCli, EvaluationsAreTheTrainers) {
  Write("val.txt", ReadAll(Path("text.txt")).substr(0, 3000));
  ExpectSuccess(Train({"--steps=10", "--lr=1e-2", "--eval_every=10", "--eval_batches=0",
                       "--val_data=val.txt", "--out=run"}));
  const double trained = Metrics("run").back()["val_loss"];
  const auto evaluate = [&](std::vector<std::string> more) {
    std::vector<std::string> command = {ProgramPath("train/tools/evaluate"), "--checkpoint=run",
                                        "--data=val.txt"};
    command.insert(command.end(), more.begin(), more.end());
    return Subprocess(command, {folder_}).Wait();
  };
  ExpectError(evaluate({"--data=val.txt:1,text.txt:1"}), 1, {"--data", "a mixture of 2"});
  for (const char* ranks : {"--ranks=1", "--ranks=3"}) {
    const Result result = evaluate({"--sequences=0", ranks});
    ExpectSuccess(result);
    const auto json = nlohmann::json::parse(ReadAll(Path("evaluation.json")));
    // Both are means of float32 losses, of which one side rounds each, the other sums of 64.
    EXPECT_NEAR(json["loss"].get<double>(), trained, 2e-6 * trained);
    EXPECT_NEAR(json["perplexity"].get<double>(), std::exp(trained), 1e-5 * std::exp(trained));
  }
  EXPECT_TRUE(absl::StartsWith(ReadAll(Path("evaluation.svg")), "<svg"));
  // With ranks as processes, rank 0 writes.
  Write("choices.jsonl", R"({"context": "line 1", "choices": [" of", "2 of"], "answer": 0})");
  const auto choices = [&](std::vector<std::string> command, const std::string& out) {
    for (const char* option : {"--checkpoint=run", "--data=choices.jsonl", "--task=choices"}) {
      command.emplace_back(option);
    }
    command.push_back("--out=" + out);
    ExpectSuccess(Subprocess(command, {folder_}).Wait());
    return nlohmann::json::parse(ReadAll(Path(out + ".json")));
  };
  const std::string program = ProgramPath("train/tools/evaluate");
  const auto alone = choices({program}, "alone");
  const auto both =
      choices({ProgramPath("tests/faults/launcher.sh"), "torchrun", "2", "5", program}, "both");
  EXPECT_EQ(both["accuracy"], alone["accuracy"]);
  EXPECT_FALSE(fs::exists(Path("alone.svg")));

  ExpectError(evaluate({"--trials=2"}), 2, {"--trials", "--task=perplexity"});
  ExpectError(evaluate({"--task=needle", "--seqlen=2"}), 2, {"--seqlen", "--task=needle"});
  ExpectError(evaluate({"--task=needle", "--depths=101"}), 2, {"--depths", "0 to 100"});
  ExpectError(evaluate({"--task=needle"}), 1, {"--task", "needle", "tokenizer"});
  ExpectError(evaluate({"--task=choices"}), 1, {"--data", "val.txt", "line 1"});
  ExpectError(evaluate({"--data="}), 2, {"--data"});
  ExpectError(evaluate({"--data=none.txt"}), 1, {"--data", "none.txt"});

  // Files that no evaluation wrote are kept.
  for (const char* name : {"run/config.json", "run/loss.svg"}) {
    const std::string before = ReadAll(Path(name));
    ASSERT_NE(before, "") << name;
    const std::string out = fs::path(name).replace_extension().string();
    ExpectError(evaluate({"--out=" + out}), 2, {"--out", out, name, "give another name"});
    EXPECT_EQ(ReadAll(Path(name)), before);
  }
}

}  // namespace
}  // namespace burst
