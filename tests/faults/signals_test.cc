// Asks a run to stop, by every signal and at every time. It ends soon, says so and exits with 128 +
// the signal. It then continues with the bits of an undisturbed run.
#include <gtest/gtest.h>

#include "tests/faults/fault_run.h"
#include "tests/testing/sanitizers.h"

namespace burst {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM, SIGUSR1, SIGHUP};

class Signals : public FaultTest {
 protected:
  std::string NameOf(int number, const char* when) const { return absl::StrCat(when, number); }

  static bool HasSocket(const Subprocess& process) {
    const std::string files = absl::StrCat("/proc/", process.pid(), "/fd");
    std::error_code error;
    for (const auto& file : std::filesystem::directory_iterator(files, error)) {
      const std::string to = std::filesystem::read_symlink(file.path(), error).string();
      if (absl::StartsWith(to, "socket:")) return true;
    }
    return false;
  }
};

TEST_F(Signals, BeforeTheFirstStepTheyEndTheProcessAtOnce) {
  // This is rank 0 of two ranks. The other one never comes.
  const Arguments alone = {"env",
                           "RANK=0",
                           "LOCAL_RANK=0",
                           "WORLD_SIZE=2",
                           "MASTER_PORT=29731",
                           "MASTER_ADDR=127.0.0.1"};
  for (const int number : kSignals) {
    Subprocess process(Plus(alone, Command({"--out=start"})), {folder_});
    while (!HasSocket(process) && !process.Ended()) SleepMs(1);  // then it waits for the other rank
    const int64_t begin = NowMs();
    process.Signal(number);
    const Result result = EndOf(process);
    EXPECT_LT(NowMs() - begin, 2000);
    EXPECT_EQ(result.exit_code, 128 + number) << result.err;
    EXPECT_TRUE(Says(result, "before its first step")) << result.err;
    EXPECT_FALSE(std::filesystem::exists(Path("start")));
  }
}

TEST_F(Signals, InAStepItIsFinishedAndSaved) {
  const size_t steps = 1500 / kSlowdown;
  const Arguments options = {absl::StrCat("--steps=", steps), "--checkpoint_every=0",
                             "--eval_every=0"};
  MakeStraight(options);
  for (const int number : kSignals) {
    const std::string run = NameOf(number, "step");
    Subprocess process(Command(Plus(options, {"--out=" + run})), {folder_});
    AwaitRows(run, 3, process);
    process.Signal(number);
    const Result result = EndOf(process);
    EXPECT_EQ(result.exit_code, 128 + number) << result.err;
    EXPECT_EQ(result.err, "");
    EXPECT_TRUE(Says(result, "stops after this step")) << result.out;
    EXPECT_TRUE(Says(result, "stopped after step")) << result.out;
    EXPECT_LT(Rows(run).size(), steps);
    ExpectContinues(run, options);
  }
}

// The run leaves the evaluation and saves the step before it. The continued run evaluates again.
TEST_F(Signals, InAnEvaluationItIsMadeUpFor) {
  std::ofstream text(Path("validation.txt"), std::ios::binary);
  for (int i = 0; i < 4000; ++i) text << "line " << i % 1000 << " of a text\n";
  text.close();
  const Arguments options = {"--steps=4",
                             "--eval_every=2",
                             "--checkpoint_every=0",
                             "--seqlen=16",
                             "--val_data=validation.txt",
                             absl::StrCat("--eval_batches=", 1000 / kSlowdown),
                             "--warmup=0"};
  MakeStraight(options);
  for (const int number : kSignals) {
    const std::string run = NameOf(number, "evaluation");
    Subprocess process(Command(Plus(options, {"--out=" + run})), {folder_});
    AwaitRows(run, 1, process);
    SleepMs(30);  // two steps take a few, the evaluation 400 times as long
    process.Signal(number);
    const Result result = EndOf(process);
    EXPECT_EQ(result.exit_code, 128 + number) << result.err;
    const auto rows = Rows(run);
    ASSERT_EQ(rows.size(), 2u);
    EXPECT_FALSE(rows.back().contains("val_loss"));
    ExpectContinues(run, options);
    EXPECT_TRUE(Rows(run)[1].contains("val_loss"));
  }
}

TEST_F(Signals, InTheSampleTheRunIsComplete) {
  const Arguments options = {"--steps=3", "--eval_every=0", "--warmup=0"};
  MakeStraight(options);
  for (const int number : kSignals) {
    const std::string run = NameOf(number, "sample");
    Subprocess process(Command(Plus(options, {"--out=" + run, "--sample=1000000"})), {folder_});
    while (!std::filesystem::exists(Path(run) + "/loss.svg") && !process.Ended()) SleepMs(1);
    const int64_t begin = NowMs();
    process.Signal(number);
    const Result result = EndOf(process);
    EXPECT_LT(NowMs() - begin, 2000);
    EXPECT_EQ(result.exit_code, 128 + number) << result.err;
    EXPECT_TRUE(Weights(run) == Weights("straight"));
  }
}

// A step takes long. A run that is asked once goes on with the step. A run that is asked twice
// ends.
class SlowStep : public Signals {
 protected:
  // Three steps, each of `micro_batches` times some hundreds of milliseconds on one core.
  static Arguments Options(int micro_batches) {
    return {"--steps=3",         "--eval_every=0", "--checkpoint_every=1",
            "--batch=8",         "--seqlen=256",   absl::StrCat("--accumulate=", micro_batches),
            "--warmup=0",        "--threads=1",    "--ranks=1",
            "--model=llama_tiny"};
  }

  // Asks a run twice in its second step. Returns false if that step ended too early to be asked.
  bool AskTwiceInTheSecondStep(const std::string& run, const Arguments& options) {
    Subprocess process(Command(Plus(options, {"--out=" + run})), {folder_});
    AwaitRows(run, 1, process);
    while (!HasCheckpoint(run)) SleepMs(1);
    SleepMs(100);
    process.Signal(SIGTERM);
    process.Signal(SIGTERM);  // timeout(1) sends both for one request
    SleepMs(200);
    process.Signal(SIGTERM);  // supervisors repeat a signal
    SleepMs(1000);
    const bool first_kind_goes_on = !process.Ended();
    process.Signal(SIGUSR1);  // another signal does not count as a second request
    SleepMs(50);
    const bool another_kind_goes_on = !process.Ended();
    const int64_t begin = NowMs();
    process.Signal(SIGTERM);
    const Result result = EndOf(process);
    if (Rows(run).size() > 1) return false;
    EXPECT_LT(NowMs() - begin, 1000);
    EXPECT_TRUE(first_kind_goes_on);
    EXPECT_TRUE(another_kind_goes_on);
    EXPECT_EQ(result.signal, SIGTERM);
    EXPECT_EQ(Rows(run).size(), 1u);
    return true;
  }
};

TEST_F(SlowStep, AskedAgainItEndsAtOnceAndTheLastCheckpointIsWhole) {
  // A fast machine needs more work for a step that outlasts the signals.
  int micro_batches = kSlowdown == 1 ? 4 : 1;
  const auto run = [&] { return absl::StrCat("twice", micro_batches); };
  while (!AskTwiceInTheSecondStep(run(), Options(micro_batches))) {
    micro_batches *= 2;
    ASSERT_LE(micro_batches, 256) << "every step ends before it is asked twice";
  }
  MakeStraight(Options(micro_batches));
  ExpectContinues(run(), Options(micro_batches));
}

// nohup turns SIGHUP off. A reader of the output that ends does not end the run.
TEST_F(Signals, NohupAndClosedPipes) {
  const Arguments options = {"--steps=200", "--eval_every=0", "--checkpoint_every=0"};
  MakeStraight(options);
  std::string train;
  for (const std::string& part : Command(Plus(options, {"--out=nohup", "--log_every=1"}))) {
    absl::StrAppend(&train, " '", part, "'");
  }
  Subprocess nohup({"bash", "-c", "trap '' HUP; exec" + train}, {folder_});
  AwaitRows("nohup", 3, nohup);
  nohup.Signal(SIGHUP);
  EXPECT_EQ(EndOf(nohup).exit_code, 0);
  EXPECT_TRUE(Weights("nohup") == Weights("straight"));

  std::filesystem::remove_all(Path("nohup"));
  Subprocess piped({"bash", "-c", "set -o pipefail;" + train + " | head -n 12 >/dev/null"},
                   {folder_});
  EXPECT_EQ(EndOf(piped).exit_code, 0);
  EXPECT_TRUE(Weights("nohup") == Weights("straight"));
}

}  // namespace
}  // namespace burst
