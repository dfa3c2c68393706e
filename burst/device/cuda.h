// The calling thread's GPU and stream, and checked calls, for code that calls CUDA.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <string>
#include <typeindex>
#include <utility>
#include <vector>

#include "burst/device/device.h"

namespace burst {
namespace cuda {

// The GPU that the calling thread is bound to and the stream on which its work is queued. One
// thread uses a context at a time. Contexts live as long as the process: when a thread ends, the
// next thread on that GPU takes over its context.
struct Context {
  int device = 0;
  int rank = 0;  // rank of the bound thread, for error messages
  cudaStream_t stream = nullptr;
  cudaEvent_t event = nullptr;  // orders other streams after this one
  int multiprocessors = 0;
  int compute_capability = 0;  // 90: sm_90

  // Returns the context's object of type T, made by T() on first use and destroyed with the
  // context. It holds state of a GPU and its stream, such as a library's handle. This layer does
  // not know T.
  template <typename T>
  T& Get() {
    for (const Object& object : objects) {
      if (object.type == typeid(T)) return *static_cast<T*>(object.pointer.get());
    }
    auto made = std::make_shared<T>();
    T& result = *made;
    objects.push_back({typeid(T), std::move(made)});
    return result;
  }

  struct Object {
    std::type_index type;
    std::shared_ptr<void> pointer;
  };
  std::vector<Object> objects;  // made by Get
};
Context& CurrentContext();
inline cudaStream_t CurrentStream() { return CurrentContext().stream; }

// Ends the program with exit code 1 and a sentence that names the call, the rank and the device.
// Under ScopedFatalErrors it throws. CUDA cannot be used after most of its errors.
[[noreturn]] void Fail(const char* call, const std::string& error);
void Check(const char* call, cudaError_t error);
// Checks in destructors, which cannot throw: ScopedFatalErrors leaves errors to the next call.
void CheckAtEnd(const char* call, cudaError_t error);

}  // namespace cuda
}  // namespace burst

#define BURST_CUDA_CHECK(call) ::burst::cuda::Check(#call, call)
// Checks a kernel launch; call it right after.
#define BURST_CUDA_CHECK_LAUNCH(kernel) ::burst::cuda::Check(kernel, cudaGetLastError())
