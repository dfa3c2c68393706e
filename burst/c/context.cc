#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "burst/base/version.h"
#include "burst/c/objects.h"

namespace burst {
namespace c {
namespace {

thread_local std::string last_error;

absl::StatusOr<std::shared_ptr<Context>> MakeContext(const burst_context_options& options) {
  if (options.struct_bytes < sizeof(burst_context_options)) {
    return absl::InvalidArgumentError(absl::StrCat("context options of ", options.struct_bytes,
                                                   " bytes, expected ", sizeof(options)));
  }
  if ((options.allocate == nullptr) != (options.release == nullptr)) {
    return absl::InvalidArgumentError("allocate and release: both or none");
  }
  // A forked process leaves its parent's alone.
  std::shared_ptr<Context> context(new Context, [](Context* made) {
    if (getpid() == made->process) delete made;
  });
  if (options.allocate != nullptr) {
    context->callers_memory = std::make_unique<CallersMemory>(options);
    context->memory = std::make_unique<SmallBlocks>(context->callers_memory.get());
  }
  if (options.device == BURST_CPU) return context;
  if (options.device != BURST_CUDA) {
    return absl::InvalidArgumentError(absl::StrCat("there is no device ", options.device));
  }
  const int gpus = CudaDeviceCount();
  if (gpus == 0) {
    return absl::UnimplementedError("this machine has no GPU, or this library no CUDA");
  }
  if (options.index < 0 || options.index >= gpus) {
    return absl::InvalidArgumentError(
        absl::StrCat("index: there is no GPU ", options.index, ", this process sees ", gpus));
  }
  context->device = DeviceType::kCuda;
  context->gpu = std::make_unique<CallersGpu>(options.index);
  return context;
}

}  // namespace

burst_code Report(burst_code code, const std::string& message) {
  last_error = message;
  return code;
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
  return Report(code, std::string(status.message()));
}

}  // namespace c
}  // namespace burst

using burst::c::Guard;

extern "C" {

int32_t burst_c_version(void) { return BURST_C_VERSION; }
const char* burst_version(void) { return burst::kVersion; }
int32_t burst_cuda_device_count(void) { return burst::CudaDeviceCount(); }
const char* burst_last_error(void) { return burst::c::last_error.c_str(); }

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
      return absl::InvalidArgumentError("stream: the context is of a CPU");
    }
    const burst::c::Use use(context->value.get());
    context->value->gpu->SetStream(stream);
    return absl::OkStatus();
  });
}

burst_code burst_context_set_threads(burst_context* context, int32_t threads) {
  return Guard([&]() -> absl::Status {
    if (threads < 1 || threads > 1024) {
      return absl::InvalidArgumentError(
          absl::StrCat("threads: ", threads, " is not between 1 and 1024"));
    }
    context->value->threads = burst::MakeThreadPool(threads);
    return absl::OkStatus();
  });
}

}  // extern "C"
