// The memory-bound kernels around the backward: delta before it, sums to bfloat16 after it.
#include "burst/kernels/gpu/simt/flash_attention_simt.h"
#include "burst/tensor/dispatch.cuh"

namespace burst {
namespace simt {
namespace {

using cuda::Accumulator;
using cuda::bf16;
using cuda::ConvertTo;
using cuda::Vec;

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

// delta[b, h, i] = rowsum(dO * O) - dlse; kLanes lanes a row. A lane sums vectors of 16 bytes, read
// as such or not: the result is the same.
template <typename T, int kLanes, bool kVectorized>
__global__ __launch_bounds__(kThreads) void DeltaKernel(AttentionOperand out, AttentionOperand dout,
                                                        uint32_t rows, uint32_t q_len,
                                                        uint32_t num_heads, int head_dim,
                                                        const Accumulator<T>* dlse,
                                                        Accumulator<T>* delta) {
  using A = Accumulator<T>;
  constexpr int kVec = 16 / sizeof(T);
  const int lane = threadIdx.x % kLanes;
  const uint32_t index = blockIdx.x * (kThreads / kLanes) + threadIdx.x / kLanes;
  const bool valid = index < rows;
  const Row row(valid ? index : 0, q_len, num_heads);
  const T* o = row.Of<const T>(out);
  const T* d = row.Of<const T>(dout);
  A sum = 0;
  for (int c = lane * kVec; c < head_dim; c += kLanes * kVec) {
    Vec<T, kVec> x = {}, y = {};
    if (kVectorized) {
      x = *reinterpret_cast<const Vec<T, kVec>*>(o + c);
      y = *reinterpret_cast<const Vec<T, kVec>*>(d + c);
    } else {
      for (int j = 0; j < kVec && c + j < head_dim; ++j) {
        x[j] = o[c + j];
        y[j] = d[c + j];
      }
    }
#pragma unroll
    for (int j = 0; j < kVec; ++j) sum += ConvertTo<A>(x[j]) * ConvertTo<A>(y[j]);
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

// sum += kVec consecutive elements; 16 bytes a load at most.
template <int kVec, typename T>
__device__ void AddVec(const T* x, float (&sum)[kVec]) {
  constexpr int kStep = kVec < 16 / static_cast<int>(sizeof(T)) ? kVec : 16 / sizeof(T);
#pragma unroll
  for (int i = 0; i < kVec; i += kStep) {
    const Vec<T, kStep> part = *reinterpret_cast<const Vec<T, kStep>*>(x + i);
#pragma unroll
    for (int j = 0; j < kStep; ++j) sum[i + j] += ConvertTo<float>(part[j]);
  }
}

template <int kVec, typename Addend>
__global__ __launch_bounds__(kThreads) void ConvertKernel(AttentionOperand from,
                                                          AttentionOperand addend,
                                                          AttentionOperand to, uint32_t vecs,
                                                          uint32_t seqlen, uint32_t num_heads,
                                                          uint32_t row_vecs) {
  const uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= vecs) return;
  const Row row(index / row_vecs, seqlen, num_heads);
  const uint32_t c = index % row_vecs * kVec;
  float sum[kVec] = {};
  AddVec(row.Of<const float>(from) + c, sum);
  if (addend.data != nullptr) AddVec(row.Of<const Addend>(addend) + c, sum);
  Vec<bf16, kVec> y;
#pragma unroll
  for (int j = 0; j < kVec; ++j) y[j] = ConvertTo<bf16>(sum[j]);
  *reinterpret_cast<Vec<bf16, kVec>*>(row.Of<bf16>(to) + c) = y;
}

// Whether every row can be read in vectors of 16 bytes, and consists of whole vectors of `vec`.
bool FitsVectors(const AttentionOperand& operand, int64_t head_dim, int64_t element_bytes,
                 int64_t vec) {
  const int64_t elements = 16 / element_bytes;
  return reinterpret_cast<uintptr_t>(operand.data) % 16 == 0 && head_dim % vec == 0 &&
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
  constexpr int kVec = 16 / sizeof(T);
  const bool vectorized = FitsVectors(params.out, shape.head_dim, sizeof(T), kVec) &&
                          FitsVectors(params.dout, shape.head_dim, sizeof(T), kVec);
  const auto kernel = vectorized ? DeltaKernel<T, kLanes, true> : DeltaKernel<T, kLanes, false>;
  kernel<<<Blocks(rows, kThreads / kLanes), kThreads, 0, cuda::CurrentStream()>>>(
      params.out, params.dout, static_cast<uint32_t>(rows), static_cast<uint32_t>(shape.q_len),
      static_cast<uint32_t>(shape.num_heads), static_cast<int>(shape.head_dim),
      static_cast<const A*>(params.dlse), static_cast<A*>(params.delta));
  BURST_CUDA_CHECK_LAUNCH("attention delta");
}

}  // namespace

// As many lanes as a row has vectors, or 32.
void Delta(const FlashDeltaParams& params) {
  cuda::DispatchDtype(params.shape.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t vecs = params.shape.head_dim * static_cast<int64_t>(sizeof(T)) / 16;
    if (vecs <= 8) return LaunchDelta<T, 8>(params);
    if (vecs <= 16) return LaunchDelta<T, 16>(params);
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
  constexpr int kVec = 8;
  const int64_t head_dim = from.dim(3);
  const bool vectorized = FitsVectors(source, head_dim, sizeof(float), kVec) &&
                          FitsVectors(target, head_dim, sizeof(bf16), kVec) &&
                          (!adds || FitsVectors(added, head_dim, SizeOf(addend.dtype()), kVec));
  const int vec = vectorized ? kVec : 1;
  const int64_t vecs = from.numel() / vec;
  const auto kernel = vectorized ? (wide ? ConvertKernel<kVec, float> : ConvertKernel<kVec, bf16>)
                                 : (wide ? ConvertKernel<1, float> : ConvertKernel<1, bf16>);
  kernel<<<Blocks(vecs, kThreads), kThreads, 0, cuda::CurrentStream()>>>(
      source, added, target, static_cast<uint32_t>(vecs), static_cast<uint32_t>(from.dim(1)),
      static_cast<uint32_t>(from.dim(2)), static_cast<uint32_t>(head_dim / vec));
  BURST_CUDA_CHECK_LAUNCH("attention convert");
}

}  // namespace simt
}  // namespace burst
