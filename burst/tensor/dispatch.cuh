// Turns a runtime dtype into a template argument in .cu files, and computes with 16-bit types.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "burst/base/check.h"
#include "burst/device/cuda.h"
#include "burst/tensor/tensor.h"

namespace burst {
namespace cuda {

using bf16 = __nv_bfloat16;
using fp16 = __half;

// Calls function(T{}) with T = float, double or bf16.
template <typename Function>
void DispatchDtype(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::kFloat32:
      return function(float{});
    case DType::kFloat64:
      return function(double{});
    case DType::kBFloat16:
      return function(bf16{});
    case DType::kInt32:
    case DType::kFloat16:
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
      break;
  }
  BURST_CHECK(false) << "expected a float32, float64 or bfloat16 tensor, got " << Name(dtype);
}

// Calls function(T{}) like DispatchDtype, also with fp16, for attention. Models have no fp16.
template <typename Function>
void DispatchDtypeOrFp16(DType dtype, Function&& function) {
  if (dtype == DType::kFloat16) return function(fp16{});
  DispatchDtype(dtype, function);
}

// The type in which a kernel computes. bf16 and fp16 only store numbers.
template <typename T>
struct AccumulatorOf {
  using type = T;
};
template <>
struct AccumulatorOf<bf16> {
  using type = float;
};
template <>
struct AccumulatorOf<fp16> {
  using type = float;
};
template <typename T>
using Accumulator = typename AccumulatorOf<T>::type;

template <typename To, typename From>
__device__ inline To ConvertTo(From value) {
  return static_cast<To>(value);
}
template <>
__device__ inline bf16 ConvertTo<bf16, double>(double value) {
  return __float2bfloat16(static_cast<float>(value));
}
template <>
__device__ inline bf16 ConvertTo<bf16, float>(float value) {
  return __float2bfloat16(value);
}
template <>
__device__ inline float ConvertTo<float, bf16>(bf16 value) {
  return __bfloat162float(value);
}
template <>
__device__ inline double ConvertTo<double, bf16>(bf16 value) {
  return __bfloat162float(value);
}
template <>
__device__ inline fp16 ConvertTo<fp16, double>(double value) {
  return __float2half(static_cast<float>(value));
}
template <>
__device__ inline fp16 ConvertTo<fp16, float>(float value) {
  return __float2half(value);
}
template <>
__device__ inline float ConvertTo<float, fp16>(fp16 value) {
  return __half2float(value);
}
template <>
__device__ inline double ConvertTo<double, fp16>(fp16 value) {
  return __half2float(value);
}

// Returns the first element of a tensor of T on a GPU.
template <typename T>
T* Data(const Tensor& tensor) {
  return tensor.null() ? nullptr : static_cast<T*>(tensor.raw_data());
}

// Consecutive elements that are read and written as one word of at most 16 bytes.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
  T values[N];
  __device__ T& operator[](int i) { return values[i]; }
  __device__ const T& operator[](int i) const { return values[i]; }
};
template <typename T>
inline constexpr int kVecSize = 16 / sizeof(T);

// Returns the blocks of `threads` for n items, a few waves. Kernels loop over the grid.
inline int GridSize(int64_t n, int threads) {
  const int64_t blocks = (n + threads - 1) / threads;
  const int64_t most = int64_t{32} * CurrentContext().multiprocessors;
  return static_cast<int>(blocks < 1 ? 1 : blocks < most ? blocks : most);
}

}  // namespace cuda
}  // namespace burst
