#include "train/report/peak_flops.h"

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "burst/base/philox.h"
#include "burst/tensor/gpu_kernel.h"
#include "model/ops/cuda/matmul.h"
#include "model/ops/matmul.h"

namespace burst {
namespace {

constexpr double kSeconds = 0.2;

// Returns 2 size^3 divided by the shortest time of one `multiply()`, which returns after it has the
// result.
template <typename Multiply>
double BestRate(double size, Multiply multiply) {
  using Clock = std::chrono::steady_clock;
  double best_seconds = 1e30;
  multiply();
  const Clock::time_point start = Clock::now();
  for (Clock::time_point before = start, after;
       std::chrono::duration<double>(before - start).count() < kSeconds; before = after) {
    multiply();
    after = Clock::now();
    best_seconds = std::min(best_seconds, std::chrono::duration<double>(after - before).count());
  }
  return 2 * size * size * size / best_seconds;
}

// Returns random numbers, because GEMMs of zeros run faster than real ones.
Tensor RandomMatrix(int64_t size, uint64_t seed, DeviceType device, DType dtype) {
  const Tensor matrix = Tensor::Empty({size, size}, DType::kFloat32);
  for (int64_t i = 0; i < matrix.numel(); i += 4) {
    const PhiloxCounter bits = Philox(seed, /*stream=*/0, i);
    for (int j = 0; j < 4; ++j) {
      matrix.data<float>()[i + j] = static_cast<float>(UniformFromBits(bits[j]) - 0.5);
    }
  }
  return matrix.To(device).To(dtype);
}

}  // namespace

double MeasurePeakFlops(DeviceType device, DType dtype) {
  if (device == DeviceType::kCpu) {
    // Three matrices fit in the caches, and larger ones run at the same rate. The CPU multiplies
    // bfloat16 in float32.
    constexpr int64_t kSize = 768;
    const Tensor a = RandomMatrix(kSize, 1, device, DType::kFloat32),
                 b = RandomMatrix(kSize, 2, device, DType::kFloat32), c = Tensor::EmptyLike(a);
    return BestRate(kSize, [&] {
      MatMul(AsMatrix<float>(a, kSize), AsMatrix<float>(b, kSize), AsMatrix<float>(c, kSize),
             Into::kAssign);
    });
  }
  // A product takes milliseconds, so waiting for its end costs nothing.
  constexpr int64_t kSize = 8192;
  // Every row of blocks has the same numbers, because drawing all of them would take longer than
  // measuring.
  const auto matrix = [&](uint64_t seed) {
    constexpr int64_t kBlock = 512;
    const Tensor block = RandomMatrix(kBlock, seed, device, dtype);
    const Tensor all = Tensor::Empty({kSize, kSize}, dtype, device);
    for (int64_t i = 0; i < kSize; i += kBlock) {
      for (int64_t j = 0; j < kSize; j += kBlock) {
        all.Slice(0, i, kBlock).Slice(1, j, kBlock).CopyFrom(block);
      }
    }
    return all;
  };
  const Tensor a = matrix(1), b = matrix(2), c = Tensor::EmptyLike(a);
  return BestRate(kSize, [&] {
    BURST_GPU_KERNEL(MatMul, cuda::MatMulParams{cuda::AsMatrix(a, kSize), cuda::AsMatrix(b, kSize),
                                                cuda::AsMatrix(c, kSize)});
    SynchronizeDevice(device);
  });
}

}  // namespace burst
