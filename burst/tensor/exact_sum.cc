#include "burst/tensor/exact_sum.h"

#include <cmath>
#include <limits>

#include "burst/base/check.h"
#include "burst/base/parallel.h"
#include "burst/tensor/exact_sum_cuda.h"
#include "burst/tensor/gpu_kernel.h"

namespace burst {
namespace {

// Hides a value from the compiler, because x + shift - shift is x rounded, not x.
template <typename T>
void AddOnCpu(int64_t n, const T* terms, const ExactGrid& grid, double* sum, bool assign) {
  const double shift = 1.5 * 0x1p52 * grid.unit, largest = grid.largest;
  ParallelFor(n, 1 << 14, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const double term = terms[i];
      const double rounded = std::abs(term) <= largest ? (term + shift) - shift
                                                       : std::numeric_limits<double>::quiet_NaN();
      sum[i] = assign ? rounded : sum[i] + rounded;
    }
  });
}

}  // namespace

ExactGrid ExactGrid::For(double unit, int64_t terms) {
  int exponent = 0;
  BURST_CHECK(std::frexp(unit, &exponent) == 0.5 && terms >= 1)
      << "unit must be a power of two and terms positive; got " << unit << " and " << terms;
  double bound = 1;
  while (bound < static_cast<double>(terms)) bound *= 2;
  return {unit, 0x1p52 * unit / bound};
}

void AddExactly(const Tensor& terms, const ExactGrid& grid, const Tensor& sum, bool assign) {
  BURST_CHECK(terms.numel() == sum.numel() && sum.dtype() == DType::kFloat64 &&
              terms.is_contiguous() && sum.is_contiguous() && terms.device() == sum.device())
      << Name(terms.dtype()) << " " << ToString(terms.shape()) << " to " << Name(sum.dtype()) << " "
      << ToString(sum.shape());
  if (sum.device() == DeviceType::kCuda)
    return BURST_GPU_KERNEL(AddExactly, terms, grid, sum, assign);
  DispatchFloat(terms.dtype(), [&](auto zero) {
    using T = decltype(zero);
    AddOnCpu(terms.numel(), terms.data<T>(), grid, sum.data<double>(), assign);
  });
}

}  // namespace burst
