// //train and //train:generate as a user meets them: what a run leaves, what errors say, and that
// nothing is lost when a run is killed.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/testing/subprocess.h"

namespace burst {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr char kTinyModel[] =
    R"({"family":"llama","layers":2,"width":16,"heads":2,"kv_heads":1,"ffn":32})";
// Large enough that writing its checkpoint takes a while.
constexpr char kSlowToSave[] =
    R"({"family":"gpt2","layers":1,"width":128,"heads":2,"dropout":0.1,"vocab":4000})";

// A checkpoint's header and its data.
std::pair<Json, std::string> SplitCheckpoint(const std::string& content) {
  uint64_t length = 0;
  std::memcpy(&length, content.data(), sizeof(length));
  return {Json::parse(content.substr(8, length)), content.substr(8 + length)};
}

std::string WithHeader(const std::string& content, const std::function<void(Json&)>& change) {
  auto [header, data] = SplitCheckpoint(content);
  change(header);
  const std::string text = header.dump();
  const uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + text + data;
}

// As the first version wrote it; if `ruined`, with a weight that is not a number.
std::string WithoutChecksums(const std::string& content, bool ruined) {
  std::string old = WithHeader(content, [](Json& header) {
    Json strings = Json::object();
    for (const auto& [key, value] : header["__metadata__"].items()) {
      if (!absl::StartsWith(key, "xxh3")) strings[key] = value;
    }
    strings["format"] = "burst checkpoint 1";
    header["__metadata__"] = strings;
  });
  const float nan = std::nanf("");
  if (ruined)
    old.replace(old.size() - sizeof(nan), sizeof(nan), reinterpret_cast<const char*>(&nan),
                sizeof(nan));
  return old;
}

class TrainCli : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = FreshTestFolder();
    std::string text;
    for (int i = 0; i < 400; ++i) {
      absl::StrAppend(&text, "line ", i * 7919 % 1000, " of a text\n", i % 10 == 9 ? "\n" : "");
    }
    Write("text.txt", text);
  }

  std::string Path(const std::string& name) const { return folder_ + "/" + name; }

  void Write(const std::string& name, const std::string& content) const {
    std::ofstream(Path(name), std::ios::binary) << content;
  }

  static std::vector<std::string> TrainCommand(const std::vector<std::string>& arguments) {
    std::vector<std::string> command = {ProgramPath("train/train"),
                                        "--data=text.txt",
                                        "--seqlen=32",
                                        "--batch=2",
                                        "--eval_batches=2",
                                        "--sample=0",
                                        absl::StrCat("--model=", kTinyModel)};
    command.insert(command.end(), arguments.begin(), arguments.end());
    return command;
  }

  Result Train(const std::vector<std::string>& arguments) const {
    return Subprocess(TrainCommand(arguments), {folder_}).Wait();
  }

  Result Generate(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), ProgramPath("train/generate/generate"));
    return Subprocess(arguments, {folder_}).Wait();
  }

  std::vector<Json> Metrics(const std::string& run) const {
    std::vector<Json> rows;
    std::istringstream lines(ReadAll(Path(run) + "/metrics.jsonl"));
    for (std::string line; std::getline(lines, line);) {
      Json row = Json::parse(line, nullptr, false);
      if (row.is_object()) rows.push_back(std::move(row));
    }
    return rows;
  }

  std::string Checkpoint(const std::string& run) const {
    return ReadAll(Path(run) + "/checkpoint.safetensors");
  }

  // Names in the folder of a run that begin and end so, sorted.
  std::vector<std::string> Names(const std::string& run, const std::string& begin,
                                 const std::string& end) const {
    std::vector<std::string> names;
    std::error_code error;
    for (fs::directory_iterator entry(Path(run), error), last; !error && entry != last;
         entry.increment(error)) {
      const std::string name = entry->path().filename().string();
      if (absl::StartsWith(name, begin) && absl::EndsWith(name, end)) names.push_back(name);
    }
    std::sort(names.begin(), names.end());
    return names;
  }
  std::vector<std::string> Temporaries(const std::string& run) const {
    return Names(run, "", ".tmp");
  }

  // Of weights and optimizer, but not of options.
  void ExpectSameWeights(const std::string& a, const std::string& b) const {
    EXPECT_TRUE(SplitCheckpoint(Checkpoint(a)).second == SplitCheckpoint(Checkpoint(b)).second);
  }

  // Runs what is the same whatever the clock says.
  void ExpectSameRun(const std::string& a, const std::string& b) const {
    EXPECT_TRUE(Checkpoint(a) == Checkpoint(b)) << "weights and optimizer differ";
    std::vector<Json> rows_a = Metrics(a), rows_b = Metrics(b);
    ASSERT_EQ(rows_a.size(), rows_b.size());
    for (size_t i = 0; i < rows_a.size(); ++i) {
      for (const char* key : {"tokens_per_second", "step_ms"}) {
        rows_a[i].erase(key), rows_b[i].erase(key);
      }
      EXPECT_EQ(rows_a[i], rows_b[i]);
    }
  }

  static void WaitUntil(const std::function<bool()>& condition) {
    for (int i = 0; i < 30000 && !condition(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    ASSERT_TRUE(condition());
  }

  std::string folder_;
};

void ExpectSuccess(const Result& result) {
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_EQ(result.err, "");
}

void ExpectError(const Result& result, int exit_code, const std::vector<std::string>& parts) {
  EXPECT_EQ(result.exit_code, exit_code) << "signal " << result.signal << "\n" << result.err;
  EXPECT_TRUE(absl::StartsWith(result.err, "error: ")) << result.err;
  EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
  for (const std::string& part : parts) {
    EXPECT_TRUE(absl::StrContains(result.err, part)) << part << " is missing in " << result.err;
  }
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

  // The configuration makes the same run again.
  ExpectSuccess(
      Subprocess({ProgramPath("train/train"), "--config=run/config.json", "--out=again"}, {folder_})
          .Wait());
  ExpectSameRun("run", "again");
}

TEST_F(TrainCli, Version) {
  for (const char* program : {"train/train", "train/generate/generate"}) {
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
  for (const char* program : {"train/train", "train/generate/generate"}) {
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
  for (int i = 0; i < 500; ++i) shard += i == 77 ? "\x52\xC4" : "\x01\x02";  // one is 50,258
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
  // What is no file, and links that lead nowhere.
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
  ExpectError(Train({"--steps=2", "--out=run", "--resume"}), 1, {"--steps", "2"});
  ExpectError(Train({"--steps=4", "--out=run", "--resume", "--seed=2"}), 1, {"--seed"});
  ExpectError(Train({"--steps=4", "--out=run", "--resume", "--model=nanogpt_cpu"}), 1,
              {"--model", "width 128 instead of"});
  Write("other.txt", ReadAll(Path("text.txt")) + "more");
  ExpectError(Train({"--steps=4", "--out=run", "--resume", "--data=other.txt"}), 1, {"--data"});
  EXPECT_TRUE(Checkpoint("run") == before);
  EXPECT_EQ(ReadAll(Path("run/metrics.jsonl")), metrics);
}

TEST_F(TrainCli, TruncatedCheckpoint) {
  ExpectSuccess(Train({"--steps=2", "--eval_every=0", "--out=run"}));
  const std::string path = Path("run/checkpoint.safetensors");
  const auto bytes = fs::file_size(path);
  for (const uintmax_t size : {bytes - 1, bytes / 2, uintmax_t{100}, uintmax_t{0}}) {
    fs::resize_file(path, size);
    ExpectError(Train({"--steps=4", "--out=run", "--resume"}), 1, {path, "truncated"});
    ExpectError(Generate({"--checkpoint=run"}), 1, {path, "truncated"});
  }
  fs::remove(path);
  ExpectError(Train({"--steps=4", "--out=run", "--resume"}), 1, {"--resume", path});
}

TEST_F(TrainCli, FullDiskKeepsTheCheckpoint) {
  const std::string model = absl::StrCat("--model=", kSlowToSave);
  ExpectSuccess(Train({"--steps=2", "--warmup=0", "--eval_every=0", "--out=run", model}));
  const std::string before = Checkpoint("run");
  Subprocess process(TrainCommand({"--steps=5000", "--resume", "--out=run", model}), {folder_});
  WaitUntil([&] { return Metrics("run").size() > 2; });
  // Room for the metrics, but not for a checkpoint.
  process.LimitFiles(static_cast<int64_t>(before.size()) / 2);
  process.Signal(SIGINT);
  ExpectError(process.Wait(), 1, {"checkpoint.safetensors", "large"});
  EXPECT_TRUE(Checkpoint("run") == before);
  EXPECT_TRUE(Temporaries("run").empty());
  ExpectSuccess(Train({"--steps=4", "--resume", "--out=run", model}));
}

TEST_F(TrainCli, ResumedAfterAKillInASaveTheRunIsBitwiseTheSame) {
  const std::vector<std::string> options = {"--steps=20", "--checkpoint_every=1", "--eval_every=7",
                                            "--accumulate=2",
                                            absl::StrCat("--model=", kSlowToSave)};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), options.begin(), options.end());
    return more;
  };
  ExpectSuccess(Train(with({"--out=straight"})));

  {
    Subprocess process(TrainCommand(with({"--out=killed"})), {folder_});
    const auto temporaries = [&] { return Names("killed", "checkpoint.safetensors.", ".tmp"); };
    bool inside_a_save = false;
    while (!inside_a_save && !process.Ended()) {
      if (temporaries().empty() || Metrics("killed").size() <= 10) continue;
      process.Stop();
      // Stopped, it cannot finish the save behind our back.
      const std::vector<std::string> found = temporaries();
      std::error_code error;
      const uintmax_t written =
          found.empty() ? 0 : fs::file_size(Path("killed/" + found[0]), error);
      inside_a_save = !error && written > 0 && written < Checkpoint("killed").size();
      process.Signal(inside_a_save ? SIGKILL : SIGCONT);
    }
    ASSERT_TRUE(inside_a_save);
    EXPECT_EQ(process.Wait().signal, SIGKILL);
  }
  ASSERT_EQ(Temporaries("killed").size(), 1u);
  EXPECT_LT(Metrics("killed").size(), 20u);
  ExpectSuccess(Train({"--resume", "--out=killed", absl::StrCat("--model=", kSlowToSave)}));
  EXPECT_TRUE(Temporaries("killed").empty());
  ExpectSameRun("straight", "killed");
}

TEST_F(TrainCli, ResumedOnOtherRanksTheRunIsTheSameToRounding) {
  const std::vector<std::string> options = {"--schedule=constant", "--warmup=0", "--eval_every=0"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), options.begin(), options.end());
    return more;
  };
  ExpectSuccess(Train(with({"--steps=20", "--ranks=1", "--out=one"})));
  ExpectSuccess(Train(with({"--steps=10", "--ranks=1", "--out=many"})));
  ExpectSuccess(Train({"--steps=20", "--resume", "--ranks=3", "--layout=striped", "--out=many"}));
  const std::vector<Json> one = Metrics("one"), many = Metrics("many");
  ASSERT_EQ(one.size(), 20u);
  ASSERT_EQ(many.size(), 20u);
  for (size_t i = 0; i < one.size(); ++i) {
    const double loss = one[i]["loss"];
    EXPECT_NEAR(many[i]["loss"].get<double>(), loss, 1e-5 * loss) << "step " << i + 1;
  }
}

TEST_F(TrainCli, InterruptedTheRunLeavesACheckpointToContinueFrom) {
  ExpectSuccess(Train({"--steps=300", "--eval_every=0", "--out=straight"}));
  for (int number : {SIGINT, SIGTERM}) {
    const std::string run = absl::StrCat("signal", number);
    Subprocess process(TrainCommand({"--steps=300", "--eval_every=0", "--out=" + run}), {folder_});
    WaitUntil([&] { return Metrics(run).size() >= 3; });
    process.Signal(number);
    const Result result = process.Wait();
    EXPECT_EQ(result.exit_code, 128 + number) << result.err;
    EXPECT_TRUE(absl::StrContains(result.out, "--resume")) << result.out;
    EXPECT_LT(Metrics(run).size(), 300u);
    EXPECT_TRUE(fs::exists(Path(run + "/loss.svg")));
    ExpectSuccess(Generate({"--checkpoint=" + run, "--tokens=5"}));
    ExpectSuccess(Train({"--resume", "--out=" + run}));
    ExpectSameRun("straight", run);
  }
}

// A model that is spread over ranks is saved whole: a run continues with the same bits on as many,
// and on any others, and generates on one.
TEST_F(TrainCli, TensorParallelRunsResumeAnywhere) {
  const std::vector<std::string> options = {"--schedule=constant", "--warmup=0", "--eval_every=0"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), options.begin(), options.end());
    return more;
  };
  const std::string four_heads =
      R"(--model={"family":"llama","layers":2,"width":16,"heads":4,"kv_heads":2,"ffn":32})";
  for (const std::string strategy : {"tp", "tp+sp"}) {
    SCOPED_TRACE(strategy);
    const std::vector<std::string> spread = {"--strategy=" + strategy, "--ranks=4", four_heads};
    const auto straight_run = [&](const std::string& steps, const std::string& out) {
      return Train(with({steps, "--out=" + out, spread[0], spread[1], spread[2], "--sample=20"}));
    };
    const std::string straight = "straight_" + strategy;
    const Result result = straight_run("--steps=300", straight);
    ExpectSuccess(result);
    EXPECT_TRUE(absl::StrContains(result.out, "x 4 tensor parallel")) << result.out;
    EXPECT_TRUE(absl::StrContains(result.out, "A sample:")) << result.out;
    ExpectSuccess(Generate({"--checkpoint=" + straight, "--tokens=5"}));

    const std::string stopped = "stopped_" + strategy;
    Subprocess process(TrainCommand(with({"--steps=300", "--out=" + stopped, spread[0], spread[1],
                                          spread[2], "--sample=20"})),
                       {folder_});
    WaitUntil([&] { return Metrics(stopped).size() >= 3; });
    process.Signal(SIGINT);
    EXPECT_EQ(process.Wait().exit_code, 128 + SIGINT);
    EXPECT_LT(Metrics(stopped).size(), 300u);
    ExpectSuccess(Train({"--resume", "--out=" + stopped, four_heads, "--sample=20"}));
    ExpectSameRun(straight, stopped);

    // Ten steps on these ranks, ten on others, and the other way round.
    const std::vector<Json> expected = Metrics(straight);
    const std::vector<std::string> others[] = {
        {"--strategy=single", "--ranks=1"},
        {"--strategy=burst", "--ranks=3"},
        {"--strategy=tp", "--ranks=2"},
        {"--strategy=tp+sp", "--dp=2", "--sp=1", "--ranks=-1"},
    };
    for (const std::vector<std::string>& other : others) {
      const auto run = [&](const std::string& out, const std::vector<std::string>& ranks,
                           std::vector<std::string> more) {
        more.insert(more.end(), ranks.begin(), ranks.end());
        more.insert(more.end(), {four_heads, "--out=" + out});
        return Train(more);
      };
      fs::remove_all(Path("there"));
      fs::remove_all(Path("back"));
      ExpectSuccess(run("there", {spread[0], spread[1]}, with({"--steps=10"})));
      ExpectSuccess(run("there", other, {"--resume", "--steps=20"}));
      ExpectSuccess(run("back", other, with({"--steps=10"})));
      ExpectSuccess(
          run("back", {spread[0], spread[1], "--dp=-1", "--sp=-1"}, {"--resume", "--steps=20"}));
      for (const char* out : {"there", "back"}) {
        const std::vector<Json> rows = Metrics(out);
        ASSERT_EQ(rows.size(), 20u);
        for (size_t i = 0; i < rows.size(); ++i) {
          const double loss = expected[i]["loss"];
          EXPECT_NEAR(rows[i]["loss"].get<double>(), loss, 1e-5 * loss)
              << out << " " << other[0] << ", step " << i + 1;
        }
      }
    }
  }
}

// The update that ruins the weights leaves them finite, and its own loss and gradient were; it is
// followed by a save. What is saved all the same must be what a run without that update has.
TEST_F(TrainCli, DivergenceStopsTheRunAndKeepsTheLastGoodCheckpoint) {
  const auto arguments = [](const std::string& run, std::vector<std::string> more) {
    more.insert(more.end(), {"--schedule=constant", "--warmup=0", "--eval_every=0",
                             "--checkpoint_every=1", "--out=" + run});
    return more;
  };
  ExpectSuccess(Train(arguments("run", {"--steps=2"})));
  const std::string good = Checkpoint("run");
  const auto bad = arguments("run", {"--steps=30", "--resume", "--lr=1e30", "--min_lr=-1"});
  ExpectError(Train(bad), 1, {"not finite", "--lr", "continues after step 2"});
  const std::vector<Json> rows = Metrics("run");
  ASSERT_EQ(rows.size(), 8u) << "step 3 ruins the model, five more find it ruined";
  EXPECT_FALSE(rows[2].contains("skipped"));
  for (size_t i = 3; i < rows.size(); ++i) EXPECT_EQ(rows[i]["skipped"], true) << i;
  EXPECT_TRUE(absl::StrContains(ReadAll(Path("run/loss.svg")), "</svg>"));
  EXPECT_TRUE(Checkpoint("run") == good);

  // It goes on from there, with the bits of a run that never diverged.
  ExpectSuccess(Train(arguments("straight", {"--steps=6"})));
  ExpectSuccess(Train(arguments("run", {"--steps=6", "--resume", "--lr=2e-3", "--min_lr=-1"})));
  EXPECT_EQ(Metrics("run").size(), 6u);
  ExpectSameWeights("straight", "run");

  // A last step that ruins the model is not saved either, and the run did not succeed.
  const auto last = arguments("run", {"--steps=7", "--resume", "--lr=1e30", "--min_lr=-1"});
  ExpectError(Train(last), 1, {"not finite after step 7, the last one", "after step 6"});
  ExpectSameWeights("straight", "run");
}

// Tensor parallel ranks, data parallel ones, rings: the ranks agree on what is not saved, also when
// only one of them has what is not finite.
TEST_F(TrainCli, DivergenceOfManyRanksKeepsTheLastGoodCheckpoint) {
  const std::vector<std::string> meshes[] = {{"--strategy=tp", "--ranks=2"},
                                             {"--strategy=tp+sp", "--dp=2", "--sp=2"},
                                             {"--strategy=burst", "--dp=2", "--sp=2"}};
  for (const auto& mesh : meshes) {
    SCOPED_TRACE(mesh[0]);
    const auto train = [&](std::vector<std::string> more) {
      more.insert(more.end(), mesh.begin(), mesh.end());
      more.insert(more.end(), {"--schedule=constant", "--warmup=0", "--eval_every=0",
                               "--checkpoint_every=1", "--out=run"});
      return Train(more);
    };
    fs::remove_all(Path("run"));
    ExpectSuccess(train({"--steps=2"}));
    const std::string good = Checkpoint("run");
    ExpectError(train({"--steps=30", "--resume", "--lr=1e30", "--min_lr=-1"}), 1, {"not finite"});
    EXPECT_TRUE(Checkpoint("run") == good);
    ExpectSuccess(train({"--steps=4", "--resume", "--lr=2e-3", "--min_lr=-1"}));
  }
}

TEST_F(TrainCli, InterruptedAfterDivergingTheRunKeepsTheLastGoodCheckpoint) {
  // Steps long enough for the signal to come between the first that is not finite and the fifth.
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), {"--schedule=constant", "--warmup=0", "--eval_every=0",
                             "--checkpoint_every=0", "--accumulate=64"});
    return more;
  };
  ExpectSuccess(Train(with({"--steps=2", "--out=run"})));
  const std::string good = Checkpoint("run");
  for (int attempt = 0; attempt < 20; ++attempt) {
    const std::string run = absl::StrCat("attempt", attempt);
    fs::copy(Path("run"), Path(run), fs::copy_options::recursive);
    Subprocess process(
        TrainCommand(with({"--steps=30", "--resume", "--lr=1e30", "--min_lr=-1", "--out=" + run})),
        {folder_});
    WaitUntil([&] { return process.Ended() || Metrics(run).size() > 3; });
    process.Signal(SIGINT);
    const Result result = process.Wait();
    EXPECT_TRUE(Checkpoint(run) == good);
    if (Metrics(run).size() >= 2 + 5) continue;  // the end after five bad steps was faster
    EXPECT_EQ(result.exit_code, 128 + SIGINT);
    EXPECT_TRUE(absl::StrContains(result.out, "is not saved")) << result.out;
    EXPECT_TRUE(absl::StrContains(result.out, "continue after step 2 with")) << result.out;
    return;
  }
  FAIL() << "no attempt was in time";
}

TEST_F(TrainCli, KeepsTheNewestCheckpointsAndTheBest) {
  const std::vector<std::string> arguments = {"--schedule=constant", "--eval_every=4",
                                              "--checkpoint_every=2"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), arguments.begin(), arguments.end());
    return more;
  };
  const auto kept = [&](const std::string& run) { return Names(run, "checkpoint", ""); };
  using List = std::vector<std::string>;
  ExpectSuccess(Train(with({"--steps=12", "--out=run"})));
  EXPECT_EQ(kept("run"), (List{"checkpoint-10.safetensors", "checkpoint-8.safetensors",
                               "checkpoint.safetensors"}));
  ExpectSuccess(Train(with({"--steps=10", "--out=one", "--keep=1"})));
  EXPECT_EQ(kept("one"), List{"checkpoint.safetensors"});
  fs::copy_file(Path("run/checkpoint-10.safetensors"), Path("copy"));
  // Continued from an older one, it leaves what it left before; later steps are made anew.
  const std::string straight = Checkpoint("run");
  fs::rename(Path("run/checkpoint-8.safetensors"), Path("run/checkpoint.safetensors"));
  ExpectSuccess(Train(with({"--steps=12", "--out=run", "--resume"})));
  EXPECT_TRUE(Checkpoint("run") == straight);
  EXPECT_TRUE(ReadAll(Path("run/checkpoint-10.safetensors")) == ReadAll(Path("copy")));
  const std::vector<Json> rows = Metrics("run");
  ASSERT_EQ(rows.size(), 12u);
  for (size_t i = 0; i < rows.size(); ++i) EXPECT_EQ(rows[i]["step"], i + 1);

  // The best of those of steps 4, 8 and 12, which a worse one does not replace.
  size_t best = 3;
  for (const size_t i : {7, 11}) {
    if (rows[i]["val_loss"] < rows[best]["val_loss"]) best = i;
  }
  EXPECT_EQ(best, 11u) << "it learns";
  EXPECT_TRUE(ReadAll(Path("run/best.safetensors")) == straight);
  ExpectSuccess(Train(with({"--steps=16", "--out=run", "--resume", "--lr=0.5", "--min_lr=-1"})));
  ASSERT_GT(Metrics("run").back()["val_loss"], rows[11]["val_loss"]) << "it unlearns";
  EXPECT_TRUE(ReadAll(Path("run/best.safetensors")) == straight);
  for (const char* name : {"", "/best.safetensors", "/checkpoint-14.safetensors"}) {
    ExpectSuccess(Generate({absl::StrCat("--checkpoint=run", name), "--tokens=5"}));
  }

  // --keep may change; also what was there before is then kept or not.
  ExpectSuccess(Train(with({"--steps=18", "--out=run", "--resume", "--keep=2"})));
  EXPECT_EQ(kept("run"), (List{"checkpoint-16.safetensors", "checkpoint.safetensors"}));
  EXPECT_TRUE(ReadAll(Path("run/best.safetensors")) == straight);
  fs::remove(Path("run/checkpoint.safetensors"));
  ExpectError(Train({"--out=run"}), 1, {"--out", "holds the checkpoints"});
  ExpectError(Train({"--keep=0", "--out=other"}), 2, {"--keep", "at least 1"});
}

// A damaged checkpoint, and one that is not finite, are refused; the error names what to do, which
// then gives the bits of the straight run.
TEST_F(TrainCli, ACheckpointThatIsNotGoodIsRefusedAndAnOlderOneNamed) {
  const std::vector<std::string> arguments = {"--eval_every=0", "--checkpoint_every=2",
                                              "--steps=12", "--schedule=constant"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), arguments.begin(), arguments.end());
    return more;
  };
  ExpectSuccess(Train(with({"--out=straight"})));
  ExpectSuccess(Train(with({"--out=run", "--steps=6"})));
  const std::string path = Path("run/checkpoint.safetensors"), good = ReadAll(path);
  const auto damage = [&](const std::string& name, size_t at) {
    std::fstream file(Path("run/" + name), std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<int64_t>(at));
    const char byte = static_cast<char>(file.get() ^ 1);
    file.seekp(static_cast<int64_t>(at));
    file.put(byte);
  };
  const std::string advice =
      "continue after step 4, rename checkpoint-4.safetensors, which is good";
  damage("checkpoint.safetensors", good.size() - 1);
  ExpectError(Train({"--resume", "--out=run", "--steps=12"}), 1,
              {"--resume", path, "checksum of the tensor", advice});
  ExpectError(Train({"--resume", "--out=run", "--steps=12", "--ranks=3"}), 1, {advice});
  damage("checkpoint.safetensors", 100);
  ExpectError(Train({"--resume", "--out=run", "--steps=12"}), 1, {"--resume", "header", advice});
  ExpectError(Generate({"--checkpoint=run"}), 1, {path, "checkpoint-4.safetensors", "good"});

  // As an older version wrote it: no checksums, and a weight that is not a number.
  Write("run/checkpoint.safetensors", WithoutChecksums(good, /*ruined=*/true));
  ExpectError(Train({"--resume", "--out=run", "--steps=12"}), 1,
              {"--resume", path, "holds a number that is not finite", advice});

  // The next older one, where that is damaged, too; and none.
  damage("checkpoint-4.safetensors", good.size() / 2);
  ExpectError(Train({"--resume", "--out=run", "--steps=12"}), 1,
              {"continue after step 2, rename checkpoint-2.safetensors"});
  fs::copy_file(Path("run/checkpoint-2.safetensors"), Path("two"));
  damage("checkpoint-2.safetensors", good.size() / 2);
  const Result none = Train({"--resume", "--out=run", "--steps=12"});
  ExpectError(none, 1, {"not finite"});
  EXPECT_FALSE(absl::StrContains(none.err, "rename")) << none.err;

  fs::rename(Path("two"), path);
  ExpectSuccess(Train({"--resume", "--out=run", "--steps=12"}));
  ExpectSameRun("straight", "run");
}

TEST_F(TrainCli, ACheckpointOfAnOlderVersionIsContinuedWithAWord) {
  ExpectSuccess(Train({"--steps=4", "--eval_every=0", "--schedule=constant", "--out=straight"}));
  ExpectSuccess(Train({"--steps=2", "--eval_every=0", "--schedule=constant", "--out=run"}));
  Write("run/checkpoint.safetensors", WithoutChecksums(Checkpoint("run"), /*ruined=*/false));
  ExpectSuccess(Generate({"--checkpoint=run", "--tokens=5"}));
  const Result result = Train({"--steps=4", "--resume", "--out=run"});
  ExpectSuccess(result);
  EXPECT_TRUE(absl::StrContains(result.out, "without checksums")) << result.out;
  ExpectSameWeights("straight", "run");
}

// What a hand-made checkpoint can say of itself that no run would.
TEST_F(TrainCli, CheckpointsThatMakeNoSenseAreRefused) {
  ExpectSuccess(Train({"--steps=2", "--eval_every=0", "--out=run"}));
  const std::string good = WithoutChecksums(Checkpoint("run"), /*ruined=*/false);
  const auto refused = [&](const std::function<void(Json&)>& change, const std::string& part) {
    SCOPED_TRACE(part);
    Write("run/checkpoint.safetensors", WithHeader(good, change));
    ExpectError(Generate({"--checkpoint=run"}), 1, {"--checkpoint", part});
  };
  const auto string = [&](const std::string& key, const std::string& value,
                          const std::string& part) {
    refused([&](Json& header) { header["__metadata__"][key] = value; }, part);
  };
  for (const std::string key : {"seqlen", "step", "updates", "window"}) {
    string(key, "-1", "'" + key + "'");
    string(key, "99999999999999999999", "'" + key + "'");
  }
  string("seqlen", "0", "'seqlen'");
  ExpectError(Train({"--resume", "--out=run", "--steps=4"}), 1, {"--resume", "'seqlen'"});
  string("seqlen", "9223372036854775807", "'seqlen'");
  string("window", "nan", "'window'");
  string("updates", "", "'updates'");
  string("step", "0", "'step'");
  string("val_loss", "nan", "'val_loss'");
  string("format", "burst checkpoint 3", "no 'burst checkpoint 2'");
  string("format", "burst checkpoint 2", "checksums are missing");
  string("model", "", "JSON");
  string("model", std::string(20000000, '['), "nested");
  string("tokenizer", R"({"kind":"byte","end_of_text":false})", "more tokens than its model's");
  string("tokenizer", R"({"kind":"char","end_of_text":false,"code_points":[]})", "tokenizer");
  const auto model = [&](const std::string& key, const Json& value, const std::string& part) {
    refused(
        [&](Json& header) {
          Json config = Json::parse(header["__metadata__"]["model"].get<std::string>());
          config[key] = value;
          header["__metadata__"]["model"] = config.dump();
        },
        part);
  };
  model("layers", 3, "not those of its model");
  for (const char* key : {"layers", "ffn"}) model(key, 1 << 24, "not those of its model");
  model("width", 1 << 24, "not those of its model");
  model("vocab", 2147483647, "not those of its model");
  model("vocab", 0, "not those of its model");
  model("norm_eps", nullptr, "norm_eps");
  refused(
      [](Json& header) { header["x"] = Json::parse(std::string(60, '[') + std::string(60, ']')); },
      "'x'");
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
  // A run folder's own files may be such links, too.
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

// A second run, and a requeued job that starts while the first process of its run is ending.
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
  first.Stop();  // it does not end while we look
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
  // It continues from what the first one saved last of all.
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
  ExpectError(Generate({"--checkpoint=run", "--prompt=\xE2\x82\xAC"}), 1, {"--prompt", "U+20AC"});
  ExpectError(Generate({"--checkpoint=run", "--temperature=-1"}), 2, {"--temperature"});
  ExpectError(Generate({"--checkpoint=run", "--top_k=-1"}), 2, {"--top_k"});
  ExpectError(Generate({"--checkpoint=run", "--tokens=-1"}), 2, {"--tokens"});
}

}  // namespace
}  // namespace burst
