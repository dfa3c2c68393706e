// Puts a part of a rank's work under the CUDA profiler. `nsys profile
// --capture-range=cudaProfilerApi` records from the first rank of the process that begins to the
// last one that ends. Meanwhile the host's timeline has a nested NVTX range for every step, phase,
// layer and op that the rank reaches (burst/base/progress.h): "step 12", "forward", "layer 3",
// "attention".
#pragma once

#include <memory>

#include "burst/device/device.h"

namespace burst {

class ProfiledRange {
 public:
  virtual ~ProfiledRange() = default;
};

// Begins on the calling thread, which is a rank, for as long as the result lives. The device's work
// so far should be done. Null on the CPU.
std::unique_ptr<ProfiledRange> Profile(DeviceType device);

}  // namespace burst
