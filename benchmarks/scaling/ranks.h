// Ranks, inputs and clocks of the experiments.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "burst/comm/communicator.h"
#include "burst/device/device.h"
#include "burst/tensor/tensor.h"

namespace burst {

// Runs body(communicator) on ranks and returns the first error. Without `processes`, they are
// threads of this process: on the CPU with a pool of `threads` each, on cuda with a GPU each. With
// `share_gpus` and fewer GPUs than ranks, they share the GPUs. With `processes`, they are the first
// `ranks` of these; the others return at once. Collective then.
absl::Status RunBenchmarkRanks(DeviceType device, int ranks, int threads, bool share_gpus,
                               Communicator* processes,
                               const std::function<absl::Status(Communicator&)>& body);

// Standard normal numbers by (stream, element), repeated after some millions, which time cannot
// tell from more. On the device of the calling thread.
Tensor RandomForTiming(const Shape& shape, DType dtype, DeviceType device, uint64_t stream);

class Stopwatch {
 public:
  double Seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace burst
