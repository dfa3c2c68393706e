// Ranks with a GPU each, connected by NCCL: as threads of this process, or as processes.
//
// Every channel has a stream of its own for GPU memory: a Post takes place there, between two
// events that order it among the work of the calling thread's stream. Between processes it is one
// group of ncclSend and ncclRecv; between threads, where their GPUs reach each other's memory,
// copies by the engines (peer_copies.h), which leave the multiprocessors to the kernels. Sums are
// NCCL's. No call waits for the GPU, allocates on it or starts a thread. Host memory, and with it
// AllGather, Barrier and Split, takes the path that the ranks met on: shared memory between
// threads, sockets between processes. It goes on working when a GPU does not.
#pragma once

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/comm/communicator.h"
#include "burst/comm/launch/process_launch.h"

namespace burst {

// Runs body(communicator) on `world_size` threads, rank r bound to GPU r, and waits for all of
// them. When a body returns an error the others are freed, also from waiting for their GPUs, and
// the first error by time is returned; if one of them does not come back within seconds, the
// program ends with that error and exit code 1. InvalidArgument where there are fewer GPUs than
// ranks; Unimplemented in a build without CUDA.
absl::Status RunCudaRanks(int world_size, const std::function<absl::Status(Communicator&)>& body);

// The communicator of the processes of a launch, this one among them, of which each has a GPU of
// its own: the calling thread's (ScopedCudaDevice). Collective. When a rank is lost or gives up,
// every process ends with exit code 1 within half a minute and says on stderr which rank it was: by
// the error that its calls return, or, if it does not come to one, without its help.
// Unavailable if not all processes come, FailedPrecondition if two of them have the same GPU.
absl::StatusOr<std::unique_ptr<Communicator>> CreateNcclCommunicator(const ProcessLaunch& launch);

// The GPU for this process: that of its local rank, or the only one that the launcher lets it see.
absl::StatusOr<int> GpuOfProcess(const ProcessLaunch& launch);

}  // namespace burst
