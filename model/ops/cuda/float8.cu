// float8 forms of bfloat16 tensors (kernels.h).
#include <cuda_fp8.h>

#include <algorithm>

#include "burst/base/check.h"
#include "burst/tensor/dispatch.cuh"
#include "model/ops/cuda/kernels.h"
#include "model/ops/cuda/vectorized.cuh"

namespace burst {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVec = 8;  // bf16 elements of a load

// ---- The largest magnitude. Magnitudes of floats are ordered as their bits, NaN above infinity.

__device__ inline uint32_t MagnitudeBits(const Words<bf16, kVec>& words) {
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < kVec / 2; ++i) {
    const uint32_t two = words.words[i] & 0x7fff7fff;
    most = max(most, max(two << 16, two & 0xffff0000));
  }
  return most;
}

__global__ void __launch_bounds__(kThreads)
    LargestMagnitudeKernel(int64_t vectors, const bf16* __restrict__ x, uint32_t* amax) {
  uint32_t most = 0;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < vectors;
       i += stride) {
    most = max(most, MagnitudeBits(Load<kVec>(x + i * kVec)));
  }
  most = __reduce_max_sync(~0u, most);
  __shared__ uint32_t warps[kThreads / 32];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = most;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  most = threadIdx.x < kThreads / 32 ? warps[threadIdx.x] : 0;
  most = __reduce_max_sync(~0u, most);
  if (threadIdx.x == 0 && most > 0) atomicMax(amax, most);
}

// ---- Rounding. A block takes 128 rows by 128 columns, a warp's lane 4 rows by 8 columns at a
// time. Four bytes of a column, one of each row, make a word in shared memory. The pitch of 33
// words keeps both its writes and its reads free of bank conflicts.

constexpr int kTile = 128;
constexpr int kPitch = kTile / 4 + 1;

// The smallest power of two s for which amax / s is at most `largest`.
__device__ inline float ScaleFor(float amax, float largest) {
  if (!isfinite(amax)) return __int_as_float(0x7fffffff);  // NaN: so is every product
  if (amax == 0) return 1;
  int exponent = ilogbf(amax / largest);
  if (amax > ldexpf(largest, exponent)) ++exponent;
  return ldexpf(1, max(exponent, -126));
}

template <__nv_fp8_interpretation_t kKind>
__device__ inline uint32_t RoundTwo(float a, float b) {
  return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, kKind);
}

// Bytes b of four words, as a word.
__device__ inline uint32_t ByteOfFour(const uint32_t (&words)[4], int b) {
  const uint32_t low = __byte_perm(words[0], words[1], b | (4 + b) << 4);
  const uint32_t high = __byte_perm(words[2], words[3], b | (4 + b) << 4);
  return __byte_perm(low, high, 0x5410);
}

template <__nv_fp8_interpretation_t kKind>
__global__ void __launch_bounds__(kThreads)
    RoundKernel(int64_t rows, int64_t cols, int64_t padded_rows, const bf16* __restrict__ x,
                const float* __restrict__ amax, uint8_t* __restrict__ as_rows,
                uint8_t* __restrict__ as_columns, float* scale_out) {
  __shared__ uint32_t columns[kTile * kPitch];
  const float scale = ScaleFor(*amax, kKind == __NV_E4M3 ? 448.f : 57344.f);
  const float inverse = 1 / scale;
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *scale_out = scale;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kTile;
  const int64_t first_col = static_cast<int64_t>(blockIdx.y) * kTile;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int part = warp; part < 16; part += kThreads / 32) {
    const int row_group = part / 4 * 8 + lane / 4;  // of 4 rows
    const int col = (part % 4 * 4 + lane % 4) * kVec;
    uint32_t low[4], high[4];  // a row's columns 0 to 3, 4 to 7
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t row = first_row + row_group * 4 + i;
      low[i] = high[i] = 0;
      if (row >= rows || first_col + col >= cols) continue;
      const int64_t at = row * cols + first_col + col;
      const Words<bf16, kVec> v = Load<kVec>(x + at);
      low[i] = RoundTwo<kKind>(v[0] * inverse, v[1] * inverse) |
               RoundTwo<kKind>(v[2] * inverse, v[3] * inverse) << 16;
      high[i] = RoundTwo<kKind>(v[4] * inverse, v[5] * inverse) |
                RoundTwo<kKind>(v[6] * inverse, v[7] * inverse) << 16;
      if (as_rows != nullptr) {
        *reinterpret_cast<uint2*>(as_rows + at) = make_uint2(low[i], high[i]);
      }
    }
    if (as_columns == nullptr) continue;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      columns[(col + j) * kPitch + row_group] = ByteOfFour(low, j);
      columns[(col + 4 + j) * kPitch + row_group] = ByteOfFour(high, j);
    }
  }
  if (as_columns == nullptr) return;
  __syncthreads();
  // Eight lanes write a column's 128 bytes.
  for (int i = threadIdx.x; i < kTile * 8; i += kThreads) {
    const int col = i / 8, row = i % 8 * 16;
    if (first_col + col >= cols || first_row + row >= padded_rows) continue;
    const uint32_t* from = columns + col * kPitch + row / 4;
    *reinterpret_cast<uint4*>(as_columns + (first_col + col) * padded_rows + first_row + row) =
        make_uint4(from[0], from[1], from[2], from[3]);
  }
}

template <typename T>
T* DataOrNull(const Tensor& tensor) {
  return tensor.null() ? nullptr : static_cast<T*>(tensor.raw_data());
}

}  // namespace

void LargestMagnitude(const Tensor& x, const Tensor& amax) {
  const int64_t vectors = x.numel() / kVec;
  BURST_CHECK(x.dtype() == DType::kBFloat16 && x.is_contiguous() && x.numel() % kVec == 0);
  BURST_CUDA_CHECK(cudaMemsetAsync(amax.raw_data(), 0, sizeof(float), CurrentStream()));
  if (vectors == 0) return;
  constexpr int64_t kMostBlocks = 132 * 8;
  const int64_t blocks = std::min(kMostBlocks, (vectors + kThreads - 1) / kThreads);
  LargestMagnitudeKernel<<<static_cast<unsigned>(blocks), kThreads, 0, CurrentStream()>>>(
      vectors, static_cast<const bf16*>(x.raw_data()), static_cast<uint32_t*>(amax.raw_data()));
  BURST_CUDA_CHECK(cudaGetLastError());
}

void RoundToFloat8(const Tensor& x, int64_t cols, const Tensor& amax, const Tensor& as_rows,
                   const Tensor& as_columns, const Tensor& scale) {
  BURST_CHECK(x.dtype() == DType::kBFloat16 && x.is_contiguous() && cols % 16 == 0);
  const DType dtype = as_rows.null() ? as_columns.dtype() : as_rows.dtype();
  BURST_CHECK(Is8Bit(dtype) &&
              (as_rows.null() || as_columns.null() || as_columns.dtype() == dtype));
  const int64_t rows = x.numel() / cols;
  const int64_t padded_rows = as_columns.null() ? rows : as_columns.dim(1);
  // At least one block, which writes the scale.
  const dim3 blocks(static_cast<unsigned>(std::max<int64_t>(1, (rows + kTile - 1) / kTile)),
                    static_cast<unsigned>((cols + kTile - 1) / kTile));
  const auto launch = [&](auto* kernel) {
    kernel<<<blocks, kThreads, 0, CurrentStream()>>>(
        rows, cols, padded_rows, static_cast<const bf16*>(x.raw_data()),
        static_cast<const float*>(amax.raw_data()), DataOrNull<uint8_t>(as_rows),
        DataOrNull<uint8_t>(as_columns), static_cast<float*>(scale.raw_data()));
  };
  dtype == DType::kFloat8E4M3 ? launch(RoundKernel<__NV_E4M3>) : launch(RoundKernel<__NV_E5M2>);
  BURST_CUDA_CHECK(cudaGetLastError());
}

}  // namespace cuda
}  // namespace burst
