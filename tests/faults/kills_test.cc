// kills_test [--kills=N] [--seed=S]: a run that is killed (kill -9) N times, at random moments of
// its start, steps, evaluations, saves and end, and resumed every time. Nothing that was once saved
// is lost, and a run that comes to its end has the bits of one that was left alone.
#include <gtest/gtest.h>

#include <cstdio>
#include <random>

#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"
#include "tests/faults/fault_run.h"

namespace burst {
namespace {

int kills = 5;
uint64_t seed = 0;

class Kills : public FaultTest {};

TEST_F(Kills, NothingIsLost) {
  std::mt19937_64 random(seed);
  const Arguments options = {"--steps=20", "--eval_every=5", "--checkpoint_every=2", "--threads=1"};
  MakeStraight(options);
  // How long a run takes from its beginning to its end, with no more work beside it than now.
  int64_t longest = 0;
  std::filesystem::remove_all(Path("killed"));
  int killed = 0, completed = 0, resumed = 0;
  const auto fresh = [&] { std::filesystem::remove_all(Path("killed")); };
  for (int64_t saved = 0; killed < kills;) {
    Arguments arguments = Plus(options, {"--out=killed"});
    if (saved > 0) arguments.push_back("--resume"), ++resumed;
    const int64_t begin = NowMs();
    Subprocess process(Command(arguments), {folder_});
    const int64_t moment =
        longest == 0 ? INT64_MAX / 2 : std::uniform_int_distribution<int64_t>(0, longest)(random);
    while (!process.Ended() && NowMs() - begin < moment) SleepMs(1);
    if (process.Ended()) {
      const Result result = process.Wait();
      ASSERT_EQ(result.exit_code, 0) << "seed " << seed << ", after " << killed << " kills\n"
                                     << result.err;
      ASSERT_TRUE(Weights("killed") == Weights("straight")) << "seed " << seed;
      ASSERT_EQ(Rows("killed"), Rows("straight")) << "seed " << seed;
      longest = std::max(longest, NowMs() - begin);
      ++completed;
      fresh();
      saved = 0;
      continue;
    }
    process.Signal(SIGKILL);
    process.Wait();
    ++killed;
    const int64_t now = SavedStep("killed");
    ASSERT_GE(now, saved) << "seed " << seed << ", kill " << killed;
    saved = now;
    if (saved == 20) {  // killed at its exit: complete
      ASSERT_TRUE(Weights("killed") == Weights("straight")) << "seed " << seed;
      fresh();
      saved = 0;
    }
    if (saved == 0 && std::filesystem::exists(Path("killed"))) fresh();
  }
  std::printf("%d kills (seed %lu): %d resumed runs, %d complete ones, 0 lost\n", killed,
              static_cast<unsigned long>(seed), resumed, completed);
}

}  // namespace
}  // namespace burst

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  burst::seed = std::random_device()();
  for (int i = 1; i < argc; ++i) {
    absl::string_view argument = argv[i];
    const bool known =
        (absl::ConsumePrefix(&argument, "--kills=") && absl::SimpleAtoi(argument, &burst::kills)) ||
        (absl::ConsumePrefix(&argument, "--seed=") && absl::SimpleAtoi(argument, &burst::seed));
    if (!known) return 2;
  }
  return RUN_ALL_TESTS();
}
