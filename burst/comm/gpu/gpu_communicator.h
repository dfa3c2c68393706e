// Ranks that own one GPU each: threads of this process, or processes of a launcher.
//
// What carries            between threads                  between processes
//   messages, GPU memory  copy engines (peer_copies.h)     NCCL (nccl_link.h); mail (peer_mail.h)
//   collectives of GPUs   NCCL                             NCCL
//   host memory           shared memory (comm/thread)      sockets (comm/tcp)
//
// Threads whose GPUs cannot access each other's memory exchange messages over NCCL too. Copy
// engines leave the multiprocessors to the kernels; NCCL's messages are kernels themselves. Mail
// carries short messages of a library's ranks on one host.
// Barrier, AllGather, Split and Abort use host memory, and so work even when a GPU does not.
//
// Every channel has its own streams for GPU memory. A Post takes place on them, between events that
// order it among the work of the calling thread's stream. No call waits for the GPU, allocates GPU
// memory or starts a thread.
#pragma once

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/comm/communicator.h"
#include "burst/comm/launch/process_launch.h"
#include "burst/comm/tcp/peer_connections.h"

namespace burst {

// Runs body(communicator) on `world_size` threads, rank r on GPU r, and waits for all of them. When
// a body returns an error, the other ranks are freed, even those that wait for their GPUs, and the
// first error by time is returned. If a rank does not return within seconds, the program ends with
// that error and exit code 1. InvalidArgument where there are fewer GPUs than ranks; Unimplemented
// in a build without CUDA.
absl::Status RunCudaRanks(int world_size, const std::function<absl::Status(Communicator&)>& body);

// Creates the communicator of all processes of a launch, for this process and the GPU of the
// calling thread (ScopedCudaDevice). Collective. When a rank is lost or gives up, every process
// names that rank on stderr and ends with exit code 1 within half a minute. A process's pending or
// next call returns the error; a process that makes no call is ended. Unavailable if not all
// processes come; FailedPrecondition if two processes use the same GPU.
absl::StatusOr<std::unique_ptr<Communicator>> CreateGpuCommunicator(const ProcessLaunch& launch);

// Creates the communicator for a library inside another program, which it never ends. `connect`
// makes the communicator of host memory, with the options it is given. After a failure NCCL's
// kernels and waits for mail end on the GPU, and calls return the error. Tensors that the GPU has
// written since are undefined. The ranks post on kRead and kGradient in one order, because the
// streams of both may share a queue of the GPU.
using HostConnector =
    std::function<absl::StatusOr<std::unique_ptr<Communicator>>(TcpOptions options)>;
absl::StatusOr<std::unique_ptr<Communicator>> CreateGpuCommunicator(const HostConnector& connect);

// Returns the GPU for this process: the GPU of its local rank, or the only GPU that the launcher
// lets it see. FailedPrecondition if there is neither.
absl::StatusOr<int> GpuOfProcess(const ProcessLaunch& launch);

}  // namespace burst
