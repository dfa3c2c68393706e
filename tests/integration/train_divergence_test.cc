// Runs of //train that diverge end, and keep their last good checkpoint.
#include <gtest/gtest.h>

#include <filesystem>
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

// The update that ruins the weights leaves them finite, and its own loss and gradient are finite. A
// save follows it. The saved state must equal the state of a run without that update.
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

  // The run goes on from there, with the bits of a run that never diverged.
  ExpectSuccess(Train(arguments("straight", {"--steps=6"})));
  ExpectSuccess(Train(arguments("run", {"--steps=6", "--resume", "--lr=2e-3", "--min_lr=-1"})));
  EXPECT_EQ(Metrics("run").size(), 6u);
  ExpectSameWeights("straight", "run");

  // A last step that ruins the model is not saved either, and the run did not succeed.
  const auto last = arguments("run", {"--steps=7", "--resume", "--lr=1e30", "--min_lr=-1"});
  ExpectError(Train(last), 1, {"not finite after step 7, the last one", "after step 6"});
  ExpectSameWeights("straight", "run");
}

// All kinds of ranks agree that a model is not saved, even if only one of them has a value that is
// not finite.
TEST_F(TrainCli, DivergenceOfManyRanksKeepsTheLastGoodCheckpoint) {
  const std::vector<std::string> meshes[] = {{"--tp=2"},
                                             {"--tp=2", "--dp=2"},
                                             {"--tp=2", "--sp=2", "--checkpoint_files=one"},
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
  // Steps are long enough for the signal to come between the first one that is not finite and the
  // fifth.
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

}  // namespace
}  // namespace burst
