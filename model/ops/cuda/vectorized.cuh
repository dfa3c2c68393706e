// Loads and stores vectors of 16 bytes of a row as numbers, in the memory-bound kernels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "burst/tensor/dispatch.cuh"

namespace burst {
namespace cuda {

// Holds N consecutive elements of memory, at most 16 bytes, as words in registers. By elements,
// nvcc would give each bf16 a register of its own, and might load them one by one.
template <typename T, int N>
struct Words {
  static constexpr int kBytes = N * static_cast<int>(sizeof(T));
  uint32_t words[kBytes < 4 ? 1 : kBytes / 4];

  // Element j, which must be known when compiled.
  __device__ Accumulator<T> operator[](int j) const {
    if constexpr (std::is_same_v<T, bf16>) {  // the upper half of a float
      return __uint_as_float(j % 2 == 0 ? words[j / 2] << 16 : words[j / 2] & 0xffff0000);
    } else if constexpr (sizeof(T) == 4) {
      return __uint_as_float(words[j]);
    } else {
      return __hiloint2double(words[2 * j + 1], words[2 * j]);
    }
  }
};

template <typename T, int N>
__device__ inline Words<T, N> ToWords(const Accumulator<T>* values) {
  Words<T, N> out;
  if constexpr (std::is_same_v<T, bf16> && N == 1) {
    out.words[0] = __bfloat16_as_ushort(__float2bfloat16(values[0]));
  } else if constexpr (std::is_same_v<T, bf16>) {
#pragma unroll
    for (int j = 0; j < N; j += 2) {
      const __nv_bfloat162 two = __floats2bfloat162_rn(values[j], values[j + 1]);
      out.words[j / 2] = *reinterpret_cast<const uint32_t*>(&two);
    }
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int j = 0; j < N; ++j) out.words[j] = __float_as_uint(values[j]);
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      out.words[2 * j] = __double2loint(values[j]);
      out.words[2 * j + 1] = __double2hiint(values[j]);
    }
  }
  return out;
}

// Loads and stores at addresses that are multiples of the words' size.
template <int N, typename T>
__device__ inline Words<T, N> Load(const T* from) {
  Words<T, N> out;
  auto& w = out.words;
  if constexpr (out.kBytes == 16) {
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "l"(from)
                 : "memory");
  } else if constexpr (out.kBytes == 8) {
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];"
                 : "=r"(w[0]), "=r"(w[1])
                 : "l"(from)
                 : "memory");
  } else if constexpr (out.kBytes == 4) {
    w[0] = *reinterpret_cast<const uint32_t*>(from);
  } else {
    w[0] = *reinterpret_cast<const uint16_t*>(from);
  }
  return out;
}

template <typename T, int N>
__device__ inline void Store(const Words<T, N>& words, T* to) {
  const auto& w = words.words;
  if constexpr (words.kBytes == 16) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(w[0]), "r"(w[1]),
                 "r"(w[2]), "r"(w[3])
                 : "memory");
  } else if constexpr (words.kBytes == 8) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(w[0]), "r"(w[1]) : "memory");
  } else if constexpr (words.kBytes == 4) {
    *reinterpret_cast<uint32_t*>(to) = w[0];
  } else {
    *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(w[0]);
  }
}

template <typename T, int N>
__device__ inline void StoreRounded(const Accumulator<T>* values, T* to) {
  Store(ToWords<T, N>(values), to);
}

// Loads and stores N numbers of an accumulator's type in global memory, by several words.
template <int N, typename A>
__device__ inline void LoadNumbers(const A* from, A* to) {
  constexpr int M = N < kVecSize<A> ? N : kVecSize<A>;
#pragma unroll
  for (int i = 0; i < N; i += M) {
    const Words<A, M> words = Load<M>(from + i);
#pragma unroll
    for (int j = 0; j < M; ++j) to[i + j] = words[j];
  }
}
template <int N, typename A>
__device__ inline void StoreNumbers(const A* from, A* to) {
  constexpr int M = N < kVecSize<A> ? N : kVecSize<A>;
#pragma unroll
  for (int i = 0; i < N; i += M) StoreRounded<A, M>(from + i, to + i);
}

// Returns whether rows of `width` elements of these tensors (except null) fit vectors.
inline bool FitsVectors(int64_t width, std::initializer_list<Tensor> tensors) {
  for (const Tensor& tensor : tensors) {
    if (tensor.null()) continue;
    if (reinterpret_cast<uintptr_t>(tensor.raw_data()) % 16 != 0) return false;
    if (width * SizeOf(tensor.dtype()) % 16 != 0) return false;
  }
  return true;
}

// Calls function(T{}, constant N) with the type T of the dtype. N is the elements of a vector, or 1
// when the rows do not fit vectors.
template <typename Function>
void DispatchVectors(DType dtype, bool vectorized, Function&& function) {
  DispatchDtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    if (vectorized) {
      function(zero, std::integral_constant<int, kVecSize<T>>());
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

// Returns 1 / (1 + exp(-x)). For results stored as bf16 the fast instructions are exact enough.
template <typename T>
__device__ inline Accumulator<T> Sigmoid(Accumulator<T> x) {
  if constexpr (std::is_same_v<T, bf16>) {
    return __fdividef(1.0f, 1.0f + __expf(-x));
  } else {
    return 1 / (1 + exp(-x));
  }
}

// Returns the blocks for n items, a thread each. Kernels count threads in 32 bits, because 64-bit
// divisions cost more than the arithmetic on the elements.
inline unsigned BlocksFor(int64_t n, int threads) {
  BURST_CHECK_LE(n + threads, int64_t{1} << 32);
  return static_cast<unsigned>((n + threads - 1) / threads);
}

}  // namespace cuda
}  // namespace burst
