// Threads inside one rank.
//
// A rank is one thread: of this process, or the main thread of a process of its own. Its kernels
// split their loops over the rank's own pool, which ScopedThreadPool installs for the rank's
// thread. Without a pool, loops run on the calling thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace burst {

class ThreadPool;

// A pool for several scopes, one after the other; null for one thread. Where the system
// has too few threads to give, OutOfMemory (host_memory.h).
std::shared_ptr<ThreadPool> MakeThreadPool(int num_threads);

// A pool of `num_threads` threads, the caller among them, used by ParallelFor calls of this thread
// for as long as the object lives.
class ScopedThreadPool {
 public:
  explicit ScopedThreadPool(int num_threads);
  explicit ScopedThreadPool(std::shared_ptr<ThreadPool> pool);
  ~ScopedThreadPool();
  ScopedThreadPool(const ScopedThreadPool&) = delete;
  ScopedThreadPool& operator=(const ScopedThreadPool&) = delete;

 private:
  const std::shared_ptr<ThreadPool> pool_;
  ThreadPool* outer_;
};

// Threads that ParallelFor spreads over when called from this thread: 1 without a pool.
int NumThreads();

// Cores this process may run on (its affinity mask), at least 1.
int NumCores();

// Calls body(begin, end) over a partition of [0, n) into contiguous chunks of almost equal size,
// one per thread; returns when all are done. There are fewer chunks where one would have less than
// about `grain` items. The number of threads moves the borders between chunks, so no result may
// depend on them. Sums are therefore kept for blocks of a fixed size. A vectorized loop whose
// remainder may round differently starts at multiples of a fixed block. Nested calls run on the
// calling thread. The first exception of a body is thrown here when all have ended. Bodies run
// under the caller's ScopedFatalErrors.
void ParallelFor(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& body);

// Calls body(task) for every task in [0, num_tasks). A thread takes the next task when it is free:
// for tasks of unequal size, whose results must not depend on the thread. What tasks throw: as
// above.
void ParallelTasks(int64_t num_tasks, const std::function<void(int64_t)>& body);

}  // namespace burst
