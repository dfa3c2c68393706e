#include "model/ops/cuda/kernels.h"
#include "model/ops/cuda/vectorized.cuh"

namespace burst {
namespace cuda {
namespace {

constexpr int kThreads = 256;

// Computes Philox (burst/base/philox.h) in 32-bit instructions. nvcc would turn its 64-bit products
// into 64-bit exclusive ors, which are twice the work.
__device__ inline uint4 Random(uint64_t key, uint4 counter) {
  uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    uint32_t low0, high0, low1, high1;
    asm("{ .reg .u64 p; mul.wide.u32 p, %2, %3; mov.b64 {%0, %1}, p; }"
        : "=r"(low0), "=r"(high0)
        : "r"(counter.x), "r"(0xD2511F53));
    asm("{ .reg .u64 p; mul.wide.u32 p, %2, %3; mov.b64 {%0, %1}, p; }"
        : "=r"(low1), "=r"(high1)
        : "r"(counter.z), "r"(0xCD9E8D57));
    counter = {high1 ^ counter.y ^ key0, low1, high0 ^ counter.w ^ key1, low0};
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return counter;
}

// Channel 64 tile + 16 w + i takes word w of counter (16 tile + i, position, row), as on the CPU
// (dropout.cc). So N counters serve a thread's four vectors of N channels, 16 channels apart.
template <typename T, int N, bool kResidual>
__global__ void __launch_bounds__(kThreads)
    DropoutKernel(int64_t count, DropoutMask mask, int length, int width,
                  const int32_t* __restrict__ positions, const T* __restrict__ x,
                  const T* __restrict__ residual, T* __restrict__ y) {
  using A = Accumulator<T>;
  constexpr int kPerTile = 16 / N;  // threads of a tile
  const uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= count) return;
  const uint32_t per_token = (width + 63) / 64 * kPerTile, token = index / per_token;
  const uint32_t rest = index - token * per_token, tile = rest / kPerTile;
  const uint32_t i = rest % kPerTile * N, row = token / length;
  const uint32_t position = positions[token - row * length], mask_row = mask.first_row + row;
  const int channel = 64 * tile + i;
  const int64_t at = token * int64_t{width} + channel;

  Words<T, N> in[4], skip[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if (channel + 16 * w >= width) break;
    in[w] = Load<N>(x + at + 16 * w);
    if (kResidual) skip[w] = Load<N>(residual + at + 16 * w);
  }
  uint32_t words[4][N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const uint4 random = Random(mask.key, {16 * tile + i + j, position, mask_row, 0});
    words[0][j] = random.x;
    words[1][j] = random.y;
    words[2][j] = random.z;
    words[3][j] = random.w;
  }
  const A scale = static_cast<A>(mask.scale);
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if (channel + 16 * w >= width) break;
    A out[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      out[j] = words[w][j] < mask.threshold ? A(0) : in[w][j] * scale;
      if (kResidual) out[j] += skip[w][j];
    }
    StoreRounded<T, N>(out, y + at + 16 * w);
  }
}

}  // namespace

void DropoutApply(const DropoutMask& mask, const Tensor& positions, const Tensor& x,
                  const Tensor& residual, const Tensor& y) {
  if (x.numel() == 0) return;
  const int64_t length = x.dim(1), width = x.dim(2);
  DispatchVectors(x.dtype(), FitsVectors(width, {x, residual, y}), [&](auto zero, auto vec_size) {
    using T = decltype(zero);
    // Eight bf16 would need the words of eight counters at once, and registers of many warps.
    constexpr int N = std::min(4, decltype(vec_size)::value);
    const int64_t count = x.dim(0) * length * ((width + 63) / 64) * (16 / N);
    const auto kernel = residual.null() ? DropoutKernel<T, N, false> : DropoutKernel<T, N, true>;
    kernel<<<BlocksFor(count, kThreads), kThreads, 0, CurrentStream()>>>(
        count, mask, static_cast<int>(length), static_cast<int>(width), Data<int32_t>(positions),
        Data<T>(x), Data<T>(residual), Data<T>(y));
  });
  BURST_CUDA_CHECK_LAUNCH("DropoutApply");
}

}  // namespace cuda
}  // namespace burst
