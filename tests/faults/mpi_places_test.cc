// mpi_places_test [--ranks=N]: kills or stops one of several ranks under mpirun, or asks it to
// stop, at every place of its work (places.h). Or it kills mpirun. Every process ends and says what
// happened. The run continues with the bits of an undisturbed one.
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "tests/faults/fault_run.h"
#include "tests/faults/places.h"

namespace burst {
namespace {

int ranks = 2;

class MpiPlaces : public FaultTest {
 protected:
  struct Case {
    Place place;
    int victim;
    std::string run;
    std::unique_ptr<Subprocess> mpirun;
    std::vector<pid_t> pids;  // process numbers of the ranks
  };

  void SetUp() override {
    if (mpirun_.empty()) GTEST_SKIP() << "built without Open MPI";
    FaultTest::SetUp();
    MakeStraight(straight_);
  }

  // Returns the cases of this shard: places and ranks.
  std::vector<Case> Cases() const {
    std::vector<Case> cases;
    for (const Place& place : kPlaces) {
      for (int victim = 0; victim < (place.of_rank0 ? 1 : ranks); ++victim) {
        cases.push_back({place, victim, NameOf(place, victim), nullptr, {}});
      }
    }
    return cases;
  }

  // Starts the ranks. Returns when the victim stands still at the place.
  void StartAndPause(Case& c, const Arguments& more = {}) const {
    // A shell prints its process number and becomes the program.
    const Arguments program = {
        "bash", "-c", "echo $$ >" + Path(c.run) + ".pid.$OMPI_COMM_WORLD_RANK; exec \"$@\"",
        "rank"};
    Arguments train = Plus(Command(Plus(options_, {"--comm=mpi", "--out=" + c.run})), more);
    train[0] = ProgramPath("tests/faults/pausing_train");
    Arguments command = {mpirun_, "--oversubscribe"};
    for (int rank = 0; rank < ranks; ++rank) {
      if (rank > 0) command.push_back(":");
      command = Plus(command, {"-np", "1", "env"});
      if (rank == c.victim) {
        command = Plus(command, {absl::StrCat("PAUSE_AT=", c.place.at), "PAUSE_FILE=" + Pause(c)});
      }
      command = Plus(Plus(command, program), train);
    }
    c.mpirun = std::make_unique<Subprocess>(
        command, Subprocess::Options{folder_, /*mpi=*/true, "." + c.run});
    while (access(Pause(c).c_str(), F_OK) != 0 && !c.mpirun->Ended()) SleepMs(1);
    ASSERT_FALSE(c.mpirun->Ended()) << "never comes to " << c.place.at << c.mpirun->Wait().err;
    for (int rank = 0; rank < ranks; ++rank) {
      pid_t pid = 0;
      while (pid == 0) {
        SleepMs(1);
        std::ifstream(absl::StrCat(Path(c.run), ".pid.", rank)) >> pid;
      }
      c.pids.push_back(pid);
    }
    // Rank 0 may still write an earlier save, which does not depend on the steps.
    while (SavedStep(c.run) < c.place.saved && !c.mpirun->Ended()) SleepMs(1);
    // The steps go on to the next save, after step 16, which waits for the save being written.
    while (IsIn(c.place, "write") && !HasEvaluated(c.run, 16)) SleepMs(1);
  }

  std::string Pause(const Case& c) const { return Path(c.run) + ".pause"; }

  // Expects that every rank ends. A rank that nobody has waited for yet has ended, too.
  static void ExpectRanksEnd(const Case& c) {
    const int64_t end = NowMs() + kEndsWithinMs;
    for (int rank = 0; rank < ranks; ++rank) {
      const std::string stat = absl::StrCat("/proc/", c.pids[rank], "/stat");
      const auto runs = [&] {
        std::ifstream file(stat);  // if it was opened before the rank ended, reading it fails
        std::string text;
        return std::getline(file, text) && !absl::StrContains(text, ") Z ");
      };
      while (runs() && NowMs() < end) SleepMs(5);
      EXPECT_FALSE(runs()) << "rank " << rank << " hangs";
    }
  }

  // Continues the run. At least `least` steps were saved, and at most `most`. Ranks that mpirun
  // asks to end save the last step that they have.
  void ExpectContinuesAfter(const Case& c, int64_t least, int64_t most) const {
    // Nobody waits for the process that saves for a killed rank.
    for (int i = 0; i < 1000 && least > 0 && SavedStep(c.run) < least; ++i) SleepMs(10);
    if (most == 24 && SavedStep(c.run) == 24) {
      EXPECT_TRUE(Weights(c.run) == Weights("straight")) << "weights or optimizer differ";
      EXPECT_EQ(Rows(c.run), Rows("straight"));
      return;
    }
    ExpectContinues(c.run, straight_);
    const std::string says = "continuing after step ";
    const std::string out = ReadAll(Path("stdout"));
    const size_t at = out.find(says);
    int64_t step = 0;
    if (at != std::string::npos) {
      const std::string number = out.substr(at + says.size());
      ASSERT_TRUE(
          absl::SimpleAtoi(number.substr(0, number.find_first_not_of("0123456789")), &step));
    }
    EXPECT_GE(step, least) << out;
    EXPECT_LE(step, most) << out;
  }

  // Returns the last step that all ranks have finished at a place.
  static int64_t Finished(const Place& place) {
    const std::vector<std::string> words = absl::StrSplit(place.at, ' ');
    int64_t step = 0;
    EXPECT_TRUE(absl::SimpleAtoi(words[1], &step));
    if (IsIn(place, "write")) return step + 4;  // to the next save
    const bool is_in_it =
        IsIn(place, "forward") || IsIn(place, "backward") || IsIn(place, "update");
    return is_in_it ? step - 1 : step;
  }

  const std::string mpirun_ = BURST_MPIRUN;
  const Arguments options_ = {"--threads=1"};
  // A run with the same number of ranks in one process.
  const Arguments straight_ = Plus(options_, {absl::StrCat("--ranks=", ranks), "--comm=threads"});
};

// mpirun names the killed rank and ends the others.
TEST_F(MpiPlaces, ARankThatIsKilled) {
  for (Case& c : Cases()) {
    SCOPED_TRACE(c.run);
    StartAndPause(c);
    kill(c.pids[c.victim], SIGKILL);
    const Result result = EndOf(*c.mpirun);
    EXPECT_NE(result.exit_code, 0);
    EXPECT_TRUE(Says(result, absl::StrCat("process rank ", c.victim, " ")) &&
                Says(result, "signal 9"))
        << result.out << result.err;
    ExpectRanksEnd(c);
    ExpectContinuesAfter(c, c.place.saved, Finished(c.place));
  }
}

// Nobody is left to end the ranks. They go on, or notice it and end.
TEST_F(MpiPlaces, MpirunIsKilled) {
  for (Case& c : Cases()) {
    SCOPED_TRACE(c.run);
    StartAndPause(c);
    c.mpirun->Signal(SIGKILL);
    EndOf(*c.mpirun);
    SleepMs(300);
    std::remove(Pause(c).c_str());
    ExpectRanksEnd(c);
    ExpectContinuesAfter(c, c.place.saved, 24);
  }
}

// SIGSTOP lasts longer than the others have patience.
TEST_F(MpiPlaces, ARankThatIsStoppedForGood) {
  std::vector<Case> cases = Cases();
  for (Case& c : cases) {
    SCOPED_TRACE(c.run);
    StartAndPause(c, {"--patience=6"});
    kill(c.pids[c.victim], SIGSTOP);
  }
  for (Case& c : cases) {
    SCOPED_TRACE(c.run);
    const Result result = EndOf(*c.mpirun);
    EXPECT_NE(result.exit_code, 0);
    EXPECT_TRUE(Says(result, "error: no rank has made progress for 6 s"))
        << result.out << result.err;
    ExpectRanksEnd(c);
    ExpectContinuesAfter(c, c.place.saved, Finished(c.place));
  }
}

// One rank is asked to stop, and all stop after the step, with a checkpoint.
TEST_F(MpiPlaces, ARankThatIsAskedToStop) {
  for (Case& c : Cases()) {
    SCOPED_TRACE(c.run);
    StartAndPause(c);
    kill(c.pids[c.victim], SIGTERM);
    SleepMs(20);  // time for the signal to arrive
    std::remove(Pause(c).c_str());
    const Result result = EndOf(*c.mpirun);
    EXPECT_NE(result.exit_code, 0) << result.out << result.err;
    ExpectRanksEnd(c);
    ExpectContinuesAfter(c, c.place.finished, c.place.finished);
  }
}

}  // namespace
}  // namespace burst

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    absl::string_view argument = argv[i];
    if (!absl::ConsumePrefix(&argument, "--ranks=") || !absl::SimpleAtoi(argument, &burst::ranks)) {
      return 2;
    }
  }
  return RUN_ALL_TESTS();
}
