// Starts ranks as processes, one of them with another option, other data, another model or an older
// copy of the run. All ranks end with a sentence that names the difference and both values. No
// checkpoint is made or replaced.
#include <gtest/gtest.h>

#include "tests/faults/fault_run.h"
#include "tests/faults/ranks.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

class Disagreement : public FaultTest {
 protected:
  Ranks RanksOf(const std::string& run, const Arguments& more = {}) const {
    return Ranks(folder_, "disagreement", 2,
                 Command(Plus(Plus({"--threads=1"}, more), {"--out=" + run})));
  }

  // Runs two ranks. Rank `other` gets more variables and options.
  static std::vector<Result> RunBoth(Ranks ranks, int other, const Arguments& environment,
                                     const Arguments& options) {
    std::vector<std::unique_ptr<Subprocess>> processes;
    for (int rank = 0; rank < 2; ++rank) {
      processes.push_back(ranks.Process(rank, rank == other ? environment : Arguments(),
                                        rank == other ? options : Arguments()));
    }
    return {EndOf(*processes[0]), EndOf(*processes[1])};
  }

  static void ExpectBothSay(const std::vector<Result>& results, const std::string& error) {
    for (const Result& result : results) {
      EXPECT_EQ(result.exit_code, 1) << result.out << result.err;
      EXPECT_TRUE(absl::StrContains(result.err, "error: " + error)) << error << "\n" << result.err;
    }
  }

  // Returns a command that lets a process see `there` at the place of `here`, as on another host.
  Arguments Seeing(const std::string& there, const std::string& here) const {
    return {
        "unshare",   "-m",      "sh", "-c", "mount --bind \"$0\" \"$1\" && shift && exec \"$@\"",
        Path(there), Path(here)};
  }
  bool CanMount() const {
    fs::create_directories(Path("a"));
    fs::create_directories(Path("b"));
    return Subprocess(Plus(Seeing("a", "b"), {"true"}), {folder_}).Wait().exit_code == 0;
  }

  void Write(const std::string& name, const std::string& text) const {
    std::ofstream(Path(name), std::ios::binary) << text;
  }

  void RunWell(const std::string& run, const Arguments& more) const {
    for (const Result& result : RunBoth(RanksOf(run, more), 0, {}, {})) {
      ASSERT_EQ(result.exit_code, 0) << result.out << result.err;
    }
  }
};

TEST_F(Disagreement, AnyOption) {
  const struct {
    std::string option, error;
  } cases[] = {
      {"--lr=0.2", "--lr: 0.2 on rank 1, 0.002 on rank 0; give all ranks the same"},
      {"--seed=7", "--seed: 7 on rank 1, 1 on rank 0"},
      {"--batch=4", "--batch: 4 on rank 1, 2 on rank 0"},
      {"--seqlen=64", "--seqlen: 64 on rank 1, 32 on rank 0"},
      {"--steps=20", "--steps: 20 on rank 1, 24 on rank 0"},
      {"--clip=0.01", "--clip: 0.01 on rank 1, 1 on rank 0"},
      {"--accumulate=2", "--accumulate: 2 on rank 1, 1 on rank 0"},
      {"--checkpoint_every=3", "--checkpoint_every: 3 on rank 1, 4 on rank 0"},
      {"--eval_every=3", "--eval_every: 3 on rank 1, 8 on rank 0"},
      {"--model.dropout=0.5", "--model.dropout: 0.5 on rank 1, -1 on rank 0"},
      {"--zero=1", "--zero: 1 on rank 1, 0 on rank 0"},
      {"--layout=striped", "--layout: striped on rank 1, zigzag on rank 0"},
      {"--dp=2", "--dp: 2 on rank 1, -1 on rank 0"},
      {"--keep=1", "--keep: 1 on rank 1, 3 on rank 0"},
      {"--model=llama_tiny", "--model: llama_tiny on rank 1, {"},
      {"--out=elsewhere", "--out: "},
      {"--data=text.txt.2", "--data: "},
      {"--tokenizer=byte", "--tokenizer: byte on rank 1, auto on rank 0"},
  };
  fs::copy(Path("text.txt"), Path("text.txt.2"));
  for (const auto& [option, error] : cases) {
    SCOPED_TRACE(option);
    ExpectBothSay(RunBoth(RanksOf("run"), 1, {}, {option}), error);
    EXPECT_FALSE(fs::exists(Path("run")));
    EXPECT_FALSE(fs::exists(Path("elsewhere")));
  }
}

// Options that do not change results may differ.
TEST_F(Disagreement, WhatIsOfOneProcessMayDiffer) {
  for (const Result& result : RunBoth(RanksOf("run"), 1, {}, {"--threads=2", "--patience=300"})) {
    EXPECT_EQ(result.exit_code, 0) << result.err;
  }
  EXPECT_EQ(SavedStep("run"), 24);
}

// One rank continues the run, and the other begins it.
TEST_F(Disagreement, OneResumes) {
  RunWell("run", {"--steps=8"});
  const std::string before = ReadAll(Path("run") + "/checkpoint.safetensors");
  for (int other = 0; other < 2; ++other) {
    ExpectBothSay(RunBoth(RanksOf("run"), other, {}, {"--resume"}),
                  absl::StrCat("--resume: rank ", other, " continues the run in "));
    EXPECT_EQ(ReadAll(Path("run") + "/checkpoint.safetensors"), before);
  }
}

// The files have the same name and other content, as on two hosts.
TEST_F(Disagreement, OtherFilesAtTheSamePath) {
  if (!CanMount()) GTEST_SKIP() << "mounting is not permitted here";
  std::string text = ReadAll(Path("text.txt"));
  std::reverse(text.begin(), text.end());
  Write("other.txt", text);
  Write("model.json", R"({"family":"llama","layers":2,"width":32,"heads":2,"ffn":64})");
  Write("wider.json", R"({"family":"llama","layers":2,"width":64,"heads":2,"ffn":64})");
  for (const char* mesh : {"--dp=2", "--sp=2"}) {
    SCOPED_TRACE(mesh);
    ExpectBothSay(RunBoth(RanksOf("run", {mesh}), 1, Seeing("other.txt", "text.txt"), {}),
                  "--data, its tokens: content ");
  }
  ExpectBothSay(
      RunBoth(RanksOf("run", {"--model=model.json"}), 1, Seeing("wider.json", "model.json"), {}),
      "--model: {");
  EXPECT_FALSE(fs::exists(Path("run")));

  // This run makes the weights to start from.
  RunWell("one", {"--steps=4"});
  RunWell("two", {"--steps=4", "--seed=2"});
  ExpectBothSay(RunBoth(RanksOf("run", {"--model=one"}), 1, Seeing("two", "one"), {}),
                "--model, its weights: ");
  EXPECT_FALSE(fs::exists(Path("run")));
}

// One host has an older copy of the run's folder.
TEST_F(Disagreement, AStaleCopyOfTheRun) {
  if (!CanMount()) GTEST_SKIP() << "mounting is not permitted here";
  for (const Arguments& mesh : {Arguments{"--dp=2"}, Arguments{"--sp=2"},
                                Arguments{"--dp=2", "--zero=1", "--checkpoint_files=one"},
                                Arguments{"--dp=2", "--zero=1"}}) {
    SCOPED_TRACE(mesh.back());
    for (const char* name : {"run", "old", "straight"}) fs::remove_all(Path(name));
    const auto steps = [&](const char* number, bool resumes) {
      Arguments options = Plus(mesh, {absl::StrCat("--steps=", number), "--schedule=constant"});
      if (resumes) options.push_back("--resume");
      return options;
    };
    RunWell("straight", steps("24", false));
    RunWell("run", steps("8", false));
    fs::copy(Path("run"), Path("old"), fs::copy_options::recursive);
    RunWell("run", steps("16", true));
    const std::string newest = ReadAll(Path("run") + "/checkpoint.safetensors");
    const std::string older = ReadAll(Path("old") + "/checkpoint.safetensors");
    for (int other = 0; other < 2; ++other) {
      const std::vector<Result> results =
          RunBoth(RanksOf("run", steps("24", true)), other, Seeing("old", "run"), {});
      ExpectBothSay(results, absl::StrCat("--resume: rank 1 sees step ", other == 1 ? 8 : 16,
                                          ", rank 0 step ", other == 1 ? 16 : 8, " in "));
      ExpectBothSay({results[1]}, absl::StrCat("--resume: rank 1 sees step "));
      EXPECT_EQ(ReadAll(Path("run") + "/checkpoint.safetensors"), newest);
      EXPECT_EQ(ReadAll(Path("old") + "/checkpoint.safetensors"), older);
    }
    RunWell("run", steps("24", true));
    EXPECT_TRUE(Weights("run") == Weights("straight"));
  }
}

// The checkpoint has the same number of steps, but belongs to another run.
TEST_F(Disagreement, AnotherRunsCheckpoint) {
  if (!CanMount()) GTEST_SKIP() << "mounting is not permitted here";
  RunWell("run", {"--steps=8"});
  RunWell("two", {"--steps=8", "--lr=0.003"});
  fs::copy(Path("run") + "/config.json", Path("two") + "/config.json",
           fs::copy_options::overwrite_existing);
  const std::string before = ReadAll(Path("run") + "/checkpoint.safetensors");
  ExpectBothSay(RunBoth(RanksOf("run", {"--resume"}), 1, Seeing("two", "run"), {}),
                "--resume: rank 1 sees step 8, content ");
  EXPECT_EQ(ReadAll(Path("run") + "/checkpoint.safetensors"), before);
}

// Two jobs have one name and port on one host, without a token. Each rank meets a rank of its own
// run, or the jobs end and name the difference. No rank trains with the other job's options.
TEST_F(Disagreement, TwoJobsOfOneName) {
  const Arguments start = {"env", "-u", "BURST_TOKEN"};
  Ranks ranks = RanksOf("run");
  std::vector<std::unique_ptr<Subprocess>> processes;
  for (int i = 0; i < 4; ++i) {
    const std::string run = i < 2 ? "--out=one" : "--out=two";
    processes.push_back(
        ranks.Process(i % 2, start, {run, i < 2 ? "--seed=1" : "--seed=2", "--patience=20"}));
  }
  for (const auto& process : processes) {
    const Result result = EndOf(*process);
    if (result.exit_code != 0) {
      EXPECT_EQ(result.exit_code, 1);
      EXPECT_TRUE(absl::StrContains(result.err, "error: ")) << result.err;
    }
  }
  for (const std::string run : {"one", "two"}) {
    if (!HasCheckpoint(run)) continue;
    MakeStraight(
        {"--threads=1", "--ranks=2", "--comm=threads", run == "one" ? "--seed=1" : "--seed=2"});
    EXPECT_TRUE(Weights(run) == Weights("straight")) << run;
    fs::remove_all(Path("straight"));
  }
}

TEST_F(Disagreement, RanksThatGenerate) {
  RunWell("run", {"--steps=4"});
  RunWell("two", {"--steps=4", "--seed=2"});
  const auto generate = [&](const Arguments& environment, const Arguments& options) {
    std::vector<std::unique_ptr<Subprocess>> processes;
    static int port = 30000 + getpid() % 600 * 16;
    port += 16;
    for (int rank = 0; rank < 2; ++rank) {
      Arguments command = {"env",
                           absl::StrCat("RANK=", rank),
                           absl::StrCat("LOCAL_RANK=", rank),
                           "WORLD_SIZE=2",
                           "LOCAL_WORLD_SIZE=2",
                           "MASTER_ADDR=localhost",
                           absl::StrCat("MASTER_PORT=", port)};
      if (rank == 1) command = Plus(command, environment);
      command = Plus(command, {ProgramPath("train/tools/generate"), "--checkpoint=run",
                               "--prompt=line", "--tokens=10"});
      if (rank == 1) command = Plus(command, options);
      processes.push_back(std::make_unique<Subprocess>(
          command, Subprocess::Options{folder_, false, absl::StrCat(".generate", port, rank)}));
    }
    return std::vector<Result>{EndOf(*processes[0]), EndOf(*processes[1])};
  };
  const auto rank0_says = [](const std::vector<Result>& results, const std::string& error) {
    EXPECT_EQ(results[0].exit_code, 1) << results[0].out;
    EXPECT_EQ(results[1].exit_code, 1) << results[1].out;
    EXPECT_TRUE(absl::StrContains(results[0].err, error)) << results[0].err;
  };
  for (const Result& result : generate({}, {})) EXPECT_EQ(result.exit_code, 0) << result.err;
  rank0_says(generate({}, {"--temperature=0.5"}), "--temperature: 0.5 on rank 1, 0.8 on rank 0");
  rank0_says(generate({}, {"--prompt=lin"}), "--prompt: lin on rank 1, line on rank 0");
  if (!CanMount()) GTEST_SKIP() << "mounting is not permitted here";
  rank0_says(generate(Seeing("two", "run"), {}), "--checkpoint, its weights: ");
}

}  // namespace
}  // namespace burst
