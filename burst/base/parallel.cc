#include "burst/base/parallel.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "burst/base/check.h"

namespace burst {

// Runs one job at a time: every worker calls job(worker index), the caller being worker 0.
// Workers spin briefly before they sleep, because the ops of a small model follow each other within
// microseconds.
class ThreadPool {
 public:
  explicit ThreadPool(int num_threads) : num_threads_(num_threads) {
    for (int i = 1; i < num_threads; ++i) threads_.emplace_back([this, i] { Work(i); });
  }

  ~ThreadPool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  int num_threads() const { return num_threads_; }

  void Run(const std::function<void(int)>& job) {
    job_ = &job;
    pending_.store(num_threads_ - 1, std::memory_order_relaxed);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    job(0);
    while (pending_.load(std::memory_order_acquire) != 0) std::this_thread::yield();
  }

 private:
  static constexpr int kSpins = 2000;

  void Work(int index) {
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
      (*job_)(index);
      pending_.fetch_sub(1, std::memory_order_release);
    }
  }

  const int num_threads_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::atomic<uint64_t> generation_{0};
  std::atomic<int> pending_{0};
  const std::function<void(int)>* job_ = nullptr;
};

namespace {

thread_local ThreadPool* current_pool = nullptr;

// Runs job on the current pool, with nested parallel loops inline.
void RunOnPool(ThreadPool* pool, const std::function<void(int)>& job) {
  pool->Run([&](int worker) {
    ThreadPool* outer = current_pool;
    current_pool = nullptr;
    job(worker);
    current_pool = outer;
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
