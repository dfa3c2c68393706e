// Checkpoints of //train: nothing is lost when a run is killed, interrupted or has no room. A run
// that continues equals one that was never stopped.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/integration/train_cli.h"
#include "tests/testing/sanitizers.h"

namespace burst {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// The steps of a run that is long enough to be interrupted.
constexpr size_t kLongRun = 300 / kSlowdown;

// A model that is large enough that writing its checkpoint takes a while.
constexpr char kSlowToSave[] =
    R"({"family":"gpt2","layers":1,"width":128,"heads":2,"dropout":0.1,"vocab":4000})";

std::string WithHeader(const std::string& content, const std::function<void(Json&)>& change) {
  auto [header, data] = SplitCheckpoint(content);
  change(header);
  const std::string text = header.dump();
  const uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + text + data;
}

// Returns the checkpoint as the first version wrote it. If `ruined`, it has a weight that is not a
// number.
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
  // There is room for the metrics, but not for a checkpoint.
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
      // A stopped process cannot finish the save meanwhile.
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

// Nothing is saved, whoever has the state, also when a run is interrupted. Losses are the ones of a
// run that saves, and the plot is drawn.
TEST_F(TrainCli, WithoutCheckpoints) {
  const std::vector<std::string> options = {"--steps=6", "--eval_every=3", "--schedule=constant"};
  const auto train = [&](std::vector<std::string> more) {
    more.insert(more.begin(), options.begin(), options.end());
    ExpectSuccess(Train(more));
  };
  using List = std::vector<std::string>;
  train({"--out=saved"});
  for (const char* zero : {"--zero=0", "--zero=1"}) {
    train({"--out=run", "--checkpoint_files=none", zero});
    EXPECT_EQ(Names("run", "", ""),
              (List{".lock", "config.json", "facts.json", "loss.svg", "metrics.jsonl"}))
        << zero;
    EXPECT_EQ(Metrics("run").size(), 6u);
    EXPECT_EQ(Metrics("run").back()["loss"], Metrics("saved").back()["loss"]);
    fs::remove_all(Path("run"));
  }

  // A run that continues leaves the checkpoint that it began with.
  const std::string before = Checkpoint("saved");
  ExpectSuccess(Train({"--resume", "--out=saved", "--steps=8", "--checkpoint_files=none"}));
  EXPECT_TRUE(Checkpoint("saved") == before);
  EXPECT_EQ(Metrics("saved").size(), 8u);

  Subprocess process(TrainCommand({"--steps=100000", "--eval_every=0", "--checkpoint_files=none",
                                   "--out=stopped"}),
                     {folder_});
  WaitUntil([&] { return Metrics("stopped").size() > 2; });
  process.Signal(SIGINT);
  const Result stopped = process.Wait();
  EXPECT_TRUE(absl::StrContains(stopped.out, "stopped after step")) << stopped.out << stopped.err;
  EXPECT_EQ(Names("stopped", "", ".safetensors"), List{});
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
  const std::string all_steps = absl::StrCat("--steps=", kLongRun);
  ExpectSuccess(Train({all_steps, "--eval_every=0", "--out=straight"}));
  for (int number : {SIGINT, SIGTERM}) {
    const std::string run = absl::StrCat("signal", number);
    Subprocess process(TrainCommand({all_steps, "--eval_every=0", "--out=" + run}), {folder_});
    WaitUntil([&] { return Metrics(run).size() >= 3; });
    process.Signal(number);
    const Result result = process.Wait();
    EXPECT_EQ(result.exit_code, 128 + number) << result.err;
    EXPECT_TRUE(absl::StrContains(result.out, "--resume")) << result.out;
    EXPECT_LT(Metrics(run).size(), kLongRun);
    EXPECT_TRUE(fs::exists(Path(run + "/loss.svg")));
    ExpectSuccess(Generate({"--checkpoint=" + run, "--tokens=5"}));
    ExpectSuccess(Train({"--resume", "--out=" + run}));
    ExpectSameRun("straight", run);
  }
}

// A model that is spread over ranks is saved whole. A run continues with the same bits on the same
// number of ranks, and continues on any other ranks. One rank generates.
TEST_F(TrainCli, TensorParallelRunsResumeAnywhere) {
  const std::vector<std::string> options = {"--schedule=constant", "--warmup=0", "--eval_every=0"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), options.begin(), options.end());
    return more;
  };
  const std::string four_heads =
      R"(--model={"layers":2,"width":16,"heads":4,"kv_heads":2,"ffn":32,"qk_norm":"all"})";
  const std::string spread = "--tp=4", all_steps = absl::StrCat("--steps=", kLongRun);
  const auto run_of = [&](const std::string& out) {
    return with({all_steps, "--out=" + out, spread, four_heads, "--sample=20"});
  };
  const Result result = Train(run_of("straight"));
  ExpectSuccess(result);
  EXPECT_TRUE(absl::StrContains(result.out, "x 4 tensor parallel")) << result.out;
  EXPECT_TRUE(absl::StrContains(result.out, "A sample:")) << result.out;
  ExpectSuccess(Generate({"--checkpoint=straight", "--tokens=5"}));

  Subprocess process(TrainCommand(run_of("stopped")), {folder_});
  WaitUntil([&] { return Metrics("stopped").size() >= 3; });
  process.Signal(SIGINT);
  EXPECT_EQ(process.Wait().exit_code, 128 + SIGINT);
  EXPECT_LT(Metrics("stopped").size(), kLongRun);
  ExpectSuccess(Train({"--resume", "--out=stopped", four_heads, "--sample=20"}));
  ExpectSameRun("straight", "stopped");

  // The run makes ten steps on these ranks and ten on others, in both orders.
  const std::vector<Json> expected = Metrics("straight");
  const std::vector<std::string> others[] = {
      {"--tp=1", "--strategy=single"},
      {"--tp=1", "--ranks=3"},
      {"--tp=2"},
      {"--tp=2", "--dp=2", "--sp=1"},
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
    ExpectSuccess(run("there", {spread}, with({"--steps=10"})));
    ExpectSuccess(run("there", other, {"--resume", "--steps=20"}));
    ExpectSuccess(run("back", other, with({"--steps=10"})));
    ExpectSuccess(run("back", {spread, "--ranks=-1", "--strategy=burst", "--dp=-1", "--sp=-1"},
                      {"--resume", "--steps=20"}));
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
  // A run that continues from an older checkpoint leaves the same files, and makes later steps
  // again.
  const std::string straight = Checkpoint("run");
  fs::rename(Path("run/checkpoint-8.safetensors"), Path("run/checkpoint.safetensors"));
  ExpectSuccess(Train(with({"--steps=12", "--out=run", "--resume"})));
  EXPECT_TRUE(Checkpoint("run") == straight);
  EXPECT_TRUE(ReadAll(Path("run/checkpoint-10.safetensors")) == ReadAll(Path("copy")));
  const std::vector<Json> rows = Metrics("run");
  ASSERT_EQ(rows.size(), 12u);
  for (size_t i = 0; i < rows.size(); ++i) EXPECT_EQ(rows[i]["step"], i + 1);

  // The best checkpoint of steps 4, 8 and 12. A worse one does not replace it.
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

  // --keep may change. It then also decides which earlier checkpoints are kept.
  ExpectSuccess(Train(with({"--steps=18", "--out=run", "--resume", "--keep=2"})));
  EXPECT_EQ(kept("run"), (List{"checkpoint-16.safetensors", "checkpoint.safetensors"}));
  EXPECT_TRUE(ReadAll(Path("run/best.safetensors")) == straight);
  fs::remove(Path("run/checkpoint.safetensors"));
  ExpectError(Train({"--out=run"}), 1, {"--out", "holds the checkpoints"});
  ExpectError(Train({"--keep=0", "--out=other"}), 2, {"--keep", "at least 1"});
}

// A damaged checkpoint, and one that is not finite, are refused. The error names what to do, and
// doing it gives the bits of the straight run.
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

  // An older version wrote no checksums. This file also has a weight that is not a number.
  Write("run/checkpoint.safetensors", WithoutChecksums(good, /*ruined=*/true));
  ExpectError(Train({"--resume", "--out=run", "--steps=12"}), 1,
              {"--resume", path, "holds a number that is not finite", advice});

  // The error names the next older one if that is damaged, too, or none.
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

// Ranks that divide the state each write a file. Names, --keep, the best, errors and bits equal
// those of a run that writes one file. Runs that do not divide the state can continue it.
TEST_F(TrainCli, ASetOfFilesIsKeptContinuedAndRefusedAsOne) {
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), {"--schedule=constant", "--eval_every=4", "--checkpoint_every=2"});
    return more;
  };
  const std::string divided = "--zero=2", ranks = "--ranks=3";
  using List = std::vector<std::string>;
  ExpectSuccess(Train(with({divided, ranks, "--steps=12", "--out=straight"})));
  ExpectSuccess(Train(with({divided, ranks, "--steps=8", "--out=run"})));
  const List kept = {"checkpoint-4.safetensors", "checkpoint-4.set", "checkpoint-6.safetensors",
                     "checkpoint-6.set",         "checkpoint-8.set", "checkpoint.safetensors"};
  EXPECT_EQ(Names("run", "checkpoint", ""), kept);
  ExpectSuccess(Generate({"--checkpoint=run", "--tokens=5"}));
  ExpectSuccess(Generate({"--checkpoint=run/best.safetensors", "--tokens=5"}));

  // The cases are any file that changed or is gone, and the index.
  const std::string set = "run/checkpoint-8.set";
  List files = Names(set, "", "");
  EXPECT_EQ(files, (List{"00001-of-00003.safetensors", "00002-of-00003.safetensors",
                         "00003-of-00003.safetensors"}));
  for (std::string& file : files) file = "checkpoint-8.set/" + file;
  files.push_back("checkpoint.safetensors");
  const std::string advice = "continue after step 6, rename checkpoint-6.safetensors";
  for (const std::string& file : files) {
    SCOPED_TRACE(file);
    const std::string name = "run/" + file, good = ReadAll(Path(name));
    for (const size_t at : {good.size() - 2, good.size() / 2, size_t{20}}) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ 1);
      Write(name, bad);
      ExpectError(Train({"--resume", "--out=run", "--steps=12"}), 1, {"--resume", file, advice});
    }
    Write(name, good.substr(0, good.size() / 2));
    ExpectError(Train({"--resume", "--out=run", "--steps=12", "--ranks=1", "--zero=0"}), 1,
                {"--resume", file, "truncated", advice});
    ExpectError(Generate({"--checkpoint=run"}), 1, {file, "checkpoint-6.safetensors"});
    if (file != files.back()) {
      fs::remove(Path(name));
      ExpectError(Train({"--resume", "--out=run", "--steps=12"}), 1,
                  {"--resume", file, "is missing", advice});
      // This file belongs to another run.
      fs::copy_file(Path("straight/checkpoint-10.set/" + fs::path(file).filename().string()),
                    Path(name));
      ExpectError(Train({"--resume", "--out=run", "--steps=12"}), 1,
                  {"--resume", file, "not the file that was saved", advice});
    }
    Write(name, good);
  }

  // Leftovers of a killed process in a set are removed, and the bits are the straight run's.
  fs::create_directory(Path("run/checkpoint-10.set"));
  Write("run/checkpoint-10.set/00001-of-00003.safetensors", "torn");
  fs::create_directory(Path("run/checkpoint-7-2.set"));
  fs::create_directory(Path("run/checkpoint-x.set"));
  ExpectSuccess(Train({"--resume", "--out=run", "--steps=12"}));
  EXPECT_FALSE(fs::exists(Path("run/checkpoint-7-2.set")));
  EXPECT_TRUE(fs::exists(Path("run/checkpoint-x.set"))) << "not one of ours";
  ExpectSameRun("straight", "run");

  // The run continues on other ranks, with one file, and with a set again.
  ExpectSuccess(Train({"--resume", "--out=run", "--steps=14", "--ranks=2", "--zero=0"}));
  EXPECT_FALSE(fs::exists(Path("run/checkpoint-14.set")));
  ExpectSuccess(
      Train({"--resume", "--out=run", "--steps=16", "--ranks=2", "--checkpoint_files=ranks"}));
  EXPECT_EQ(Names("run/checkpoint-16.set", "", "").size(), 2u);
  ExpectSuccess(Train({"--resume", "--out=run", "--steps=18", "--ranks=4", "--zero=3",
                       "--checkpoint_files=one", "--keep=1"}));
  EXPECT_EQ(Names("run", "checkpoint", ".safetensors"), List{"checkpoint.safetensors"});
  ExpectError(Train({"--out=other", "--steps=2", "--ranks=1", "--checkpoint_files=ranks"}), 2,
              {"--checkpoint_files", "one rank", "auto"});
  ExpectError(Train({"--checkpoint_files=many", "--out=other"}), 2, {"--checkpoint_files", "many"});

  // The step is made again while the index of the first time exists.
  fs::copy(Path("straight"), Path("again"), fs::copy_options::recursive);
  fs::rename(Path("again/checkpoint-8.safetensors"), Path("again/checkpoint.safetensors"));
  ExpectSuccess(Train({"--resume", "--out=again", "--steps=12"}));
  ExpectSameWeights("straight", "again");
  ASSERT_TRUE(fs::exists(Path("again/checkpoint-10-2.set"))) << "beside the first one, until then";
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

// Values that only a hand-made checkpoint can have.
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

}  // namespace
}  // namespace burst
