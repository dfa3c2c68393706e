#include "burst/base/philox.h"
#include "model/ops/cuda/kernels.h"
#include "model/ops/cuda/packs.cuh"

namespace burst {
namespace cuda {
namespace {

constexpr int kThreads = 256;

// Channel 64 tile + 16 w + i takes word w of counter (16 tile + i, position, row), as on the CPU
// (dropout.cc). So N counters serve four packs of N channels, 16 channels apart: a thread's.
template <typename T, int N, bool kResidual>
__global__ void __launch_bounds__(kThreads)
    DropoutKernel(int64_t count, DropoutMask mask, int length, int width,
                  const int32_t* __restrict__ positions, const T* __restrict__ x,
                  const T* __restrict__ residual, T* __restrict__ y) {
  using A = Accumulator<T>;
  constexpr int kPerTile = 16 / N;  // threads
  const int64_t index = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (index >= count) return;
  const int per_token = (width + 63) / 64 * kPerTile;
  const int64_t token = index / per_token;
  const int rest = static_cast<int>(index - token * per_token);
  const int tile = rest / kPerTile, i = rest % kPerTile * N;
  const int64_t row = token / length;
  const uint32_t position = positions[token - row * length];
  const uint32_t mask_row = mask.first_row + static_cast<uint32_t>(row);

  Pack<T, N> in[4], skip[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const int channel = 64 * tile + 16 * w + i;
    if (channel >= width) break;
    in[w] = *AsPacks<T, N>(x + token * width + channel);
    if (kResidual) skip[w] = *AsPacks<T, N>(residual + token * width + channel);
  }
  uint32_t dropped = 0;  // bit w N + j: channel j of pack w
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const PhiloxCounter random = Philox(
        mask.key, PhiloxCounter{static_cast<uint32_t>(16 * tile + i + j), position, mask_row, 0});
#pragma unroll
    for (int w = 0; w < 4; ++w) dropped |= uint32_t{random[w] < mask.threshold} << (w * N + j);
  }
  const A scale = static_cast<A>(mask.scale);
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const int channel = 64 * tile + 16 * w + i;
    if (channel >= width) break;
    A out[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      out[j] = dropped >> (w * N + j) & 1 ? A(0) : ConvertTo<A>(in[w][j]) * scale;
      if (kResidual) out[j] += ConvertTo<A>(skip[w][j]);
    }
    *AsPacks<T, N>(y + token * width + channel) = ToPack<T, N>(out);
  }
}

}  // namespace

void DropoutApply(const DropoutMask& mask, const Tensor& positions, const Tensor& x,
                  const Tensor& residual, const Tensor& y) {
  if (x.numel() == 0) return;
  const int64_t length = x.dim(1), width = x.dim(2);
  DispatchPacks(x.dtype(), FitsPacks(width, {x, residual, y}), [&](auto zero, auto pack) {
    using T = decltype(zero);
    // Eight bf16 would need the words of eight counters at once, and registers for few warps.
    constexpr int N = std::min(4, decltype(pack)::value);
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
