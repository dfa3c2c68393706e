// Kills runs at each call of a save that makes, flushes, renames or removes something. When they
// continue, they leave the files of an undisturbed run, and no other file.
#include <gtest/gtest.h>

#include <filesystem>
#include <set>
#include <string>

#include "tests/faults/fault_run.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

class SaveKills : public FaultTest {
 protected:
  std::set<std::string> Names(const std::string& run) const {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(Path(run))) {
      names.insert(entry.path().filename().string());
    }
    return names;
  }

  // Returns the step of best.safetensors.
  std::string BestStep(const std::string& run) const {
    const auto header = Header(ReadAll(Path(run) + "/best.safetensors"));
    return header.is_object() ? header["__metadata__"]["step"].get<std::string>() : "none";
  }

  // Kills runs at one call after the other, until a run is complete before the call.
  void KillAtEachCall(const Arguments& options) {
    MakeStraight(options);
    const std::set<std::string> names = Names("straight");
    int complete = 0;
    for (int call = 1;; ++call) {
      SCOPED_TRACE(call);
      fs::remove_all(Path("killed"));
      Subprocess process(
          Plus({"env", "LD_PRELOAD=" + ProgramPath("tests/faults/libfaulty_calls.so"),
                absl::StrCat("FAULT=name:/killed/:", call, ":kill")},
               Command(Plus(options, {"--out=" + Path("killed")}))),
          {folder_});
      const Result killed = EndOf(process);
      if (killed.exit_code == 0) {
        std::printf("%d calls, %d of them after the last save\n", call - 1, complete);
        EXPECT_GT(call, 30);
        EXPECT_GT(complete, 3);
        return;
      }
      ASSERT_EQ(killed.signal, SIGKILL) << killed.err;
      Arguments arguments = Plus(options, {"--out=" + Path("killed")});
      if (HasCheckpoint("killed")) arguments.push_back("--resume");
      const Result result = Run(arguments);
      ASSERT_EQ(result.exit_code, 0) << result.out << result.err;
      complete += Says(result, "is complete");
      ASSERT_TRUE(Weights("killed") == Weights("straight"));
      ASSERT_EQ(Rows("killed"), Rows("straight"));
      ASSERT_EQ(Names("killed"), names);
      ASSERT_EQ(BestStep("killed"), BestStep("straight"));
      ASSERT_EQ(ReadAll(Path("killed") + "/loss.svg"), ReadAll(Path("straight") + "/loss.svg"));
    }
  }
};

TEST_F(SaveKills, OneFile) {
  KillAtEachCall({"--steps=6", "--eval_every=2", "--checkpoint_every=2", "--keep=2",
                  "--log_every=100", "--threads=1"});
}

TEST_F(SaveKills, Sets) {
  KillAtEachCall({"--steps=4", "--eval_every=2", "--checkpoint_every=2", "--keep=1",
                  "--log_every=100", "--threads=1", "--ranks=2", "--zero=1",
                  "--checkpoint_files=ranks"});
}

}  // namespace
}  // namespace burst
