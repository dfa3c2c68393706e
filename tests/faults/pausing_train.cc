// pausing_train OPTION...: //train, which stands still at one place of its work until a test lets
// it go on. The progress record defines the places (burst/base/progress.h). The linker leads
// its calls through the functions below (--wrap, see BUILD).
//
//   PAUSE_AT="backward 5 3"   the third event of phase "backward" in step 5: the begin of a phase,
//   of
//                             an op, of a wait for a message. Step 0: before the first one
//   PAUSE_AT="write 8 2"      the second write into a file that replaces another, after step 8: by
//                             the thread that writes the checkpoint, while the rank goes on
//   PAUSE_AT="data 0 1"       before the data is read
//   PAUSE_AT="exit 24 1"      the run's part of this rank is done after step 24
//   PAUSE_FILE=path           is made there; the process goes on once it is gone
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <sstream>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/base/progress.h"
#include "burst/cli/files.h"
#include "train/checkpoint/state_copy.h"
#include "train/config/config.h"
#include "train/run/setup.h"

namespace burst {
namespace {

struct Pause {
  std::string phase;
  int64_t step = -1;
  int number = 0;
  const char* const file = std::getenv("PAUSE_FILE");

  Pause() {
    const char* const at = std::getenv("PAUSE_AT");
    if (at != nullptr) std::istringstream(at) >> phase >> step >> number;
  }
};

void Reached(const std::string& phase, int64_t step) {
  static const Pause* const pause = new Pause;
  static std::atomic<int> events{0};
  if (pause->file == nullptr || phase != pause->phase || step != pause->step) return;
  if (++events != pause->number) return;
  close(open(pause->file, O_CREAT | O_WRONLY, 0644));
  while (access(pause->file, F_OK) == 0) usleep(1000);
}

int64_t Step() {
  return current_progress == nullptr
             ? 0
             : std::max<int64_t>(0, current_progress->place().step);  // -1 is before the first step
}

void ReachedItsPlace() {
  if (current_progress != nullptr) Reached(current_progress->place().phase, Step());
}

}  // namespace

// Each function has its original and the one that its callers call instead. A member function is
// called like a function whose first parameter is the object.
using Phase = ScopedPhase;
using Place = ProgressPlace;
void RealPhase(Phase*, const char*) asm("__real__ZN5burst11ScopedPhaseC1EPKc");
void WrapPhase(Phase*, const char*) asm("__wrap__ZN5burst11ScopedPhaseC1EPKc");
void WrapPhase(Phase* object, const char* phase) {
  RealPhase(object, phase);
  ReachedItsPlace();
}

void RealReach(RankProgress*,
               const Place&) asm("__real__ZN5burst12RankProgress5ReachERKNS_13ProgressPlaceE");
void WrapReach(RankProgress*,
               const Place&) asm("__wrap__ZN5burst12RankProgress5ReachERKNS_13ProgressPlaceE");
void WrapReach(RankProgress* object, const Place& place) {
  RealReach(object, place);
  ReachedItsPlace();
}

void RealWait(RankProgress*, const char*, const char*, int,
              int64_t) asm("__real__ZN5burst12RankProgress4WaitEPKcS2_il");
void WrapWait(RankProgress*, const char*, const char*, int,
              int64_t) asm("__wrap__ZN5burst12RankProgress4WaitEPKcS2_il");
void WrapWait(RankProgress* object, const char* what, const char* channel, int peer,
              int64_t bytes) {
  RealWait(object, what, channel, peer, bytes);
  if (what != nullptr) ReachedItsPlace();
}

// The step whose state is being written while the following ones run.
std::atomic<int64_t> saved_step{0};

void RealTake(StateCopy*) asm("__real__ZN5burst9StateCopy4TakeEv");
void WrapTake(StateCopy*) asm("__wrap__ZN5burst9StateCopy4TakeEv");
void WrapTake(StateCopy* object) {
  saved_step.store(Step());
  RealTake(object);
}

absl::Status RealWrite(AtomicFile*, const void*,
                       int64_t) asm("__real__ZN5burst10AtomicFile5WriteEPKvl");
absl::Status WrapWrite(AtomicFile*, const void*,
                       int64_t) asm("__wrap__ZN5burst10AtomicFile5WriteEPKvl");
absl::Status WrapWrite(AtomicFile* object, const void* data, int64_t bytes) {
  Reached("write", current_progress != nullptr ? Step() : saved_step.load());
  return RealWrite(object, data, bytes);
}

absl::StatusOr<TrainingSetup> RealPrepare(const ResolvedConfig&) asm(
    "__real__ZN5burst15PrepareTrainingERKNS_14ResolvedConfigE");
absl::StatusOr<TrainingSetup> WrapPrepare(const ResolvedConfig&) asm(
    "__wrap__ZN5burst15PrepareTrainingERKNS_14ResolvedConfigE");
absl::StatusOr<TrainingSetup> WrapPrepare(const ResolvedConfig& config) {
  Reached("data", 0);
  return RealPrepare(config);
}

void RealEnd(ScopedRankProgress*) asm("__real__ZN5burst18ScopedRankProgressD1Ev");
void WrapEnd(ScopedRankProgress*) asm("__wrap__ZN5burst18ScopedRankProgressD1Ev");
void WrapEnd(ScopedRankProgress* object) {
  Reached("exit", Step());
  RealEnd(object);
}

}  // namespace burst
