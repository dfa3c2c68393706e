// The two memory-bound kernels around the backward: delta before it, dQ to bf16 after it.
#include <cuda_runtime.h>

#include <algorithm>

#include "burst/kernels/gpu/sm90/tensor_map.h"
#include "burst/kernels/gpu/sm90/tile.cuh"

namespace burst {
namespace sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kLanesPerRow = 16;  // eight columns each, head_dim <= 128
constexpr int kRowsPerBlock = kThreads / kLanesPerRow;

struct Floats8 {
  float x[8];
};

__device__ __forceinline__ Floats8 Load8(const float* source) {
  const float4 a = reinterpret_cast<const float4*>(source)[0];
  const float4 b = reinterpret_cast<const float4*>(source)[1];
  return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

__device__ __forceinline__ Floats8 Load8(const bf16* source) {
  const uint4 packed = *reinterpret_cast<const uint4*>(source);
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
  Floats8 values;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values.x[2 * i] = __uint_as_float(words[i] << 16);
    values.x[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
  }
  return values;
}

// The row of this half-warp among [batch, seqlen, num_heads], heads innermost as in memory.
struct Row {
  int64_t batch, seq, head;
  bool valid;
};

__device__ __forceinline__ Row MakeRow(int64_t batch, int64_t seqlen, int64_t num_heads) {
  const int64_t index =
      static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kLanesPerRow;
  const int64_t sequence = index / num_heads;
  return {sequence / seqlen, sequence % seqlen, index % num_heads,
          index < batch * seqlen * num_heads};
}

// delta = rowsum(dout * out) - dlse
template <class Out>
__global__ __launch_bounds__(kThreads) void DeltaKernel(OutputView out, OutputView dout,
                                                        int64_t batch, int64_t q_len,
                                                        int64_t num_heads, int head_dim,
                                                        const float* dlse, float* delta) {
  const Row row = MakeRow(batch, q_len, num_heads);
  const int column = threadIdx.x % kLanesPerRow * 8;
  float sum = 0;
  if (row.valid && column < head_dim) {
    const int64_t out_offset = row.batch * out.batch_stride + row.seq * out.seq_stride +
                               row.head * out.head_stride + column;
    const int64_t dout_offset = row.batch * dout.batch_stride + row.seq * dout.seq_stride +
                                row.head * dout.head_stride + column;
    const Floats8 a = Load8(static_cast<const Out*>(out.data) + out_offset);
    const Floats8 b = Load8(static_cast<const bf16*>(dout.data) + dout_offset);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(a.x[i], b.x[i], sum);
  }
#pragma unroll
  for (int distance = kLanesPerRow / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(0xffffffff, sum, distance);
  }
  if (row.valid && column == 0) {
    const int64_t index = (row.batch * num_heads + row.head) * q_len + row.seq;
    delta[index] = dlse == nullptr ? sum : sum - dlse[index];
  }
}

__global__ __launch_bounds__(kThreads) void ConvertKernel(OutputView source, OutputView target,
                                                          int64_t batch, int64_t seqlen,
                                                          int64_t num_heads, int head_dim) {
  const Row row = MakeRow(batch, seqlen, num_heads);
  const int column = threadIdx.x % kLanesPerRow * 8;
  if (!row.valid || column >= head_dim) return;
  const Floats8 x = Load8(static_cast<const float*>(source.data) + row.batch * source.batch_stride +
                          row.seq * source.seq_stride + row.head * source.head_stride + column);
  bf16* out = static_cast<bf16*>(target.data) + row.batch * target.batch_stride +
              row.seq * target.seq_stride + row.head * target.head_stride + column;
  *reinterpret_cast<uint4*>(out) = make_uint4(PackBf16(x.x[0], x.x[1]), PackBf16(x.x[2], x.x[3]),
                                              PackBf16(x.x[4], x.x[5]), PackBf16(x.x[6], x.x[7]));
}

unsigned Blocks(int64_t rows) {
  return static_cast<unsigned>((rows + kRowsPerBlock - 1) / kRowsPerBlock);
}

bool IsHeadDimServed(int64_t head_dim) {
  return head_dim > 0 && head_dim <= 128 && head_dim % 8 == 0;
}

}  // namespace

cudaError_t LaunchDelta(const DeltaParams& params, cudaStream_t stream) {
  const Shape& shape = params.shape;
  if (!IsHeadDimServed(shape.head_dim)) return cudaErrorInvalidValue;
  const int64_t rows = shape.batch * shape.q_len * shape.num_heads;
  if (rows == 0) return cudaSuccess;
  const auto kernel = params.out_is_float ? DeltaKernel<float> : DeltaKernel<bf16>;
  kernel<<<Blocks(rows), kThreads, 0, stream>>>(
      View(params.out), View(params.dout), shape.batch, shape.q_len, shape.num_heads,
      static_cast<int>(shape.head_dim), params.dlse, params.delta);
  return cudaGetLastError();
}

cudaError_t LaunchConvert(const ConvertParams& params, cudaStream_t stream) {
  if (!IsHeadDimServed(params.head_dim)) return cudaErrorInvalidValue;
  const int64_t rows = params.batch * params.seqlen * params.num_heads;
  if (rows == 0) return cudaSuccess;
  ConvertKernel<<<Blocks(rows), kThreads, 0, stream>>>(
      View(params.source), View(params.target), params.batch, params.seqlen, params.num_heads,
      static_cast<int>(params.head_dim));
  return cudaGetLastError();
}

}  // namespace sm90
}  // namespace burst
