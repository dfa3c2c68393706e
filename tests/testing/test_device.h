// Names the device on which a test runs. device_test (tests/defs.bzl) compiles one source twice:
// for the CPU, and with BURST_TEST_CUDA for a GPU.
#pragma once

#include "burst/device/device.h"

namespace burst {

#ifdef BURST_TEST_CUDA
inline constexpr DeviceType kTestDevice = DeviceType::kCuda;
#else
inline constexpr DeviceType kTestDevice = DeviceType::kCpu;
#endif

}  // namespace burst
