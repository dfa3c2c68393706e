// Reads numbers and text from a fuzzer's bytes. After the last byte it returns the smallest value,
// so every input is valid.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace burst {

class FuzzInput {
 public:
  FuzzInput(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  bool empty() const { return size_ == 0; }

  // Returns a value from `least` to `most`, read from as many bytes as the range has.
  int64_t Integer(int64_t least, int64_t most) {
    const uint64_t range = static_cast<uint64_t>(most) - static_cast<uint64_t>(least);
    uint64_t value = 0;
    for (uint64_t left = range; left > 0; left >>= 8) value = value << 8 | Byte();
    if (range != UINT64_MAX) value %= range + 1;
    return static_cast<int64_t>(static_cast<uint64_t>(least) + value);
  }
  bool Bool() { return Byte() % 2 == 1; }
  template <typename T, size_t n>
  const T& Pick(const T (&values)[n]) {
    return values[Integer(0, static_cast<int64_t>(n) - 1)];
  }

  // Returns at most `most` bytes.
  std::string Text(int64_t most) {
    const int64_t wanted = Integer(0, most);
    const size_t n = std::min(static_cast<size_t>(wanted), size_);
    const std::string text(reinterpret_cast<const char*>(data_), n);
    data_ += n, size_ -= n;
    return text;
  }
  // Returns the bytes up to the separator, which is dropped, or all remaining bytes.
  std::string TextUntil(char separator) {
    const absl::string_view all(reinterpret_cast<const char*>(data_), size_);
    const size_t end = std::min(all.find(separator), size_);
    const size_t used = std::min(end + 1, size_);
    data_ += used, size_ -= used;
    return std::string(all.substr(0, end));
  }
  std::string Rest() { return Text(static_cast<int64_t>(size_)); }

 private:
  uint8_t Byte() {
    if (size_ == 0) return 0;
    --size_;
    return *data_++;
  }

  const uint8_t* data_;
  size_t size_;
};

}  // namespace burst
