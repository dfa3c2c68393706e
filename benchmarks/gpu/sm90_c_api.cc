// The attention kernels of a GPU as a shared library with C names, so that sm90_attention.py can
// call them on PyTorch's tensors, beside cuDNN in the same process. The calls are those that
// training makes: what they choose, check and allocate is timed with them.
#include <cuda_runtime.h>

#include "burst/device/cuda.h"
#include "burst/kernels/flash_attention.h"

namespace {

// Queues on the caller's stream while it lives.
class OnStream {
 public:
  explicit OnStream(cudaStream_t stream) : own_(burst::cuda::CurrentStream()) {
    burst::cuda::CurrentContext().stream = stream;
  }
  ~OnStream() { burst::cuda::CurrentContext().stream = own_; }

 private:
  const cudaStream_t own_;
};

const burst::AttentionKernels& Kernels() { return burst::KernelsOf(burst::DeviceType::kCuda); }

}  // namespace

extern "C" {

void burst_attention_forward(const burst::FlashForwardParams* params, cudaStream_t stream) {
  const OnStream on_stream(stream);
  Kernels().Forward(*params);
}
void burst_attention_delta(const burst::FlashDeltaParams* params, cudaStream_t stream) {
  const OnStream on_stream(stream);
  Kernels().Delta(*params);
}
void burst_attention_backward(const burst::FlashBackwardParams* params, cudaStream_t stream) {
  const OnStream on_stream(stream);
  Kernels().Backward(*params);
}

}  // extern "C"
