#include "benchmarks/scaling/ranks.h"

#include <memory>

#include "burst/base/parallel.h"
#include "burst/base/status.h"
#include "burst/comm/gpu/gpu_communicator.h"
#include "burst/comm/thread/thread_communicator.h"

namespace burst {

absl::Status RunBenchmarkRanks(DeviceType device, int ranks, int threads, bool share_gpus,
                               Communicator* processes,
                               const std::function<absl::Status(Communicator&)>& body) {
  const auto with_pool = [&](Communicator& comm) {
    const ScopedThreadPool pool(threads);
    return body(comm);
  };
  if (processes != nullptr) {
    BURST_ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> group,
                           processes->Split(processes->rank() < ranks ? 0 : -1, /*key=*/0));
    return group == nullptr ? absl::OkStatus() : with_pool(*group);
  }
  if (device == DeviceType::kCpu) return RunRanks(ranks, with_pool);
  if (!share_gpus || ranks <= CudaDeviceCount()) return RunCudaRanks(ranks, with_pool);
  return RunRanks(ranks, [&](Communicator& comm) {
    const ScopedCudaDevice gpu(comm.rank() % CudaDeviceCount(), comm.rank());
    return with_pool(comm);
  });
}

}  // namespace burst
