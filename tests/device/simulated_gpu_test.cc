#include "burst/device/simulated_gpu.h"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <thread>
#include <vector>

#include "burst/base/progress.h"
#include "burst/device/event.h"
#include "burst/tensor/gpu_kernel.h"
#include "burst/tensor/tensor.h"

namespace burst {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

GpuModel Model() {
  GpuModel model;
  model.bandwidth = 1e12;
  model.bf16 = 1e14;
  model.kernel_seconds = 1e-6;
  return model;
}

Tensor OfBytes(int64_t bytes) {
  return Tensor::Empty({bytes / 4}, DType::kFloat32, DeviceType::kCuda);
}

TEST(SimulatedGpu, CountsMemoryAsCudaWould) {
  SimulatedGpu gpu(Model());
  const ScopedSimulatedGpu scoped(&gpu);
  {
    const Tensor a = OfBytes(4), b = OfBytes(200 * kMiB);
    EXPECT_EQ(gpu.memory().bytes_in_use, 512 + 200 * kMiB);
    Tensor c = OfBytes(kMiB);
    c = Tensor();
    EXPECT_EQ(gpu.memory().bytes_in_use, 512 + 200 * kMiB);
  }
  EXPECT_EQ(gpu.memory().bytes_in_use, 0);
  EXPECT_EQ(gpu.memory().peak_bytes, 512 + 201 * kMiB);
  EXPECT_EQ(GetMemoryStats(DeviceType::kCuda).peak_bytes, 512 + 201 * kMiB);
  EXPECT_EQ(gpu.largest_allocation(), 200 * kMiB);
  ResetPeakMemory(DeviceType::kCuda);
  EXPECT_EQ(gpu.memory().peak_bytes, 0);
  EXPECT_EQ(gpu.largest_allocation(), 0);
}

// The tensor has 40 TB, for which the host has no page.
TEST(SimulatedGpu, HasMoreMemoryThanTheHost) {
  SimulatedGpu gpu(Model());
  const ScopedSimulatedGpu scoped(&gpu);
  std::vector<Tensor> tensors;
  for (int i = 0; i < 40; ++i) {
    tensors.push_back(
        Tensor::Zeros({int64_t{250'000'000'000}}, DType::kFloat32, DeviceType::kCuda));
  }
  EXPECT_GE(gpu.memory().bytes_in_use, 40'000'000'000'000);
  const Tensor sum = tensors[0].To(DType::kFloat64);
  sum.Scale(2);
}

TEST(SimulatedGpu, TellsWhatWasAllocatedAtThePeak) {
  SimulatedGpu gpu(Model());
  const ScopedSimulatedGpu scoped(&gpu);
  const ScopedRankProgress rank(0);
  const Tensor kept = OfBytes(kMiB);
  {
    const ScopedPhase phase("forward");
    ReachOp(0, "attention");
    const Tensor early = OfBytes(2 * kMiB);
    ReachOp(1, "attention");
    const Tensor more = OfBytes(3 * kMiB);
  }
  const Tensor later = OfBytes(2 * kMiB);  // less than before
  const std::map<std::string, int64_t> expected = {{"start", kMiB},
                                                   {"forward, attention", 5 * kMiB}};
  EXPECT_EQ(gpu.AtPeak(), expected);
}

// Simulated memory keeps masks and tokens that the host copies to it. Copies of other memory are
// zeros.
TEST(SimulatedGpu, KeepsSmallMemory) {
  SimulatedGpu gpu(Model());
  const ScopedSimulatedGpu scoped(&gpu);
  const std::vector<int32_t> values = {3, 1, 4, 1, 5};
  const Tensor tensor = Tensor::FromVector(values, {5}, DeviceType::kCuda);
  EXPECT_EQ(tensor.ToVector<int32_t>(), values);
  const Tensor large = OfBytes(2 * SimulatedGpu::kBackedBytes);
  EXPECT_FALSE(SimulatedGpu::IsBacked(large.raw_data()));
  EXPECT_EQ(large.Slice(0, 0, 3).ToVector<float>(), std::vector<float>(3, 0));
}

// A kernel moves each of its arguments once, at 1 TB/s, after 1 us.
TEST(SimulatedGpu, KernelsTakeTheTimeOfTheirMemory) {
  SimulatedGpu gpu(Model());
  const ScopedSimulatedGpu scoped(&gpu);
  const Tensor a = OfBytes(4'000'000), b = OfBytes(4'000'000);
  const double begin = gpu.now();
  a.Add(b);
  EXPECT_NEAR(gpu.now() - begin, 1e-6 + 8e6 / 1e12, 1e-12);
}

TEST(SimulatedGpu, EventsAreOnItsClock) {
  SimulatedGpu gpu(Model());
  const ScopedSimulatedGpu scoped(&gpu);
  DeviceEvent begin(DeviceType::kCuda), end(DeviceType::kCuda);
  begin.Record();
  gpu.RunKernel(/*bytes=*/0, /*seconds=*/3600);
  end.Record();
  EXPECT_NEAR(end.SecondsSince(begin), 3600, 1e-3);
}

TEST(SimulatedGpu, IsOneThreads) {
  SimulatedGpu gpu(Model());
  {
    const ScopedSimulatedGpu scoped(&gpu);
    EXPECT_EQ(SimulatedGpu::Current(), &gpu);
    Tensor tensor = OfBytes(kMiB);
    std::thread other([&] {
      EXPECT_EQ(SimulatedGpu::Current(), nullptr);
      tensor = Tensor();  // may be freed anywhere
    });
    other.join();
    EXPECT_EQ(gpu.memory().bytes_in_use, 0);
  }
  EXPECT_EQ(SimulatedGpu::Current(), nullptr);
}

}  // namespace
}  // namespace burst
