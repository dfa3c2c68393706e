// Tests //train and //train:generate as users run them: the files of a run, and the errors.
#include "tests/integration/train_cli.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace burst {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// Counts the event files of TensorBoard.
int EventFiles(const std::string& folder) {
  int files = 0;
  for (const auto& entry : fs::directory_iterator(folder)) {
    files += absl::StartsWith(entry.path().filename().string(), "events.out.tfevents.");
  }
  return files;
}

// Steps hold 64 tokens. A run that resumes may be longer, in the unit that it began with.
TEST_F(TrainCli, RunsHaveTokensOrEpochs) {
  ExpectSuccess(Train({"--tokens=129", "--eval_every=0", "--out=run"}));
  EXPECT_EQ(Metrics("run").size(), 3u);
  ExpectSuccess(Train({"--resume", "--tokens=300", "--out=run"}));
  EXPECT_EQ(Metrics("run").size(), 5u);
  ExpectError(Train({"--resume", "--steps=9", "--out=run"}), 2, {"--tokens", "--steps"});
  const Result epochs = Train({"--epochs=0.5", "--eval_every=0", "--out=epochs"});
  ExpectSuccess(epochs);
  EXPECT_TRUE(absl::StrContains(epochs.out, " 53 steps, 0.50 epochs")) << epochs.out;
  const size_t steps = Metrics("epochs").size();
  EXPECT_EQ(steps, 53u);
  ExpectSuccess(Train({"--resume", "--epochs=0.6", "--out=epochs"}));
  EXPECT_GT(Metrics("epochs").size(), steps);
  ExpectError(Train({"--resume", "--epochs=0.2", "--out=epochs"}), 1, {"has made"});
}

// A mixture's order is a function of the seed and the step, so a resumed run has the same losses.
TEST_F(TrainCli, MixturesResume) {
  std::string numbers;
  for (int i = 0; i < 900; ++i) absl::StrAppend(&numbers, i * 7919 % 10007, "\n");
  Write("numbers.txt", numbers);
  const auto train = [&](std::vector<std::string> more) {
    more.insert(more.end(), {"--data=text.txt:0.7,numbers.txt:0.3", "--eval_every=0", "--lr=1e-3",
                             "--schedule=constant", "--warmup=0"});
    return Train(more);
  };
  ExpectSuccess(train({"--steps=12", "--out=whole"}));
  ExpectSuccess(train({"--steps=5", "--out=parts"}));
  ExpectSuccess(train({"--resume", "--steps=12", "--out=parts"}));
  const std::vector<Json> whole = Metrics("whole"), parts = Metrics("parts");
  ASSERT_EQ(whole.size(), 12u);
  ASSERT_EQ(parts.size(), 12u);
  for (size_t i = 0; i < whole.size(); ++i) EXPECT_EQ(whole[i]["loss"], parts[i]["loss"]) << i;
  ExpectError(
      Train({"--resume", "--steps=13", "--out=parts", "--data=text.txt:0.6,numbers.txt:0.4"}), 1,
      {"--data"});
}

TEST_F(TrainCli, RunLeavesItsFolder) {
  const Result result = Train({"--steps=6", "--eval_every=3", "--out=run", "--sample=20"});
  ExpectSuccess(result);
  for (const char* part : {"run folder", "validation loss", "tok/s", "MFU", "loss"}) {
    EXPECT_TRUE(absl::StrContains(result.out, part)) << part << " is missing in " << result.out;
  }
  const std::vector<Json> rows = Metrics("run");
  ASSERT_EQ(rows.size(), 6u);
  for (size_t i = 0; i < rows.size(); ++i) {
    for (const char* key :
         {"step", "tokens", "loss", "lr", "grad_norm", "tokens_per_second", "step_ms"}) {
      EXPECT_TRUE(rows[i].contains(key) && rows[i][key].is_number()) << key;
    }
    EXPECT_EQ(rows[i]["step"], i + 1);
    EXPECT_EQ(rows[i]["tokens"], 64 * (i + 1));
    EXPECT_EQ(rows[i].contains("val_loss"), i == 2 || i == 5);
  }
  EXPECT_TRUE(absl::StrContains(ReadAll(Path("run/loss.svg")), "</svg>"));
  EXPECT_TRUE(Temporaries("run").empty());

  EXPECT_EQ(EventFiles(Path("run")), 0);

  // The configuration makes the same run again.
  ExpectSuccess(
      Subprocess({ProgramPath("train/train"), "--config=run/config.json", "--out=again"}, {folder_})
          .Wait());
  ExpectSameRun("run", "again");
}

TEST_F(TrainCli, TensorBoardReadsAFileOfEachStart) {
  ExpectSuccess(Train({"--steps=2", "--eval_every=2", "--tensorboard", "--out=run"}));
  EXPECT_EQ(EventFiles(Path("run")), 1);
  ExpectSuccess(Train({"--steps=3", "--eval_every=2", "--resume", "--out=run"}));
  EXPECT_EQ(EventFiles(Path("run")), 2);
}

TEST_F(TrainCli, Version) {
  for (const char* program : {"train/train", "train/tools/generate"}) {
    const Result result = Subprocess({ProgramPath(program), "--version"}, {folder_}).Wait();
    ExpectSuccess(result);
    EXPECT_TRUE(absl::StartsWith(result.out, "Burst 0.")) << result.out;
  }
}

TEST_F(TrainCli, FoldersAreNumbered) {
  for (int run = 1; run <= 2; ++run) {
    ExpectSuccess(Train({"--steps=1", "--eval_every=0"}));
    EXPECT_TRUE(fs::exists(Path(absl::StrCat("runs/custom-", run, "/checkpoint.safetensors"))));
  }
}

TEST_F(TrainCli, Help) {
  for (const char* program : {"train/train", "train/tools/generate"}) {
    const Result result = Subprocess({ProgramPath(program), "--help"}, {folder_}).Wait();
    ExpectSuccess(result);
    EXPECT_TRUE(absl::StrContains(result.out, "--seed=1")) << result.out;
    std::istringstream lines(result.out);
    for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 100u) << line;
  }
}

TEST_F(TrainCli, ErrorsNameTheirOption) {
  const std::vector<std::string> two_steps = {"--steps=2", "--eval_every=0"};
  std::string shard(1024, '\0');
  const int32_t header[] = {20240520, 1, 500};
  shard.replace(0, sizeof(header), reinterpret_cast<const char*>(header), sizeof(header));
  for (int i = 0; i < 500; ++i) shard += i == 77 ? "\x52\xC4" : "\x01\x02";  // one token is 50,258
  Write("tokens.bin", shard);
  shard[0] = 9;
  Write("magic.bin", shard);
  Write("empty.txt", "");
  Write("short.txt", "too short");
  Write("heads.json", R"({"family":"llama","layers":1,"width":16,"heads":3})");
  Write("kv.json", R"({"family":"llama","layers":1,"width":16,"heads":4,"kv_heads":3})");
  Write("vocab.json", R"({"family":"llama","layers":1,"width":16,"heads":4,"vocab":5})");
  Write("a_file", "");

  fs::create_directory(Path("runs"));
  const auto fails = [&](int code, const std::vector<std::string>& arguments,
                         const std::vector<std::string>& parts) {
    SCOPED_TRACE(arguments[0]);
    ExpectError(Train(arguments), code, parts);
    for (const auto& entry : fs::directory_iterator(Path("runs"))) {
      EXPECT_EQ(entry.path().filename(), ".data-cache") << "nothing starts";
    }
  };
  fails(2, {"--seqlen=0"}, {"--seqlen", "at least 1"});
  fails(2, {"--sedd=3"}, {"--sedd", "--seed"});
  fails(2, {"--model=heads.json"}, {"--model", "heads", "3"});
  fails(2, {"--model=kv.json"}, {"--model", "kv_heads", "3"});
  fails(2, {"--steps=5", "--warmup=6"}, {"--warmup"});
  fails(1, {"--data=missing.txt"}, {"--data", "missing.txt"});
  fails(1, {"--data=empty.txt"}, {"--data", "empty"});
  fails(1, {"--data=short.txt"}, {"--data", "--seqlen"});
  fails(1, {"--val_data=short.txt"}, {"--val_data", "--seqlen"});
  fails(1, {"--data=magic.bin"}, {"--data", "magic.bin", "20240520"});
  fails(1, {"--data=tokens.bin"}, {"tokens.bin", "50258", "50257"});
  fails(1, {"--data=tokens.bin", "--tokenizer=byte"}, {"--tokenizer"});
  fails(1, {"--data=tokens.bin", "--sample=5"}, {"--sample"});
  fails(1, {"--model=vocab.json"}, {"--model", "vocabulary of 5"});
  Write("one_line.txt", std::string(5000, 'x'));
  fails(1, {"--data=one_line.txt", "--packed"}, {"--packed", "single document"});
  fails(1, {"--data_cache=a_file/cache"}, {"--data_cache", "a_file/cache"});
  // The paths are not files, or are links that lead nowhere.
  fs::create_directory(Path("loop"));
  fs::create_symlink("loop.txt", Path("loop/loop.txt"));
  fs::create_symlink("nowhere", Path("dangling.txt"));
  ASSERT_EQ(mkfifo(Path("pipe.txt").c_str(), 0644), 0);
  ASSERT_EQ(mkfifo(Path("pipe.bin").c_str(), 0644), 0);
  fails(1, {"--data=loop"}, {"--data", "loop.txt", "symbolic links"});
  fails(1, {"--data=loop/loop.txt"}, {"--data", "loop.txt", "symbolic links"});
  fails(1, {"--data=dangling.txt"}, {"--data", "dangling.txt"});
  fails(1, {"--data=text.txt", "--val_data=loop"}, {"--val_data", "loop.txt", "symbolic links"});
  fails(1, {"--data=pipe.txt"}, {"--data", "pipe.txt is a pipe, not a file"});
  fails(1, {"--data=*.bin"}, {"--data", "pipe.bin is a pipe, not a file"});
  fails(1, {"--data=/dev/zero"}, {"--data", "/dev/zero is a device, not a file"});
  fails(1, {"--data=/proc/self/mem"}, {"--data", "/proc/self/mem is empty"});
  ExpectError(Train({"--out=a_file/run"}), 1, {"--out", "a_file/run"});
  ExpectError(Generate({}), 2, {"--checkpoint"});
  ExpectError(Generate({"--checkpoint=missing"}), 1, {"--checkpoint", "missing"});
  ExpectError(Generate({"--checkpoint=text.txt"}), 1, {"text.txt"});
}

TEST_F(TrainCli, AnotherRunsFolderIsLeftAlone) {
  ExpectSuccess(Train({"--steps=2", "--eval_every=0", "--out=run"}));
  const std::string before = Checkpoint("run"), metrics = ReadAll(Path("run/metrics.jsonl"));
  ExpectError(Train({"--steps=2", "--out=run"}), 1, {"--out", "--resume"});
  ExpectError(Train({"--steps=1", "--out=run", "--resume"}), 1, {"--steps", "2"});
  ExpectError(Train({"--steps=4", "--out=run", "--resume", "--seed=2"}), 1, {"--seed"});
  ExpectError(Train({"--steps=4", "--out=run", "--resume", "--model=nanogpt_cpu"}), 1,
              {"--model", "width 128 instead of"});
  Write("other.txt", ReadAll(Path("text.txt")) + "more");
  ExpectError(Train({"--steps=4", "--out=run", "--resume", "--data=other.txt"}), 1, {"--data"});
  EXPECT_TRUE(Checkpoint("run") == before);
  EXPECT_EQ(ReadAll(Path("run/metrics.jsonl")), metrics);
}

// A job that is queued again until it exits with 0 uses one command line for every start.
TEST_F(TrainCli, OneCommandStartsARunContinuesItAndEndsIt) {
  const auto run = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"--resume=auto", "--eval_every=0", "--steps=4",
                                          "--schedule=constant"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return Train(arguments);
  };
  ExpectError(run({}), 2, {"--resume", "--out"});
  ExpectSuccess(run({"--out=whole"}));
  ExpectSuccess(run({"--out=parts", "--steps=2"}));
  const Result second = run({"--out=parts"});
  ExpectSuccess(second);
  EXPECT_TRUE(absl::StrContains(second.out, "continuing after step 2")) << second.out;
  ExpectSameWeights("whole", "parts");
  const std::string checkpoint = Checkpoint("parts"),
                    metrics = ReadAll(Path("parts/metrics.jsonl"));
  Write("parts/checkpoint.safetensors.1-1.tmp", "what a killed process left");
  for (const std::string how : {"--resume=auto", "--resume"}) {
    for (const std::string ranks : {"--ranks=1", "--ranks=3"}) {
      const Result finished = run({"--out=parts", how, ranks});
      ExpectSuccess(finished);
      EXPECT_TRUE(absl::StrContains(finished.out, "parts is complete: it has made its 4 steps"))
          << finished.out;
    }
  }
  EXPECT_EQ(Temporaries("parts"), std::vector<std::string>());
  EXPECT_TRUE(Checkpoint("parts") == checkpoint);
  EXPECT_EQ(ReadAll(Path("parts/metrics.jsonl")), metrics);
  ExpectError(run({"--out=parts", "--seed=2"}), 1, {"--seed"});
}

TEST_F(TrainCli, PathsThatLeadNowhereAreErrors) {
  fs::create_symlink(Path("b"), Path("a"));
  fs::create_symlink(Path("a"), Path("b"));
  fs::create_directories(Path("folder/checkpoint.safetensors"));
  ASSERT_EQ(mkfifo(Path("pipe").c_str(), 0600), 0);
  for (const std::string path :
       {"a", "a/run", "b/checkpoint.safetensors", "text.txt/run", "folder", "pipe"}) {
    SCOPED_TRACE(path);
    ExpectError(Generate({"--checkpoint=" + path}), 1, {"--checkpoint", path});
  }
  for (const std::string path : {"a", "a/run", "text.txt/run", "pipe", "text.txt"}) {
    SCOPED_TRACE(path);
    ExpectError(Train({"--steps=1", "--out=" + path}), 1, {"--out", path});
    ExpectError(Train({"--steps=1", "--resume", "--out=" + path}), 2, {"--resume", path});
  }
  // A run folder's own files may also be such links.
  ExpectSuccess(Train({"--steps=1", "--eval_every=0", "--out=run"}));
  for (const std::string name : {".lock", "checkpoint.safetensors", "config.json"}) {
    SCOPED_TRACE(name);
    fs::rename(Path("run/" + name), Path("aside"));
    fs::create_symlink(Path("a"), Path("run/" + name));
    const int exit_code = name == "config.json" ? 2 : 1;
    ExpectError(Train({"--steps=2", "--resume", "--out=run"}), exit_code, {name});
    fs::rename(Path("aside"), Path("run/" + name));
  }
  ExpectSuccess(Train({"--steps=2", "--resume", "--out=run"}));
}

// The cases are a second run, and a requeued job that starts while the first process of its run is
// ending.
TEST_F(TrainCli, OneRunAtATimeWorksInAFolder) {
  const std::vector<std::string> options = {"--steps=100", "--eval_every=0", "--checkpoint_every=1",
                                            "--schedule=constant"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), options.begin(), options.end());
    return more;
  };
  ExpectSuccess(Train(with({"--out=straight"})));
  Subprocess first(TrainCommand(with({"--out=run"})), {folder_});
  WaitUntil([&] { return Metrics("run").size() >= 3; });
  first.Stop();  // it does not end while the test looks
  const std::string before = Checkpoint("run"), rows = ReadAll(Path("run/metrics.jsonl"));
  const std::vector<std::string> there = {"--data=" + Path("text.txt"), "--out=" + Path("run")};
  const std::string elsewhere = Path("elsewhere");
  fs::create_directories(elsewhere);
  const std::string holder = absl::StrCat("run is in use by pid ", first.pid(), " on ");
  ExpectError(Subprocess(TrainCommand(with(there)), {elsewhere}).Wait(), 1, {"--out", holder});

  std::vector<std::string> again = with(there);
  again.push_back("--resume");
  Subprocess requeued(TrainCommand(again), {elsewhere});
  const auto waits = [&] {
    const std::string out = ReadAll(elsewhere + "/stdout");
    return absl::StrContains(out, holder) && absl::StrContains(out, "waiting up to 60 seconds");
  };
  WaitUntil(waits);
  EXPECT_TRUE(Checkpoint("run") == before);
  EXPECT_EQ(ReadAll(Path("run/metrics.jsonl")), rows);
  first.Signal(SIGTERM);
  first.Signal(SIGCONT);
  EXPECT_EQ(first.Wait().exit_code, 128 + SIGTERM);
  // It continues from the first process's last save.
  ExpectSuccess(requeued.Wait());
  ExpectSameRun("straight", "run");
}

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
  const auto text = [&](const std::string& prompt) {
    const Result result = Generate({"--checkpoint=run", "--tokens=9", "--prompt=" + prompt});
    return result.out.substr(prompt.size());
  };
  const std::string second = text("line 7\n");
  const std::string expected = text("line 12\n") + second + text("line 7\n" + second + "text\n");
  const std::string program = ProgramPath("train/tools/chat");
  const Result result =
      Subprocess({"/bin/sh", "-c", "\"$0\" \"$@\" < \"$BUILD_WORKING_DIRECTORY/lines\"", program,
                  "--checkpoint=run", "--template=chat.jinja", "--tokens=9"},
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
