// What the handles of burst.h point to, and the guard around every call.
#pragma once

#include <unistd.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "burst/attention/ring/schedule.h"
#include "burst/attention/sequence_parallel_attention.h"
#include "burst/base/check.h"
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
  std::unique_ptr<SmallBlocks> memory;            // of it
  std::unique_ptr<CallersGpu> gpu;                // null: the CPU
  std::shared_ptr<ThreadPool> threads;            // null: one
  const pid_t process = getpid();
};

// While it lives, the calling thread works for a context.
class Use {
 public:
  // queues: whether work is queued that later calls, on whatever stream, come after.
  explicit Use(Context* context, bool queues = false)
      : context_(*context),
        queues_(queues),
        memory_(context->memory.get(), context->device),
        threads_(context->threads) {
    if (context->gpu != nullptr) device_ = std::make_unique<ScopedCudaDevice>(context->gpu.get());
  }
  // After a failure, too, later calls come after what was queued: they may be given its memory.
  ~Use() {
    try {
      if (queues_) End();
    } catch (const FatalError&) {  // the failure itself is reported
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
  const ScopedFatalErrors fatal_errors_;
  const ScopedMemorySource memory_;
  const ScopedThreadPool threads_;
  std::unique_ptr<ScopedCudaDevice> device_;
};

// Destroys *pointer, which may hold the last reference to what uses the context's device. In a
// forked process it is left alone.
template <typename T>
void Destroy(const std::shared_ptr<Context>& context, std::shared_ptr<T>* pointer) {
  if (getpid() != context->process) {
    new std::shared_ptr<T>(std::move(*pointer));
    return;
  }
  const Use use(context.get());
  pointer->reset();
}

struct Attention;

struct Comm {
  explicit Comm(std::shared_ptr<Context> context) : context(std::move(context)) {}
  ~Comm() { Destroy(context, &communicator); }
  void Finish();
  const std::shared_ptr<Context> context;
  std::shared_ptr<Communicator> communicator;        // null: one rank, or finished
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
  std::shared_ptr<RingSchedule> schedule;
};

// Records the error of the calling thread.
burst_code Report(burst_code code, const std::string& message);
burst_code Report(const absl::Status& status);

// Runs body() -> absl::Status; nothing it throws leaves.
template <typename Body>
burst_code Guard(Body&& body) noexcept {
  try {
    const ScopedFatalErrors fatal_errors;
    return Report(body());
  } catch (const FatalError& error) {
    return Report(error.out_of_memory ? BURST_OUT_OF_MEMORY : BURST_INTERNAL, error.what());
  } catch (const std::bad_alloc&) {
    return Report(BURST_OUT_OF_MEMORY, "out of memory on the host");
  } catch (const std::exception& error) {
    return Report(BURST_INTERNAL, error.what());
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
