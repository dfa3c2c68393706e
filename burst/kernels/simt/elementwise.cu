// The memory-bound kernels around the backward: delta before it, sums to bfloat16 after it.
#include "burst/kernels/simt/flash_attention_simt.h"
#include "burst/tensor/dispatch.cuh"

namespace burst {
namespace simt {
namespace {

using cuda::Accumulator;
using cuda::bf16;
using cuda::ConvertTo;
using cuda::Pack;

constexpr int kThreads = 256;
constexpr int kWarpsPerBlock = kThreads / 32;

template <typename T>
__device__ T* Row(const AttentionOperand& operand, int64_t b, int64_t i, int64_t h) {
  return static_cast<T*>(operand.data) + b * operand.batch_stride + i * operand.seq_stride +
         h * operand.head_stride;
}

// delta[b, h, i] = rowsum(dO * O) - dlse; a warp a row, rows in the order of memory. A lane sums
// packs of 16 bytes, read as such or not: the result is the same.
template <typename T, bool kPacked>
__global__ __launch_bounds__(kThreads) void DeltaKernel(AttentionOperand out, AttentionOperand dout,
                                                        int64_t rows, int64_t q_len,
                                                        int64_t num_heads, int head_dim,
                                                        const Accumulator<T>* dlse,
                                                        Accumulator<T>* delta) {
  using A = Accumulator<T>;
  constexpr int kPack = 16 / sizeof(T);
  const int lane = threadIdx.x % 32;
  const int64_t row = blockIdx.x * int64_t{kWarpsPerBlock} + threadIdx.x / 32;
  if (row >= rows) return;
  const int64_t h = row % num_heads, i = row / num_heads % q_len, b = row / num_heads / q_len;
  const T* o = Row<T>(out, b, i, h);
  const T* d = Row<T>(dout, b, i, h);
  A sum = 0;
  for (int c = lane * kPack; c < head_dim; c += 32 * kPack) {
    Pack<T, kPack> x = {}, y = {};
    if (kPacked) {
      x = *reinterpret_cast<const Pack<T, kPack>*>(o + c);
      y = *reinterpret_cast<const Pack<T, kPack>*>(d + c);
    } else {
      for (int j = 0; j < kPack && c + j < head_dim; ++j) {
        x[j] = o[c + j];
        y[j] = d[c + j];
      }
    }
#pragma unroll
    for (int j = 0; j < kPack; ++j) sum += ConvertTo<A>(x[j]) * ConvertTo<A>(y[j]);
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffff, sum, distance);
  }
  if (lane == 0) {
    const int64_t index = (b * num_heads + h) * q_len + i;
    delta[index] = dlse == nullptr ? sum : sum - dlse[index];
  }
}

template <int kPack>
__global__ __launch_bounds__(kThreads) void ConvertKernel(AttentionOperand from,
                                                          AttentionOperand to, int64_t packs,
                                                          int64_t seqlen, int64_t num_heads,
                                                          int row_packs) {
  const int64_t index = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (index >= packs) return;
  const int64_t c = index % row_packs, row = index / row_packs;
  const int64_t h = row % num_heads, i = row / num_heads % seqlen, b = row / num_heads / seqlen;
  const auto x = reinterpret_cast<const Pack<float, kPack>*>(Row<float>(from, b, i, h))[c];
  Pack<bf16, kPack> y;
#pragma unroll
  for (int j = 0; j < kPack; ++j) y[j] = ConvertTo<bf16>(x[j]);
  reinterpret_cast<Pack<bf16, kPack>*>(Row<bf16>(to, b, i, h))[c] = y;
}

// Whether every row can be read `pack` elements at a time.
bool InPacks(const AttentionOperand& operand, int64_t head_dim, int64_t element_bytes,
             int64_t pack) {
  return reinterpret_cast<uintptr_t>(operand.data) % (pack * element_bytes) == 0 &&
         operand.batch_stride % pack == 0 && operand.seq_stride % pack == 0 &&
         operand.head_stride % pack == 0 && head_dim % pack == 0;
}

unsigned Blocks(int64_t items, int per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

template <typename T>
void LaunchDelta(const FlashDeltaParams& params) {
  using A = Accumulator<T>;
  const FlashAttentionShape& shape = params.shape;
  const int64_t rows = shape.batch * shape.q_len * shape.num_heads;
  if (rows == 0) return;
  constexpr int kPack = 16 / sizeof(T);
  const bool packed = InPacks(params.out, shape.head_dim, sizeof(T), kPack) &&
                      InPacks(params.dout, shape.head_dim, sizeof(T), kPack);
  const auto kernel = packed ? DeltaKernel<T, true> : DeltaKernel<T, false>;
  kernel<<<Blocks(rows, kWarpsPerBlock), kThreads, 0, cuda::CurrentStream()>>>(
      params.out, params.dout, rows, shape.q_len, shape.num_heads, static_cast<int>(shape.head_dim),
      static_cast<const A*>(params.dlse), static_cast<A*>(params.delta));
  BURST_CUDA_CHECK_LAUNCH("attention delta");
}

}  // namespace

void Delta(const FlashDeltaParams& params) {
  cuda::DispatchDtype(params.shape.dtype, [&](auto zero) { LaunchDelta<decltype(zero)>(params); });
}

void Convert(const Tensor& from, const AttentionOperand& target) {
  if (from.numel() == 0) return;
  const AttentionOperand source = Operand(from);
  constexpr int kPack = 4;
  const int64_t head_dim = from.dim(3);
  const bool packed =
      InPacks(source, head_dim, sizeof(float), kPack) && InPacks(target, head_dim, 2, kPack);
  const int pack = packed ? kPack : 1;
  const int64_t packs = from.numel() / pack;
  const auto kernel = packed ? ConvertKernel<kPack> : ConvertKernel<1>;
  kernel<<<Blocks(packs, kThreads), kThreads, 0, cuda::CurrentStream()>>>(
      source, target, packs, from.dim(1), from.dim(2), static_cast<int>(head_dim / pack));
  BURST_CUDA_CHECK_LAUNCH("attention convert");
}

}  // namespace simt
}  // namespace burst
