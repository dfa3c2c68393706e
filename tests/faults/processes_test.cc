// Tests several processes of one run. One of them starts late, never or twice, cannot write, or has
// a clock that jumps. The run goes on with the bits of an undisturbed one, or ends with a sentence
// and continues with these bits.
#include <gtest/gtest.h>
#include <sys/mount.h>

#include "tests/faults/fault_run.h"
#include "tests/faults/ranks.h"

namespace burst {
namespace {

class Processes : public FaultTest {
 protected:
  // Makes a run of `size` ranks in the folder `run`.
  Ranks RanksOf(int size, const std::string& run, const Arguments& more = {}) const {
    return Ranks(folder_, "processes", size, Command(Plus(Plus(options_, more), {"--out=" + run})));
  }

  Arguments Straight(int ranks) const {
    return Plus(options_, {absl::StrCat("--ranks=", ranks), "--comm=threads"});
  }

  static void ExpectEndsWell(Subprocess& process) {
    const Result result = EndOf(process);
    EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  }

  static void ExpectFails(Subprocess& process, const std::string& says) {
    const Result result = EndOf(process);
    EXPECT_EQ(result.exit_code, 1) << result.out << result.err;
    EXPECT_TRUE(absl::StartsWith(result.err, "error: ")) << result.err;
    EXPECT_TRUE(Says(result, says)) << says << " is missing in " << result.err;
  }

  enum class Other { kNamesIt, kIsSilent, kHasFinished };
  // Expects that rank 0 of two fails with `says`. Rank 1 names it, or may have finished. It may be
  // silent while they prepare, when one rank speaks for all.
  static void ExpectRank0Fails(Ranks& processes, const std::string& says, Other other) {
    ExpectFails(processes[0], says);
    const Result result = EndOf(processes[1]);
    if (other == Other::kHasFinished && result.exit_code == 0) return;
    EXPECT_EQ(result.exit_code, 1) << result.out << result.err;
    if (other == Other::kIsSilent && result.err.empty()) return;
    EXPECT_TRUE(Says(result, "error: rank 0 of 2 gave up: ")) << result.err;
  }

  const Arguments options_ = {"--threads=1"};
};

TEST_F(Processes, ARankThatStartsLate) {
  MakeStraight(Straight(3));
  for (int late = 0; late < 3; ++late) {
    SCOPED_TRACE(late);
    std::filesystem::remove_all(Path("late"));
    Ranks ranks = RanksOf(3, "late");
    std::vector<std::unique_ptr<Subprocess>> processes;
    for (int rank = 0; rank < 3; ++rank) {
      if (rank != late) processes.push_back(ranks.Process(rank));
    }
    SleepMs(2000);
    processes.push_back(ranks.Process(late));
    for (const auto& process : processes) ExpectEndsWell(*process);
    EXPECT_TRUE(Weights("late") == Weights("straight"));
    EXPECT_EQ(Rows("late"), Rows("straight"));
  }
}

TEST_F(Processes, ARankThatStartsTooLate) {
  for (int late = 0; late < 3; ++late) {
    SCOPED_TRACE(late);
    Ranks ranks = RanksOf(3, "late", {"--patience=2"});
    std::vector<std::unique_ptr<Subprocess>> processes;
    for (int rank = 0; rank < 3; ++rank) {
      if (rank != late) processes.push_back(ranks.Process(rank));
    }
    for (int i = 0; i < 2; ++i) {
      // Rank 0 says which rank is missing; ranks 1 and 2 say that rank 0 gave up or never came.
      ExpectFails(*processes[i],
                  late == 0 ? "found no rank 0 at "
                  : i == 0  ? absl::StrCat("rank 0 waited 2 s in vain for rank ", late, " of 3")
                            : "rank 0 gave up before all 3 ranks had come");
    }
    ExpectFails(*ranks.Process(late),
                late == 0 ? "rank 0 waited 2 s in vain for rank 1, 2 of 3" : "found no rank 0 at ");
    EXPECT_FALSE(std::filesystem::exists(Path("late")));
  }
}

// Two processes say they are rank 1. The first one stays and the second one ends, so one of the
// three ranks is missing.
TEST_F(Processes, ARankThatIsThereTwiceAtTheStart) {
  Ranks ranks = RanksOf(3, "twice", {"--patience=5"});
  std::vector<std::unique_ptr<Subprocess>> processes;
  for (const int rank : {0, 1, 1}) processes.push_back(ranks.Process(rank));
  ExpectFails(*processes[0], "rank 0 waited 5 s in vain for rank 2 of 3; ");
  for (int i = 1; i < 3; ++i) ExpectFails(*processes[i], "rank 0 ");
  EXPECT_FALSE(std::filesystem::exists(Path("twice")));
}

TEST_F(Processes, ASecondProcessOfARankEndsAndTheJobGoesOn) {
  MakeStraight(Straight(3));
  Ranks ranks = RanksOf(3, "twice", {"--patience=15"});
  std::vector<std::unique_ptr<Subprocess>> processes;
  for (const int rank : {0, 1, 1}) processes.push_back(ranks.Process(rank));
  SleepMs(2000);  // both processes of rank 1 have called
  processes.push_back(ranks.Process(2));
  ExpectEndsWell(*processes[0]);
  ExpectEndsWell(*processes[3]);
  const Result first = EndOf(*processes[1]), second = EndOf(*processes[2]);
  EXPECT_EQ(first.exit_code + second.exit_code, 1) << first.err << second.err;
  EXPECT_TRUE(Weights("twice") == Weights("straight"));
}

// The others may meet one of them and leave the other alone, or some may meet each. Two runs never
// write to one folder.
TEST_F(Processes, ARank0ThatIsThereTwiceAtTheStart) {
  MakeStraight(Straight(3));
  Ranks ranks = RanksOf(3, "twice", {"--patience=5"});
  std::vector<std::unique_ptr<Subprocess>> processes;
  for (const int rank : {0, 0, 1, 2}) processes.push_back(ranks.Process(rank));
  int well = 0;
  for (const auto& process : processes) {
    const Result result = EndOf(*process);
    if (result.exit_code == 0) {
      ++well;
    } else {
      EXPECT_EQ(result.exit_code, 1);
      EXPECT_TRUE(absl::StartsWith(result.err, "error: ")) << result.err;
    }
  }
  EXPECT_TRUE(well == 0 || well == 3) << well;
  EXPECT_EQ(SavedStep("twice"), well == 0 ? 0 : 24);
  if (well == 3) {
    EXPECT_TRUE(Weights("twice") == Weights("straight"));
  }
}

// In the middle of a run, the second process finds no others, and they do not notice it.
TEST_F(Processes, ARankThatStartsASecondTimeInARun) {
  MakeStraight(Straight(3));
  const char* const kPlaces[] = {"data 0 1",       "start 0 4",  "backward 6 3",
                                 "evaluation 8 3", "write 12 3", "exit 24 1"};
  for (const char* place : kPlaces) {
    SCOPED_TRACE(place);
    std::filesystem::remove_all(Path("twice"));
    Ranks ranks = RanksOf(3, "twice", {"--patience=60"});
    ranks.StartAndPause(0, place);
    const auto second = ranks.Process(1, {}, {"--patience=1"});
    ExpectFails(*second, "rank 1 of 3 found no rank 0 at ");
    const auto second0 = ranks.Process(0, {}, {"--patience=1"});
    ExpectFails(*second0, "rank 0 waited 1 s in vain for rank 1, 2 of 3");
    ranks.GoOn();
    for (int rank = 0; rank < 3; ++rank) ExpectEndsWell(ranks[rank]);
    EXPECT_TRUE(Weights("twice") == Weights("straight"));
    EXPECT_EQ(Rows("twice"), Rows("straight"));
  }
}

// All ranks start again as a second run, which the first run's lock keeps out.
TEST_F(Processes, AllRanksStartASecondTimeInARun) {
  MakeStraight(Straight(2));
  Ranks ranks = RanksOf(2, "twice", {"--patience=60"});
  ranks.StartAndPause(0, "backward 6 3");
  const auto second0 = ranks.Process(0), second1 = ranks.Process(1);
  ExpectFails(*second0, "is in use by ");
  EXPECT_EQ(EndOf(*second1).exit_code, 1);
  ranks.GoOn();
  for (int rank = 0; rank < 2; ++rank) ExpectEndsWell(ranks[rank]);
  EXPECT_TRUE(Weights("twice") == Weights("straight"));
  EXPECT_EQ(Rows("twice"), Rows("straight"));
}

// Calls fail in the start, a step, an evaluation, saves and at the end.
TEST_F(Processes, CallsThatFailAtRank0) {
  MakeStraight(Straight(2));
  const struct {
    const char* fault;
    const char* file;
    int64_t saved;
  } cases[] = {
      {"rename:config.json:1:EIO", "config.json", 0},
      {"write:metrics:6:ENOSPC", "metrics.jsonl", 4},
      {"write:metrics:9:EIO", "metrics.jsonl", 4},  // the validation loss of step 8
      {"write:checkpoint.safetensors:3:tear", "checkpoint", 0},
      {"fsync:checkpoint.safetensors:2:EIO", "checkpoint", 4},
      {"rename:checkpoint.safetensors:3:ENOSPC", "checkpoint", 8},
      {"fsync:checkpoint.safetensors:6:EIO", "checkpoint", 20},
  };
  int number = 0;
  for (const auto& c : cases) {
    SCOPED_TRACE(c.fault);
    const std::string run = absl::StrCat("fails", number++);
    Ranks ranks = RanksOf(2, run);
    ranks.Start(0, {"LD_PRELOAD=" + ProgramPath("tests/faults/libfaulty_calls.so"),
                    absl::StrCat("FAULT=", c.fault)});
    ExpectRank0Fails(ranks, c.file, c.saved < 20 ? Other::kNamesIt : Other::kHasFinished);
    EXPECT_EQ(SavedStep(run), c.saved);
    ExpectContinues(run, Straight(2));
  }
}

// Calls fail while a set is written, where each rank writes a file and rank 0 the index. The rank
// that fails says so, and the previous set is still there.
TEST_F(Processes, CallsThatFailInASet) {
  const Arguments divided = {"--zero=2"};
  MakeStraight(Plus(Straight(2), divided));
  const struct {
    int rank;
    const char* fault;
    const char* file;
  } cases[] = {{0, "write:checkpoint-8.set:1:ENOSPC", "checkpoint-8.set/00001-of-00002"},
               {1, "write:checkpoint-8.set:3:tear", "checkpoint-8.set/00002-of-00002"},
               {1, "fsync:checkpoint-8.set:1:EIO", "checkpoint-8.set/00002-of-00002"},
               {1, "rename:checkpoint-8.set:1:EIO", "checkpoint-8.set/00002-of-00002"},
               {0, "rename:checkpoint.safetensors:2:EIO", "checkpoint.safetensors"}};
  int number = 0;
  for (const auto& c : cases) {
    SCOPED_TRACE(c.fault);
    const std::string run = absl::StrCat("set", number++);
    Ranks ranks = RanksOf(2, run, divided);
    ranks.Start(c.rank, {"LD_PRELOAD=" + ProgramPath("tests/faults/libfaulty_calls.so"),
                         absl::StrCat("FAULT=", c.fault)});
    ExpectFails(ranks[c.rank], c.file);
    ExpectFails(ranks[1 - c.rank], absl::StrCat("error: rank ", c.rank, " of 2 gave up: "));
    EXPECT_EQ(SavedStep(run), 4);
    EXPECT_TRUE(std::filesystem::exists(Path(run) + "/checkpoint-8.set"));
    ExpectContinues(run, Plus(Straight(2), divided));
  }
}

// One host has another folder of the same name.
TEST_F(Processes, ARunFolderThatNotAllRanksSee) {
  const std::string out = Path("apart");
  std::filesystem::create_directory(out);
  const Arguments elsewhere = {
      "unshare", "-m", "sh", "-c", "mount -t tmpfs none \"$0\" && exec \"$@\"", out};
  if (Subprocess(Plus(elsewhere, {"true"}), {folder_}).Wait().exit_code != 0) {
    GTEST_SKIP() << "mounting a tmpfs is not permitted here";
  }
  Ranks ranks = RanksOf(2, "apart", {"--zero=1"});
  ranks.Start(1, elsewhere);
  ExpectFails(ranks[1], "--checkpoint_files: rank 1 does not see ");
  ExpectFails(ranks[0], "error: rank 1 of 2 gave up: ");
  Ranks gathered = RanksOf(2, "apart", {"--zero=1", "--checkpoint_files=one"});
  gathered.Start(1, elsewhere);
  for (int rank = 0; rank < 2; ++rank) ExpectEndsWell(gathered[rank]);
  EXPECT_EQ(SavedStep("apart"), 24);
}

// A small disk in memory is full from some place on.
TEST_F(Processes, AFullDisk) {
  MakeStraight(Straight(2));
  const std::string disk = Path("disk"), filler = disk + "/filler";
  std::filesystem::create_directory(disk);
  const struct {
    const char* place;
    int64_t saved;
  } cases[] = {{"data 0 1", 0}, {"start 0 4", 0},  {"forward 6 3", 4}, {"evaluation 8 3", 4},
               {"save 8 1", 4}, {"write 12 3", 8}, {"exit 24 1", 24}};
  for (const auto& c : cases) {
    SCOPED_TRACE(c.place);
    if (mount("tmpfs", disk.c_str(), "tmpfs", 0, "size=4m") != 0) {
      GTEST_SKIP() << "mounting a small tmpfs is not permitted here";
    }
    Ranks ranks = RanksOf(2, "disk/run");
    ranks.StartAndPause(0, c.place);
    while (SavedStep("disk/run") < c.saved && !ranks[0].Ended()) SleepMs(1);
    std::ofstream(filler, std::ios::binary) << std::string(5 << 20, 'x');
    ranks.GoOn();
    if (c.saved == 24) {
      for (int rank = 0; rank < 2; ++rank) ExpectEndsWell(ranks[rank]);
    } else {
      ExpectRank0Fails(ranks, "No space left on device",
                       absl::StartsWith(c.place, "data") ? Other::kIsSilent : Other::kNamesIt);
    }
    std::filesystem::remove(filler);
    EXPECT_EQ(SavedStep("disk/run"), c.saved);
    if (c.saved < 24) ExpectContinues("disk/run", Straight(2));
    EXPECT_TRUE(Weights("disk/run") == Weights("straight"));
    EXPECT_EQ(umount2(disk.c_str(), MNT_DETACH), 0);
  }
}

TEST_F(Processes, AClockThatJumpsOnOneRankChangesNothing) {
  MakeStraight(Straight(2));
  for (int rank = 0; rank < 2; ++rank) {
    for (const char* jump : {"CLOCK_JUMP=86400", "CLOCK_JUMP=-86400"}) {
      SCOPED_TRACE(absl::StrCat("rank ", rank, " ", jump));
      std::filesystem::remove_all(Path("jumps"));
      Ranks ranks = RanksOf(2, "jumps", {"--patience=30"});
      ranks.Start(rank, {"LD_PRELOAD=" + ProgramPath("tests/faults/libfaulty_calls.so"), jump});
      for (int i = 0; i < 2; ++i) ExpectEndsWell(ranks[i]);
      EXPECT_TRUE(Weights("jumps") == Weights("straight"));
      EXPECT_EQ(Rows("jumps"), Rows("straight"));
    }
  }
}

}  // namespace
}  // namespace burst
