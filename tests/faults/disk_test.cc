// Tests faults of files and clocks: writes, flushes and renames that fail, tear or end the process,
// a full disk, and a clock that jumps. The run names the file and the reason, and continues with
// the bits of an undisturbed run.
#include <gtest/gtest.h>
#include <sys/mount.h>

#include "tests/faults/fault_run.h"

namespace burst {
namespace {

class Disk : public FaultTest {
 protected:
  void SetUp() override {
    FaultTest::SetUp();
    MakeStraight(options_);
  }

  Result RunWith(const std::string& variable, const Arguments& more) const {
    Subprocess process(
        Plus({"env", "LD_PRELOAD=" + ProgramPath("tests/faults/libfaulty_calls.so"), variable},
             Command(Plus(options_, more))),
        {folder_});
    return EndOf(process);
  }

  const Arguments options_ = {"--steps=12", "--eval_every=6", "--checkpoint_every=4",
                              "--log_every=100", "--threads=1"};
};

TEST_F(Disk, FailingCallsEndTheRunWithAWordAndLoseNothing) {
  const struct {
    const char* fault;
    const char* file;
  } cases[] = {
      {"write:checkpoint:1:ENOSPC", "checkpoint"}, {"write:checkpoint:4:EIO", "checkpoint"},
      {"write:checkpoint:3:tear", "checkpoint"},   {"fsync:checkpoint:2:EIO", "checkpoint"},
      {"rename:checkpoint:2:EIO", "checkpoint"},   {"write:metrics:7:ENOSPC", "metrics.jsonl"},
      {"write:metrics:1:EIO", "metrics.jsonl"},    {"write:config.json:1:ENOSPC", "config.json"},
      {"rename:config.json:1:EIO", "config.json"},
  };
  int number = 0;
  for (const auto& c : cases) {
    SCOPED_TRACE(c.fault);
    const std::string run = absl::StrCat("fails", number++);
    const Result result = RunWith(absl::StrCat("FAULT=", c.fault), {"--out=" + run});
    EXPECT_EQ(result.exit_code, 1) << result.out << result.err;
    EXPECT_TRUE(absl::StartsWith(result.err, "error: ")) << result.err;
    EXPECT_TRUE(Says(result, c.file)) << result.err;
    ExpectContinues(run, options_);
  }
}

TEST_F(Disk, KilledAtACallOfASaveTheRunLosesNothing) {
  int number = 0;
  for (const char* fault :
       {"write:checkpoint:1:kill", "write:checkpoint:5:kill", "fsync:checkpoint:1:kill",
        "rename:checkpoint:1:kill", "rename:checkpoint:2:kill", "write:metrics:6:kill",
        "rename:loss.svg:2:kill", "rename:config.json:1:kill"}) {
    SCOPED_TRACE(fault);
    const std::string run = absl::StrCat("killed", number++);
    EXPECT_EQ(RunWith(absl::StrCat("FAULT=", fault), {"--out=" + run}).signal, SIGKILL);
    ExpectContinues(run, options_);
  }
}

// The next save draws the plot again, and no step depends on it.
TEST_F(Disk, APlotThatCannotBeWrittenIsAWarning) {
  for (const char* fault : {"fsync:loss.svg:2:EIO", "rename:loss.svg:3:ENOSPC"}) {
    SCOPED_TRACE(fault);
    std::filesystem::remove_all(Path("plots"));
    const Result result = RunWith(absl::StrCat("FAULT=", fault), {"--out=plots"});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_TRUE(absl::StartsWith(result.err, "warning: cannot write ")) << result.err;
    EXPECT_TRUE(Says(result, "loss.svg")) << result.err;
    EXPECT_TRUE(Weights("plots") == Weights("straight"));
  }
}

// If a user removes them, another run can start, or rows are lost.
TEST_F(Disk, ALockOrMetricsThatAreRemovedAreNoticedAtASave) {
  for (const char* file : {".lock", "metrics.jsonl"}) {
    SCOPED_TRACE(file);
    const std::string run = absl::StrCat("removed", file);
    Subprocess process(Command(Plus(options_, {"--out=" + run, "--steps=100000"})), {folder_});
    AwaitRows(run, 2, process);
    std::filesystem::remove(Path(run) + "/" + file);
    const Result result = EndOf(process);
    EXPECT_EQ(result.exit_code, 1) << result.out;
    EXPECT_TRUE(Says(result, "error: --out: ")) << result.err;
    EXPECT_TRUE(Says(result, absl::StrCat("/", file, " was removed or replaced"))) << result.err;
  }
}

TEST_F(Disk, AClockThatJumpsChangesNothing) {
  for (const char* jump : {"CLOCK_JUMP=86400", "CLOCK_JUMP=-86400"}) {
    SCOPED_TRACE(jump);
    std::filesystem::remove_all(Path("jumps"));
    const Result result = RunWith(jump, {"--out=jumps", "--patience=30"});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_TRUE(Weights("jumps") == Weights("straight"));
    EXPECT_EQ(Rows("jumps"), Rows("straight"));
  }
}

// This is a real disk, in memory.
TEST_F(Disk, FullDisk) {
  const std::string disk = Path("disk");
  std::filesystem::create_directory(disk);
  if (mount("tmpfs", disk.c_str(), "tmpfs", 0, "size=300k") != 0) {
    GTEST_SKIP() << "mounting a small tmpfs is not permitted here";
  }
  const Result result = Run(Plus(options_, {"--out=disk/run"}));
  EXPECT_EQ(result.exit_code, 1) << result.out;
  EXPECT_TRUE(Says(result, "No space left on device")) << result.err;
  // With room again, the run continues.
  EXPECT_EQ(mount("tmpfs", disk.c_str(), "tmpfs", MS_REMOUNT, "size=50m"), 0);
  ExpectContinues("disk/run", options_);
  EXPECT_EQ(umount2(disk.c_str(), MNT_DETACH), 0);
}

}  // namespace
}  // namespace burst
