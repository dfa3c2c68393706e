// Tests runs whose launcher asks them to stop and kills them some time later.
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/faults/fault_run.h"
#include "tests/testing/sanitizers.h"

namespace burst {
namespace {

class Launchers : public FaultTest {
 protected:
  // A step takes much longer than the second that mpirun grants.
  const Arguments slow_ = {
      "--steps=2",       "--eval_every=0", "--checkpoint_every=0",
      "--seqlen=256",    "--batch=16",     absl::StrCat("--accumulate=", 10 / kSlowdown),
      "--warmup=0",      "--threads=1",    "--model=llama_tiny",
      "--precision=fp32"};
  const Arguments threads_ = {"--ranks=2", "--comm=threads"};
  // All steps take longer than that second.
  const size_t fast_steps_ = 12000 / kSlowdown;
  const Arguments fast_ = {absl::StrCat("--steps=", fast_steps_), "--eval_every=0",
                           "--checkpoint_every=0", "--threads=1"};
  // Steps take less than a tenth of a millisecond, and print a line each. mpirun reads no output
  // while it ends a job.
  const Arguments tiny_ = {absl::StrCat("--steps=", 120000 / kSlowdown),
                           "--eval_every=0",
                           "--checkpoint_every=0",
                           "--threads=1",
                           "--seqlen=8",
                           "--batch=1",
                           "--log_every=1",
                           R"(--model={"family":"llama","layers":1,"width":8,"heads":2,"ffn":8})"};
  const std::string mpirun_ = BURST_MPIRUN;

  Arguments Mpirun(const Arguments& of_mpirun, const Arguments& options) const {
    return Plus(Plus({mpirun_, "--oversubscribe", "-np", "2"}, of_mpirun),
                Command(Plus(options, {"--comm=mpi", "--out=mpi"})));
  }
};

// Ctrl-C. Open MPI sends SIGTERM a second later, and SIGKILL one more second later.
TEST_F(Launchers, MpirunKillsInTheMiddleOfAStepAndTheStepsBeforeItAreKept) {
  if (mpirun_.empty()) GTEST_SKIP() << "built without Open MPI";
  MakeStraight(Plus(slow_, threads_));
  Subprocess process(Mpirun({}, slow_), {folder_, /*mpi=*/true});
  AwaitRows("mpi", 1, process);
  SleepMs(200);
  process.Signal(SIGINT);
  EndOf(process);
  // Nobody waits for the process that saves.
  for (int i = 0; i < 1000 && !HasCheckpoint("mpi"); ++i) SleepMs(10);
  ASSERT_TRUE(HasCheckpoint("mpi"));
  if (Rows("mpi").size() == 2) GTEST_SKIP() << "a step here is shorter than what mpirun grants";
  EXPECT_EQ(Rows("mpi").size(), 1u);
  ExpectContinues("mpi", Plus(slow_, threads_));
}

// A short step is finished. After SIGUSR1, which mpirun passes on, any step is finished.
TEST_F(Launchers, MpirunPassesSignalsOn) {
  if (mpirun_.empty()) GTEST_SKIP() << "built without Open MPI";
  const struct {
    int number;
    Arguments options;
  } cases[] = {{SIGINT, fast_}, {SIGUSR1, fast_}, {SIGINT, tiny_}};
  for (const auto& c : cases) {
    std::filesystem::remove_all(Path("straight"));
    MakeStraight(Plus(c.options, threads_));
    // mpirun grants a second after SIGINT, in which a busy machine may not finish a step.
    constexpr int kChances = 3;
    Result result;
    for (int chance = 0; chance < kChances; ++chance) {
      std::filesystem::remove_all(Path("mpi"));
      Subprocess process(Mpirun({}, c.options), {folder_, /*mpi=*/true});
      AwaitRows("mpi", 3, process);
      process.Signal(c.number);
      result = EndOf(process);
      EXPECT_NE(result.exit_code, 0);
      // After SIGINT mpirun no longer prints what its processes say.
      if (c.number != SIGINT) {
        EXPECT_TRUE(Says(result, "stopped after step")) << result.out << result.err;
      }
      EXPECT_LT(Rows("mpi").size(), Rows("straight").size());
      // If mpirun was quicker, the process that saves may still be at work.
      for (int i = 0; i < 1000 && !HasCheckpoint("mpi"); ++i) SleepMs(10);
      if (HasCheckpoint("mpi")) break;
    }
    ASSERT_TRUE(HasCheckpoint("mpi")) << result.out << result.err;
    ExpectContinues("mpi", Plus(c.options, threads_));
  }
}

// launcher.sh acts as torchrun and srun do: it sends SIGTERM, and SIGKILL some time later. As srun,
// it also sends the signal that --signal asks for before the time limit.
TEST_F(Launchers, TorchrunAndSrunGrantSomeSeconds) {
  MakeStraight(Plus(fast_, threads_));
  const struct {
    const char* launcher;
    int number;
  } cases[] = {{"torchrun", SIGTERM}, {"torchrun", SIGINT}, {"srun", SIGTERM}, {"srun", SIGUSR1}};
  for (const auto& c : cases) {
    const std::string run = absl::StrCat(c.launcher, c.number);
    Subprocess process(Plus({ProgramPath("tests/faults/launcher.sh"), c.launcher, "2", "30"},
                            Command(Plus(fast_, {"--out=" + run, "--comm=tcp"}))),
                       {folder_});
    AwaitRows(run, 3, process);
    process.Signal(c.number);
    const Result result = EndOf(process);
    EXPECT_NE(result.exit_code, 0) << run;
    EXPECT_TRUE(Says(result, "stopped after step")) << run << result.out << result.err;
    EXPECT_FALSE(Says(result, "launcher: killed")) << run;
    EXPECT_LT(Rows(run).size(), fast_steps_);
    ExpectContinues(run, Plus(fast_, threads_));
  }
}

// The step is longer than the launcher's grace.
TEST_F(Launchers, TorchrunKillsInTheMiddleOfAStepAndTheStepsBeforeItAreKept) {
  MakeStraight(Plus(slow_, threads_));
  Subprocess process(Plus({ProgramPath("tests/faults/launcher.sh"), "torchrun", "2", "1"},
                          Command(Plus(slow_, {"--out=tcp", "--comm=tcp"}))),
                     {folder_});
  AwaitRows("tcp", 1, process);
  SleepMs(200);
  process.Signal(SIGTERM);
  EndOf(process);
  for (int i = 0; i < 1000 && !HasCheckpoint("tcp"); ++i) SleepMs(10);
  ASSERT_TRUE(HasCheckpoint("tcp"));
  if (Rows("tcp").size() == 2) GTEST_SKIP() << "a step here is shorter than what is granted";
  ExpectContinues("tcp", Plus(slow_, threads_));
}

// mpirun grants the time that an option gives. Tensor parallel runs, in which no rank could save
// alone, finish their step.
TEST_F(Launchers, MpirunGrantsWhatItIsTold) {
  if (mpirun_.empty()) GTEST_SKIP() << "built without Open MPI";
  // mpirun waits this time twice: before SIGTERM, and from SIGTERM to SIGKILL. A step takes a tenth
  // of a second, or a second or two on a busy machine.
  const int seconds = 10 * kSlowdown;
  const size_t all = 200;
  const Arguments options =
      Plus(slow_, {"--tp=2", "--accumulate=1", absl::StrCat("--batch=", std::max(1, 4 / kSlowdown)),
                   absl::StrCat("--steps=", all)});
  MakeStraight(Plus(options, threads_));
  Subprocess process(Mpirun({"--mca", "odls_base_sigkill_timeout", absl::StrCat(seconds)}, options),
                     {folder_, /*mpi=*/true});
  AwaitRows("mpi", 1, process);
  process.Signal(SIGINT);
  EndOf(process);
  // If mpirun was quicker, the process that saves may still be at work.
  for (int i = 0; i < 1000 && !HasCheckpoint("mpi"); ++i) SleepMs(10);
  ASSERT_TRUE(HasCheckpoint("mpi"));
  if (Rows("mpi").size() == all) GTEST_SKIP() << "all steps here are shorter than what is granted";
  ExpectContinues("mpi", Plus(options, threads_));
}

}  // namespace
}  // namespace burst
