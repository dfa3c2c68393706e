#include "burst/tensor/dispatch.cuh"
#include "burst/tensor/exact_sum_cuda.h"

namespace burst {
namespace cuda {
namespace {

constexpr int kThreads = 256, kVec = 4;

template <typename T>
__device__ __forceinline__ double RoundTerm(T value, double shift, double largest) {
  const double term = value;
  return fabs(term) <= largest ? (term + shift) - shift
                               : __longlong_as_double(0x7ff8000000000000ll);
}

// Adds vectors of four terms, which reads and writes 32 bytes of sums at a time.
template <typename T>
__global__ void AddExactlyKernel(int64_t n, const T* __restrict__ terms, double shift,
                                 double largest, double* __restrict__ sum, bool assign) {
  const int64_t first = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * blockDim.x, vecs = n / kVec;
  for (int64_t i = first; i < vecs; i += step) {
    T own[kVec];
#pragma unroll
    for (int j = 0; j < kVec; j += kVecSize<T>) {
      const auto part =
          reinterpret_cast<const Vec<T, kVecSize<T>>*>(terms + i * kVec)[j / kVecSize<T>];
#pragma unroll
      for (int k = 0; k < kVecSize<T>; ++k) own[j + k] = part[k];
    }
#pragma unroll
    for (int j = 0; j < kVec; j += 2) {
      auto& place = reinterpret_cast<Vec<double, 2>*>(sum + i * kVec)[j / 2];
      Vec<double, 2> sums = {0, 0};
      if (!assign) sums = place;
      sums[0] += RoundTerm(own[j], shift, largest);
      sums[1] += RoundTerm(own[j + 1], shift, largest);
      place = sums;
    }
  }
  for (int64_t i = vecs * kVec + first; i < n; i += step) {
    sum[i] = (assign ? 0 : sum[i]) + RoundTerm(terms[i], shift, largest);
  }
}

// Vectors need 16-byte addresses. A slice may not have them; it is added element by element.
template <typename T>
__global__ void AddElementsExactlyKernel(int64_t n, const T* __restrict__ terms, double shift,
                                         double largest, double* __restrict__ sum, bool assign) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    sum[i] = (assign ? 0 : sum[i]) + RoundTerm(terms[i], shift, largest);
  }
}

template <typename T>
void Launch(int64_t n, const T* terms, const ExactGrid& grid, double* sum, bool assign) {
  const double shift = 1.5 * 0x1p52 * grid.unit;
  const bool aligned =
      reinterpret_cast<uintptr_t>(terms) % 16 == 0 && reinterpret_cast<uintptr_t>(sum) % 16 == 0;
  if (aligned) {
    AddExactlyKernel<<<GridSize(n / kVec, kThreads), kThreads, 0, CurrentStream()>>>(
        n, terms, shift, grid.largest, sum, assign);
  } else {
    AddElementsExactlyKernel<<<GridSize(n, kThreads), kThreads, 0, CurrentStream()>>>(
        n, terms, shift, grid.largest, sum, assign);
  }
  BURST_CUDA_CHECK_LAUNCH("AddExactly");
}

}  // namespace

void AddExactly(const Tensor& terms, const ExactGrid& grid, const Tensor& sum, bool assign) {
  if (terms.numel() == 0) return;
  if (terms.dtype() == DType::kFloat64) {
    return Launch(terms.numel(), Data<double>(terms), grid, Data<double>(sum), assign);
  }
  BURST_CHECK(terms.dtype() == DType::kFloat32) << Name(terms.dtype());
  Launch(terms.numel(), Data<float>(terms), grid, Data<double>(sum), assign);
}

}  // namespace cuda
}  // namespace burst
