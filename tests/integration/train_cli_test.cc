// Tests //train as users run it: the files of a run, and the errors.
#include "tests/integration/train_cli.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

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
  ExpectSuccess(Train({"--resume", "--steps=9", "--out=run"}));
  EXPECT_EQ(Metrics("run").size(), 9u);
  ExpectError(Train({"--tokens=129", "--steps=9", "--out=both"}), 2, {"--tokens", "--steps"});
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

// NaN has a sign bit, which says nothing.
TEST_F(TrainCli, ADivergedRunPrintsNanWithoutASign) {
  const Result run = Train({"--steps=6", "--eval_every=0", "--lr=1e30", "--warmup=0", "--out=run"});
  EXPECT_TRUE(absl::StrContains(run.out, "grad nan")) << run.out;
  EXPECT_FALSE(absl::StrContains(run.out, "-nan")) << run.out;
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

// Standard output that takes no text is an error, also where the text is the help or the version.
TEST_F(TrainCli, ALostHelpIsAnError) {
  for (const char* program : {"train/train", "train/tools/generate"}) {
    for (const char* option : {"--help", "--version"}) {
      const Result result =
          Subprocess({"/bin/sh", "-c", "\"$0\" \"$1\" > /dev/full", ProgramPath(program), option},
                     {folder_})
              .Wait();
      ExpectError(result, 1, {"standard output: must take what is printed"});
    }
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

}  // namespace
}  // namespace burst
