#include "burst/comm/thread/thread_world.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/parallel.h"

namespace burst {
namespace {

constexpr int kSpins = 1000;  // some tens of microseconds

}  // namespace

ThreadWorld::ThreadWorld(int size, std::function<void(const absl::Status&)> on_failure)
    : ranks_(size), spins_(size <= NumCores() ? kSpins : 0), on_failure_(std::move(on_failure)) {}

ThreadWorld::Lock ThreadWorld::Acquire() {
  Lock lock(mutex_, std::defer_lock);
  Reacquire(lock);
  return lock;
}

void ThreadWorld::Reacquire(Lock& lock) {
  for (int i = 0; i < spins_ / 8; ++i) {
    if (lock.try_lock()) return;
    __builtin_ia32_pause();
  }
  lock.lock();
}

void ThreadWorld::Fail(int rank, const absl::Status& cause) {
  if (!cause_.ok()) return;
  cause_ = cause;
  aborted_ = absl::UnavailableError(
      absl::StrCat("rank ", rank, " of ", ranks_.size(), " gave up: ", cause.message()));
  if (on_failure_ != nullptr) on_failure_(aborted_);
  for (size_t i = 0; i < ranks_.size(); ++i) Wake(i);
}

void ThreadWorld::Leave(int rank) {
  ranks_[rank].left = true;
  for (size_t i = 0; i < ranks_.size(); ++i) Wake(i);
}

void ThreadWorld::Wake(int rank) {
  ranks_[rank].events.fetch_add(1, std::memory_order_relaxed);
  ranks_[rank].woken.notify_all();
}

bool ThreadWorld::Spin(Lock& lock, int rank, uint64_t seen) {
  const auto unchanged = [&] {
    return ranks_[rank].events.load(std::memory_order_relaxed) == seen;
  };
  lock.unlock();
  for (int i = 0; i < spins_ && unchanged(); ++i) __builtin_ia32_pause();
  Reacquire(lock);
  return !unchanged();
}

void ThreadWorld::EndCopy(int rank) {
  --ranks_[rank].copies;
  Wake(rank);
}

void ThreadWorld::AwaitCopies(Lock& lock, int rank) {
  while (ranks_[rank].copies > 0) Sleep(lock, rank, [] {});
}

ThreadGroup::ThreadGroup(ThreadWorld& world, std::vector<int> world_ranks)
    : world(world),
      world_ranks(std::move(world_ranks)),
      size(static_cast<int>(this->world_ranks.size())),
      links(kNumChannels * size * size),
      ranks(size) {}

void ThreadGroup::EndMeeting() {
  arrived = 0;
  ++meetings;
  for (int rank : world_ranks) world.Wake(rank);
}

}  // namespace burst
