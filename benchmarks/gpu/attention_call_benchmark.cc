// Measures the host's time of one call of BurstAttention on GPUs: checks, tensors, messages and
// launches. A rank is a thread with a GPU of its own. The tensors are small, so the GPU is never
// the slower side. Prints medians in microseconds for one rank and for all GPUs.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "absl/status/status.h"
#include "benchmarks/harness/harness.h"
#include "burst/attention/burst_attention.h"
#include "burst/base/print_error.h"
#include "burst/base/status.h"
#include "burst/comm/communicator.h"
#include "burst/comm/gpu/gpu_communicator.h"
#include "burst/device/device.h"
#include "burst/tensor/tensor.h"

namespace burst {
namespace {

constexpr int64_t kTokensPerRank = 256, kHeads = 8, kKVHeads = 4, kHeadDim = 128;
constexpr int kRepeats = 50, kCalls = 20;  // few enough for the queue of a stream

// Returns the median over repeats of the host's seconds of one of kCalls calls in a row.
template <typename Call>
absl::StatusOr<double> HostSeconds(Communicator& comm, Call call) {
  std::vector<double> seconds;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    SynchronizeDevice(DeviceType::kCuda);
    BURST_RETURN_IF_ERROR(comm.Barrier());
    const Stopwatch stopwatch;
    for (int i = 0; i < kCalls; ++i) BURST_RETURN_IF_ERROR(call());
    seconds.push_back(stopwatch.Seconds() / kCalls);
  }
  return Median(seconds);
}

absl::Status Run(Communicator& comm) {
  const int ranks = comm.world_size();
  for (const bool causal : {false, true}) {
    BURST_ASSIGN_OR_RETURN(const auto attention, BurstAttention::Create({}, &comm));
    BURST_ASSIGN_OR_RETURN(
        const AttentionSchedule schedule,
        attention->Schedule({ranks * kTokensPerRank}, causal ? Mask::Causal() : Mask::Full()));
    const int64_t length = schedule.shard().group_length();
    const auto tensor = [length](int64_t heads) {
      return Tensor::Zeros({1, length, heads, kHeadDim}, DType::kBFloat16, DeviceType::kCuda);
    };
    const AttentionCall call = {&schedule, tensor(kHeads), tensor(kKVHeads), tensor(kKVHeads)};
    AttentionResult result;
    BURST_ASSIGN_OR_RETURN(const double forward,
                           HostSeconds(comm, [&] { return attention->Forward(call, &result); }));
    AttentionGradients gradients = {result.out};
    BURST_ASSIGN_OR_RETURN(const double backward, HostSeconds(comm, [&] {
                             return attention->Backward(call, result, &gradients);
                           }));
    if (comm.rank() != 0) continue;
    std::printf("%5d | %6s | %7.1f | %8.1f\n", ranks, causal ? "causal" : "full", 1e6 * forward,
                1e6 * backward);
  }
  return absl::OkStatus();
}

absl::Status Main() {
  const int gpus = CudaDeviceCount();
  if (gpus < 1) return absl::FailedPreconditionError("this benchmark needs a GPU");
  std::printf("%s x %d\nranks |   mask | forward | backward, us\n", CudaDeviceName(0).c_str(),
              gpus);
  BURST_RETURN_IF_ERROR(RunCudaRanks(1, Run));
  return gpus == 1 ? absl::OkStatus() : RunCudaRanks(gpus, Run);
}

}  // namespace
}  // namespace burst

int main() {
  const absl::Status status = burst::Main();
  if (!status.ok()) burst::PrintError(status);
  return status.ok() ? 0 : 1;
}
