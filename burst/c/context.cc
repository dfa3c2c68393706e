#include <pthread.h>

#include <atomic>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "burst/base/version.h"
#include "burst/c/objects.h"
#include "burst/device/capture.h"

namespace burst {
namespace c {
namespace {

// The message has a fixed size, because reporting that memory ran out must not need memory.
constexpr size_t kMessageBytes = 2048;
thread_local char last_error[kMessageBytes];
std::atomic<pthread_t> without_memory{};  // the thread of the last ReportNoMemory

absl::StatusOr<std::shared_ptr<Context>> MakeContext(const burst_context_options& callers) {
  burst_context_options options = {};
  BURST_RETURN_IF_ERROR(CopyStruct("burst_context_options", callers, &options));
  if ((options.allocate == nullptr) != (options.release == nullptr)) {
    return absl::InvalidArgumentError("allocate: must be given with release, or neither");
  }
  // A forked process does not destroy its parent's context.
  std::shared_ptr<Context> context(new Context, [](Context* made) {
    if (getpid() == made->process) delete made;
  });
  if (options.allocate != nullptr) {
    context->callers_memory = std::make_unique<CallersMemory>(options);
    context->memory = std::make_unique<SmallBlocks>(context->callers_memory.get());
  }
  if (options.device == BURST_CPU) return context;
  if (options.device != BURST_CUDA) {
    return absl::InvalidArgumentError(
        absl::StrCat("device: must be BURST_CPU or BURST_CUDA; got ", options.device));
  }
  const int gpus = CudaDeviceCount();
  if (gpus == 0) {
    return absl::UnimplementedError("this machine has no GPU, or this library no CUDA");
  }
  if (options.index < 0 || options.index >= gpus) {
    return absl::InvalidArgumentError(absl::StrCat(
        "index: must be below the ", gpus, " GPUs that this process sees; got ", options.index));
  }
  context->device = DeviceType::kCuda;
  context->gpu = std::make_unique<CallersGpu>(options.index);
  return context;
}

}  // namespace

burst_code Report(burst_code code, absl::string_view message) {
  constexpr absl::string_view kCut = "...";
  const bool cut = message.size() >= kMessageBytes;
  const size_t bytes = cut ? kMessageBytes - 1 - kCut.size() : message.size();
  std::memmove(last_error, message.data(), bytes);
  std::memcpy(last_error + bytes, kCut.data(), cut ? kCut.size() : 0);
  last_error[cut ? kMessageBytes - 1 : bytes] = '\0';
  pthread_t self = pthread_self();
  without_memory.compare_exchange_strong(self, {});
  return code;
}

absl::Status Captured() {
  return absl::UnimplementedError(
      "a CUDA graph is being captured on this stream, and calls of Burst cannot be captured; leave "
      "them out of the graph (torch.compile: not in the mode reduce-overhead)");
}

burst_code ReportNoMemory() {
  without_memory.store(pthread_self());
  return BURST_OUT_OF_MEMORY;
}

burst_code Report(const absl::Status& status) {
  if (status.ok()) return BURST_OK;
  burst_code code = BURST_INTERNAL;
  if (absl::IsInvalidArgument(status) || absl::IsFailedPrecondition(status)) {
    code = BURST_INVALID_ARGUMENT;
  } else if (absl::IsUnavailable(status)) {
    code = BURST_UNAVAILABLE;
  } else if (absl::IsUnimplemented(status)) {
    code = BURST_UNSUPPORTED;
  }
  return Report(code, status.message());
}

}  // namespace c
}  // namespace burst

using burst::c::Guard;

extern "C" {

int32_t burst_c_version(void) { return BURST_C_VERSION; }
const char* burst_version(void) { return burst::kVersion; }
int32_t burst_cuda_device_count(void) { return burst::CudaDeviceCount(); }
const char* burst_last_error(void) {
  const bool without_memory = burst::c::without_memory.load() == pthread_self();
  return without_memory ? "out of memory on the host" : burst::c::last_error;
}

burst_code burst_context_create(const burst_context_options* options, burst_context** context) {
  return Guard([&]() -> absl::Status {
    BURST_ASSIGN_OR_RETURN(auto made, burst::c::MakeContext(*options));
    *context = new burst_context{std::move(made)};
    return absl::OkStatus();
  });
}

void burst_context_destroy(burst_context* context) {
  (void)Guard([&] {
    delete context;
    return absl::OkStatus();
  });
}

burst_code burst_context_set_stream(burst_context* context, void* stream) {
  return Guard([&]() -> absl::Status {
    if (context->value->gpu == nullptr) {
      return absl::InvalidArgumentError("stream: must be for a context of a GPU; got one of a CPU");
    }
    const burst::c::Use use(context->value.get());
    if (burst::IsCaptured(stream)) return burst::c::Captured();
    context->value->gpu->SetStream(stream);
    return absl::OkStatus();
  });
}

burst_code burst_context_set_threads(burst_context* context, int32_t threads) {
  return Guard([&]() -> absl::Status {
    if (threads < 1 || threads > 1024) {
      return absl::InvalidArgumentError(
          absl::StrCat("threads: must be from 1 to 1024; got ", threads));
    }
    std::shared_ptr<burst::ThreadPool> pool = burst::MakeThreadPool(threads);
    const burst::c::Use use(context->value.get());
    context->value->threads.swap(pool);
    return absl::OkStatus();
  });
}

}  // extern "C"
