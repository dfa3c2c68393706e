// kills_test [--kills=N] [--seed=S] [--ranks=N]: kills a run (kill -9) N times and resumes it every
// time. The kills come at random moments of its start, steps, evaluations, saves and end. No save
// is lost, and a run that reaches its end has the bits of an undisturbed one. The test also kills
// one or all processes of a run with several processes. The others end by themselves.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>

#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"
#include "tests/faults/fault_run.h"
#include "tests/faults/ranks.h"

namespace burst {
namespace {

int kills = 5, ranks = 2;
uint64_t seed = 0;

class Kills : public FaultTest {
 protected:
  // The processes of a run that has begun.
  using Processes = std::vector<std::unique_ptr<Subprocess>>;
  static std::vector<Subprocess*> Running(const Processes& processes) {
    std::vector<Subprocess*> running;
    for (const auto& process : processes) {
      if (!process->Ended()) running.push_back(process.get());
    }
    return running;
  }

  using Start = std::function<Processes(const Arguments& options)>;

  // Kills and resumes a run. `straight` starts the same run as one process.
  void NothingIsLost(const Arguments& straight, const Start& start) {
    MakeStraight(Plus(options_, straight));
    std::mt19937_64 random(seed);
    const std::string where = absl::StrCat("seed ", seed);
    // The time of a run from its begin to its end, under the present load.
    int64_t longest = 0;
    int killed = 0, completed = 0, resumed = 0;
    const auto fresh = [&] { std::filesystem::remove_all(Path("killed")); };
    fresh();
    for (int64_t saved = 0; killed < kills;) {
      Arguments options = Plus(options_, {"--out=killed"});
      if (saved > 0) options.push_back("--resume"), ++resumed;
      const int64_t begin = NowMs();
      const Processes processes = start(options);
      const int64_t moment =
          longest == 0 ? INT64_MAX / 2 : std::uniform_int_distribution<int64_t>(0, longest)(random);
      std::vector<Subprocess*> running;
      while (!(running = Running(processes)).empty() && NowMs() - begin < moment) SleepMs(1);
      if (running.empty()) {
        for (const auto& process : processes) {
          const Result result = process->Wait();
          ASSERT_EQ(result.exit_code, 0) << where << ", after " << killed << " kills\n"
                                         << result.err;
        }
        ASSERT_TRUE(Weights("killed") == Weights("straight")) << where;
        ASSERT_EQ(Rows("killed"), Rows("straight")) << where;
        longest = std::max(longest, NowMs() - begin);
        ++completed;
        fresh();
        saved = 0;
        continue;
      }
      // The victim is one of the running processes, or all of them.
      const size_t victim = std::uniform_int_distribution<size_t>(0, running.size())(random);
      for (size_t i = 0; i < running.size(); ++i) {
        if (i == victim || victim == running.size()) running[i]->Signal(SIGKILL);
      }
      for (const auto& process : processes) {
        const Result result = EndOf(*process);
        if (result.signal == SIGKILL || result.exit_code == 0) continue;
        ASSERT_TRUE(absl::StrContains(result.err, "error: ")) << where << ": " << result.err;
      }
      ++killed;
      const int64_t now = SavedStep("killed");
      ASSERT_GE(now, saved) << where << ", kill " << killed;
      saved = now;
      if (saved == 20) {  // the run was killed at its exit and is complete
        ASSERT_TRUE(Weights("killed") == Weights("straight")) << where;
        fresh();
        saved = 0;
      }
      if (saved == 0 && std::filesystem::exists(Path("killed"))) fresh();
    }
    std::printf("%d kills (%s): %d resumed runs, %d complete ones, 0 lost\n", killed, where.c_str(),
                resumed, completed);
  }

  const Arguments options_ = {"--steps=20", "--eval_every=5", "--checkpoint_every=2",
                              "--threads=1"};
};

TEST_F(Kills, NothingIsLostOfOneProcess) {
  NothingIsLost({}, [this](const Arguments& options) {
    Processes processes;
    processes.push_back(
        std::make_unique<Subprocess>(Command(options), Subprocess::Options{folder_}));
    return processes;
  });
}

class ManyKills : public Kills, public testing::WithParamInterface<const char*> {};

// The parameter is an option of the run.
TEST_P(ManyKills, NothingIsLostOfSeveralProcesses) {
  int number = 0;
  const Arguments straight = {absl::StrCat("--ranks=", ranks), "--comm=threads", GetParam()};
  NothingIsLost(straight, [&](const Arguments& options) {
    // Every run gets another number, because the previous run's ports may still be in use.
    Ranks run(folder_, absl::StrCat("killed", number++), ranks,
              Command(Plus(options, {"--patience=10", GetParam()})));
    Processes processes;
    for (int rank = 0; rank < ranks; ++rank) processes.push_back(run.Process(rank));
    return processes;
  });
}

INSTANTIATE_TEST_SUITE_P(OneFileAndASet, ManyKills, testing::Values("--zero=0", "--zero=2"));

}  // namespace
}  // namespace burst

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  burst::seed = std::random_device()();
  for (int i = 1; i < argc; ++i) {
    absl::string_view argument = argv[i];
    const bool known =
        (absl::ConsumePrefix(&argument, "--kills=") && absl::SimpleAtoi(argument, &burst::kills)) ||
        (absl::ConsumePrefix(&argument, "--ranks=") && absl::SimpleAtoi(argument, &burst::ranks)) ||
        (absl::ConsumePrefix(&argument, "--seed=") && absl::SimpleAtoi(argument, &burst::seed));
    if (!known) return 2;
  }
  return RUN_ALL_TESTS();
}
