// Makes float8 forms (kernels.h) of bfloat16 tensors, and of SwiGLU's results, which never exist in
// bfloat16.
#include <algorithm>

#include "burst/base/check.h"
#include "burst/tensor/dispatch.cuh"
#include "model/ops/cuda/float8.cuh"
#include "model/ops/cuda/kernels.h"
#include "model/ops/cuda/vectorized.cuh"

namespace burst {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVec = 8;  // bf16 elements of a load
using Eight = Words<bf16, kVec>;

// ---- Largest magnitudes.

__global__ void __launch_bounds__(kThreads)
    LargestMagnitudeKernel(int64_t vectors, const bf16* __restrict__ x, uint32_t* amax) {
  uint32_t most = 0;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < vectors;
       i += stride) {
    most = max(most, MagnitudeBits(Load<kVec>(x + i * kVec)));
  }
  RaiseAmax(most, amax);
}

// ---- SwiGLU. gate and up are the halves of a row of [rows, 2 n].

// silu(g) = g s, with s = sigmoid(g)
__device__ inline float Silu(float g) { return g * Sigmoid<bf16>(g); }

// |silu'(g)| = |s (1 + g (1 - s))| is below this bound for every g.
constexpr float kSteepestSilu = 1.1f;

__global__ void __launch_bounds__(kThreads)
    SwiGluMagnitudesKernel(int64_t vectors, int n, const bf16* __restrict__ gate_up,
                           uint32_t* largest) {
  uint32_t most[3] = {0, 0, 0};
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < vectors;
       i += stride) {
    const int64_t row = i / (n / kVec);
    const bf16* gates = gate_up + (i + row * (n / kVec)) * kVec;
    const Eight gate = Load<kVec>(gates), up = Load<kVec>(gates + n);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float silu = Silu(gate[j]), u = up[j];
      most[0] = max(most[0], MagnitudeBits(silu * u));
      most[1] = max(most[1], MagnitudeBits(silu));
      most[2] = max(most[2], MagnitudeBits(u));
    }
  }
#pragma unroll
  for (int i = 0; i < 3; ++i) RaiseAmax(most[i], largest + i);
}

// ---- Sources: the numbers that a tile of the results is made of. A source gives eight bytes of
// each of its kOutputs results at (row, col). The results are side by side: [rows, kOutputs cols].

struct TensorSource {
  static constexpr int kOutputs = 1;
  const bf16* x;
  const float* amax;
  float* scale_out;
  int64_t cols;
};

// Gives x / scale.
template <__nv_fp8_interpretation_t kKind>
struct Rounded : TensorSource {
  float inverse = 0;

  __device__ void Begin(bool first) {
    const float scale = ScaleFor(*amax, kKind == __NV_E4M3 ? kLargestE4M3 : kLargestE5M2);
    if (first) *scale_out = scale;
    inverse = 1 / scale;
  }
  __device__ void Read(int64_t row, int64_t col, uint2 (&out)[1]) const {
    const Eight words = Load<kVec>(x + row * cols + col);
    float v[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) v[j] = words[j];
    out[0] = RoundEight<kKind>(v, inverse);
  }
};

// Gives bytes as they are, for their transpose.
struct Bytes {
  static constexpr int kOutputs = 1;
  const uint8_t* x;
  int64_t cols;

  __device__ void Begin(bool) {}
  __device__ void Read(int64_t row, int64_t col, uint2 (&out)[1]) const {
    out[0] = *reinterpret_cast<const uint2*>(x + row * cols + col);
  }
};

// Gives silu(gate) up / scale, in e4m3.
struct SwiGluSource {
  static constexpr int kOutputs = 1;
  const bf16* gate_up;
  const float* largest;  // result of SwiGluMagnitudes
  float* scale_out;
  int64_t n;
  float inverse = 0;

  __device__ void Begin(bool first) {
    const float scale = ScaleFor(largest[0], kLargestE4M3);
    if (first) *scale_out = scale;
    inverse = 1 / scale;
  }
  __device__ void Read(int64_t row, int64_t col, uint2 (&out)[1]) const {
    const bf16* gates = gate_up + row * 2 * n + col;
    const Eight gate = Load<kVec>(gates), up = Load<kVec>(gates + n);
    float v[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) v[j] = Silu(gate[j]) * up[j];
    out[0] = RoundEight<__NV_E4M3>(v, inverse);
  }
};

// Gives gradients of gate and up / scale, in e5m2. With the gradient d of silu(gate) up:
//   dgate = d up s (1 + gate (1 - s)),   dup = d silu(gate)
struct SwiGluGradSource {
  static constexpr int kOutputs = 2;
  const bf16 *gate_up, *grad;
  const float *grad_amax, *largest;
  float* scale_out;
  int64_t n;
  float inverse = 0;

  __device__ void Begin(bool first) {
    const float most = fmaxf(kSteepestSilu * largest[2], largest[1]);  // fmaxf drops a NaN
    const float scale =
        ScaleFor(*grad_amax * (largest[0] < INFINITY ? most : INFINITY), kLargestE5M2);
    if (first) *scale_out = scale;
    inverse = 1 / scale;
  }
  __device__ void Read(int64_t row, int64_t col, uint2 (&out)[2]) const {
    const bf16* gates = gate_up + row * 2 * n + col;
    const Eight gate = Load<kVec>(gates), up = Load<kVec>(gates + n);
    const Eight d = Load<kVec>(grad + row * n + col);
    float dgate[kVec], dup[kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float g = gate[j], s = Sigmoid<bf16>(g), scaled = d[j] * s;
      dgate[j] = scaled * up[j] * (1 + g * (1 - s));
      dup[j] = scaled * g;
    }
    out[0] = RoundEight<__NV_E5M2>(dgate, inverse);
    out[1] = RoundEight<__NV_E5M2>(dup, inverse);
  }
};

// ---- The tile kernel. A block makes 128 rows by 128 columns, a warp's lane 4 rows by 8 columns at
// a time. Four bytes of a column, one of each row, make a word in shared memory. The pitch of 33
// words keeps both its writes and its reads free of bank conflicts.

constexpr int kTile = 128;
constexpr int kPitch = kTile / 4 + 1;

// Returns bytes b of four words, as a word.
__device__ inline uint32_t ByteOfFour(const uint32_t (&words)[4], int b) {
  const uint32_t low = __byte_perm(words[0], words[1], b | (4 + b) << 4);
  const uint32_t high = __byte_perm(words[2], words[3], b | (4 + b) << 4);
  return __byte_perm(low, high, 0x5410);
}

// as_rows: [rows, kOutputs cols]; as_columns: [kOutputs cols, padded_rows]. Either may be null.
template <typename Source>
__global__ void __launch_bounds__(kThreads)
    TileKernel(int64_t rows, int64_t cols, int64_t padded_rows, Source source,
               uint8_t* __restrict__ as_rows, uint8_t* __restrict__ as_columns) {
  constexpr int kOutputs = Source::kOutputs;
  __shared__ uint32_t columns[kOutputs][kTile * kPitch];
  source.Begin(blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0);
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kTile;
  const int64_t first_col = static_cast<int64_t>(blockIdx.y) * kTile;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int part = warp; part < 16; part += kThreads / 32) {
    const int row_group = part / 4 * 8 + lane / 4;  // a group of 4 rows
    const int col = (part % 4 * 4 + lane % 4) * kVec;
    uint32_t low[kOutputs][4], high[kOutputs][4];  // columns 0 to 3 and 4 to 7 of each row
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t row = first_row + row_group * 4 + i;
      const bool inside = row < rows && first_col + col < cols;
      uint2 bytes[kOutputs] = {};
      if (inside) source.Read(row, first_col + col, bytes);
#pragma unroll
      for (int o = 0; o < kOutputs; ++o) {
        low[o][i] = bytes[o].x;
        high[o][i] = bytes[o].y;
        if (as_rows == nullptr || !inside) continue;
        const int64_t at = (row * kOutputs + o) * cols + first_col + col;
        *reinterpret_cast<uint2*>(as_rows + at) = bytes[o];
      }
    }
    if (as_columns == nullptr) continue;
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        columns[o][(col + j) * kPitch + row_group] = ByteOfFour(low[o], j);
        columns[o][(col + 4 + j) * kPitch + row_group] = ByteOfFour(high[o], j);
      }
    }
  }
  if (as_columns == nullptr) return;
  __syncthreads();
  // Eight lanes write the 128 bytes of a column.
#pragma unroll
  for (int o = 0; o < kOutputs; ++o) {
    for (int i = threadIdx.x; i < kTile * 8; i += kThreads) {
      const int col = i / 8, row = i % 8 * 16;
      if (first_col + col >= cols || first_row + row >= padded_rows) continue;
      const uint32_t* from = columns[o] + col * kPitch + row / 4;
      const int64_t to = (o * cols + first_col + col) * padded_rows + first_row + row;
      *reinterpret_cast<uint4*>(as_columns + to) = make_uint4(from[0], from[1], from[2], from[3]);
    }
  }
}

template <typename T>
T* DataOrNull(const Tensor& tensor) {
  return tensor.null() ? nullptr : static_cast<T*>(tensor.raw_data());
}
float* Float(const Tensor& tensor) { return static_cast<float*>(tensor.raw_data()); }
const bf16* Bf16(const Tensor& tensor) {
  BURST_CHECK(tensor.dtype() == DType::kBFloat16 && tensor.is_contiguous());
  return static_cast<const bf16*>(tensor.raw_data());
}

// Takes at least one block, which writes the scale.
template <typename Source>
void MakeTiles(int64_t rows, int64_t cols, const Source& source, const Tensor& as_rows,
               const Tensor& as_columns) {
  BURST_CHECK(cols % 16 == 0);
  const dim3 blocks(static_cast<unsigned>(std::max<int64_t>(1, (rows + kTile - 1) / kTile)),
                    static_cast<unsigned>((cols + kTile - 1) / kTile));
  TileKernel<<<blocks, kThreads, 0, CurrentStream()>>>(
      rows, cols, as_columns.null() ? rows : as_columns.dim(1), source,
      DataOrNull<uint8_t>(as_rows), DataOrNull<uint8_t>(as_columns));
  BURST_CUDA_CHECK(cudaGetLastError());
}

// Returns the number of blocks that read `vectors` vectors, and leave few numbers to combine.
unsigned BlocksToReduce(int64_t vectors) {
  constexpr int64_t kMostBlocks = 132 * 8;
  return static_cast<unsigned>(std::min(kMostBlocks, (vectors + kThreads - 1) / kThreads));
}

DType Float8DType(const Tensor& as_rows, const Tensor& as_columns) {
  const DType dtype = as_rows.null() ? as_columns.dtype() : as_rows.dtype();
  BURST_CHECK(Is8Bit(dtype) &&
              (as_rows.null() || as_columns.null() || as_columns.dtype() == dtype));
  return dtype;
}

}  // namespace

void LargestMagnitude(const Tensor& x, const Tensor& amax) {
  const int64_t vectors = x.numel() / kVec;
  BURST_CHECK(x.numel() % kVec == 0);
  BURST_CUDA_CHECK(cudaMemsetAsync(amax.raw_data(), 0, sizeof(float), CurrentStream()));
  if (vectors == 0) return;
  LargestMagnitudeKernel<<<BlocksToReduce(vectors), kThreads, 0, CurrentStream()>>>(
      vectors, Bf16(x), static_cast<uint32_t*>(amax.raw_data()));
  BURST_CUDA_CHECK(cudaGetLastError());
}

void RoundToFloat8(const Tensor& x, int64_t cols, const Tensor& amax, const Tensor& as_rows,
                   const Tensor& as_columns, const Tensor& scale) {
  const TensorSource source{Bf16(x), Float(amax), Float(scale), cols};
  const int64_t rows = x.numel() / cols;
  if (Float8DType(as_rows, as_columns) == DType::kFloat8E4M3) {
    MakeTiles(rows, cols, Rounded<__NV_E4M3>{source}, as_rows, as_columns);
  } else {
    MakeTiles(rows, cols, Rounded<__NV_E5M2>{source}, as_rows, as_columns);
  }
}

void TransposeFloat8(const Tensor& as_rows, int64_t cols, const Tensor& as_columns) {
  BURST_CHECK(Float8DType(as_rows, as_columns) == as_rows.dtype() && as_rows.is_contiguous());
  MakeTiles(as_rows.numel() / cols, cols, Bytes{static_cast<uint8_t*>(as_rows.raw_data()), cols},
            Tensor(), as_columns);
}

void SwiGluMagnitudes(const Tensor& gate_up, const Tensor& largest) {
  const int64_t n = gate_up.dim(-1) / 2, vectors = gate_up.numel() / (2 * kVec);
  BURST_CHECK(n % kVec == 0 && largest.numel() == 3);
  BURST_CUDA_CHECK(cudaMemsetAsync(largest.raw_data(), 0, 3 * sizeof(float), CurrentStream()));
  if (vectors == 0) return;
  SwiGluMagnitudesKernel<<<BlocksToReduce(vectors), kThreads, 0, CurrentStream()>>>(
      vectors, static_cast<int>(n), Bf16(gate_up), static_cast<uint32_t*>(largest.raw_data()));
  BURST_CUDA_CHECK(cudaGetLastError());
}

void SwiGluToFloat8(const Tensor& gate_up, const Tensor& largest, const Tensor& as_rows,
                    const Tensor& as_columns, const Tensor& scale) {
  const int64_t n = gate_up.dim(-1) / 2;
  BURST_CHECK(Float8DType(as_rows, as_columns) == DType::kFloat8E4M3);
  MakeTiles(gate_up.numel() / (2 * n), n,
            SwiGluSource{Bf16(gate_up), Float(largest), Float(scale), n}, as_rows, as_columns);
}

void SwiGluGradToFloat8(const Tensor& gate_up, const Tensor& grad, const Tensor& grad_amax,
                        const Tensor& largest, const Tensor& as_rows, const Tensor& as_columns,
                        const Tensor& scale) {
  const int64_t n = grad.dim(-1);
  BURST_CHECK(Float8DType(as_rows, as_columns) == DType::kFloat8E5M2 && gate_up.dim(-1) == 2 * n);
  MakeTiles(grad.numel() / n, n,
            SwiGluGradSource{Bf16(gate_up), Bf16(grad), Float(grad_amax), Float(largest),
                             Float(scale), n},
            as_rows, as_columns);
}

}  // namespace cuda
}  // namespace burst
