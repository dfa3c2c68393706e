// Rows of elements, read and written as vectors of the type that kernels compute in. It is the
// elements' own, and float for elements of 16 bits.
#pragma once

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

#include "burst/base/check.h"
#include "burst/kernels/cpu/vector.h"
#include "burst/tensor/number.h"
#include "burst/tensor/tensor.h"

namespace burst {
namespace cpu {

template <typename Element>
struct ComputedIn {
  using Type = Element;
};
template <>
struct ComputedIn<BFloat16> {
  using Type = float;
};
template <>
struct ComputedIn<Float16> {
  using Type = float;
};
template <typename Element>
using Computed = typename ComputedIn<Element>::Type;

// Calls function(Element{}) with the element type of a dtype that the kernels serve.
template <typename Function>
auto DispatchElement(DType dtype, Function&& function) {
  if (dtype == DType::kBFloat16) return function(BFloat16{});
  if (dtype == DType::kFloat16) return function(Float16{});
  return DispatchFloat(dtype, function);
}

// ---- One element.

inline float Read(float x) { return x; }
inline double Read(double x) { return x; }
inline float Read(BFloat16 x) { return ToFloat(x); }
inline float Read(Float16 x) { return ToFloat(x); }

inline void Write(float value, float* x) { *x = value; }
inline void Write(double value, double* x) { *x = value; }
inline void Write(float value, BFloat16* x) { Round(value, x); }
inline void Write(float value, Float16* x) { Round(value, x); }

// ---- A vector of elements.

inline Vec<float> ReadVector(const float* x) { return Load(x); }
inline Vec<double> ReadVector(const double* x) { return Load(x); }
inline void WriteVector(Vec<float> v, float* x) { Store(x, v); }
inline void WriteVector(Vec<double> v, double* x) { Store(x, v); }

typedef uint16_t HalfWords __attribute__((vector_size(kVectorBytes / 2)));
typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));

inline Vec<float> ReadVector(const BFloat16* x) {
  HalfWords halves;
  std::memcpy(&halves, x, sizeof(halves));
  const Words bits = __builtin_convertvector(halves, Words) << 16;
  Vec<float> v;
  std::memcpy(&v, &bits, sizeof(v));
  return v;
}

// Rounds as Round does.
inline void WriteVector(Vec<float> v, BFloat16* x) {
  Words bits;
  std::memcpy(&bits, &v, sizeof(bits));
  const Words rounded = bits + 0x7fff + (bits >> 16 & 1), nan = bits | 0x400000;
  bits = (bits & 0x7fffffff) > 0x7f800000 ? nan : rounded;
  const HalfWords halves = __builtin_convertvector(bits >> 16, HalfWords);
  std::memcpy(static_cast<void*>(x), &halves, sizeof(halves));
}

inline Vec<float> ReadVector(const Float16* x) {
  float values[kLanes<float>];
#if defined(__F16C__)
  for (int i = 0; i < kLanes<float>; i += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i));
    _mm256_storeu_ps(values + i, _mm256_cvtph_ps(halves));
  }
#else
  for (int i = 0; i < kLanes<float>; ++i) values[i] = ToFloat(x[i]);
#endif
  return Load(values);
}

inline void WriteVector(Vec<float> v, Float16* x) {
  float values[kLanes<float>];
  Store(values, v);
#if defined(__F16C__)
  for (int i = 0; i < kLanes<float>; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(values + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(x + i), halves);
  }
#else
  for (int i = 0; i < kLanes<float>; ++i) Round(values[i], x + i);
#endif
}

// ---- Rows of n elements.

// y[c] = factor * x[c]
template <typename From, typename T, typename To>
void ScaleRow(int64_t n, T factor, const From* x, To* y) {
  int64_t c = 0;
  for (; c + kLanes<T> <= n; c += kLanes<T>) WriteVector(factor * ReadVector(x + c), y + c);
  for (; c < n; ++c) Write(factor * Read(x[c]), y + c);
}

// y[c] = a * x[c] + b * z[c]
template <typename T, typename To>
void AddRows(int64_t n, T a, const T* x, T b, const T* z, To* y) {
  int64_t c = 0;
  for (; c + kLanes<T> <= n; c += kLanes<T>) {
    WriteVector(a * ReadVector(x + c) + b * ReadVector(z + c), y + c);
  }
  for (; c < n; ++c) Write(a * x[c] + b * z[c], y + c);
}

// Returns the sum of a[c] b[c].
template <typename Element>
Computed<Element> Dot(int64_t n, const Element* a, const Element* b) {
  using T = Computed<Element>;
  Vec<T> sums = {};
  int64_t c = 0;
  for (; c + kLanes<T> <= n; c += kLanes<T>) sums += ReadVector(a + c) * ReadVector(b + c);
  T sum = HorizontalSum<T>(sums);
  for (; c < n; ++c) sum += Read(a[c]) * Read(b[c]);
  return sum;
}

}  // namespace cpu
}  // namespace burst
