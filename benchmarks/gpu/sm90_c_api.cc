// A shared library with C names for the attention kernels of a GPU. With it, sm90_attention.py can
// call them on PyTorch's tensors and compare them with cuDNN in the same process. The calls are the
// trainer's: their choices, checks and allocations are timed, too.
#include <cuda_runtime.h>

#include "burst/device/cuda.h"
#include "burst/kernels/flash_attention.h"
#include "burst/kernels/gpu/flash_attention_gpu.h"

namespace {

// While it lives, this thread queues work on the caller's stream.
class OnStream {
 public:
  explicit OnStream(cudaStream_t stream) : own_(burst::cuda::CurrentStream()) {
    burst::cuda::CurrentContext().stream = stream;
  }
  ~OnStream() { burst::cuda::CurrentContext().stream = own_; }

 private:
  const cudaStream_t own_;
};

}  // namespace

extern "C" {

void burst_attention_forward(const burst::FlashForwardParams* params, cudaStream_t stream) {
  const OnStream on_stream(stream);
  burst::cuda::GpuKernels()->Forward(*params);
}
void burst_attention_delta(const burst::FlashDeltaParams* params, cudaStream_t stream) {
  const OnStream on_stream(stream);
  burst::cuda::GpuKernels()->Delta(*params);
}
void burst_attention_backward(const burst::FlashBackwardParams* params, cudaStream_t stream) {
  const OnStream on_stream(stream);
  burst::cuda::GpuKernels()->Backward(*params);
}

}  // extern "C"
