#include "burst/base/parallel.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "burst/base/check.h"
#include "burst/base/host_memory.h"

namespace burst {

// Runs one job at a time: every worker calls job(worker index), the caller being worker 0. Workers
// spin briefly before they sleep, because the ops of a small model follow each other within
// microseconds. An exception of a worker is rethrown on the caller, once all workers have ended.
class ThreadPool {
 public:
  explicit ThreadPool(int num_threads) : num_threads_(num_threads), pending_(num_threads - 1) {
    threads_.reserve(num_threads - 1);
    try {
      for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this, i] { Work(i); });
    } catch (const std::system_error& error) {
      Stop();
      OutOfMemory(("thread " + std::to_string(threads_.size() + 2) + " of " +
                   std::to_string(num_threads) + ": " + error.what() +
                   "; fewer threads need less memory")
                      .c_str());
    }
    AwaitWorkers();
    if (!lacks_memory_) return;
    Stop();
    OutOfMemory("out of memory: none for a thread; fewer threads need less");
  }

  ~ThreadPool() { Stop(); }

  int num_threads() const { return num_threads_; }

  void Run(const std::function<void(int)>& job) {
    job_ = &job;
    fatal_errors_ = ScopedFatalErrors::active();
    pending_.store(num_threads_ - 1, std::memory_order_relaxed);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    Perform(0);
    AwaitWorkers();
    if (error_ != nullptr) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  static constexpr int kSpins = 2000;

  void AwaitWorkers() {
    while (pending_.load(std::memory_order_acquire) != 0) std::this_thread::yield();
  }

  void Stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  // Performs the worker's part of the job. The pool keeps the first exception of any worker.
  void Perform(int index) noexcept {
    try {
      (*job_)(index);
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (error_ == nullptr) error_ = std::current_exception();
    }
  }

  void Work(int index) {
    if (!HasMemoryForThread()) lacks_memory_ = true;
    pending_.fetch_sub(1, std::memory_order_release);
    uint64_t seen = 0;
    while (true) {
      for (int i = 0; i < kSpins && generation_.load(std::memory_order_acquire) == seen; ++i) {
        __builtin_ia32_pause();
      }
      if (generation_.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen; });
      }
      seen = generation_.load(std::memory_order_acquire);
      if (stop_) return;
      {
        std::optional<ScopedFatalErrors> fatal_errors;  // the caller's
        if (fatal_errors_) fatal_errors.emplace();
        Perform(index);
      }
      pending_.fetch_sub(1, std::memory_order_release);
    }
  }

  const int num_threads_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::atomic<uint64_t> generation_{0};
  std::atomic<int> pending_;  // workers that have not ended their part yet
  std::atomic<bool> lacks_memory_{false};
  bool fatal_errors_ = false;  // ScopedFatalErrors of the caller
  std::exception_ptr error_;
  const std::function<void(int)>* job_ = nullptr;
};

namespace {

thread_local ThreadPool* current_pool = nullptr;

// While this object lives, parallel loops of this thread run inline.
class ScopedInline {
 public:
  ScopedInline() : outer_(std::exchange(current_pool, nullptr)) {}
  ~ScopedInline() { current_pool = outer_; }

 private:
  ThreadPool* const outer_;
};

// Runs the job on the pool, with nested parallel loops inline.
void RunOnPool(ThreadPool* pool, const std::function<void(int)>& job) {
  pool->Run([&](int worker) {
    const ScopedInline nested;
    job(worker);
  });
}

}  // namespace

std::shared_ptr<ThreadPool> MakeThreadPool(int num_threads) {
  BURST_CHECK_GE(num_threads, 1);
  return num_threads > 1 ? std::make_shared<ThreadPool>(num_threads) : nullptr;
}

ScopedThreadPool::ScopedThreadPool(int num_threads)
    : ScopedThreadPool(MakeThreadPool(num_threads)) {}

ScopedThreadPool::ScopedThreadPool(std::shared_ptr<ThreadPool> pool)
    : pool_(std::move(pool)), outer_(current_pool) {
  current_pool = pool_.get();
}

ScopedThreadPool::~ScopedThreadPool() { current_pool = outer_; }

int NumThreads() { return current_pool == nullptr ? 1 : current_pool->num_threads(); }

int NumCores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

void ParallelFor(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& body) {
  if (n <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  const int64_t chunks = std::min<int64_t>(NumThreads(), (n + grain - 1) / grain);
  if (chunks <= 1) return body(0, n);
  RunOnPool(current_pool, [&](int worker) {
    if (worker < chunks) body(n * worker / chunks, n * (worker + 1) / chunks);
  });
}

void ParallelTasks(int64_t num_tasks, const std::function<void(int64_t)>& body) {
  if (NumThreads() == 1 || num_tasks <= 1) {
    for (int64_t task = 0; task < num_tasks; ++task) body(task);
    return;
  }
  std::atomic<int64_t> next{0};
  RunOnPool(current_pool, [&](int) {
    for (int64_t task = next++; task < num_tasks; task = next++) body(task);
  });
}

}  // namespace burst
