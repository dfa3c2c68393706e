// Records where every rank of this process is in its work: the step, phase, layer and op, and the
// message it waits for. Ranks write it as they go (a few stores). The watchdog (watchdog.h) reads
// it when nothing has moved for too long.
//
//    const ScopedRankProgress rank(comm.rank());     // this thread is the rank
//    ReachStep(step);
//    const ScopedPhase phase("forward");
//    ReachOp(layer, "attention");
//    const ScopedWait wait("receives", "read", peer, bytes);
//
// On threads that are not a rank, all of this does nothing. Texts are string literals.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace burst {

// A place in a rank's work.
struct ProgressPlace {
  int64_t step = -1;  // from 1; -1: before the first
  const char* phase = "start";
  int layer = -1;            // -1: outside the layers
  const char* op = nullptr;  // null: none in particular
};

// The marks that a device has reached in the work that its rank queued. The device writes a number
// into the host's memory at every mark; see burst/device/progress.h.
class DeviceMarks {
 public:
  virtual ~DeviceMarks() = default;
  // Queues a mark: when the device reaches it, its work is at `place`.
  virtual void Mark(const ProgressPlace& place) = 0;
  // Counts the marks that the device has reached. From any thread.
  virtual uint64_t reached() const = 0;
  // Describes the unfinished work of the device, or returns "" if there is none. Callable from any
  // thread. It does not use the device's driver, which may be the part that hangs.
  virtual std::string Describe() const = 0;
};

// Is called with every place that a rank reaches, on the rank's thread. A profiler's ranges are
// made so (burst/device/profiler.h).
class ProgressListener {
 public:
  virtual ~ProgressListener() = default;
  virtual void Reached(const ProgressPlace& place) = 0;
};

class RankProgress {
 public:
  explicit RankProgress(int rank) : rank_(rank) {}

  // The rank's own thread.
  void Event() { events_.store(events_.load(kRelaxed) + 1, kRelaxed); }
  const ProgressPlace& place() const { return place_; }
  void Reach(const ProgressPlace& place);
  void Wait(const char* what, const char* channel, int peer, int64_t bytes);
  void set_device(DeviceMarks* device);                                    // null: none any more
  void set_listener(ProgressListener* listener) { listener_ = listener; }  // null: none any more
  DeviceMarks* device() const { return device_.load(kRelaxed); }

  // Any thread.
  int rank() const { return rank_; }
  uint64_t events() const;
  // "rank 1: step 12, backward, layer 3, attention: receives 4,096 bytes from rank 0 (channel
  // read); cuda: ..."
  std::string Describe() const;

 private:
  static constexpr std::memory_order kRelaxed = std::memory_order_relaxed;

  const int rank_;
  ProgressPlace place_;  // the rank's own view of what follows
  ProgressListener* listener_ = nullptr;
  std::atomic<uint64_t> events_{0};
  std::atomic<int64_t> step_{-1};
  std::atomic<const char*> phase_{"start"};
  std::atomic<int> layer_{-1};
  std::atomic<const char*> op_{nullptr};
  std::atomic<const char*> wait_{nullptr};  // null: it computes
  std::atomic<const char*> channel_{nullptr};
  std::atomic<int> peer_{-1};
  std::atomic<int64_t> bytes_{0};
  std::atomic<DeviceMarks*> device_{nullptr};
};

// "step 12, backward, layer 3, attention"
std::string Describe(const ProgressPlace& place);

// The calling thread's progress; null if it is not a rank.
inline thread_local RankProgress* current_progress = nullptr;

// The calling thread is a rank for as long as the object lives. `rank`: in the world.
class ScopedRankProgress {
 public:
  explicit ScopedRankProgress(int rank);
  ~ScopedRankProgress();
  ScopedRankProgress(const ScopedRankProgress&) = delete;
  ScopedRankProgress& operator=(const ScopedRankProgress&) = delete;

 private:
  RankProgress* const outer_;
  RankProgress progress_;
};

// While it lives, the watchdog does not watch the calling thread's rank, which may take as long as
// it needs. Used for reading data, for example, which reports no progress.
class ScopedUnwatched {
 public:
  ScopedUnwatched();
  ~ScopedUnwatched();
  ScopedUnwatched(const ScopedUnwatched&) = delete;
  ScopedUnwatched& operator=(const ScopedUnwatched&) = delete;

 private:
  const RankProgress* const rank_;
};

// Returns, for the ranks of this process, the number of events since the process began, the number
// of ranks in progress, and a line for each.
uint64_t CountProgress();
int RanksInProgress();
std::vector<std::string> DescribeProgress();

// Counts an event: a file, a batch or a token. For long work without layers.
inline void CountEvent() {
  if (current_progress != nullptr) current_progress->Event();
}

void ReachStep(int64_t step);

// While it lives, the rank is in this phase, outside the layers; afterwards in the phase before.
class ScopedPhase {
 public:
  explicit ScopedPhase(const char* phase);
  ~ScopedPhase();
  ScopedPhase(const ScopedPhase&) = delete;
  ScopedPhase& operator=(const ScopedPhase&) = delete;

 private:
  ProgressPlace outer_;
};

// Records that the rank begins the op. `layer`: -1 outside the layers. With `on_device` the rank's
// device also gets a mark.
inline void ReachOp(int layer, const char* op, bool on_device = false) {
  RankProgress* const rank = current_progress;
  if (rank == nullptr) return;
  ProgressPlace place = rank->place();
  place.layer = layer;
  place.op = op;
  rank->Reach(place);
  if (on_device && rank->device() != nullptr) rank->device()->Mark(place);
}

// The layer that the rank is in; -1 if none.
inline int CurrentLayer() {
  return current_progress == nullptr ? -1 : current_progress->place().layer;
}

// Returns whether a watchdog lives. Devices get marks only then.
bool ProgressIsWatched();
void SetProgressIsWatched(bool watched);

// Ends a wait that RankProgress::Wait began.
inline void EndWait() {
  if (current_progress != nullptr) current_progress->Wait(nullptr, nullptr, -1, 0);
}

// While it lives, the rank waits: "receives", "sends", "waits for". `channel` and `peer` (a rank of
// the world) are null and -1 where they do not matter.
class ScopedWait {
 public:
  explicit ScopedWait(const char* what, const char* channel = nullptr, int peer = -1,
                      int64_t bytes = 0) {
    if (current_progress != nullptr) current_progress->Wait(what, channel, peer, bytes);
  }
  ~ScopedWait() { EndWait(); }
  ScopedWait(const ScopedWait&) = delete;
  ScopedWait& operator=(const ScopedWait&) = delete;
};

}  // namespace burst
