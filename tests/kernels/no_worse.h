// Compares kernels for bfloat16 and float16 with a naive computation of the same problem that
// rounds everything. The kernels keep sums and scores in float32 and round only P, dS and the
// results. So the root mean square of an error may exceed the naive one by at most one rounding, u
// / sqrt(3). (U is 2^-9 in bfloat16, 2^-12 in float16.) With few rows the naive computation may be
// lucky. The largest error is a single draw of either. It may be twice the naive one and a rounding
// (u of the largest element).
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "burst/tensor/tensor.h"
#include "tests/kernels/attention_problem.h"
#include "tests/testing/attention_reference.h"

namespace burst {

inline double SquaredError(const Tensor& actual, const Tensor& expected) {
  const std::vector<double> a = actual.ToVector<double>(), e = expected.ToVector<double>();
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - e[i]) * (a[i] - e[i]);
  return sum;
}

inline double LargestOf(const Tensor& x) {
  double largest = 0;
  for (double value : x.ToVector<double>()) largest = std::max(largest, std::abs(value));
  return largest;
}

// From this number of draws on, luck does not make the naive error smaller than a kernel's. Naive
// dq and dk round six values: S, P, O, dP, dS and the result. Kernels round three: O, dS and the
// result. If all weigh alike, a kernel's root mean square is expected to be sqrt(3 / 6) = 0.71 of
// the naive one. The root mean square of n normal draws has a standard deviation of 1 / sqrt(2 n),
// as a share: 1/8 for 32 draws. Two of them leave 0.75 of the naive one, which is above 0.71.
inline constexpr int64_t kEnoughDraws = 32;

// Compares one result. `draws` is the number of independent draws in the error. With at least
// kEnoughDraws, our root mean square may exceed the naive one by a rounding. With fewer draws it
// may also be twice as large, like the largest error. `more` is the additional error that an
// element may have.
inline void ExpectNoWorse(const char* name, const Tensor& actual, const Tensor& naive,
                          const Tensor& expected, int64_t draws = 1000, double more = 0) {
  if (expected.numel() == 0) return;
  const double luck = draws < kEnoughDraws ? 2 : 1;
  const double rounding = actual.dtype() == DType::kFloat16 ? 0x1p-12 : 0x1p-9;
  const double largest = LargestOf(expected);
  EXPECT_LE(RelativeError(actual, expected),
            2 * RelativeError(naive, expected) + rounding + (largest > 0 ? more / largest : 0))
      << name;
  const double n = static_cast<double>(expected.numel());
  const double rms = std::sqrt(SquaredError(expected, Tensor::ZerosLike(expected)) / n);
  EXPECT_LE(
      std::sqrt(SquaredError(actual, expected) / n),
      luck * std::sqrt(SquaredError(naive, expected) / n) + rounding / std::sqrt(3.0) * rms + more)
      << name << ", root mean square";
}

// Compares all results.
//
//    naive           results in the inputs' dtype
//    lse_tolerance   the tolerance of products and sums in float32
//    rows            the number of rows whose delta differs; 0: all that see a key
//    more_of_dq      the additional error that an element of dq may have; more_of_dk: of dk
inline void ExpectNoWorse(const AttentionResults& result, const AttentionResults& naive,
                          const AttentionResults& expected, double lse_tolerance = 1e-5,
                          int64_t rows = 0, double more_of_dq = 0, double more_of_dk = 0) {
  EXPECT_LE(RelativeError(result.lse, expected.lse), lse_tolerance) << "lse";
  ExpectNoWorse("out", result.out, naive.out, expected.out);
  // The errors of dq and dk contain the error of delta, one number for every row of a head.
  if (rows == 0) {
    for (double lse : expected.lse.ToVector<double>()) rows += std::isfinite(lse);
  }
  ExpectNoWorse("dq", result.dq, naive.dq, expected.dq, rows, more_of_dq);
  ExpectNoWorse("dk", result.dk, naive.dk, expected.dk, rows, more_of_dk);
  ExpectNoWorse("dv", result.dv, naive.dv, expected.dv);
}

// dP and delta cancel where one key has nearly all of a row's weight, by ALiBi, or a sink has the
// weight of the other keys. In a naive computation they cancel to the bit. In a kernel they cancel
// up to the rounding of out, from which delta is computed. An element of dq, a mean of keys, is off
// by at most u scale max |K| max_row |dO| . |out|. An element of dk is off by as much of max |Q|
// where a row's weight is on one key.
inline double OffByDelta(const Problem& problem, const AttentionResults& expected,
                         const Tensor& q_or_k) {
  const double u = problem.q.dtype() == DType::kFloat16 ? 0x1p-12 : 0x1p-9;
  const std::vector<double> out = expected.out.ToVector<double>(),
                            dout = problem.dout.ToVector<double>();
  const int64_t d = problem.v.dim(3);
  double largest = 0;
  for (size_t row = 0; row < out.size(); row += d) {
    double sum = 0;
    for (int64_t i = 0; i < d; ++i) sum += std::abs(out[row + i] * dout[row + i]);
    largest = std::max(largest, sum);
  }
  return u * problem.softmax_scale * LargestOf(q_or_k) * largest;
}

}  // namespace burst
