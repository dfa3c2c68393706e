// A 64-byte SIMD vector through the compiler's vector extension: one AVX-512 register, or two of
// AVX2, without intrinsics.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace burst {
namespace cpu {

template <typename T>
struct Vector;
template <>
struct Vector<float> {
  typedef float Type __attribute__((vector_size(64)));
  typedef int32_t Int __attribute__((vector_size(64)));
};
template <>
struct Vector<double> {
  typedef double Type __attribute__((vector_size(64)));
  typedef int64_t Int __attribute__((vector_size(64)));
};

template <typename T>
using Vec = typename Vector<T>::Type;

template <typename T>
inline constexpr int kLanes = 64 / sizeof(T);

template <typename T>
inline Vec<T> Load(const T* p) {
  Vec<T> v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

template <typename T>
inline void Store(T* p, Vec<T> v) {
  std::memcpy(p, &v, sizeof(v));
}

template <typename T>
inline Vec<T> Broadcast(T x) {
  return Vec<T>{} + x;
}

template <typename V>
inline V Max(V a, V b) {
  return a > b ? a : b;
}

// e^x. x is reduced to x = n ln 2 + r, |r| <= ln 2 / 2; e^r by a polynomial whose first neglected
// term is below half an ulp (degree 6: r^7 / 7! < 2^-23 / 10; degree 12 in double); 2^n by adding n
// to the exponent. Below the smallest normal number the result is 0, so e^-inf = 0. Not for x above
// ln of the largest number: the softmax's arguments are at most about 0.
inline Vec<float> Exp(Vec<float> x) {
  using V = Vec<float>;
  using I = Vector<float>::Int;
  const V floor = Broadcast(-87.3f);
  const V clamped = Max(x, floor);
  const V shifted = clamped * 1.44269504088896341f + 12582912.f;  // 1.5 * 2^23: rounds to an integer
  const V n = shifted - 12582912.f;
  const V r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts
  V p = Broadcast(1.f / 720);
  p = p * r + 1.f / 120;
  p = p * r + 1.f / 24;
  p = p * r + 1.f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.f;
  p = p * r + 1.f;
  I bits, exponent;
  std::memcpy(&bits, &p, sizeof(bits));
  std::memcpy(&exponent, &shifted, sizeof(exponent));
  bits += exponent << 23;  // the low bits of `shifted` are n; the rest falls off the top
  std::memcpy(&p, &bits, sizeof(p));
  return x < floor ? V{} : p;
}

inline Vec<double> Exp(Vec<double> x) {
  Vec<double> y = {};
  for (int i = 0; i < kLanes<double>; ++i) y[i] = std::exp(x[i]);
  return y;
}

template <typename T>
inline T HorizontalSum(Vec<T> v) {
  T sum = 0;
  for (int i = 0; i < kLanes<T>; ++i) sum += v[i];
  return sum;
}

template <typename T>
inline T HorizontalMax(Vec<T> v) {
  T max = v[0];
  for (int i = 1; i < kLanes<T>; ++i) max = v[i] > max ? v[i] : max;
  return max;
}

}  // namespace cpu
}  // namespace burst
