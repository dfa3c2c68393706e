#include <algorithm>

#include "burst/kernels/gpu/common/elementwise.h"
#include "burst/kernels/merge.h"
#include "burst/tensor/dispatch.cuh"

namespace burst {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxGridY = 65535;

// Finds the rows [columns] of a tensor [batch, seqlen, num_heads, columns], in memory's order.
// Each row has kLanes lanes. blockIdx.y walks the batch, so that a lane divides once, in 32 bits.
template <int kLanes>
struct Row {
  static constexpr int kPerBlock = kThreads / kLanes;

  __device__ Row(uint32_t rows, uint32_t num_heads) {
    const uint32_t index = blockIdx.x * kPerBlock + threadIdx.x / kLanes;
    valid = index < rows;
    const uint32_t mine = valid ? index : 0;
    const uint32_t token = mine / num_heads;
    i = token;
    h = mine - token * num_heads;
  }
  template <typename T>
  __device__ T* Of(const AttentionOperand& operand, int64_t b) const {
    return OfToken<T>(operand, b, i);
  }
  template <typename T>
  __device__ T* OfToken(const AttentionOperand& operand, int64_t b, int64_t token) const {
    return static_cast<T*>(operand.data) + b * operand.batch_stride + token * operand.seq_stride +
           h * operand.head_stride;
  }
  int64_t i, h;
  bool valid;
};

// Computes delta[b, h, i] = rowsum(dO * O) - dlse. Lanes take vectors of 16 bytes, with or without
// kVectorized loads, which change no bit.
template <typename T, int kLanes, bool kVectorized>
__global__ __launch_bounds__(kThreads) void DeltaKernel(
    const __grid_constant__ FlashDeltaParams params) {
  using A = Accumulator<T>;
  constexpr int kVec = kVecSize<T>;
  const uint32_t q_len = static_cast<uint32_t>(params.shape.q_len);
  const uint32_t num_heads = static_cast<uint32_t>(params.shape.num_heads);
  const int value_dim = static_cast<int>(params.shape.value_dim);
  const int batch = static_cast<int>(params.shape.batch);
  const int lane = threadIdx.x % kLanes;
  const Row<kLanes> row(q_len * num_heads, num_heads);
#pragma unroll 1
  for (int64_t b = blockIdx.y; b < batch; b += gridDim.y) {
    const T* o = row.template Of<const T>(params.out, b);
    const T* d = row.template Of<const T>(params.dout, b);
    A sum = 0;
#pragma unroll 1
    for (int c = lane * kVec; c < value_dim; c += kLanes * kVec) {
      Vec<T, kVec> x = {}, y = {};
      if (kVectorized) {
        x = *reinterpret_cast<const Vec<T, kVec>*>(o + c);
        y = *reinterpret_cast<const Vec<T, kVec>*>(d + c);
      } else {
        for (int j = 0; j < kVec && c + j < value_dim; ++j) {
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
    if (row.valid && lane == 0) {
      const int64_t at = (b * num_heads + row.h) * q_len + row.i;
      const A* dlse = static_cast<const A*>(params.dlse);
      static_cast<A*>(params.delta)[at] = dlse == nullptr ? sum : sum - dlse[at];
    }
  }
}

// Adds kVec consecutive elements to `sum`, with loads of at most 16 bytes.
template <int kVec, typename T>
__device__ void AddVec(const T* x, float (&sum)[kVec]) {
  constexpr int kStep = kVec < kVecSize<T> ? kVec : kVecSize<T>;
#pragma unroll
  for (int i = 0; i < kVec; i += kStep) {
    const Vec<T, kStep> part = *reinterpret_cast<const Vec<T, kStep>*>(x + i);
#pragma unroll
    for (int j = 0; j < kStep; ++j) sum[i + j] += ConvertTo<float>(part[j]);
  }
}

struct ConvertParams {
  AttentionOperand from, addend, to;
  const int32_t* addend_rows;  // null: all rows
  int batch, head_dim;
  uint32_t seqlen, num_heads;
};

template <int kVec, int kLanes, typename Addend, typename To>
__global__ __launch_bounds__(kThreads) void ConvertKernel(
    const __grid_constant__ ConvertParams params) {
  const Row<kLanes> row(params.seqlen * params.num_heads, params.num_heads);
  if (!row.valid) return;
  const int64_t addend_row = params.addend_rows == nullptr ? row.i : params.addend_rows[row.i];
#pragma unroll 1
  for (int64_t b = blockIdx.y; b < params.batch; b += gridDim.y) {
#pragma unroll 1
    for (int c = threadIdx.x % kLanes * kVec; c < params.head_dim; c += kLanes * kVec) {
      float sum[kVec] = {};
      AddVec(row.template Of<const float>(params.from, b) + c, sum);
      if (params.addend.data != nullptr && addend_row >= 0) {
        AddVec(row.template OfToken<const Addend>(params.addend, b, addend_row) + c, sum);
      }
      Vec<To, kVec> y;
#pragma unroll
      for (int j = 0; j < kVec; ++j) y[j] = ConvertTo<To>(sum[j]);
      *reinterpret_cast<Vec<To, kVec>*>(row.template Of<To>(params.to, b) + c) = y;
    }
  }
}

// A thread block computes a row of out; all its threads find the same weights.
template <typename T>
__global__ __launch_bounds__(kThreads) void MergeKernel(const Accumulator<T>* parts,
                                                        const Accumulator<T>* sinks, int sets,
                                                        int64_t stride, int64_t rows, int q_len,
                                                        int heads, int head_dim, T* out) {
  using A = Accumulator<T>;
  const int64_t row = blockIdx.x, token = row / heads;
  const int64_t b = token / q_len, i = token % q_len, h = row % heads;
  const A* const lses = parts + rows * head_dim + (b * heads + h) * q_len + i;
  for (int c = threadIdx.x; c < head_dim; c += kThreads) {
    A sum = 0, lse = sinks == nullptr ? A(-INFINITY) : sinks[h];
    for (int set = 0; set < sets; ++set) {
      const MergeWeights<A> merged = Merge(lse, lses[set * stride]);
      sum = sum * merged.a + parts[set * stride + row * head_dim + c] * merged.b;
      lse = merged.lse;
    }
    out[row * head_dim + c] = ConvertTo<T>(sum);
  }
}

// A thread block computes the gradient of one head's sink. A thread adds up every kThreads-th row,
// and a tree adds up the threads.
template <typename A>
__global__ __launch_bounds__(kThreads) void SinkGradsKernel(const A* lse, const A* delta,
                                                            const A* sinks, int batch, int q_len,
                                                            A* dsinks) {
  __shared__ double sums[kThreads];
  const int64_t h = blockIdx.x, heads = gridDim.x;
  const A sink = sinks[h];
  double sum = 0;
  for (int64_t b = 0; b < batch && sink != -INFINITY; ++b) {
    const int64_t first = (b * heads + h) * q_len;
    for (int64_t i = threadIdx.x; i < q_len; i += kThreads) {
      sum -= double{exp(sink - lse[first + i])} * delta[first + i];
    }
  }
  sums[threadIdx.x] = sum;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) dsinks[h] = static_cast<A>(sums[0]);
}

// Returns whether every row begins at a multiple of 16 bytes and consists of whole vectors of `vec`
// elements.
bool InVectors(const AttentionOperand& operand, int64_t head_dim, int64_t element_bytes,
               int64_t vec) {
  const int64_t elements = 16 / element_bytes;
  return reinterpret_cast<uintptr_t>(operand.data) % 16 == 0 && head_dim % vec == 0 &&
         operand.batch_stride % elements == 0 && operand.seq_stride % elements == 0 &&
         operand.head_stride % elements == 0;
}

// Returns the grid for `rows` rows in each row of the batch, `per_block` rows a thread block.
dim3 Grid(int64_t batch, int64_t rows, int per_block) {
  BURST_CHECK_LT(rows, int64_t{1} << 32);
  return dim3(static_cast<unsigned>((rows + per_block - 1) / per_block),
              static_cast<unsigned>(std::min(batch, kMaxGridY)));
}

template <typename T, int kLanes>
void LaunchDelta(const FlashDeltaParams& params) {
  const FlashAttentionShape& shape = params.shape;
  const bool vectorized = InVectors(params.out, shape.value_dim, sizeof(T), kVecSize<T>) &&
                          InVectors(params.dout, shape.value_dim, sizeof(T), kVecSize<T>);
  const auto kernel = vectorized ? DeltaKernel<T, kLanes, true> : DeltaKernel<T, kLanes, false>;
  const dim3 grid = Grid(shape.batch, shape.q_len * shape.num_heads, Row<kLanes>::kPerBlock);
  kernel<<<grid, kThreads, 0, CurrentStream()>>>(params);
  BURST_CUDA_CHECK_LAUNCH("attention delta");
}

template <typename To, int kVec, int kLanes>
void LaunchConvert(const ConvertParams& params, bool addend_is_float) {
  const auto kernel = addend_is_float ? ConvertKernel<kVec, kLanes, float, To>
                                      : ConvertKernel<kVec, kLanes, To, To>;
  const int64_t rows = static_cast<int64_t>(params.seqlen) * params.num_heads;
  kernel<<<Grid(params.batch, rows, Row<kLanes>::kPerBlock), kThreads, 0, CurrentStream()>>>(
      params);
  BURST_CUDA_CHECK_LAUNCH("attention convert");
}

}  // namespace

// Takes as many lanes as a row has vectors of 16 bytes, at most 32.
void Delta(const FlashDeltaParams& params) {
  const FlashAttentionShape& shape = params.shape;
  if (shape.batch * shape.q_len * shape.num_heads == 0) return;
  DispatchDtypeOrFp16(shape.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t vectors = shape.value_dim * static_cast<int64_t>(sizeof(T)) / 16;
    if (vectors <= 8) return LaunchDelta<T, 8>(params);
    if (vectors <= 16) return LaunchDelta<T, 16>(params);
    LaunchDelta<T, 32>(params);
  });
}

void Convert(const Tensor& from, const Tensor& addend, const int32_t* addend_rows,
             const AttentionOperand& to, DType dtype) {
  if (from.numel() == 0) return;
  const bool adds = !addend.null(), wide = adds && addend.dtype() == DType::kFloat32;
  BURST_CHECK(!adds || wide || addend.dtype() == dtype) << Name(addend.dtype());
  BURST_CHECK(!adds || addend_rows != nullptr || addend.shape() == from.shape());
  ConvertParams params;
  params.from = Operand(from);
  if (adds) params.addend = Operand(addend);
  params.addend_rows = addend_rows;
  params.to = to;
  params.batch = static_cast<int>(from.dim(0));
  params.seqlen = static_cast<uint32_t>(from.dim(1));
  params.num_heads = static_cast<uint32_t>(from.dim(2));
  params.head_dim = static_cast<int>(from.dim(3));
  constexpr int kVec = 8;
  const bool vectorized =
      InVectors(params.from, params.head_dim, sizeof(float), kVec) &&
      InVectors(to, params.head_dim, SizeOf(dtype), kVec) &&
      (!adds || InVectors(params.addend, params.head_dim, SizeOf(addend.dtype()), kVec));
  const auto launch = [&](auto element) {
    using To = decltype(element);
    if (!vectorized) return LaunchConvert<To, 1, 32>(params, wide);
    if (params.head_dim <= 8 * kVec) return LaunchConvert<To, kVec, 8>(params, wide);
    if (params.head_dim <= 16 * kVec) return LaunchConvert<To, kVec, 16>(params, wide);
    LaunchConvert<To, kVec, 32>(params, wide);
  };
  dtype == DType::kFloat16 ? launch(fp16{}) : launch(bf16{});
}

void MergeParts(const Tensor& parts, const Tensor& out, const Tensor& sinks) {
  const int64_t rows = out.numel() / out.dim(3);
  BURST_CHECK_LT(rows, int64_t{1} << 31);
  DispatchDtypeOrFp16(out.dtype(), [&](auto zero) {
    using T = decltype(zero);
    MergeKernel<T><<<static_cast<unsigned>(rows), kThreads, 0, CurrentStream()>>>(
        static_cast<const Accumulator<T>*>(parts.raw_data()),
        sinks.null() ? nullptr : static_cast<const Accumulator<T>*>(sinks.raw_data()),
        static_cast<int>(parts.dim(0)), parts.dim(1), rows, static_cast<int>(out.dim(1)),
        static_cast<int>(out.dim(2)), static_cast<int>(out.dim(3)),
        static_cast<T*>(out.raw_data()));
    BURST_CUDA_CHECK_LAUNCH("attention merge");
  });
}

void SinkGrads(const Tensor& lse, const Tensor& delta, const Tensor& sinks, const Tensor& dsinks) {
  const auto launch = [&](auto zero) {
    using A = decltype(zero);
    const auto data = [](const Tensor& tensor) { return static_cast<A*>(tensor.raw_data()); };
    SinkGradsKernel<A><<<static_cast<unsigned>(sinks.numel()), kThreads, 0, CurrentStream()>>>(
        data(lse), data(delta), data(sinks), static_cast<int>(lse.dim(0)),
        static_cast<int>(lse.dim(2)), data(dsinks));
  };
  lse.dtype() == DType::kFloat64 ? launch(double{}) : launch(float{});
  BURST_CUDA_CHECK_LAUNCH("gradients of attention sinks");
}

}  // namespace cuda
}  // namespace burst
