// Calls the CUDA kernels behind a function of the host.
//
//   BURST_GPU_KERNEL(SwiGluForward, gate_up, y);   // cuda::SwiGluForward(gate_up, y)
//
// A simulated GPU (burst/device/simulated_gpu.h) computes nothing. Its clock moves by the time of a
// kernel that reads or writes each argument once. Without CUDA and without a simulated GPU, no
// tensor on a GPU can reach this call.
#pragma once

#include "burst/device/device.h"
#include "burst/device/simulated_gpu.h"
#include "burst/tensor/tensor.h"

namespace burst {

// The work that an argument causes in a kernel. Every type that holds or represents tensors has an
// overload, declared next to the type.
struct KernelWork {
  double bytes = 0;    // of memory, read or written
  double seconds = 0;  // of computing, in parallel with memory
};
template <typename T>
KernelWork WorkOf(const T&) {
  return {};
}
inline KernelWork WorkOf(const Tensor& tensor) {
  return {tensor.null() ? 0.0 : static_cast<double>(tensor.size_bytes()), 0};
}
inline KernelWork WorkOf(absl::Span<const TensorCopy> copies) {
  KernelWork work;
  for (const TensorCopy& copy : copies) work.bytes += 2.0 * copy.to.size_bytes();
  return work;
}

template <typename... Args>
void SimulateKernel(const Args&... args) {
  SimulatedGpu* const gpu = SimulatedGpu::Current();
#ifndef BURST_WITH_CUDA
  if (gpu == nullptr) CudaUnavailable();
#endif
  KernelWork sum;
  for (const KernelWork& work : {WorkOf(args)...}) {
    sum.bytes += work.bytes;
    sum.seconds += work.seconds;
  }
  gpu->RunKernel(sum.bytes, sum.seconds);
}

}  // namespace burst

#ifdef BURST_WITH_CUDA
#define BURST_GPU_KERNEL(kernel, ...)                                               \
  (::burst::SimulatedGpu::Current() == nullptr ? ::burst::cuda::kernel(__VA_ARGS__) \
                                               : ::burst::SimulateKernel(__VA_ARGS__))
#else
#define BURST_GPU_KERNEL(kernel, ...) ::burst::SimulateKernel(__VA_ARGS__)
#endif
