// A random permutation of [0, n) that is computed, not stored: element i in constant time from
// (n, key, stream, i), so a position in the data needs no state to save and resume.
#pragma once

#include <cstdint>

#include "burst/base/check.h"
#include "burst/base/philox.h"

namespace burst {

// A Feistel network over the smallest even number of bits that holds n, with Philox as its round
// function; a result outside of [0, n) is sent through again until it falls inside (cycle walking),
// four times on average at worst.
class RandomPermutation {
 public:
  RandomPermutation(int64_t n, uint64_t key, uint64_t stream) : n_(n), key_(key), stream_(stream) {
    BURST_CHECK_GE(n, 1);
    while (half_bits_ < 31 && (int64_t{1} << (2 * half_bits_)) < n) ++half_bits_;
  }

  int64_t operator()(int64_t i) const {
    uint64_t x = static_cast<uint64_t>(i);
    do x = Encrypt(x);
    while (x >= static_cast<uint64_t>(n_));
    return static_cast<int64_t>(x);
  }

 private:
  static constexpr uint64_t kRounds = 6;

  uint64_t Encrypt(uint64_t x) const {
    const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
    uint64_t left = x >> half_bits_, right = x & mask;
    for (uint64_t round = 0; round < kRounds; ++round) {
      const uint64_t bits = Philox(key_, stream_, round << 32 | right)[0];
      const uint64_t next = left ^ (bits & mask);
      left = right;
      right = next;
    }
    return left << half_bits_ | right;
  }

  int64_t n_;
  uint64_t key_, stream_;
  int half_bits_ = 1;
};

}  // namespace burst
