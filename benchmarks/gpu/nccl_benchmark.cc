// Compares a transfer around the ring and an all-reduce through the communicator with NCCL alone. A
// rank owns one GPU. Ranks are threads on all GPUs of this machine, whose transfers are copies by
// the copy engines. Or they are processes of a launcher (mpirun, torchrun, srun), whose messages go
// over NCCL.
//
// GB/s of a transfer counts the bytes that a rank sends. GB/s of an all-reduce over G ranks counts
// 2(G-1)/G of the tensor's bytes, the least that a rank must send. The column us is the host's time
// in a Post and a Wait.
#include <cuda_runtime.h>
#include <nccl.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>

#include "absl/status/status.h"
#include "benchmarks/harness/harness.h"
#include "burst/base/check.h"
#include "burst/base/print_error.h"
#include "burst/base/status.h"
#include "burst/comm/communicator.h"
#include "burst/comm/gpu/gpu_communicator.h"
#include "burst/comm/launch/process_launch.h"
#include "burst/device/cuda.h"
#include "burst/device/device.h"
#include "burst/tensor/tensor.h"

namespace burst {
namespace {

#define NCCL_CHECK(call) BURST_CHECK_EQ(call, ncclSuccess)

struct Time {
  double seconds = 0;       // the time of a step
  double host_seconds = 0;  // the host's time to queue it
};

// Returns the mean of many steps, after a few untimed ones. step() queues one on the thread's
// stream.
template <typename Step>
absl::StatusOr<Time> Measure(Communicator& comm, int64_t bytes, Step step) {
  const int steps = bytes < (1 << 24) ? 100 : 20;
  for (int i = 0; i < 3; ++i) BURST_RETURN_IF_ERROR(step());
  SynchronizeDevice(DeviceType::kCuda);
  BURST_RETURN_IF_ERROR(comm.Barrier());
  const Stopwatch stopwatch;
  for (int i = 0; i < steps; ++i) BURST_RETURN_IF_ERROR(step());
  Time time;
  time.host_seconds = stopwatch.Seconds() / steps;
  SynchronizeDevice(DeviceType::kCuda);
  BURST_RETURN_IF_ERROR(comm.Barrier());
  time.seconds = stopwatch.Seconds() / steps;
  return time;
}

double FreeMiB() {
  size_t free = 0, total = 0;
  BURST_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return static_cast<double>(free) / (1 << 20);
}

absl::Status Run(Communicator& comm) {
  const int ranks = comm.world_size(), next = (comm.rank() + 1) % ranks,
            last = (comm.rank() + ranks - 1) % ranks;
  const bool prints = comm.rank() == 0;

  const double before = FreeMiB();
  const Stopwatch stopwatch;
  BURST_ASSIGN_OR_RETURN(const auto group, comm.Split(0, comm.rank()));
  if (prints) {
    std::printf("%d ranks; a group of them takes %.2f s and %.0f MiB of each GPU\n", ranks,
                stopwatch.Seconds(), before - FreeMiB());
  }
  ncclUniqueId id;
  if (comm.rank() == 0) {
    NCCL_CHECK(ncclGetUniqueId(&id));
  }
  BURST_RETURN_IF_ERROR(comm.Broadcast(&id, sizeof(id), 0));
  ncclComm_t alone;
  const double without = FreeMiB();
  NCCL_CHECK(ncclCommInitRank(&alone, ranks, id, comm.rank()));
  const cudaStream_t stream = cuda::CurrentStream();
  const double made = FreeMiB();
  const Tensor one = Tensor::Zeros({2}, DType::kFloat32, DeviceType::kCuda);
  NCCL_CHECK(ncclGroupStart());
  NCCL_CHECK(ncclRecv(one.Slice(0, 0, 1).raw_data(), 4, ncclInt8, last, alone, stream));
  NCCL_CHECK(ncclSend(one.Slice(0, 1, 1).raw_data(), 4, ncclInt8, next, alone, stream));
  NCCL_CHECK(ncclGroupEnd());
  const double connected = FreeMiB();
  NCCL_CHECK(ncclAllReduce(one.raw_data(), one.raw_data(), 2, ncclFloat32, ncclSum, alone, stream));
  SynchronizeDevice(DeviceType::kCuda);
  if (prints) {
    std::printf(
        "an ncclComm_t takes %.0f MiB, its connections around a ring %.0f, those of an all-reduce "
        "%.0f\n",
        without - made, made - connected, connected - FreeMiB());
  }

  if (prints) {
    std::printf("%9s | %21s %8s | %21s %8s\n%9s | %6s %6s %7s %8s | %6s %6s %7s %8s\n", "",
                "transfer, GB/s", "us", "all-reduce, GB/s", "us", "MiB", "NCCL", "ours", "ratio",
                "", "NCCL", "ours", "ratio", "");
  }
  for (int64_t mib : {1, 4, 16, 64, 256}) {
    const int64_t bytes = mib << 20;
    const Tensor a = Tensor::Zeros({bytes / 4}, DType::kFloat32, DeviceType::kCuda);
    const Tensor b = Tensor::ZerosLike(a);
    const SendBuffer send = {a.raw_data(), bytes, next, DeviceType::kCuda};
    const ReceiveBuffer receive = {b.raw_data(), bytes, last, DeviceType::kCuda};

    BURST_ASSIGN_OR_RETURN(
        const Time peer_transfer, Measure(comm, bytes, [&] {
          NCCL_CHECK(ncclGroupStart());
          NCCL_CHECK(ncclRecv(b.raw_data(), bytes, ncclInt8, last, alone, stream));
          NCCL_CHECK(ncclSend(a.raw_data(), bytes, ncclInt8, next, alone, stream));
          NCCL_CHECK(ncclGroupEnd());
          return absl::OkStatus();
        }));
    BURST_ASSIGN_OR_RETURN(
        const Time transfer, Measure(comm, bytes, [&] {
          BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {&send, 1}, {&receive, 1}));
          return comm.Wait(Channel::kRead);
        }));
    BURST_ASSIGN_OR_RETURN(const Time peer_reduce, Measure(comm, bytes, [&] {
                             NCCL_CHECK(ncclAllReduce(a.raw_data(), a.raw_data(), a.numel(),
                                                      ncclFloat32, ncclSum, alone, stream));
                             return absl::OkStatus();
                           }));
    BURST_ASSIGN_OR_RETURN(const Time reduce,
                           Measure(comm, bytes, [&] { return comm.AllReduceSum(a); }));
    if (!prints) continue;
    const double gb = bytes * 1e-9, sent = gb * 2 * (ranks - 1) / ranks;
    std::printf("%9d | %6.1f %6.1f %7.3f %8.1f | %6.1f %6.1f %7.3f %8.1f\n", static_cast<int>(mib),
                gb / peer_transfer.seconds, gb / transfer.seconds,
                peer_transfer.seconds / transfer.seconds, 1e6 * transfer.host_seconds,
                sent / peer_reduce.seconds, sent / reduce.seconds,
                peer_reduce.seconds / reduce.seconds, 1e6 * reduce.host_seconds);
  }
  NCCL_CHECK(ncclCommDestroy(alone));
  return absl::OkStatus();
}

absl::Status RunProcess(const ProcessLaunch& launch) {
  BURST_ASSIGN_OR_RETURN(const int gpu, GpuOfProcess(launch));
  const ScopedCudaDevice device(gpu, launch.rank);
  BURST_ASSIGN_OR_RETURN(const auto comm, CreateGpuCommunicator(launch));
  const absl::Status status = Run(*comm);
  if (!status.ok()) comm->Abort(status);
  return status;
}

absl::Status Main() {
  BURST_ASSIGN_OR_RETURN(const std::optional<ProcessLaunch> launch,
                         DetectProcessLaunch(std::getenv));
  if (launch.has_value()) return RunProcess(*launch);
  if (CudaDeviceCount() < 2) return absl::FailedPreconditionError("needs two GPUs");
  std::printf("%s x %d\n", CudaDeviceName(0).c_str(), CudaDeviceCount());
  return RunCudaRanks(CudaDeviceCount(), Run);
}

}  // namespace
}  // namespace burst

int main() {
  const absl::Status status = burst::Main();
  if (!status.ok()) burst::PrintError(status);
  return status.ok() ? 0 : 1;
}
