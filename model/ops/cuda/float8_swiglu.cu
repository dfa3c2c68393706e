// Makes float8 forms (kernels.h) of SwiGLU's results, which never exist in bfloat16.
#include "burst/base/check.h"
#include "burst/tensor/dispatch.cuh"
#include "model/ops/cuda/float8_tiles.cuh"
#include "model/ops/cuda/kernels.h"

namespace burst {
namespace cuda {
namespace {

// ---- SwiGLU. gate and up are the halves of a row of [rows, 2 n].

// silu(g) = g s, with s = sigmoid(g)
__device__ inline float Silu(float g) { return g * Sigmoid<bf16>(g); }

// |silu'(g)| = |s (1 + g (1 - s))| is below this bound for every g.
constexpr float kSteepestSilu = 1.1f;
// Rounding to e4m3 changes a number by at most this part of it, or of the largest number.
constexpr float kHalfUnit = 0x1p-4f;

// The results of SwiGluMagnitudes.
enum { kHiddenAmax, kSiluAmax, kGateAmax, kUpAmax };

__global__ void __launch_bounds__(kThreads)
    SwiGluMagnitudesKernel(int64_t vectors, int n, const bf16* __restrict__ gate_up,
                           uint32_t* largest) {
  uint32_t most[kSwiGluMagnitudes] = {};
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < vectors;
       i += stride) {
    const int64_t row = i / (n / kVec);
    const bf16* gates = gate_up + (i + row * (n / kVec)) * kVec;
    const Eight gate = Load<kVec>(gates), up = Load<kVec>(gates + n);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float silu = Silu(gate[j]);
      most[kHiddenAmax] = max(most[kHiddenAmax], MagnitudeBits(silu * up[j]));
      most[kSiluAmax] = max(most[kSiluAmax], MagnitudeBits(silu));
    }
    most[kGateAmax] = max(most[kGateAmax], MagnitudeBits(gate));
    most[kUpAmax] = max(most[kUpAmax], MagnitudeBits(up));
  }
#pragma unroll
  for (int i = 0; i < kSwiGluMagnitudes; ++i) RaiseAmax(most[i], largest + i);
}

// gate and up as they come from their product. Begin keeps e4m3 of them, unless `kept` is null.
struct FreshGateUp {
  const bf16* x;  // [rows, 2 n]
  int64_t n;
  uint8_t* kept;       // [rows, 2 n]
  float* kept_scales;  // [2], of gate and of up
  float inverse[2] = {};

  __device__ void Begin(bool first, const float* largest) {
    if (kept == nullptr) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float scale = ScaleFor(largest[kGateAmax + i], kLargestE4M3);
      if (first) kept_scales[i] = scale;
      inverse[i] = 1 / scale;
    }
  }
  __device__ void Read(int64_t row, int64_t col, float (&gate_up)[2][kVec]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t at = (row * 2 + i) * n + col;
      const Eight words = Load<kVec>(x + at);
#pragma unroll
      for (int j = 0; j < kVec; ++j) gate_up[i][j] = words[j];
      if (kept == nullptr) continue;
      *reinterpret_cast<uint2*>(kept + at) = RoundEight<__NV_E4M3>(gate_up[i], inverse[i]);
    }
  }
};

// gate and up as FreshGateUp kept them.
struct KeptGateUp {
  const uint8_t* kept;
  const float* kept_scales;
  int64_t n;
  float scale[2] = {};

  __device__ void Begin(bool, const float*) {
    scale[0] = kept_scales[0];
    scale[1] = kept_scales[1];
  }
  __device__ void Read(int64_t row, int64_t col, float (&gate_up)[2][kVec]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint2 bytes = *reinterpret_cast<const uint2*>(kept + (row * 2 + i) * n + col);
      FromE4M3(bytes, scale[i], gate_up[i]);
    }
  }
};

// Gives silu(gate) up / scale, in e4m3. `growth` is room in the scale for a gate and an up that
// were rounded; what exceeds it is saturated.
template <typename GateUp>
struct SwiGluSource {
  static constexpr int kOutputs = 1;
  static constexpr bool kOwnColumns = false;
  GateUp gate_up;
  const float* largest;  // result of SwiGluMagnitudes
  float growth;
  float* scale_out;
  float inverse = 0;

  __device__ void Begin(int64_t first_row, int64_t first_col) {
    const bool first = IsFirstThread(first_row, first_col);
    const float scale = ScaleFor(growth * largest[kHiddenAmax], kLargestE4M3);
    if (first) *scale_out = scale;
    inverse = 1 / scale;
    gate_up.Begin(first, largest);
  }
  __device__ void Read(int64_t row, int64_t col, uint2 (&out)[1]) const {
    float v[2][kVec];
    gate_up.Read(row, col, v);
#pragma unroll
    for (int j = 0; j < kVec; ++j) v[0][j] = Silu(v[0][j]) * v[1][j];
    out[0] = RoundEight<__NV_E4M3>(v[0], inverse);
  }
};

// Gives gradients of gate and up / scale, in e5m2. With the gradient d of silu(gate) up:
//   dgate = d up s (1 + gate (1 - s)),   dup = d silu(gate)
struct SwiGluGradSource {
  static constexpr int kOutputs = 2;
  static constexpr bool kOwnColumns = false;
  KeptGateUp gate_up;
  const bf16* grad;
  const float *grad_amax, *largest;
  float* scale_out;
  float inverse = 0;

  __device__ void Begin(int64_t first_row, int64_t first_col) {
    const bool first = IsFirstThread(first_row, first_col);
    // Rounding has changed gate and up, and so silu(gate).
    const float up = largest[kUpAmax] * (1 + kHalfUnit);
    const float silu = largest[kSiluAmax] + kSteepestSilu * kHalfUnit * largest[kGateAmax];
    const float most = fmaxf(kSteepestSilu * up, silu);  // fmaxf drops a NaN
    const float scale =
        ScaleFor(*grad_amax * (largest[kHiddenAmax] < INFINITY ? most : INFINITY), kLargestE5M2);
    if (first) *scale_out = scale;
    inverse = 1 / scale;
    gate_up.Begin(first, largest);
  }
  __device__ void Read(int64_t row, int64_t col, uint2 (&out)[2]) const {
    float v[2][kVec], dgate[kVec], dup[kVec];
    gate_up.Read(row, col, v);
    const Eight d = Load<kVec>(grad + row * gate_up.n + col);
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float g = v[0][j], s = Sigmoid<bf16>(g), scaled = d[j] * s;
      dgate[j] = scaled * v[1][j] * (1 + g * (1 - s));
      dup[j] = scaled * g;
    }
    out[0] = RoundEight<__NV_E5M2>(dgate, inverse);
    out[1] = RoundEight<__NV_E5M2>(dup, inverse);
  }
};

KeptGateUp Kept(const Tensor& kept, const Tensor& scales) {
  BURST_CHECK(kept.dtype() == DType::kFloat8E4M3 && scales.numel() == 2);
  return {static_cast<const uint8_t*>(kept.raw_data()), Float(scales), kept.dim(-1) / 2};
}

}  // namespace

void SwiGluMagnitudes(const Tensor& gate_up, const Tensor& largest) {
  const int64_t n = gate_up.dim(-1) / 2, vectors = gate_up.numel() / (2 * kVec);
  BURST_CHECK(n % kVec == 0 && largest.numel() == kSwiGluMagnitudes);
  BURST_CUDA_CHECK(
      cudaMemsetAsync(largest.raw_data(), 0, kSwiGluMagnitudes * sizeof(float), CurrentStream()));
  if (vectors == 0) return;
  SwiGluMagnitudesKernel<<<BlocksToReduce(vectors), kThreads, 0, CurrentStream()>>>(
      vectors, static_cast<int>(n), Bf16(gate_up), static_cast<uint32_t*>(largest.raw_data()));
  BURST_CUDA_CHECK(cudaGetLastError());
}

void SwiGluToFloat8(const Tensor& gate_up, const Tensor& largest, const Tensor& as_rows,
                    const Tensor& scale, const Tensor& kept, const Tensor& kept_scales) {
  const int64_t n = gate_up.dim(-1) / 2;
  BURST_CHECK(as_rows.dtype() == DType::kFloat8E4M3 && kept.null() == kept_scales.null());
  const FreshGateUp fresh{Bf16(gate_up), n, DataOrNull<uint8_t>(kept),
                          DataOrNull<float>(kept_scales)};
  MakeTiles(gate_up.numel() / (2 * n), n,
            SwiGluSource<FreshGateUp>{fresh, Float(largest), 1, Float(scale)}, as_rows, Tensor());
}

void KeptSwiGluToFloat8(const Tensor& kept, const Tensor& kept_scales, const Tensor& largest,
                        const Tensor& as_columns, const Tensor& scale) {
  BURST_CHECK(as_columns.dtype() == DType::kFloat8E4M3);
  const KeptGateUp gate_up = Kept(kept, kept_scales);
  constexpr float kGrowth = (1 + 2 * kHalfUnit) * (1 + kHalfUnit);
  MakeTiles(kept.numel() / (2 * gate_up.n), gate_up.n,
            SwiGluSource<KeptGateUp>{gate_up, Float(largest), kGrowth, Float(scale)}, Tensor(),
            as_columns);
}

void SwiGluGradToFloat8(const Tensor& kept, const Tensor& kept_scales, const Tensor& grad,
                        const Tensor& grad_amax, const Tensor& largest, const Tensor& as_rows,
                        const Tensor& as_columns, const Tensor& scale) {
  const KeptGateUp gate_up = Kept(kept, kept_scales);
  BURST_CHECK(Float8DType(as_rows, as_columns) == DType::kFloat8E5M2 && grad.dim(-1) == gate_up.n);
  MakeTiles(grad.numel() / gate_up.n, gate_up.n,
            SwiGluGradSource{gate_up, Bf16(grad), Float(grad_amax), Float(largest), Float(scale)},
            as_rows, as_columns);
}

}  // namespace cuda
}  // namespace burst
