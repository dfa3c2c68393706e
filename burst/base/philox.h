// Philox-4x32-10, the counter-based generator of Salmon et al., "Parallel Random Numbers: As Easy
// as 1, 2, 3" (SC 2011).
//
// A random number is a pure function of (key, counter). Initial weights, dropout masks and data
// order are keyed by what they belong to (seed, step, layer, global token, channel). So they are
// equal for any number of ranks, any layout and after a resume, and no generator state needs
// saving.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

namespace burst {

using PhiloxCounter = std::array<uint32_t, 4>;

// 128 random bits for (key, counter). constexpr, so that CUDA kernels can call it.
constexpr PhiloxCounter Philox(uint64_t key, PhiloxCounter counter) {
  constexpr uint64_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = kMultiplier0 * counter[0];
    const uint64_t product1 = kMultiplier1 * counter[2];
    counter = {
        static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key0, static_cast<uint32_t>(product1),
        static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key1, static_cast<uint32_t>(product0)};
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return counter;
}

// Random bits number `index` of the stream (key, stream): four at a time.
inline PhiloxCounter Philox(uint64_t key, uint64_t stream, uint64_t index) {
  return Philox(key, {static_cast<uint32_t>(index), static_cast<uint32_t>(index >> 32),
                      static_cast<uint32_t>(stream), static_cast<uint32_t>(stream >> 32)});
}

// Uniform in (0, 1), from 32 random bits.
inline double UniformFromBits(uint32_t bits) { return (bits + 0.5) * 0x1p-32; }

// Two independent standard normals from two words of random bits (Box and Muller).
inline std::array<double, 2> NormalFromBits(uint32_t a, uint32_t b) {
  const double radius = std::sqrt(-2.0 * std::log(UniformFromBits(a)));
  const double angle = 6.283185307179586 * UniformFromBits(b);
  return {radius * std::cos(angle), radius * std::sin(angle)};
}

}  // namespace burst
