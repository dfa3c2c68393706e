// The Hopper kernels as a shared library with C names, so that benchmarks/sm90_attention.py can
// call them on PyTorch's tensors, beside cuDNN in the same process.
#include "burst/kernels/gpu/sm90/flash_attention_sm90.h"

extern "C" {

size_t burst_sm90_forward_workspace(const burst::sm90::Shape* shape) {
  return burst::sm90::ForwardWorkspaceBytes(*shape);
}
int burst_sm90_forward(const burst::sm90::ForwardParams* params, cudaStream_t stream) {
  return burst::sm90::LaunchForward(*params, stream);
}
size_t burst_sm90_backward_workspace(const burst::sm90::Shape* shape, bool deterministic) {
  return burst::sm90::BackwardWorkspaceBytes(*shape, deterministic);
}
int burst_sm90_delta(const burst::sm90::DeltaParams* params, cudaStream_t stream) {
  return burst::sm90::LaunchDelta(*params, stream);
}
int burst_sm90_backward(const burst::sm90::BackwardParams* params, cudaStream_t stream) {
  return burst::sm90::LaunchBackward(*params, stream);
}
int burst_sm90_convert(const burst::sm90::ConvertParams* params, cudaStream_t stream) {
  return burst::sm90::LaunchConvert(*params, stream);
}

}  // extern "C"
