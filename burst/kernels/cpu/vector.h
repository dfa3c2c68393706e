// SIMD vectors through the compiler's vector extension, as wide as one register of the target: no
// intrinsics, so the kernels compile for any machine.
#pragma once

#include <cstdint>
#include <cstring>

namespace burst {
namespace cpu {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
inline constexpr int kVectorRegisters = 32;
#elif defined(__AVX__)
inline constexpr int kVectorBytes = 32;
inline constexpr int kVectorRegisters = 16;
#else
inline constexpr int kVectorBytes = 16;
inline constexpr int kVectorRegisters = 16;
#endif

template <typename T>
struct Vector;
template <>
struct Vector<float> {
  typedef float Type __attribute__((vector_size(kVectorBytes)));
  typedef int32_t Int __attribute__((vector_size(kVectorBytes)));
};
template <>
struct Vector<double> {
  typedef double Type __attribute__((vector_size(kVectorBytes)));
  typedef int64_t Int __attribute__((vector_size(kVectorBytes)));
};

template <typename T>
using Vec = typename Vector<T>::Type;

template <typename T>
inline constexpr int kLanes = kVectorBytes / sizeof(T);

// n rounded up to whole vectors.
template <typename T>
constexpr int64_t RoundUpToLanes(int64_t n) {
  return (n + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
}

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
  return x - Vec<T>{};  // x - 0 is x, also for -0; x + 0 is not
}

// The larger; b where one of them is not a number.
template <typename V>
inline V Max(V a, V b) {
  return a > b ? a : b;
}

template <typename T>
inline T HorizontalSum(Vec<T> v) {
  T sum = 0;
  for (int i = 0; i < kLanes<T>; ++i) sum += v[i];
  return sum;
}

// 2^r on [-1/2, 1/2] is 1 + r q(r); q interpolates (2^r - 1) / r at Chebyshev nodes, constant
// first. `kRound` is 1.5 * 2^(bits of the mantissa): adding it rounds to an integer, which is then
// in the lowest bits of the sum. `kMinExponent` is the smallest exponent of a normal number.
template <typename T>
struct Exp2Constants;
template <>
struct Exp2Constants<float> {  // error of the polynomial 5.1e-9
  static constexpr float kCoefficients[] = {0.693147188026228781f,   0.240226507605681269f,
                                            0.0555035711421907782f,  0.00961808255727785149f,
                                            0.00133908633646712344f, 0.000154531629451206902f};
  static constexpr float kRound = 12582912;
  static constexpr int kMantissaBits = 23;
  static constexpr float kMinExponent = -126;
};
template <>
struct Exp2Constants<double> {  // error of the polynomial 8.4e-18
  static constexpr double kCoefficients[] = {
      0.693147180559945309,    0.240226506959100982,    0.0555041086648215943,
      0.00961812910760688853,  0.00133335581464169353,  0.000154035304417360502,
      1.52527338298361184e-05, 1.32154425879216897e-06, 1.01780624458457735e-07,
      7.0725859492692237e-09,  4.45496059818651839e-10};
  static constexpr double kRound = 6755399441055744;
  static constexpr int kMantissaBits = 52;
  static constexpr double kMinExponent = -1022;
};

// 2^x, within 1 ulp: x = n + r with n an integer and |r| <= 1/2 is exact, 2^n is added to the
// exponent. Results below the smallest normal number are 0, so 2^-inf = 0; NaN stays NaN. Not for x
// at or above 128 (float; 1024 in double): a softmax's arguments are at most about 0.
template <typename T>
inline Vec<T> Exp2(Vec<T> x) {
  using Constants = Exp2Constants<T>;
  constexpr int kDegree = sizeof(Constants::kCoefficients) / sizeof(T);
  const Vec<T> lowest = Broadcast<T>(Constants::kMinExponent);
  const Vec<T> clamped = Max(lowest, x);
  const Vec<T> shifted = clamped + Constants::kRound;
  const Vec<T> r = clamped - (shifted - Constants::kRound);
  Vec<T> p = Broadcast(Constants::kCoefficients[kDegree - 1]);
#pragma GCC unroll 16
  for (int i = kDegree - 2; i >= 0; --i) p = p * r + Constants::kCoefficients[i];
  p = p * r + T{1};
  typename Vector<T>::Int bits, n;
  std::memcpy(&bits, &p, sizeof(bits));
  std::memcpy(&n, &shifted, sizeof(n));
  bits += n << Constants::kMantissaBits;
  std::memcpy(&p, &bits, sizeof(p));
  return x < lowest ? Vec<T>{} : p;
}

}  // namespace cpu
}  // namespace burst
