// A thread that watches the ranks of a process while they work. For nccl_communicator.cc.
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>

#include "burst/comm/nccl/nccl_link.h"

namespace burst {

// While the ranks are at work: notices errors of NCCL in the background; and when the world has
// failed, ends the program with that failure unless the ranks come back from wherever they are.
class NcclWatchdog {
 public:
  // With `free_threads` the ranks are threads that wait for their GPUs, and are freed.
  NcclWatchdog(NcclWorld* world, bool free_threads)
      : world_(world), free_threads_(free_threads), thread_([this] { Watch(); }) {}
  ~NcclWatchdog() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      done_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  // After the world's Fail.
  void Wake() { changed_.notify_all(); }

 private:
  void Watch();

  NcclWorld* const world_;
  const bool free_threads_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::thread thread_;  // last: it uses the others
};

}  // namespace burst
