// Tells tests whether they run under a sanitizer. Under the thread sanitizer everything takes ten
// times as long, so sweeps whose cases differ only in size take fewer cases, and say so. The
// address sanitizer holds freed memory back. Work that must only last some time is divided by
// kSlowdown.
#pragma once

#include <cstdio>
#include <initializer_list>
#include <vector>

namespace burst {

#ifdef __SANITIZE_THREAD__
inline constexpr bool kThreadSanitizer = true;
#else
inline constexpr bool kThreadSanitizer = false;
#endif

#ifdef __SANITIZE_ADDRESS__
inline constexpr bool kAddressSanitizer = true;
#else
inline constexpr bool kAddressSanitizer = false;
#endif

// The factor by which a test takes longer, about.
inline constexpr int kSlowdown = kThreadSanitizer ? 10 : kAddressSanitizer ? 4 : 1;

// Returns all cases; under the thread sanitizer the first `few`.
template <typename T>
std::vector<T> CasesOrFew(std::initializer_list<T> cases, size_t few) {
  if (!kThreadSanitizer) return cases;
  std::fprintf(stderr, "thread sanitizer: %zu of %zu cases\n", few, cases.size());
  return {cases.begin(), cases.begin() + few};
}

}  // namespace burst
