#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>

#include "burst/device/cuda.h"
#include "burst/kernels/gpu/common/operand.cuh"
#include "burst/kernels/gpu/sm90/quantize_fp8.h"

namespace burst {
namespace sm90 {
namespace {

constexpr int kThreads = 256;
constexpr int kBlock = static_cast<int>(kFp8Block), kColumns = static_cast<int>(kFp8HeadDim);
// 16 lanes have a row, eight elements each.
constexpr int kRowLanes = 16, kOwn = kColumns / kRowLanes;
constexpr int kRowsAtOnce = kThreads / kRowLanes;
constexpr int kRounds = kBlock / kRowsAtOnce;
constexpr float kLargest = 448;         // the largest number of e4m3
constexpr float kSmallestTop = 1e-12f;  // keeps scales, and products of two, normal numbers

struct QuantizeArgs {
  AttentionOperand from;
  uint8_t* to;
  float* scales;  // one for each thread block
  int rows, head_dim, heads, blocks;
};

// The rows at which a thread block works.
struct Place {
  int block, head, batch;
  __device__ explicit Place(const QuantizeArgs& args)
      : block(static_cast<int>(blockIdx.x) % args.blocks),
        head(static_cast<int>(blockIdx.x) / args.blocks % args.heads),
        batch(static_cast<int>(blockIdx.x) / args.blocks / args.heads) {}
};

template <class Element>
__device__ __forceinline__ float2 Unpack(uint32_t pair) {
  if constexpr (std::is_same_v<Element, Float16>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  } else {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000)};
  }
}

// The sign bits of the lane's four pairs of channels; binary digits of pi give all 128.
struct Signs {
  uint32_t pairs[kOwn / 2];
  __device__ Signs() {
    constexpr uint32_t kPi[4] = {0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344};
    const int lane = threadIdx.x % kRowLanes;
    uint32_t word = kPi[0];
#pragma unroll
    for (int i = 1; i < 4; ++i) word = lane / 4 == i ? kPi[i] : word;
    word >>= lane % 4 * kOwn;
#pragma unroll
    for (int i = 0; i < kOwn / 2; ++i) {
      pairs[i] = (word >> 2 * i & 1) << 15 | (word >> (2 * i + 1) & 1) << 31;
    }
  }
};

// Loads a row, times `signs` unless they are null. Infinity becomes NaN, which e4m3 keeps.
template <class Element>
__device__ __forceinline__ void LoadRow(const QuantizeArgs& args, const Place& place, int row,
                                        const Signs* signs, float (&x)[kOwn]) {
  const int column = threadIdx.x % kRowLanes * kOwn;
  uint4 bits = {0, 0, 0, 0};
  if (row < args.rows && column < args.head_dim) {
    const int64_t offset = cuda::Offset(args.from, place.batch, place.head, row) + column;
    bits =
        __ldg(reinterpret_cast<const uint4*>(static_cast<const Element*>(args.from.data) + offset));
  }
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < kOwn / 2; ++i) {
    const float2 pair = Unpack<Element>(signs == nullptr ? words[i] : words[i] ^ signs->pairs[i]);
    x[2 * i] = fmaf(pair.x, 0.f, pair.x);
    x[2 * i + 1] = fmaf(pair.y, 0.f, pair.y);
  }
}

// Computes x = H x over the row's 16 lanes. H has -1 and 1: sqrt(128) times an orthogonal matrix.
__device__ __forceinline__ void Hadamard(float (&x)[kOwn]) {
  const int lane = threadIdx.x % kRowLanes;
#pragma unroll
  for (int distance = 1; distance < kOwn; distance *= 2) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (i & distance) continue;
      const float a = x[i], b = x[i + distance];
      x[i] = a + b;
      x[i + distance] = a - b;
    }
  }
#pragma unroll
  for (int distance = 1; distance < kRowLanes; distance *= 2) {
    const float sign = (lane & distance) != 0 ? -1.f : 1.f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      x[i] = fmaf(sign, x[i], __shfl_xor_sync(0xffffffff, x[i], distance));
    }
  }
}

// Returns the thread block's largest magnitude, without NaN, or kSmallestTop if that is larger.
__device__ __forceinline__ float Top(const float (&x)[kRounds][kOwn]) {
  __shared__ float warps[kThreads / 32];
  float top = kSmallestTop;
#pragma unroll
  for (int i = 0; i < kRounds * kOwn; ++i) top = fmaxf(top, fabsf(x[i / kOwn][i % kOwn]));
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, distance));
  }
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = top;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) top = fmaxf(top, warps[i]);
  return top;
}

// Packs four numbers into a word, the first in the lowest byte.
__device__ __forceinline__ uint32_t Pack4(float a, float b, float c, float d) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2({a, b}, __NV_SATFINITE, __NV_E4M3);
  const uint32_t high = __nv_cvt_float2_to_fp8x2({c, d}, __NV_SATFINITE, __NV_E4M3);
  return low | high << 16;
}

// Quantizes Q or K.
template <class Element>
__global__ __launch_bounds__(kThreads, 2) void QuantizeRows(QuantizeArgs args) {
  const Place place(args);
  const int first = place.block * kBlock + static_cast<int>(threadIdx.x) / kRowLanes;
  const Signs signs;
  float x[kRounds][kOwn];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    LoadRow<Element>(args, place, first + round * kRowsAtOnce, &signs, x[round]);
  }
#pragma unroll
  for (int round = 0; round < kRounds; ++round) Hadamard(x[round]);
  const float top = Top(x), factor = kLargest / top;
  if (threadIdx.x == 0) {
    constexpr float kInverseRoot = 0.08838834764831845f;  // 1 / sqrt(128)
    args.scales[blockIdx.x] = top / kLargest * kInverseRoot;
  }
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int row = first + round * kRowsAtOnce;
    if (row >= args.rows) break;
    float(&y)[kOwn] = x[round];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) y[i] *= factor;
    const int64_t index =
        (static_cast<int64_t>(place.batch) * args.heads + place.head) * args.rows + row;
    *reinterpret_cast<uint2*>(args.to + index * kColumns + threadIdx.x % kRowLanes * kOwn) = {
        Pack4(y[0], y[1], y[2], y[3]), Pack4(y[4], y[5], y[6], y[7])};
  }
}

// Quantizes V, transposed. A word has four consecutive keys, in the order of quantize_fp8.h. A
// thread has kRounds / 4 words of each of its columns.
template <class Element>
__global__ __launch_bounds__(kThreads, 2) void QuantizeTransposed(QuantizeArgs args) {
  constexpr int kWords = kBlock / 4;
  __shared__ uint32_t words[kColumns][kWords + 1];
  const Place place(args);
  const int group = threadIdx.x / kRowLanes;
  float x[kRounds][kOwn];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int word = group + round / 4 * kRowsAtOnce, p = round % 4;
    const int key = word / 4 * 16 + 8 * (p / 2) + 2 * (word % 4) + p % 2;
    LoadRow<Element>(args, place, place.block * kBlock + key, /*signs=*/nullptr, x[round]);
  }
  const float top = Top(x), factor = kLargest / top;
  if (threadIdx.x == 0) args.scales[blockIdx.x] = top / kLargest;
#pragma unroll
  for (int round = 0; round < kRounds; round += 4) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      words[threadIdx.x % kRowLanes * kOwn + i][group + round / 4 * kRowsAtOnce] =
          Pack4(x[round][i] * factor, x[round + 1][i] * factor, x[round + 2][i] * factor,
                x[round + 3][i] * factor);
    }
  }
  __syncthreads();
  const int64_t padded = static_cast<int64_t>(args.blocks) * kBlock;
  uint8_t* to = args.to +
                (static_cast<int64_t>(place.batch) * args.heads + place.head) * kColumns * padded +
                place.block * kBlock;
  for (int i = threadIdx.x; i < kColumns * kWords; i += kThreads) {
    const int column = i / kWords, word = i % kWords;
    *reinterpret_cast<uint32_t*>(to + column * padded + word * 4) = words[column][word];
  }
}

int64_t Blocks(int64_t tokens) { return (tokens + kFp8Block - 1) / kFp8Block; }

int64_t Aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// The bytes of each part, in the order of Fp8Operands.
struct PartBytes {
  int64_t q, k, v, q_scales, kv_scales;
};

PartBytes BytesOf(const FlashAttentionShape& shape) {
  const int64_t heads = shape.batch * shape.num_heads, kv_heads = shape.batch * shape.num_kv_heads;
  const int64_t q_blocks = Blocks(shape.q_len), k_blocks = Blocks(shape.k_len);
  const auto scales = [](int64_t count) { return Aligned(count * int64_t{sizeof(float)}); };
  return {Aligned(heads * shape.q_len * kFp8HeadDim), Aligned(kv_heads * shape.k_len * kFp8HeadDim),
          kv_heads * k_blocks * kFp8Block * kFp8HeadDim, scales(heads * q_blocks),
          scales(kv_heads * k_blocks)};
}

template <class Element>
void QuantizeOf(const FlashForwardParams& params, const Fp8Operands& operands) {
  const FlashAttentionShape& shape = params.shape;
  const auto start = [&](auto kernel, const AttentionOperand& from, uint8_t* to, float* scales,
                         int64_t rows, int64_t heads) {
    const QuantizeArgs args = {from,
                               to,
                               scales,
                               static_cast<int>(rows),
                               static_cast<int>(shape.head_dim),
                               static_cast<int>(heads),
                               static_cast<int>(Blocks(rows))};
    if (rows == 0) return;
    const int64_t blocks = shape.batch * heads * Blocks(rows);
    kernel<<<static_cast<unsigned>(blocks), kThreads, 0, cuda::CurrentStream()>>>(args);
    BURST_CUDA_CHECK_LAUNCH("quantization to e4m3");
  };
  start(QuantizeRows<Element>, params.q, operands.q, operands.q_scales, shape.q_len,
        shape.num_heads);
  start(QuantizeRows<Element>, params.k, operands.k, operands.k_scales, shape.k_len,
        shape.num_kv_heads);
  start(QuantizeTransposed<Element>, params.v, operands.v, operands.v_scales, shape.k_len,
        shape.num_kv_heads);
}

}  // namespace

int64_t Fp8OperandBytes(const FlashAttentionShape& shape) {
  const PartBytes bytes = BytesOf(shape);
  return bytes.q + bytes.k + bytes.v + bytes.q_scales + 2 * bytes.kv_scales;
}

Fp8Operands Fp8OperandsIn(const FlashAttentionShape& shape, uint8_t* memory) {
  const PartBytes bytes = BytesOf(shape);
  const auto take = [&memory](int64_t size) {
    uint8_t* const part = memory;
    memory += size;
    return part;
  };
  Fp8Operands operands;
  operands.q = take(bytes.q);
  operands.k = take(bytes.k);
  operands.v = take(bytes.v);
  operands.q_scales = reinterpret_cast<float*>(take(bytes.q_scales));
  operands.k_scales = reinterpret_cast<float*>(take(bytes.kv_scales));
  operands.v_scales = reinterpret_cast<float*>(take(bytes.kv_scales));
  return operands;
}

void QuantizeFp8(const FlashForwardParams& params, const Fp8Operands& operands) {
  params.shape.dtype == DType::kFloat16 ? QuantizeOf<Float16>(params, operands)
                                        : QuantizeOf<BFloat16>(params, operands);
}

}  // namespace sm90
}  // namespace burst
