// If a rank stands still, the run ends. Every rank says where it is and for which message it waits,
// over any kind of connection.
#include <gtest/gtest.h>

#include "tests/faults/fault_run.h"
#include "tests/testing/sanitizers.h"

namespace burst {
namespace {

class Stuck : public FaultTest {
 protected:
  static constexpr char kPatience[] = "--patience=3";

  // Returns the command of a run in which rank 1 stands still at its 40th wait for messages.
  Arguments StuckTrain(const Arguments& more) const {
    return Plus({ProgramPath("tests/faults/stuck_train"), "1", "40", "--data=text.txt", kPatience,
                 "--seqlen=32", "--batch=2", "--steps=1000", "--eval_every=0", "--sample=0",
                 "--out=stuck", "--model.dropout=0",
                 R"(--model={"family":"llama","layers":2,"width":32,"heads":2,"ffn":64})"},
                more);
  }

  // `says` has a line for each rank.
  static void ExpectReport(const Result& result, const std::vector<std::string>& says) {
    EXPECT_EQ(result.exit_code, 1) << result.err;
    EXPECT_TRUE(Says(result, "error: no rank has made progress for 3 s (--patience)\n"))
        << result.err;
    for (const std::string& line : says) {
      EXPECT_TRUE(Says(result, line)) << line << " is missing in " << result.err;
    }
  }

  const std::string mpirun_ = BURST_MPIRUN;
};

TEST_F(Stuck, Threads) {
  Subprocess process(StuckTrain({"--ranks=3", "--threads=1"}), {folder_});
  const Result result = EndOf(process);
  ExpectReport(result, {"rank 0: step ", "rank 1: step ", "rank 2: step "});
  // In the ring, rank 1 does not take the block that its neighbors offer.
  for (const char* part : {", layer ", ", attention: ", " bytes ", " rank 1, channel "}) {
    EXPECT_TRUE(Says(result, part)) << part << " is missing in " << result.err;
  }
}

TEST_F(Stuck, ThreadsOfAMesh) {
  Subprocess process(StuckTrain({"--dp=2", "--sp=2", "--ranks=4", "--threads=1"}), {folder_});
  const Result result = EndOf(process);
  ExpectReport(result, {"rank 0: step ", "rank 1: step ", "rank 2: step ", "rank 3: step "});
  EXPECT_TRUE(Says(result, "rank 1, channel ")) << "its number in the world: " << result.err;
}

TEST_F(Stuck, MpiProcesses) {
  if (mpirun_.empty()) GTEST_SKIP() << "built without Open MPI";
  Subprocess process(
      Plus({mpirun_, "--oversubscribe", "-np", "3"}, StuckTrain({"--comm=mpi", "--threads=1"})),
      {folder_, /*mpi=*/true});
  const Result result = EndOf(process);
  ExpectReport(result, {"rank 0: step ", "rank 1: step ", "rank 2: step ",
                        ", attention: ", " bytes ", " rank 1, channel "});
}

TEST_F(Stuck, ProcessesOverSockets) {
  Subprocess process(Plus({ProgramPath("tests/faults/launcher.sh"), "srun", "3", "5"},
                          StuckTrain({"--comm=tcp", "--threads=1"})),
                     {folder_});
  const Result result = EndOf(process);
  ExpectReport(result, {"rank 0: step ", "rank 1: step ", "rank 2: step ",
                        ", attention: ", " bytes ", " rank 1, channel "});
}

// The process is stopped and continued. The time in which nothing ran does not count.
TEST_F(Stuck, AProcessThatWasStoppedForLongerGoesOn) {
  const Arguments options = {"--steps=400", "--eval_every=0", "--checkpoint_every=0"};
  const int seconds = kSlowdown == 1 ? 2 : 5;  // enough for each step, also on a busy machine
  MakeStraight(options);
  Subprocess process(
      Command(Plus(options, {"--out=stopped", absl::StrCat("--patience=", seconds)})), {folder_});
  AwaitRows("stopped", 3, process);
  ASSERT_TRUE(process.Stop());
  SleepMs(2000 * seconds);
  process.Signal(SIGCONT);
  const Result result = EndOf(process);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(Weights("stopped") == Weights("straight"));
}

}  // namespace
}  // namespace burst
