// Controls when the code of kernels is loaded onto a GPU.
//
// The driver loads code when it is first needed, and waits for that until the GPU runs nothing.
// Suppose that a kernel on that GPU waits for another rank (NCCL's do), and that rank waits for
// this host thread: then all wait for ever. So no code may be loaded while such a kernel runs:
//
// - The program's own kernels are all loaded when a thread first uses a GPU, before there are
//   messages.
// - Libraries load theirs as they please (cuBLASLt: when a GEMM first needs a kernel). Before such
//   a call, AwaitOtherRanks waits, outside of the driver, until this GPU has no kernel that waits
//   for another rank. Such a kernel ends without this host thread: ranks enqueue their messages in
//   one order, and whatever this rank enqueued, the others will enqueue, too.
// - With CUDA_MODULE_LOADING=EAGER a library's code is loaded onto all GPUs of the process at once,
//   other ranks' GPUs too, whose kernels may wait for this thread. So the variable is set to LAZY.
#pragma once

#include <cuda_runtime.h>

namespace burst {
namespace cuda {

// Loads all kernels of this program that the calling thread's GPU can run.
void LoadKernels();

// Adds a stream of the calling thread's GPU whose kernels wait for other ranks, or removes it.
void AddMessageStream(cudaStream_t stream);
void RemoveMessageStream(cudaStream_t stream);

// Returns when no kernel on the calling thread's message streams is unfinished. Call it before
// anything that may load code.
void AwaitOtherRanks();

}  // namespace cuda
}  // namespace burst
