#include "burst/tensor/dispatch.cuh"
#include "burst/tensor/tensor_cuda.h"

namespace burst {
namespace cuda {
namespace {

constexpr int kThreads = 256;

// Sets y[i] = f(i, y[i]) over the grid.
template <typename T, typename Function>
__global__ void MapKernel(int64_t n, T* y, Function f) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    y[i] = f(i, y[i]);
  }
}

template <typename T, typename Function>
void Map(int64_t n, T* y, Function f) {
  if (n == 0) return;
  MapKernel<<<GridSize(n, kThreads), kThreads, 0, CurrentStream()>>>(n, y, f);
  BURST_CUDA_CHECK_LAUNCH("Map");
}

// Sets y[i] = x[i], or y[i] += x[i], by 16 bytes of the wider type at a time.
template <bool kAdd, typename To, typename From>
__global__ void ConvertKernel(int64_t n, const From* __restrict__ x, To* __restrict__ y) {
  constexpr int kVec = 16 / (sizeof(To) > sizeof(From) ? sizeof(To) : sizeof(From));
  using A = Accumulator<To>;
  const int64_t vecs = n / kVec;
  const int64_t first = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  const auto value = [](From from, To old) {
    A result = ConvertTo<A>(from);
    if (kAdd) result += ConvertTo<A>(old);
    return ConvertTo<To>(result);
  };
  for (int64_t i = first; i < vecs; i += step) {
    const auto from = reinterpret_cast<const Vec<From, kVec>*>(x)[i];
    Vec<To, kVec> to;
    if (kAdd) to = reinterpret_cast<const Vec<To, kVec>*>(y)[i];
#pragma unroll
    for (int j = 0; j < kVec; ++j) to[j] = value(from[j], to[j]);
    reinterpret_cast<Vec<To, kVec>*>(y)[i] = to;
  }
  for (int64_t i = vecs * kVec + first; i < n; i += step) {
    y[i] = value(x[i], kAdd ? y[i] : To{});
  }
}

// Vectors need 16-byte addresses. A slice may not have them; it is handled element by element.
template <bool kAdd, typename To, typename From>
void LaunchConvert(int64_t n, const From* x, To* y) {
  if (n == 0) return;
  const bool aligned =
      reinterpret_cast<uintptr_t>(x) % 16 == 0 && reinterpret_cast<uintptr_t>(y) % 16 == 0;
  if (aligned) {
    ConvertKernel<kAdd><<<GridSize(n / 4, kThreads), kThreads, 0, CurrentStream()>>>(n, x, y);
    BURST_CUDA_CHECK_LAUNCH("Convert");
    return;
  }
  Map(n, y, [x] __device__(int64_t i, To old) {
    using A = Accumulator<To>;
    A result = ConvertTo<A>(x[i]);
    if (kAdd) result += ConvertTo<A>(old);
    return ConvertTo<To>(result);
  });
}

// These are functions, because device lambdas must not be inside generic lambdas.
template <typename T>
void FillTyped(const Tensor& y, double value) {
  Map(y.numel(), Data<T>(y), [value] __device__(int64_t, T) { return ConvertTo<T>(value); });
}

template <typename T>
void ScaleTyped(const Tensor& y, double factor) {
  Map(y.numel(), Data<T>(y), [factor] __device__(int64_t, T old) {
    using A = Accumulator<T>;
    return ConvertTo<T>(ConvertTo<A>(old) * static_cast<A>(factor));
  });
}

}  // namespace

void Convert(const Tensor& from, const Tensor& to) {
  DispatchDtypeOrFp16(from.dtype(), [&](auto source) {
    DispatchDtypeOrFp16(to.dtype(), [&](auto target) {
      using From = decltype(source);
      using To = decltype(target);
      if constexpr (!std::is_same_v<From, To>) {
        LaunchConvert<false>(from.numel(), Data<From>(from), Data<To>(to));
      }
    });
  });
}

void Fill(const Tensor& tensor, double value) {
  if (value == 0) {
    BURST_CUDA_CHECK(cudaMemsetAsync(tensor.raw_data(), 0, tensor.size_bytes(), CurrentStream()));
    return;
  }
  if (tensor.dtype() == DType::kInt32) return FillTyped<int32_t>(tensor, value);
  DispatchDtypeOrFp16(tensor.dtype(), [&](auto zero) { FillTyped<decltype(zero)>(tensor, value); });
}

void Add(const Tensor& y, const Tensor& x) {
  if (y.dtype() == DType::kFloat32 && Is16Bit(x.dtype())) {
    if (x.dtype() == DType::kFloat16) {
      return LaunchConvert<true>(y.numel(), Data<fp16>(x), Data<float>(y));
    }
    return LaunchConvert<true>(y.numel(), Data<bf16>(x), Data<float>(y));
  }
  BURST_CHECK(x.dtype() == y.dtype()) << Name(y.dtype()) << " += " << Name(x.dtype());
  DispatchDtypeOrFp16(y.dtype(), [&](auto zero) {
    using T = decltype(zero);
    LaunchConvert<true>(y.numel(), Data<T>(x), Data<T>(y));
  });
}

void Scale(const Tensor& y, double factor) {
  DispatchDtypeOrFp16(y.dtype(), [&](auto zero) { ScaleTyped<decltype(zero)>(y, factor); });
}

}  // namespace cuda
}  // namespace burst
