// What the memory-bound kernels share: 16 bytes of a row as numbers to compute with.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "burst/tensor/dispatch.cuh"

namespace burst {
namespace cuda {

// N consecutive elements in the accumulator's type.
template <typename T, int N>
__device__ inline void Unpack(const Pack<T, N>& pack, Accumulator<T>* values) {
#pragma unroll
  for (int j = 0; j < N; ++j) values[j] = ConvertTo<Accumulator<T>>(pack[j]);
}

// Back to memory's type, two bf16 by one instruction.
template <typename T, int N>
__device__ inline Pack<T, N> ToPack(const Accumulator<T>* values) {
  Pack<T, N> pack;
  if constexpr (std::is_same_v<T, bf16> && N % 2 == 0) {
#pragma unroll
    for (int j = 0; j < N; j += 2) {
      const __nv_bfloat162 two = __floats2bfloat162_rn(values[j], values[j + 1]);
      pack[j] = two.x;
      pack[j + 1] = two.y;
    }
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) pack[j] = ConvertTo<T>(values[j]);
  }
  return pack;
}

template <typename T, int N>
__device__ inline const Pack<T, N>* AsPacks(const T* data) {
  return reinterpret_cast<const Pack<T, N>*>(data);
}
template <typename T, int N>
__device__ inline Pack<T, N>* AsPacks(T* data) {
  return reinterpret_cast<Pack<T, N>*>(data);
}

// N consecutive numbers as they are, by words of at most 16 bytes, to which `from` is aligned.
template <typename A, int N>
__device__ inline void Load(const A* from, A* to) {
  constexpr int M = N < kPackSize<A> ? N : kPackSize<A>;
#pragma unroll
  for (int i = 0; i < N / M; ++i) {
    const Pack<A, M> pack = AsPacks<A, M>(from)[i];
#pragma unroll
    for (int j = 0; j < M; ++j) to[i * M + j] = pack[j];
  }
}
template <typename A, int N>
__device__ inline void Store(const A* from, A* to) {
  constexpr int M = N < kPackSize<A> ? N : kPackSize<A>;
#pragma unroll
  for (int i = 0; i < N / M; ++i) {
    Pack<A, M> pack;
#pragma unroll
    for (int j = 0; j < M; ++j) pack[j] = from[i * M + j];
    AsPacks<A, M>(to)[i] = pack;
  }
}

// Whether rows of `width` elements of these tensors (null ones aside) can be read in packs.
inline bool FitsPacks(int64_t width, std::initializer_list<Tensor> tensors) {
  for (const Tensor& tensor : tensors) {
    if (tensor.null()) continue;
    if (reinterpret_cast<uintptr_t>(tensor.raw_data()) % 16 != 0) return false;
    if (width * SizeOf(tensor.dtype()) % 16 != 0) return false;
  }
  return true;
}

// Calls function(T{}, constant N): T of the dtype, N the elements of a pack, or 1 when the rows do
// not fit packs.
template <typename Function>
void DispatchPacks(DType dtype, bool packs, Function&& function) {
  DispatchDtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    if (packs) {
      function(zero, std::integral_constant<int, kPackSize<T>>());
    } else {
      function(zero, std::integral_constant<int, 1>());
    }
  });
}

// Calls function(G{}) with the type of a parameter's gradient buffer: the accumulator's, or T.
template <typename T, typename Function>
void DispatchGrad(DType dtype, Function&& function) {
  if constexpr (!std::is_same_v<T, Accumulator<T>>) {
    if (dtype == DType::kBFloat16) return function(T{});
  }
  BURST_CHECK(dtype == DTypeOf<Accumulator<T>>::value) << "a gradient of " << Name(dtype);
  function(Accumulator<T>{});
}

// 1 / (1 + exp(-x)). What is stored as bf16 needs no more than the fast instructions.
template <typename T>
__device__ inline Accumulator<T> Sigmoid(Accumulator<T> x) {
  if constexpr (std::is_same_v<T, bf16>) {
    return __fdividef(1.0f, 1.0f + __expf(-x));
  } else {
    return 1 / (1 + exp(-x));
  }
}

// Blocks for n items, a thread each: no cap, the kernels do not loop.
inline unsigned BlocksFor(int64_t n, int threads) {
  const int64_t blocks = (n + threads - 1) / threads;
  BURST_CHECK_LE(blocks, int64_t{0x7fffffff});
  return static_cast<unsigned>(blocks);
}

}  // namespace cuda
}  // namespace burst
