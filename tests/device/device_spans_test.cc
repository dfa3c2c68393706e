// Tests spans of time, by a simulated GPU's clock.
#include "burst/device/device_spans.h"

#include <gtest/gtest.h>

#include "burst/device/simulated_gpu.h"

namespace burst {
namespace {

constexpr double kTick = 2e-9;  // s: a time is kept in whole ns

TEST(DeviceSpans, AreBusyAndSpanAllOfThem) {
  GpuModel model;
  model.bandwidth = 1e12;
  SimulatedGpu gpu(model);
  const ScopedSimulatedGpu scoped(&gpu);
  DeviceSpans times(DeviceType::kCuda);
  EXPECT_EQ(times.Busy(), 0);
  EXPECT_EQ(times.Span(), 0);
  for (int step = 0; step < 2; ++step) {  // the second one forgets the first
    times.Clear();
    gpu.RunKernel(0, 7);  // before the first span
    for (int span = 0; span < 3; ++span) {
      gpu.WaitUntil(gpu.now() + 0.5);
      times.Begin();
      gpu.RunKernel(0, 1 + span + step);
      gpu.RunKernel(0, 0.25);
      times.End();
    }
    gpu.RunKernel(0, 11);  // after the last one
    const double busy = 1 + 2 + 3 + 3 * 0.25 + 3 * step;
    EXPECT_NEAR(times.Busy(), busy, 3 * kTick);
    EXPECT_NEAR(times.Span(), busy + 2 * 0.5, kTick);
  }
}

TEST(DeviceSpans, AreBounded) {
  SimulatedGpu gpu{GpuModel()};
  const ScopedSimulatedGpu scoped(&gpu);
  DeviceSpans times(DeviceType::kCuda, /*most=*/2);
  for (const int spans : {2, 3, 1}) {
    times.Clear();
    for (int span = 0; span < spans; ++span) {
      times.Begin();
      gpu.WaitUntil(gpu.now() + 1);
      times.End();
    }
    EXPECT_EQ(times.complete(), spans <= 2);
    EXPECT_NEAR(times.Busy(), spans == 1 ? 1 : 2, 3 * kTick);
  }
}

}  // namespace
}  // namespace burst
