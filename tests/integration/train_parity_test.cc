// Trains the same model on one rank and on a ring of ranks. Losses agree to rounding, for any
// layout, transport, direction of the backward, mask and family.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <ostream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/subprocess.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

constexpr int kSteps = kThreadSanitizer ? 10 : kAddressSanitizer ? 20 : 50;

struct Run {
  std::string name;
  std::vector<std::string> arguments;
};

void PrintTo(const Run& run, std::ostream* out) { *out << run.name; }

// Returns a command that starts another one as `ranks` processes, as torchrun does.
std::vector<std::string> AsTorchrun(int ranks) {
  const std::string script =
      "pids=(); for ((rank = 0; rank < $0; ++rank)); do "
      "env RANK=$rank WORLD_SIZE=$0 LOCAL_RANK=$rank LOCAL_WORLD_SIZE=$0 MASTER_ADDR=localhost "
      "MASTER_PORT=$((20000 + $$ % 10000)) TORCHELASTIC_RUN_ID=$$ \"$@\" & pids+=($!); done; "
      "code=0; for pid in ${pids[@]}; do wait $pid || code=$?; done; exit $code";
  return {"bash", "-c", script, absl::StrCat(ranks)};
}

class TrainParity : public testing::TestWithParam<Run> {
 protected:
  void SetUp() override {
    folder_ = absl::StrCat(testing::TempDir(), "/parity_", GetParam().name);
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    std::ofstream text(folder_ + "/text.txt");
    for (int i = 0; i < 600; ++i) {
      text << "sentence " << i * 7919 % 1000 << " of many\n" << (i % 4 == 3 ? "\n" : "");
    }
  }

  // Returns the losses of a run: training, then validation. `command` starts the program: mpirun,
  // or nothing.
  std::vector<double> Losses(std::vector<std::string> command,
                             const std::vector<std::string>& arguments) const {
    const bool mpi = !command.empty();
    const std::string out = absl::StrCat(folder_, "/run");
    fs::remove_all(out);
    command.insert(
        command.end(),
        {ProgramPath("train/train"), "--data=text.txt", "--batch=3",
         absl::StrCat("--steps=", kSteps), "--lr=3e-3", absl::StrCat("--eval_every=", kSteps / 2),
         "--eval_batches=2", "--checkpoint_every=0", "--sample=0", "--threads=1", "--out=" + out});
    command.insert(command.end(), GetParam().arguments.begin(), GetParam().arguments.end());
    command.insert(command.end(), arguments.begin(), arguments.end());
    const Result result = Subprocess(command, {folder_, mpi}).Wait();
    EXPECT_EQ(result.exit_code, 0) << result.err;
    std::vector<double> losses, validation;
    std::istringstream lines(ReadAll(out + "/metrics.jsonl"));
    for (std::string line; std::getline(lines, line);) {
      const auto row = nlohmann::json::parse(line);
      losses.push_back(row["loss"]);
      if (row.contains("val_loss")) validation.push_back(row["val_loss"]);
    }
    EXPECT_EQ(losses.size(), size_t{kSteps});
    EXPECT_EQ(validation.size(), 2u);
    losses.insert(losses.end(), validation.begin(), validation.end());
    return losses;
  }

  // Sums of some thousand products in another order differ by 1e-5 at most, and a wrong sum shows
  // in the first steps. Later steps amplify differences of rounding, by a factor that depends on
  // the model and on the machine's vectors.
  static void ExpectEqual(const std::vector<double>& losses, const std::vector<double>& expected) {
    constexpr size_t kFirstSteps = 10;
    ASSERT_EQ(losses.size(), expected.size());
    double worst = 0;
    for (size_t i = 0; i < losses.size(); ++i) {
      worst = std::max(worst, std::fabs(losses[i] / expected[i] - 1));
      const double bound = i < kFirstSteps ? 1e-5 : 1e-4;
      EXPECT_NEAR(losses[i], expected[i], bound * expected[i]) << "step " << i + 1;
    }
    testing::Test::RecordProperty("largest_relative_difference", absl::StrCat(worst));
  }

  std::string folder_;
};

TEST_P(TrainParity, FourRanksTrainAsOneDoes) {
  const std::vector<double> one = Losses({}, {"--ranks=1"});
  if (!kThreadSanitizer) {
    EXPECT_LT(one[kSteps - 1], 0.9 * one[0]) << "it learns";
  }
  for (const char* layout : {"contiguous", "zigzag", "striped"}) {
    for (const char* backward : {"burst", "ring"}) {
      SCOPED_TRACE(absl::StrCat(layout, " ", backward));
      ExpectEqual(Losses({}, {"--ranks=4", absl::StrCat("--layout=", layout),
                              absl::StrCat("--ring_backward=", backward)}),
                  one);
    }
  }
}

// Documents of one row and of three rows are dealt to the ranks, which are threads and processes.
TEST_P(TrainParity, BalancedDocumentsTrainAsOneRankDoes) {
  if (GetParam().name.find("Packed") == std::string::npos) GTEST_SKIP() << "for packed documents";
  for (const char* batch : {"--batch=1", "--batch=3"}) {
    SCOPED_TRACE(batch);
    const std::vector<double> one = Losses({}, {batch, "--seqlen=400", "--window=0", "--ranks=1"});
    for (const char* strategy : {"--strategy=burst", "--strategy=ring", "--ulysses=2"}) {
      std::vector<std::string> options = {
          batch, "--seqlen=400", "--window=0", "--layout=balanced", "--ranks=4", strategy};
      if (strategy[2] == 'u') options.push_back("--strategy=burst+ulysses");
      const std::vector<double> balanced = Losses({}, options);
      ExpectEqual(balanced, one);
      if (strategy[2] == 'u') {
        EXPECT_EQ(Losses(AsTorchrun(4), options), balanced);
      }
    }
  }
}

// There are two nodes of two ranks.
TEST_P(TrainParity, ADoubleRingTrainsAsOneRankDoes) {
  const std::vector<double> one = Losses({}, {"--ranks=1"});
  ExpectEqual(Losses({}, {"--ranks=4", "--ranks_per_node=2"}), one);
}

// The mesh is data parallel x sequence parallel, and the groups share the batch.
TEST_P(TrainParity, AMeshOfRanksTrainsAsOneDoes) {
  const std::vector<double> one = Losses({}, {"--batch=4", "--ranks=1"});
  ExpectEqual(Losses({}, {"--batch=4", "--dp=2", "--sp=2"}), one);
  ExpectEqual(Losses({}, {"--batch=4", "--dp=4"}), one);
}

// The other strategies run over four ranks. Ulysses runs if the model has heads for them.
TEST_P(TrainParity, OtherStrategiesTrainAsOneRankDoes) {
  const std::vector<double> one = Losses({}, {"--strategy=single", "--ranks=1"});
  const bool two_heads = GetParam().name == "Gpt2Dropout";
  const std::vector<std::string> hybrid = {"--strategy=burst+ulysses", "--ranks=4", "--ulysses=2"};
  ExpectEqual(Losses({}, hybrid), one);
  if (!two_heads) ExpectEqual(Losses({}, {"--strategy=ulysses", "--ranks=4"}), one);
  ExpectEqual(Losses({}, {"--strategy=ring", "--ranks=2"}), one);
}

// The model itself is spread over ranks, at most one for each head, alone and combined with data
// parallelism.
TEST_P(TrainParity, TensorParallelRanksTrainAsOneDoes) {
  const std::vector<double> one = Losses({}, {"--batch=4", "--strategy=single", "--ranks=1"});
  const bool two_heads = GetParam().name == "Gpt2Dropout";
  ExpectEqual(Losses({}, {"--batch=4", "--tp=2"}), one);
  if (!two_heads) ExpectEqual(Losses({}, {"--batch=4", "--tp=4"}), one);
  ExpectEqual(Losses({}, {"--batch=4", "--tp=2", "--dp=2", "--layout=contiguous"}), one);
}

// Ranks as processes give the very bits that ranks as threads give.
TEST_P(TrainParity, ProcessesTrainAsThreadsDo) {
  const std::string mpirun = BURST_MPIRUN;
  const auto compare = [&](std::vector<std::string> options, bool over_mpi) {
    SCOPED_TRACE(options[0]);
    options.push_back("--ranks=4");
    const std::vector<double> expected = Losses({}, options);
    EXPECT_EQ(Losses(AsTorchrun(4), options), expected) << "sockets, which are the default";
    options.push_back("--comm=mpi");
    if (!over_mpi || mpirun.empty()) return;
    EXPECT_EQ(Losses({mpirun, "--oversubscribe", "-np", "4"}, options), expected);
  };
  for (const char* layout : {"contiguous", "zigzag", "striped"}) {
    compare({absl::StrCat("--layout=", layout)}, /*over_mpi=*/layout[0] == 'z');
  }
  compare({"--ranks_per_node=2"}, true);
  compare({"--strategy=burst+ulysses", "--ulysses=2"}, true);
  compare({"--zero=2", "--dp=2", "--batch=4"}, false);
  compare({"--zero=3"}, true);
  compare({"--tp=2", "--dp=2", "--batch=4"}, true);
}

// Recomputed layers give the bits of layers that store everything. Processes do so, too, although
// they enqueue reductions of gradients between the layers.
TEST_P(TrainParity, RecomputationTrainsAsItself) {
  const std::string mpirun = BURST_MPIRUN;
  const std::vector<double> expected = Losses({}, {"--ranks=2"});
  EXPECT_EQ(Losses({}, {"--ranks=2", "--recompute=full"}), expected);
  EXPECT_EQ(Losses(AsTorchrun(2), {"--recompute=selective"}), expected);
  if (mpirun.empty()) GTEST_SKIP() << "built without Open MPI";
  const std::vector<std::string> start = {mpirun, "--oversubscribe", "-np", "2"};
  EXPECT_EQ(Losses(start, {"--comm=mpi", "--recompute=selective"}), expected);
  EXPECT_EQ(Losses(start, {"--comm=tcp", "--recompute=selective"}), expected);
}

// With --exact, any ranks have one rank's bits, as threads, and as processes over sockets and MPI.
TEST_P(TrainParity, AnExactRunHasTheBitsOfOneRank) {
  const std::string mpirun = BURST_MPIRUN;
  std::vector<std::string> options = {"--exact", "--seqlen=96", "--batch=4", "--ranks=1"};
  const std::vector<double> one = Losses({}, options);
  options.back() = "--dp=2";
  EXPECT_EQ(Losses(AsTorchrun(4), options), one);
  options.back() = "--layout=striped";
  EXPECT_EQ(Losses(AsTorchrun(3), options), one);
  if (mpirun.empty()) return;
  options.push_back("--comm=mpi");
  EXPECT_EQ(Losses({mpirun, "--oversubscribe", "-np", "3"}, options), one);
}

TEST(TrainUnderMpirun, ErrorsArePrintedOnce) {
  const std::string mpirun = BURST_MPIRUN, folder = testing::TempDir();
  if (mpirun.empty()) GTEST_SKIP() << "built without Open MPI";
  const auto errors = [&](const std::vector<std::string>& arguments, int exit_code) {
    std::vector<std::string> command = {mpirun, "--oversubscribe", "-np", "3",
                                        ProgramPath("train/train")};
    command.insert(command.end(), arguments.begin(), arguments.end());
    const Result result = Subprocess(command, {folder, true}).Wait();
    EXPECT_EQ(result.exit_code, exit_code) << result.err;
    int count = 0;
    for (size_t at = 0; (at = result.err.find("error: ", at)) != std::string::npos; ++at) ++count;
    EXPECT_EQ(count, 1) << result.err;
    return result.err;
  };
  EXPECT_THAT(errors({"--comm=threads"}, 2), testing::HasSubstr("3 separate models"));
  EXPECT_THAT(errors({"--ranks=2"}, 2), testing::HasSubstr("got 2; give --ranks=3"));
  EXPECT_THAT(errors({"--data=missing.txt"}, 1), testing::HasSubstr("missing.txt"));
  EXPECT_THAT(errors({"--comm=mpi", "--ranks=2"}, 2), testing::HasSubstr("got 2; give --ranks=3"));
  EXPECT_THAT(errors({"--comm=mpi", "--lyout=zigzag"}, 2), testing::HasSubstr("--layout"));
  EXPECT_THAT(errors({"--comm=mpi", "--data=missing.txt"}, 1), testing::HasSubstr("missing.txt"));
}

// This shows, without MPI, what a launcher would print when one of its processes dies.
TEST(TrainUnderTorchrun, AKilledRankIsNamedByAllOthers) {
  const std::string folder = FreshTestFolder();
  std::ofstream(folder + "/text.txt") << std::string(3000, 'a') << std::string(3000, 'b');
  const std::string script = R"sh(
    for rank in 0 1 2; do
      env RANK=$rank WORLD_SIZE=3 LOCAL_RANK=$rank LOCAL_WORLD_SIZE=3 MASTER_ADDR=localhost \
        MASTER_PORT=$((20000 + $$ % 10000)) TORCHELASTIC_RUN_ID=$$ "$0" --data=text.txt \
        --steps=100000 --seqlen=64 --batch=3 --eval_every=0 --sample=0 --threads=1 --out=run \
        >out.$rank 2>err.$rank &
      pids[rank]=$!
    done
    for ((i = 0; i < 600; ++i)); do
      [[ -e run/metrics.jsonl && $(wc -l <run/metrics.jsonl) -ge 3 ]] && break
      sleep 0.1
    done
    kill -9 ${pids[1]}
    for rank in 0 2; do
      wait ${pids[rank]}
      echo "$? $(cat err.$rank)"
    done)sh";
  const Result result =
      Subprocess({"bash", "-c", "cd \"$1\" && " + script, ProgramPath("train/train"), folder},
                 {folder})
          .Wait();
  const std::string line = "1 error: rank 1 of 3 was lost: its connection closed\n";
  EXPECT_EQ(result.out, line + line) << result.err;
}

const Run kRuns[] = {
    {"Llama",
     {R"(--model={"family":"llama","layers":2,"width":32,"heads":4,"kv_heads":2,"ffn":64})",
      "--seqlen=67"}},
    {"Gpt2Dropout",
     {R"(--model={"family":"gpt2","layers":2,"width":32,"heads":2,"tied_embeddings":true})",
      "--model.dropout=0.1", "--accumulate=2", "--seqlen=48"}},
    {"LlamaWindowPacked",
     {R"(--model={"family":"llama","layers":2,"width":32,"heads":4,"kv_heads":1,"ffn":64})",
      "--seqlen=70", "--window=20", "--packed"}},
};

INSTANTIATE_TEST_SUITE_P(Models, TrainParity, testing::ValuesIn(kRuns),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace burst
