// Tests the times of passes, by a simulated GPU's clock.
#include "train/pipeline/pass_times.h"

#include <gtest/gtest.h>

#include "burst/device/simulated_gpu.h"

namespace burst {
namespace {

constexpr double kTick = 2e-9;  // s: a time is kept in whole ns

TEST(PassTimes, AreBusyInPassesAndSpanAllOfThem) {
  GpuModel model;
  model.bandwidth = 1e12;
  SimulatedGpu gpu(model);
  const ScopedSimulatedGpu scoped(&gpu);
  PassTimes times(DeviceType::kCuda);
  EXPECT_EQ(times.Busy(), 0);
  EXPECT_EQ(times.Span(), 0);
  for (int step = 0; step < 2; ++step) {  // the second one forgets the first
    times.Clear();
    gpu.RunKernel(0, 7);  // before the first pass
    for (int pass = 0; pass < 3; ++pass) {
      gpu.WaitUntil(gpu.now() + 0.5);
      times.Begin();
      gpu.RunKernel(0, 1 + pass + step);
      gpu.RunKernel(0, 0.25);
      times.End();
    }
    gpu.RunKernel(0, 11);  // after the last one
    const double busy = 1 + 2 + 3 + 3 * 0.25 + 3 * step;
    EXPECT_NEAR(times.Busy(), busy, 3 * kTick);
    EXPECT_NEAR(times.Span(), busy + 2 * 0.5, kTick);
  }
}

}  // namespace
}  // namespace burst
