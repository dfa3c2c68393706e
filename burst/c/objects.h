// The objects behind the handles of burst.h, and the guard around every call.
#pragma once

#include <unistd.h>

#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "burst/attention/attention_call.h"
#include "burst/attention/attention_ranks.h"
#include "burst/attention/sequence_parallel_attention.h"
#include "burst/base/check.h"
#include "burst/base/host_memory.h"
#include "burst/base/parallel.h"
#include "burst/c/burst.h"
#include "burst/comm/communicator.h"
#include "burst/device/device.h"
#include "burst/device/memory.h"
#include "burst/device/small_blocks.h"

namespace burst {
namespace c {

class CallersMemory : public MemorySource {
 public:
  explicit CallersMemory(const burst_context_options& options)
      : allocate_(options.allocate), release_(options.release), user_(options.user) {}
  void* Allocate(size_t bytes) override { return allocate_(bytes, user_); }
  void Free(void* data) override { release_(data, user_); }

 private:
  void* (*const allocate_)(size_t, void*);
  void (*const release_)(void*, void*);
  void* const user_;
};

// A device, and how threads use it. Members are destroyed in reverse: memory last.
struct Context {
  DeviceType device = DeviceType::kCpu;
  std::unique_ptr<CallersMemory> callers_memory;  // null: the pool
  std::unique_ptr<SmallBlocks> memory;            // memory in small blocks
  std::unique_ptr<CallersGpu> gpu;                // null: the CPU
  std::shared_ptr<ThreadPool> threads;            // null: one
  const pid_t process = getpid();

  // Held by the thread that works for the context: it alone touches the device. Recursive: the
  // caller's allocator, called while it is held, may destroy objects.
  std::recursive_mutex in_use;
  // Objects that other threads destroyed meanwhile; the working thread frees them before it leaves.
  std::mutex left_mutex;  // locked after in_use; before it only where that is tried
  std::vector<std::shared_ptr<void>> left;
};

// While it lives, the calling thread works for a context; it waits for another that does.
class Use {
 public:
  // queues: whether work is queued that later calls, on whatever stream, come after.
  explicit Use(Context* context, bool queues = false)
      : context_(*context),
        queues_(queues),
        in_use_(context->in_use),
        memory_(context->memory.get(), context->device),
        threads_(context->threads) {
    if (context->gpu != nullptr) device_.emplace(context->gpu.get());
  }
  // After a failure, too, later calls come after what was queued: they may be given its memory.
  ~Use() {
    try {
      if (queues_) End();
    } catch (...) {  // the failure itself is reported
    }
    for (std::vector<std::shared_ptr<void>> left;; left.clear()) {
      const std::lock_guard<std::mutex> lock(context_.left_mutex);
      left.swap(context_.left);
      if (!left.empty()) continue;
      in_use_.unlock();  // before another thread can leave something
      return;
    }
  }
  // The end of what is queued. Destructors alone cannot report an error.
  void End() {
    queues_ = false;
    if (context_.gpu != nullptr) context_.gpu->EndWork();
  }

 private:
  Context& context_;
  bool queues_;
  std::unique_lock<std::recursive_mutex> in_use_;
  const ScopedFatalErrors fatal_errors_;
  const ScopedMemorySource memory_;
  const ScopedThreadPool threads_;
  std::optional<ScopedCudaDevice> device_;
};

// Destroys *pointer, which may hold the last reference to users of the context's device. While
// another thread works for the context, that one does so at the end of its call. In a forked
// process the object is left alone.
template <typename T>
void Destroy(const std::shared_ptr<Context>& context, std::shared_ptr<T>* pointer) {
  if (getpid() != context->process) {
    union Kept {
      explicit Kept(std::shared_ptr<T> value) : value(std::move(value)) {}
      ~Kept() {}
      std::shared_ptr<T> value;
    } kept(std::move(*pointer));
    return;
  }
  if (*pointer == nullptr) return;
  try {
    std::unique_lock<std::mutex> lock(context->left_mutex);
    context->left.reserve(context->left.size() + 1);  // may throw
    context->left.push_back(std::move(*pointer));
    if (!context->in_use.try_lock()) return;
    lock.unlock();
    const Use use(context.get());
    context->in_use.unlock();
  } catch (const std::bad_alloc&) {  // there is no memory for the list
    const Use use(context.get());
    pointer->reset();
  }
}

struct Attention;

struct Comm {
  explicit Comm(std::shared_ptr<Context> context) : context(std::move(context)) {}
  ~Comm() {
    Destroy(context, &ranks);
    Destroy(context, &communicator);
  }
  void Finish();
  const std::shared_ptr<Context> context;
  std::shared_ptr<Communicator> communicator;        // null: one rank, or finished
  std::shared_ptr<AttentionRanks> ranks;             // the communicator's ranks; null where that is
  std::vector<std::weak_ptr<Attention>> attentions;  // those made from it; some may be gone
  int rank = 0, size = 1;
  bool finished = false;
};

struct Attention {
  explicit Attention(std::shared_ptr<Context> context) : context(std::move(context)) {}
  ~Attention() { Destroy(context, &attention); }
  const std::shared_ptr<Context> context;
  std::shared_ptr<Comm> comm;                            // null: one rank
  std::shared_ptr<SequenceParallelAttention> attention;  // null: its comm has finished
};

// InvalidArgument if burst_comm_finish was called.
inline absl::Status CheckNotFinished(const Comm* comm) {
  if (comm == nullptr || !comm->finished) return absl::OkStatus();
  return absl::InvalidArgumentError("comm: it has finished (burst_comm_finish)");
}

struct Schedule {
  ~Schedule() { Destroy(context, &schedule); }
  std::shared_ptr<Context> context;
  std::shared_ptr<AttentionSchedule> schedule;
};

// Copies a caller's struct, whose fields beyond the caller's struct_bytes stay zero.
template <typename Struct>
absl::Status CopyStruct(const char* name, const Struct& callers, Struct* copy) {
  constexpr size_t kLeast = sizeof(Struct);  // the size in version 1
  if (callers.struct_bytes < kLeast) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": struct_bytes must be at least ", kLeast,
                                                   "; got ", callers.struct_bytes));
  }
  std::memcpy(copy, &callers, sizeof(Struct));
  return absl::OkStatus();
}

inline std::string Or(const char* text, const char* otherwise) {
  return text == nullptr ? otherwise : text;
}

// That calls cannot be a part of a CUDA graph. Nothing may be queued before: it would end the
// capture, and leave the caller's framework in the middle of one.
absl::Status Captured();

// Records the error of the calling thread.
burst_code Report(burst_code code, absl::string_view message);
burst_code Report(const absl::Status& status);
// BURST_OUT_OF_MEMORY, recorded without a thread-local variable.
burst_code ReportNoMemory();

// Runs body() -> absl::Status; nothing it throws leaves.
template <typename Body>
burst_code Guard(Body&& body) noexcept {
  if (!HasMemoryForThread()) return ReportNoMemory();
  try {
    const ScopedFatalErrors fatal_errors;
    return Report(body());
  } catch (const FatalError& error) {
    return Report(error.out_of_memory ? BURST_OUT_OF_MEMORY : BURST_INTERNAL, error.what());
  } catch (const std::bad_alloc&) {
    return Report(BURST_OUT_OF_MEMORY, "out of memory on the host");
  } catch (const std::exception& error) {
    return Report(BURST_INTERNAL, error.what());
  } catch (...) {
    return Report(BURST_INTERNAL, "something was thrown that is not a std::exception");
  }
}

}  // namespace c
}  // namespace burst

struct burst_context {
  std::shared_ptr<burst::c::Context> value;
};
struct burst_comm {
  std::shared_ptr<burst::c::Comm> value;
};
struct burst_attention {
  std::shared_ptr<burst::c::Attention> value;
};
struct burst_schedule {
  std::shared_ptr<burst::c::Schedule> value;
};
