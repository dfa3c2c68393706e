// The device that a test runs on. "Every CPU test that makes sense runs on CUDA from the same
// source": the BUILD file compiles it once more with BURST_TEST_CUDA.
#pragma once

#include "burst/device/device.h"

namespace burst {

#ifdef BURST_TEST_CUDA
inline constexpr DeviceType kTestDevice = DeviceType::kCuda;
#else
inline constexpr DeviceType kTestDevice = DeviceType::kCpu;
#endif

}  // namespace burst
