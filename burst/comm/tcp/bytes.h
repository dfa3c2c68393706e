// Converts numbers to little-endian bytes and back, for messages between processes (greeting.h,
// frame.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"

namespace burst {

using ByteSpan = absl::Span<const uint8_t>;

template <typename T>
void PutNumber(T value, uint8_t* to) {
  for (size_t i = 0; i < sizeof(T); ++i) to[i] = static_cast<uint8_t>(value >> (8 * i));
}

template <typename T>
T GetNumber(const uint8_t* from) {
  T value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) value |= static_cast<T>(from[i]) << (8 * i);
  return value;
}

}  // namespace burst
