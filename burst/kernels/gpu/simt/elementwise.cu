// The memory-bound kernels around the backward: delta before it, sums to bfloat16 after it.
#include "burst/kernels/gpu/simt/flash_attention_simt.h"
#include "burst/tensor/dispatch.cuh"

namespace burst {
namespace simt {
namespace {

using cuda::Accumulator;
using cuda::bf16;
using cuda::ConvertTo;
using cuda::Pack;

constexpr int kThreads = 256;

// Row `index` of [batch, seqlen, num_heads], in the order of memory; 32 bits, for divisions are
// slow.
struct Row {
  __device__ Row(uint32_t index, uint32_t seqlen, uint32_t num_heads)
      : b(index / num_heads / seqlen), i(index / num_heads % seqlen), h(index % num_heads) {}
  template <typename T>
  __device__ T* Of(const AttentionOperand& operand) const {
    return static_cast<T*>(operand.data) + b * operand.batch_stride + i * operand.seq_stride +
           h * operand.head_stride;
  }
  int64_t b, i, h;
};

// delta[b, h, i] = rowsum(dO * O) - dlse; kLanes lanes a row. A lane sums packs of 16 bytes, read
// as such or not: the result is the same.
template <typename T, int kLanes, bool kPacked>
__global__ __launch_bounds__(kThreads) void DeltaKernel(AttentionOperand out, AttentionOperand dout,
                                                        uint32_t rows, uint32_t q_len,
                                                        uint32_t num_heads, int head_dim,
                                                        const Accumulator<T>* dlse,
                                                        Accumulator<T>* delta) {
  using A = Accumulator<T>;
  constexpr int kPack = 16 / sizeof(T);
  const int lane = threadIdx.x % kLanes;
  const uint32_t index = blockIdx.x * (kThreads / kLanes) + threadIdx.x / kLanes;
  const bool valid = index < rows;
  const Row row(valid ? index : 0, q_len, num_heads);
  const T* o = row.Of<const T>(out);
  const T* d = row.Of<const T>(dout);
  A sum = 0;
  for (int c = lane * kPack; c < head_dim; c += kLanes * kPack) {
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
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffff, sum, distance);
  }
  if (valid && lane == 0) {
    const int64_t at = (row.b * num_heads + row.h) * q_len + row.i;
    delta[at] = dlse == nullptr ? sum : sum - dlse[at];
  }
}

// sum += kPack consecutive elements; 16 bytes a load at most.
template <int kPack, typename T>
__device__ void AddPack(const T* x, float (&sum)[kPack]) {
  constexpr int kStep = kPack < 16 / static_cast<int>(sizeof(T)) ? kPack : 16 / sizeof(T);
#pragma unroll
  for (int i = 0; i < kPack; i += kStep) {
    const Pack<T, kStep> part = *reinterpret_cast<const Pack<T, kStep>*>(x + i);
#pragma unroll
    for (int j = 0; j < kStep; ++j) sum[i + j] += ConvertTo<float>(part[j]);
  }
}

template <int kPack, typename Addend>
__global__ __launch_bounds__(kThreads) void ConvertKernel(AttentionOperand from,
                                                          AttentionOperand addend,
                                                          AttentionOperand to, uint32_t packs,
                                                          uint32_t seqlen, uint32_t num_heads,
                                                          uint32_t row_packs) {
  const uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= packs) return;
  const Row row(index / row_packs, seqlen, num_heads);
  const uint32_t c = index % row_packs * kPack;
  float sum[kPack] = {};
  AddPack(row.Of<const float>(from) + c, sum);
  if (addend.data != nullptr) AddPack(row.Of<const Addend>(addend) + c, sum);
  Pack<bf16, kPack> y;
#pragma unroll
  for (int j = 0; j < kPack; ++j) y[j] = ConvertTo<bf16>(sum[j]);
  *reinterpret_cast<Pack<bf16, kPack>*>(row.Of<bf16>(to) + c) = y;
}

// Whether every row can be read in packs of 16 bytes, and consists of whole packs of `pack`.
bool InPacks(const AttentionOperand& operand, int64_t head_dim, int64_t element_bytes,
             int64_t pack) {
  const int64_t elements = 16 / element_bytes;
  return reinterpret_cast<uintptr_t>(operand.data) % 16 == 0 && head_dim % pack == 0 &&
         operand.batch_stride % elements == 0 && operand.seq_stride % elements == 0 &&
         operand.head_stride % elements == 0;
}

unsigned Blocks(int64_t items, int per_block) {
  BURST_CHECK_LT(items, int64_t{1} << 32);
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

template <typename T, int kLanes>
void LaunchDelta(const FlashDeltaParams& params) {
  using A = Accumulator<T>;
  const FlashAttentionShape& shape = params.shape;
  const int64_t rows = shape.batch * shape.q_len * shape.num_heads;
  if (rows == 0) return;
  constexpr int kPack = 16 / sizeof(T);
  const bool packed = InPacks(params.out, shape.head_dim, sizeof(T), kPack) &&
                      InPacks(params.dout, shape.head_dim, sizeof(T), kPack);
  const auto kernel = packed ? DeltaKernel<T, kLanes, true> : DeltaKernel<T, kLanes, false>;
  kernel<<<Blocks(rows, kThreads / kLanes), kThreads, 0, cuda::CurrentStream()>>>(
      params.out, params.dout, static_cast<uint32_t>(rows), static_cast<uint32_t>(shape.q_len),
      static_cast<uint32_t>(shape.num_heads), static_cast<int>(shape.head_dim),
      static_cast<const A*>(params.dlse), static_cast<A*>(params.delta));
  BURST_CUDA_CHECK_LAUNCH("attention delta");
}

}  // namespace

// As many lanes as a row has packs, or 32.
void Delta(const FlashDeltaParams& params) {
  cuda::DispatchDtype(params.shape.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t packs = params.shape.head_dim * static_cast<int64_t>(sizeof(T)) / 16;
    if (packs <= 8) return LaunchDelta<T, 8>(params);
    if (packs <= 16) return LaunchDelta<T, 16>(params);
    LaunchDelta<T, 32>(params);
  });
}

void Convert(const Tensor& from, const Tensor& addend, const AttentionOperand& target) {
  if (from.numel() == 0) return;
  const AttentionOperand source = Operand(from);
  const bool adds = !addend.null(), wide = adds && addend.dtype() == DType::kFloat32;
  BURST_CHECK(!adds ||
              (addend.shape() == from.shape() && (wide || addend.dtype() == DType::kBFloat16)));
  const AttentionOperand added = adds ? Operand(addend) : AttentionOperand();
  constexpr int kPack = 8;
  const int64_t head_dim = from.dim(3);
  const bool packed = InPacks(source, head_dim, sizeof(float), kPack) &&
                      InPacks(target, head_dim, sizeof(bf16), kPack) &&
                      (!adds || InPacks(added, head_dim, SizeOf(addend.dtype()), kPack));
  const int pack = packed ? kPack : 1;
  const int64_t packs = from.numel() / pack;
  const auto kernel = packed ? (wide ? ConvertKernel<kPack, float> : ConvertKernel<kPack, bf16>)
                             : (wide ? ConvertKernel<1, float> : ConvertKernel<1, bf16>);
  kernel<<<Blocks(packs, kThreads), kThreads, 0, cuda::CurrentStream()>>>(
      source, added, target, static_cast<uint32_t>(packs), static_cast<uint32_t>(from.dim(1)),
      static_cast<uint32_t>(from.dim(2)), static_cast<uint32_t>(head_dim / pack));
  BURST_CUDA_CHECK_LAUNCH("attention convert");
}

}  // namespace simt
}  // namespace burst
