// Tests attention on a simulated GPU: the time that a plan counts for a mask.

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "burst/device/simulated_gpu.h"
#include "burst/kernels/flash_attention.h"
#include "burst/tensor/tensor.h"

namespace burst {
namespace {

GpuModel Model() {
  GpuModel model;
  model.bandwidth = 1e18;  // only matrix products take time
  model.attention_forward = 1e12;
  model.attention_backward = 5e11;
  return model;
}

// A block of a list takes the time of its 128 x 128 pairs. The work that does not depend on the
// mask takes the time that it takes without one.
TEST(SimulatedAttention, CountsListedBlocks) {
  constexpr int64_t kBatch = 2, kHeads = 4, kDim = 128, kLength = 4 * kListBlock;
  SimulatedGpu gpu(Model());
  const ScopedSimulatedGpu scoped(&gpu);
  const AttentionKernels& kernels = KernelsOf(DeviceType::kCuda);  // the simulated kernels
  FlashAttentionShape shape{kBatch, kLength, kLength, kHeads,           kHeads,
                            kDim,   kDim,    1,       DType::kBFloat16, {}};
  ASSERT_TRUE(kernels.TakesBlocks(shape.dtype, kDim));
  const auto seconds = [&](const std::vector<int32_t>& key_begin, int64_t key_stride,
                           bool forward) {
    const Tensor begins =
        Tensor::FromVector(key_begin, {static_cast<int64_t>(key_begin.size())}, DeviceType::kCuda);
    shape.blocks = {};
    if (!key_begin.empty()) shape.blocks.key_begin = static_cast<const int32_t*>(begins.raw_data());
    shape.blocks.key_stride = key_stride;
    const double start = gpu.now();
    if (forward) {
      FlashForwardParams params;
      params.shape = shape;
      kernels.Forward(params);
    } else {
      FlashBackwardParams params;
      params.shape = shape;
      kernels.Backward(params);
    }
    return gpu.now() - start;
  };
  for (const bool forward : {true, false}) {
    // The forward has two products and the backward five, with two operations a number.
    const double block = 2.0 * (forward ? 2 : 5) * kListBlock * kListBlock * kDim /
                         (forward ? Model().attention_forward : Model().attention_backward);
    const double all = seconds({}, 0, forward), none = seconds({0, 0, 0, 0, 0}, 0, forward);
    EXPECT_NEAR(all - none, kBatch * kHeads * 16 * block, 1e-6 * all);
    EXPECT_NEAR(seconds({0, 1, 1, 4, 5}, 0, forward) - none, kBatch * kHeads * 5 * block,
                1e-6 * all);
    // The lists of the batch rows have three blocks, and one.
    EXPECT_NEAR(seconds({0, 1, 1, 3, 3, 3, 3, 3, 4, 4}, 5, forward) - none, kHeads * 4 * block,
                1e-6 * all);
  }
}

// In fp8 attention is faster, for heads that its kernels serve.
TEST(SimulatedAttention, Fp8IsFasterWhereItIsServed) {
  constexpr int64_t kDim = 128, kLength = 1024;
  SimulatedGpu gpu(Model());
  const ScopedSimulatedGpu scoped(&gpu);
  const AttentionKernels& kernels = KernelsOf(DeviceType::kCuda);
  EXPECT_TRUE(kernels.CheckFp8(DeviceType::kCuda, DType::kBFloat16, kDim).ok());
  EXPECT_FALSE(kernels.CheckFp8(DeviceType::kCuda, DType::kBFloat16, 64).ok());
  EXPECT_FALSE(kernels.CheckFp8(DeviceType::kCuda, DType::kFloat32, kDim).ok());
  FlashForwardParams params;
  params.shape = {1, kLength, kLength, 2, 2, kDim, kDim, 1, DType::kBFloat16, {}};
  const auto seconds = [&] {
    const double start = gpu.now();
    kernels.Forward(params);
    return gpu.now() - start;
  };
  const double plain = seconds();
  params.fp8 = true;
  EXPECT_LT(seconds(), plain);
}

}  // namespace
}  // namespace burst
