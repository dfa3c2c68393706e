// Conversions of single 16-bit elements on the CPU.
#pragma once

#include <Eigen/Core>
#include <cstdint>
#include <cstring>

#include "burst/tensor/tensor.h"

namespace burst {

inline float ToFloat(BFloat16 value) {
  const uint32_t bits = uint32_t{value.bits} << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

inline float ToFloat(Float16 value) {
  namespace half_impl = Eigen::half_impl;
  return half_impl::half_to_float(half_impl::raw_uint16_to_half(value.bits));
}

// Rounds to nearest, ties to even. NaN stays NaN.
inline void Round(float value, BFloat16* result) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  const uint32_t rounded = nan ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
  result->bits = static_cast<uint16_t>(rounded >> 16);
}

inline void Round(float value, Float16* result) {
  result->bits = Eigen::half_impl::float_to_half_rtne(value).x;
}

}  // namespace burst
