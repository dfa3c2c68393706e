// Products of float8 numbers in double, for tests of ops in float8.
//
// A test rounds factors to float8 itself, with the scales that ops.h promises, and multiplies them
// in double. The GPU may differ from that by its sums alone. A tensor core's instruction aligns 32
// products and a sum to the largest of these, and truncates each 13 bits after its leading bit. So
// a sum of k products is off by at most 33/32 k 2^-13 of the largest product or sum on the way. The
// bias and the residual are added in fp32. A result in bfloat16 is rounded once more, by at most
// 2^-8 relative.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "burst/tensor/tensor.h"

namespace burst {

using Values = std::vector<double>;

inline constexpr double kRounding = 0x1p-8;  // the rounding of a result in bfloat16

// A float8 format has bits of mantissa, the exponent of the smallest normal number, and the largest
// number.
struct Format {
  int mantissa;
  int least_exponent;
  double largest;
};
inline constexpr Format kE4M3 = {3, -6, 448};
inline constexpr Format kE5M2 = {2, -14, 57344};

// Rounds to nearest, ties to even, with saturation.
inline double RoundTo(const Format& format, double value) {
  if (value == 0) return 0;
  const int exponent = std::max(std::ilogb(value), format.least_exponent);
  const double unit = std::ldexp(1, exponent - format.mantissa);
  const double rounded = std::nearbyint(value / unit) * unit;
  return std::clamp(rounded, -format.largest, format.largest);
}

// The smallest power of two that fits a bound.
inline double ScaleFor(const Format& format, double bound) {
  return bound == 0 ? 1 : std::exp2(std::ceil(std::log2(bound / format.largest)));
}

// Returns values [rows, cols] as float8 numbers times their scales. Elements of which `group`
// returns the same number have the same scale, the smallest power of two that fits them.
inline Values Rounded(const Format& format, const Values& values, int64_t cols,
                      const std::function<int64_t(int64_t row, int64_t col)>& group) {
  std::map<int64_t, double> amax;
  const auto group_of = [&](size_t i) {
    return group(static_cast<int64_t>(i) / cols, static_cast<int64_t>(i) % cols);
  };
  for (size_t i = 0; i < values.size(); ++i) {
    double& most = amax[group_of(i)];
    most = std::max(most, std::abs(values[i]));
  }
  Values result(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    const double scale = ScaleFor(format, amax[group_of(i)]);
    result[i] = RoundTo(format, values[i] / scale) * scale;
  }
  return result;
}
inline Values Rounded(const Format& format, const Values& values) {
  return Rounded(format, values, 1, [](int64_t, int64_t) { return 0; });
}

// c[i, j] = sum over l of a(i, l) b(l, j), and the largest magnitude of a product or a sum on the
// way.
struct Product {
  Values sum, largest;
};
template <typename A, typename B>
inline Product Multiply(int64_t m, int64_t k, int64_t n, const A& a, const B& b) {
  Product p{Values(m * n), Values(m * n)};
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t l = 0; l < k; ++l) {
        const double term = a(i, l) * b(l, j);
        p.sum[i * n + j] += term;
        double& largest = p.largest[i * n + j];
        largest = std::max({largest, std::abs(term), std::abs(p.sum[i * n + j])});
      }
    }
  }
  return p;
}

// Compares a result with its products. `added` is what the GEMM adds to its products, and its
// largest magnitude.
inline void ExpectClose(const Tensor& actual, const Product& expected, int64_t k,
                        const Product& added, double rounding, const char* what) {
  const Values values = actual.ToVector<double>();
  ASSERT_EQ(values.size(), expected.sum.size());
  for (size_t i = 0; i < values.size(); ++i) {
    const double want = expected.sum[i] + added.sum[i];
    const double bound = 33.0 / 32 * static_cast<double>(k) * 0x1p-13 * expected.largest[i] +
                         rounding * std::abs(want) + 0x1p-22 * added.largest[i];
    ASSERT_NEAR(values[i], want, bound) << what << " " << i;
  }
}

// Half the distance of two neighboring numbers of the format, times the scale: the error of
// rounding a value that is itself off by `error`.
inline double RoundingError(const Format& format, double scale, double value, double error) {
  const double normal = std::ldexp(std::abs(value) + error, -format.mantissa - 1);
  return error + std::max(normal, std::ldexp(scale, format.least_exponent - format.mantissa - 1));
}

inline double Largest(const Values& values) {
  double largest = 0;
  for (const double value : values) largest = std::max(largest, std::abs(value));
  return largest;
}

inline Tensor OnGpu(const Values& values, const Shape& shape) {
  return Tensor::FromVector(values, shape).To(DType::kBFloat16).To(DeviceType::kCuda);
}

inline void ExpectWithin(const Tensor& actual, const Values& expected, const Values& errors,
                         double rounding, const char* what) {
  const Values values = actual.ToVector<double>();
  ASSERT_EQ(values.size(), expected.size());
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_NEAR(values[i], expected[i],
                (1 + rounding) * errors[i] + rounding * std::abs(expected[i]))
        << what << " " << i;
  }
}

}  // namespace burst
