// Tests //train:plan as a program.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/integration/train_cli.h"

namespace burst {
namespace {

class PlanCli : public TrainCli {
 protected:
  Result Plan(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), ProgramPath("train/tools/plan"));
    return Subprocess(arguments, {folder_}).Wait();
  }
};

TEST_F(PlanCli, SaysMemoryAndTimeByPart) {
  const Result result = Plan({"--model=llama_1b", "--seqlen=16384", "--batch=1", "--gpus=2xH200"});
  ExpectSuccess(result);
  for (const char* part : {"parameters", "gradients", "optimizer", "of forward, feed-forward",
                           "peak", " of 139.0", "of backward, attention", "tokens/s a GPU"}) {
    EXPECT_TRUE(absl::StrContains(result.out, part)) << part << "\n" << result.out;
  }
}

// A plan that standard output does not take is lost, which is an error.
TEST_F(PlanCli, LostPlansAreErrors) {
  const std::pair<const char*, const char*> outputs[] = {{"> /dev/full", "No space left"},
                                                         {">&-", "it is closed"}};
  for (const auto& [output, cause] : outputs) {
    for (const char* step : {"--seqlen=1024", "--seqlens=1024,2048"}) {
      const Result result =
          Subprocess({"/bin/sh", "-c", absl::StrCat("\"$0\" \"$@\" ", output),
                      ProgramPath("train/tools/plan"), "--model=llama_1b", "--gpus=2xH200", step},
                     {folder_})
              .Wait();
      ExpectError(result, 1, {"standard output", cause});
    }
  }
}

// An exact run needs a second gradient, in fp64, and more time. If it does not fit, the error names
// options that an exact run takes.
TEST_F(PlanCli, PlansExactRuns) {
  const Result exact = Plan({"--model=llama_1b", "--seqlen=16384", "--batch=1", "--gpus=2xH200",
                             "--exact", "--exact_chunk=8192"});
  ExpectSuccess(exact);
  EXPECT_TRUE(absl::StrContains(exact.out, "peak")) << exact.out;
  const Result refused = Plan({"--model=llama_1b", "--seqlen=16384", "--batch=1", "--gpus=2xH200",
                               "--exact", "--exact_chunk=8192", "--memory=35"});
  EXPECT_NE(refused.exit_code, 0);
  for (const char* option : {"--zero=2", "--zero=3", "--head_chunk", "--recompute=sequence"}) {
    EXPECT_FALSE(absl::StrContains(refused.err, option)) << refused.err;
  }
}

// Nothing is trained. There is no run folder, and a model with a vocabulary needs no text.
TEST_F(PlanCli, WritesNothing) {
  std::filesystem::remove(Path("text.txt"));
  ExpectSuccess(Plan({"--model=d12", "--seqlen=1024", "--data=text.txt"}));
  EXPECT_FALSE(std::filesystem::exists(Path("runs")));
  EXPECT_FALSE(std::filesystem::exists(Path(".data-cache")));
}

// A model of characters has the text's characters, and documents end where the text says.
TEST_F(PlanCli, ReadsTheTextWhereItMatters) {
  const std::string model = absl::StrCat("--model=", kTinyModel);
  Write("empty.txt", "");
  ExpectError(Plan({model, "--data=empty.txt", "--seqlen=32"}), 1, {"--data", "is empty"});
  EXPECT_FALSE(std::filesystem::exists(Path("runs"))) << "nothing was read";
  ExpectSuccess(Plan({model, "--data=text.txt", "--seqlen=32"}));
  ExpectSuccess(Plan({model, "--data=text.txt", "--seqlen=32", "--packed"}));
  ExpectError(Plan({model, "--data=nowhere.txt", "--seqlen=32"}), 1, {"--data", "nowhere.txt"});
}

TEST_F(PlanCli, RefusesWhatDoesNotFitAndSaysWhatWould) {
  const std::vector<std::string> large = {"--model=llama_1b", "--seqlen=131072", "--batch=1",
                                          "--gpus=1xH200"};
  ExpectError(
      Plan(large), 1,
      {"a step needs 19", " of a GPU that has 139.0 GiB", "with --ffn_chunk=16384 it needs"});
  std::vector<std::string> fit = large;
  fit.push_back("--fit");
  const Result result = Plan(fit);
  ExpectSuccess(result);
  EXPECT_TRUE(absl::StrContains(result.out, "With --ffn_chunk=16384")) << result.out;
}

TEST_F(PlanCli, ChoosesTheMesh) {
  std::vector<std::string> step = {"--model=llama_1b", "--batch=4", "--seqlen=2048",
                                   "--gpus=4xH200", "--fit"};
  const Result chosen = Plan(step);
  ExpectSuccess(chosen);
  EXPECT_TRUE(absl::StrContains(chosen.out, "With --dp=4 --sp=1")) << chosen.out;
  step.push_back("--sp=2");  // the given value
  const Result given = Plan(step);
  ExpectSuccess(given);
  EXPECT_FALSE(absl::StrContains(given.out, "--dp")) << given.out;
}

// A strategy that is given stays, the default one, too.
TEST_F(PlanCli, KeepsTheGivenStrategy) {
  std::vector<std::string> step = {"--model=llama_1b", "--batch=1", "--seqlen=65536",
                                   "--gpus=8xH100", "--fit"};
  const Result chosen = Plan(step);
  ExpectSuccess(chosen);
  EXPECT_TRUE(absl::StrContains(chosen.out, "With --strategy=")) << chosen.out;
  step.push_back("--strategy=burst");
  const Result given = Plan(step);
  ExpectSuccess(given);
  EXPECT_FALSE(absl::StrContains(given.out, "--strategy")) << given.out;
}

TEST_F(PlanCli, PrintsATable) {
  const Result result = Plan({"--model=llama_1b", "--batch=1", "--gpus=1xH100",
                              "--seqlens=32768,131072", "--counts=1,2", "--fit"});
  ExpectSuccess(result);
  for (const char* row : {" 32768      1 ", " 32768      2 ", "131072      1 ", "131072      2 "}) {
    EXPECT_TRUE(absl::StrContains(result.out, row)) << row << "\n" << result.out;
  }
}

TEST_F(PlanCli, DrawsTheTable) {
  ExpectSuccess(Plan({"--model=llama_1b", "--batch=1", "--seqlens=1024,4096,16384", "--counts=1,2",
                      "--gpus=1xH200", "--plot=cost.svg"}));
  const std::string svg = ReadAll(Path("cost.svg"));
  for (const char* part : {"<svg", "Seconds of a step on H200", "1 GPU<", "2 GPUs<", "tokens"}) {
    EXPECT_TRUE(absl::StrContains(svg, part)) << part;
  }
  ExpectError(Plan({"--model=d12", "--plot=cost.svg"}), 2, {"--plot", "--seqlens"});
  ExpectError(Plan({"--model=llama_1b", "--batch=1", "--seqlens=131072", "--plot=cost.svg"}), 1,
              {"--plot", "no step fits"});
  ExpectError(Plan({"--model=d12", "--seqlens=1024", "--plot=no/cost.svg"}), 1,
              {"--plot", "no/cost.svg"});
}

// Ranks that save their own files copy their state to the host first.
TEST_F(PlanCli, CountsTheHostsMemoryForCheckpoints) {
  const auto host_row = [&](const std::string& files) {
    const Result result = Plan({"--model=llama_1b", "--seqlen=1024", "--batch=2", "--gpus=2xH200",
                                "--zero=3", absl::StrCat("--checkpoint_files=", files)});
    ExpectSuccess(result);
    return absl::StrContains(result.out, "of the host's memory");
  };
  EXPECT_TRUE(host_row("auto"));
  EXPECT_TRUE(host_row("ranks"));
  EXPECT_FALSE(host_row("one"));  // rank 0 gathers the state
  EXPECT_FALSE(host_row("none"));
  ExpectError(Plan({"--model=llama_1b", "--gpus=2xH200", "--pp=2", "--accumulate=2",
                    "--checkpoint_files=one"}),
              2, {"--checkpoint_files", "--pp"});
}

// The masks of all ranks alone would take four times as much.
TEST_F(PlanCli, ManyRanksAndTokensTakeLittleMemory) {
  ExpectSuccess(
      Plan({"--model={\"family\":\"llama\",\"layers\":2,\"width\":4096,\"heads\":32,"
            "\"kv_heads\":8,\"ffn\":14336,\"vocab\":128256}",
            "--seqlen=1048576", "--batch=1", "--gpus=128xH200", "--zero=3"}));
  rusage usage;
  ASSERT_EQ(getrusage(RUSAGE_CHILDREN, &usage), 0);
  EXPECT_LT(usage.ru_maxrss, 1 << 20);  // KiB: the largest program so far
}

// A plot replaces plots, and no other file of the user.
TEST_F(PlanCli, FilesThatAreNoPlotsAreKept) {
  const std::string before = ReadAll(Path("text.txt"));
  ExpectError(Plan({"--model=llama_1b", "--seqlens=1024", "--plot=text.txt"}), 2,
              {"--plot", "must be a new file or an SVG"});
  EXPECT_EQ(ReadAll(Path("text.txt")), before);
  for (int times = 0; times < 2; ++times) {
    ExpectSuccess(Plan({"--model=llama_1b", "--seqlens=1024", "--plot=plot.svg"}));
  }
}

TEST_F(PlanCli, RefusesOptionsByName) {
  ExpectError(Plan({"--gpus=4"}), 2, {"--gpus", "4xH200"});
  ExpectError(Plan({"--out=run"}), 2, {"out"});
  const Result mesh = Plan({"--model=llama_1b", "--gpus=4xH200", "--dp=3"});
  ExpectError(mesh, 2, {"--dp", "ranks, 4; got 3; give another number of ranks"});
  EXPECT_FALSE(absl::StrContains(mesh.err, "--ranks")) << "it is an option of //train";
  ExpectError(Plan({"--fit", "--exact"}), 2, {"--fit", "--exact"});
  ExpectError(Plan({"--counts=0"}), 2, {"--counts", "at least 1"});
  EXPECT_TRUE(absl::StrContains(Plan({"--help"}).out, "--gpus_per_node"));
}

}  // namespace
}  // namespace burst
