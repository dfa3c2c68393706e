// Sums whose bits do not depend on the order of their terms, nor on how these are divided among
// ranks.
//
// Every term is first rounded to a multiple of a power of two, the unit. Multiples of a unit that
// stay below 2^53 units are added in float64 without rounding, so their sum is exact in any order
// (pre-rounding: Rump, Ogita and Oishi, "Accurate Floating-Point Summation", SIAM J. Sci. Comput.
// 31(1), 2008; Demmel and Nguyen, "Fast Reproducible Floating-Point Summation", ARITH 2013).
#pragma once

#include <cstdint>

#include "burst/tensor/tensor.h"

namespace burst {

// The grid to which terms are rounded, and the largest term.
struct ExactGrid {
  double unit = 0;     // a power of two; a term is rounded by at most half of it
  double largest = 0;  // a term beyond +- this becomes NaN, and so does the sum

  // Returns the grid for sums of at most `terms` terms. `largest` is 2^52 unit / terms, with
  // `terms` rounded up to a power of two, so that no sum can leave the exact range.
  static ExactGrid For(double unit, int64_t terms);
};

// Adds terms, rounded to the grid, to sum; with `assign` it overwrites sum with them. terms:
// float32 or float64. sum: float64, multiples of the grid's unit. Both are contiguous, of equal
// size, on one device.
void AddExactly(const Tensor& terms, const ExactGrid& grid, const Tensor& sum, bool assign = false);

}  // namespace burst
