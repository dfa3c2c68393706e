// places_test [--ranks=N] [--device=cuda]: kills or stops one of several processes, or asks it to
// stop, at every place of a run. Places are start, step, evaluation, save and exit. The others name
// it and end. No save is lost, and the run continues with the bits of an undisturbed one. With
// --device=cuda each process has a GPU, whose work is some steps behind it.
#include "tests/faults/places.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"
#include "tests/faults/fault_run.h"
#include "tests/faults/ranks.h"

namespace burst {
namespace {

int ranks = 2;
bool cuda = false;

class Places : public FaultTest {
 protected:
  struct Case {
    Place place;
    int victim;
    std::string run;
    std::unique_ptr<Ranks> processes;
  };

  void SetUp() override {
    FaultTest::SetUp();
    MakeStraight(straight_);
  }

  // Makes a case for every place and rank. Each has its own run, which has not begun.
  template <typename ManyPlaces>
  std::vector<Case> Cases(const ManyPlaces& places, const Arguments& more = {}) const {
    std::vector<Case> cases;
    for (const Place& place : places) {
      for (int victim = 0; victim < (place.of_rank0 ? 1 : ranks); ++victim) {
        cases.push_back({place, victim, NameOf(place, victim), nullptr});
        Case& c = cases.back();
        c.processes = std::make_unique<Ranks>(
            folder_, c.run, ranks, Command(Plus(Plus(options_, more), {"--out=" + c.run})));
      }
    }
    return cases;
  }

  // Returns when the victim stands still at the place.
  void StartAndPause(const Case& c) const {
    c.processes->StartAndPause(c.victim, c.place.at);
    if (c.place.set) return;
    // Rank 0 may still write an earlier save, which does not depend on the steps.
    while (SavedStep(c.run) < c.place.saved && !(*c.processes)[0].Ended()) SleepMs(1);
    // The steps go on to the next save, after step 16, which waits for the save being written.
    while (IsIn(c.place, "write") && !HasEvaluated(c.run, 16)) SleepMs(1);
  }

  // Expects that every other rank ends with this code and says this, or ends well if all work was
  // done.
  static void ExpectOthersEnd(Case& c, const std::string& says, int exit_code = 1) {
    for (int rank = 0; rank < ranks; ++rank) {
      if (rank == c.victim) continue;
      const Result result = EndOf((*c.processes)[rank]);
      if (IsIn(c.place, "exit") && result.exit_code == 0) continue;
      EXPECT_EQ(result.exit_code, exit_code) << "rank " << rank << result.err;
      EXPECT_TRUE(Says(result, says)) << "rank " << rank << ": " << result.out << result.err;
    }
  }

  static std::string Lost(int rank) {
    return absl::StrCat("error: rank ", rank, " of ", ranks, " was lost: ");
  }

  // Expects that the saved steps exist. `ahead` is the number of further steps that may have been
  // saved.
  void ExpectNothingIsLost(const Case& c, int64_t saved, int64_t ahead = 0) const {
    EXPECT_GE(SavedStep(c.run), saved);
    EXPECT_LE(SavedStep(c.run), saved + ahead);
    if (saved < 24) return ExpectContinues(c.run, straight_);
    EXPECT_TRUE(Weights(c.run) == Weights("straight")) << "weights or optimizer differ";
    EXPECT_EQ(Rows(c.run), Rows("straight"));
  }

  // Expects the set of the place's step, or the one before if the ranks had not yet agreed on its
  // write. While a rank writes its part of the next set, all have agreed.
  void ExpectNewestSet(const Case& c) const {
    const int64_t step = SavedStep(c.run);
    EXPECT_TRUE(step == c.place.saved || (step == c.place.saved - 4 && !IsIn(c.place, "write")))
        << step;
  }

  static constexpr int64_t kStepsAhead = 2;
  const Arguments options_ = {"--threads=1", cuda ? "--device=cuda" : "--device=cpu"};
  // A run with the same number of ranks in one process.
  const Arguments straight_ = Plus(options_, {absl::StrCat("--ranks=", ranks), "--comm=threads"});
};

TEST_F(Places, ARankThatIsKilled) {
  for (Case& c : Cases(kPlaces)) {
    SCOPED_TRACE(c.run);
    StartAndPause(c);
    (*c.processes)[c.victim].Signal(SIGKILL);
    ExpectOthersEnd(c, Lost(c.victim) + "its connection closed");
    ExpectNothingIsLost(c, c.place.saved);
  }
}

// Rank 0 finishes its current save, and the next one if both ranks had reached it.
TEST_F(Places, ARankThatIsKilledWhileAnotherSaves) {
  Ranks processes(folder_, "run", ranks, Command(Plus(options_, {"--out=run"})));
  processes.StartAndPause(0, "write 12 3");
  processes[1].Signal(SIGKILL);
  SleepMs(300);  // time to notice the loss
  processes.GoOn();
  const Result result = EndOf(processes[0]);
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_TRUE(Says(result, Lost(1))) << result.err;
  EXPECT_TRUE(SavedStep("run") == 12 || SavedStep("run") == 16) << SavedStep("run");
  ExpectContinues("run", straight_);
}

// A rank does not end before the last save is written, also if it is asked to. Launchers kill the
// others when a process ends with the code of a signal.
TEST_F(Places, AllRanksWaitForTheLastSave) {
  Ranks processes(folder_, "run", ranks, Command(Plus(options_, {"--out=run"})));
  processes.StartAndPause(0, "write 24 3");
  SleepMs(300);  // time to end
  processes[1].Signal(SIGTERM);
  SleepMs(300);
  for (int rank = 0; rank < ranks; ++rank) EXPECT_FALSE(processes[rank].Ended()) << rank;
  EXPECT_LT(SavedStep("run"), 24);
  processes.GoOn();
  for (int rank = 0; rank < ranks; ++rank) {
    EXPECT_EQ(EndOf(processes[rank]).exit_code, rank == 1 ? 128 + SIGTERM : 0) << rank;
  }
  EXPECT_EQ(SavedStep("run"), 24);
}

// If later steps ruin the model while a save is written, that save is the last one, and it is
// complete.
TEST_F(Places, DivergenceWhileACheckpointIsWritten) {
  const Arguments diverges = {
      "--checkpoint_every=1", "--eval_every=0", "--warmup=0",        "--lr=1e-2",
      "--schedule=constant",  "--min_lr=-1",    "--weight_decay=1e9"};
  const Result reference = Run(Plus(Plus(straight_, diverges), {"--out=reference"}));
  EXPECT_EQ(reference.exit_code, 1) << reference.out;
  const int64_t saved = SavedStep("reference");
  if (saved == 0) GTEST_SKIP() << "the first step ruins the model here";
  Ranks processes(folder_, "run", ranks, Command(Plus(Plus(options_, diverges), {"--out=run"})));
  processes.StartAndPause(0, absl::StrCat("write ", saved, " 3"));
  while (Rows("run").size() < Rows("reference").size()) SleepMs(1);
  EXPECT_LT(SavedStep("run"), saved);
  processes.GoOn();
  const Result result = EndOf(processes[0]);
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_TRUE(Says(result, absl::StrCat("--resume continues after step ", saved))) << result.err;
  EXPECT_EQ(SavedStep("run"), saved);
  EXPECT_TRUE(Weights("run") == Weights("reference"));
}

// Ranks that each have a part of the model wait for one another in every layer, and in a save.
TEST_F(Places, ARankThatIsKilledInAPartedModel) {
  if (ranks != 2) GTEST_SKIP() << "the model has two heads";
  const Arguments parted = {"--tp=2"};
  FaultTest::SetUp();  // an empty folder
  MakeStraight(Plus(straight_, parted));
  std::vector<Place> places;
  for (const char* at : {"forward 6 1", "forward 6 8", cuda ? "forward 6 12" : "forward 6 20",
                         "backward 6 8", "evaluation 8 1", "save 8 2", "write 8 1", "write 8 4"}) {
    places.push_back({at, 4, 0, /*of_rank0=*/false, /*set=*/true});
  }
  for (Case& c : Cases(places, parted)) {
    SCOPED_TRACE(c.run);
    StartAndPause(c);
    (*c.processes)[c.victim].Signal(SIGKILL);
    ExpectOthersEnd(c, Lost(c.victim) + "its connection closed");
    ExpectNewestSet(c);
    ExpectContinues(c.run, Plus(straight_, parted));
  }
}

// Ranks divide the model's state. A save needs all of them, because nobody has the others' parts.
TEST_F(Places, ARankThatIsLostOrAskedToStopWithADividedState) {
  const Arguments divided = {"--zero=3"};
  FaultTest::SetUp();  // an empty folder
  MakeStraight(Plus(straight_, divided));
  const Place places[] = {{"save 8 2", 4, 0, false, /*set=*/true},
                          {"write 8 1", 4, 0, false, /*set=*/true},
                          {"write 8 4", 4, 0, false, /*set=*/true},
                          {"backward 6 3", 0, 6, false, /*set=*/true}};
  for (Case& c : Cases(places, divided)) {
    SCOPED_TRACE(c.run);
    const bool stops = c.place.finished > 0;
    StartAndPause(c);
    (*c.processes)[c.victim].Signal(stops ? SIGTERM : SIGKILL);
    if (stops) {
      SleepMs(20);  // time for the signal to arrive
      c.processes->GoOn();
      EXPECT_EQ(EndOf((*c.processes)[c.victim]).exit_code, 128 + SIGTERM);
      ExpectOthersEnd(c, "", /*exit_code=*/0);
    } else {
      ExpectOthersEnd(c, Lost(c.victim) + "its connection closed");
    }
    if (stops) {
      EXPECT_EQ(SavedStep(c.run), c.place.finished);
    } else {
      ExpectNewestSet(c);
    }
    ExpectContinues(c.run, Plus(straight_, divided));
  }
}

TEST_F(Places, AllRanksAreKilledAtOnce) {
  for (Case& c : Cases(kPlaces)) {
    if (c.victim != 0) continue;
    SCOPED_TRACE(c.run);
    StartAndPause(c);
    for (int rank = 0; rank < ranks; ++rank) (*c.processes)[rank].Signal(SIGKILL);
    for (int rank = 0; rank < ranks; ++rank) EndOf((*c.processes)[rank]);
    ExpectNothingIsLost(c, c.place.saved);
  }
}

// SIGSTOP lasts longer than the others have patience. Before a rank is in progress, its silence
// shows the stop. Ranks with a GPU are in progress from their start.
TEST_F(Places, ARankThatIsStoppedForGood) {
  std::vector<Case> cases = Cases(kPlaces, {"--patience=6"});
  for (Case& c : cases) {
    SCOPED_TRACE(c.run);
    StartAndPause(c);
    (*c.processes)[c.victim].Stop();
  }
  for (Case& c : cases) {
    SCOPED_TRACE(c.run);
    ExpectOthersEnd(c, IsIn(c.place, "data") && !cuda ? Lost(c.victim) + "nothing heard of it for 2"
                                                      : "error: no rank has made progress for 6 s");
    // When it continues, it finds nobody.
    Subprocess& victim = (*c.processes)[c.victim];
    c.processes->GoOn();
    victim.Signal(SIGCONT);
    const Result result = EndOf(victim);
    EXPECT_EQ(result.exit_code, 1) << result.err;
    EXPECT_TRUE(absl::StrContains(result.err, "error: ")) << result.err;
  }
  for (Case& c : cases) {
    SCOPED_TRACE(c.run);
    // The rank finishes its current save, and the next one if all ranks had reached it.
    const bool writes = IsIn(c.place, "write");
    ExpectNothingIsLost(c, writes ? 12 : c.place.saved, writes ? 4 : 0);
  }
}

TEST_F(Places, ARankThatIsStoppedForAWhile) {
  std::vector<Case> cases = Cases(kPlaces, {"--patience=120"});
  for (Case& c : cases) {
    SCOPED_TRACE(c.run);
    StartAndPause(c);
    (*c.processes)[c.victim].Stop();
    SleepMs(100);
    c.processes->GoOn();
    (*c.processes)[c.victim].Signal(SIGCONT);
    for (int rank = 0; rank < ranks; ++rank) {
      const Result result = EndOf((*c.processes)[rank]);
      EXPECT_EQ(result.exit_code, 0) << result.err;
    }
    ExpectNothingIsLost(c, 24);
  }
}

// One rank is asked to stop, and all stop after the step, with a checkpoint. Before the first step
// that rank ends at once.
TEST_F(Places, ARankThatIsAskedToStop) {
  for (Case& c : Cases(kPlaces)) {
    SCOPED_TRACE(c.run);
    StartAndPause(c);
    (*c.processes)[c.victim].Signal(SIGTERM);
    SleepMs(20);  // time for the signal to arrive
    c.processes->GoOn();
    EXPECT_EQ(EndOf((*c.processes)[c.victim]).exit_code, 128 + SIGTERM);
    if (IsBeforeTheSteps(c.place)) {
      ExpectOthersEnd(c, Lost(c.victim) + "its connection closed");
    } else {
      ExpectOthersEnd(c, "", /*exit_code=*/0);
    }
    // A GPU finishes the steps that were enqueued.
    const bool has_steps = cuda && c.place.finished > 0 && c.place.finished < 24;
    ExpectNothingIsLost(c, c.place.finished, has_steps ? kStepsAhead : 0);
  }
}

}  // namespace
}  // namespace burst

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    absl::string_view argument = argv[i];
    if (argument == "--device=cuda") {
      burst::cuda = true;
    } else if (!absl::ConsumePrefix(&argument, "--ranks=") ||
               !absl::SimpleAtoi(argument, &burst::ranks)) {
      return 2;
    }
  }
  return RUN_ALL_TESTS();
}
