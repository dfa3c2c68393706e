#include "benchmarks/scaling/ranks.h"

#include <algorithm>
#include <memory>

#include "burst/base/parallel.h"
#include "burst/base/philox.h"
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

Tensor RandomForTiming(const Shape& shape, DType dtype, DeviceType device, uint64_t stream) {
  constexpr int64_t kDistinct = 1 << 22;
  const Tensor tensor = Tensor::Empty(shape, dtype, device);
  const Tensor flat = tensor.View({-1});
  const int64_t distinct = std::min(kDistinct, flat.numel());
  const Tensor numbers = Tensor::Empty({distinct}, DType::kFloat32);
  float* data = numbers.data<float>();
  ParallelFor((distinct + 1) / 2, 1 << 12, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const PhiloxCounter bits = Philox(/*key=*/1, stream, i);
      const auto pair = NormalFromBits(bits[0], bits[1]);
      data[2 * i] = static_cast<float>(pair[0]);
      if (2 * i + 1 < distinct) data[2 * i + 1] = static_cast<float>(pair[1]);
    }
  });
  const Tensor converted = numbers.To(dtype).To(device);
  for (int64_t begin = 0; begin < flat.numel(); begin += distinct) {
    const int64_t length = std::min(distinct, flat.numel() - begin);
    flat.Slice(0, begin, length).CopyFrom(converted.Slice(0, 0, length));
  }
  return tensor;
}

}  // namespace burst
