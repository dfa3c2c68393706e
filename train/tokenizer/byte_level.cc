#include "train/tokenizer/byte_level.h"

#include <array>

#include "train/data/utf8.h"

namespace burst {
namespace {

constexpr uint32_t kFirstOther = 0x100;
constexpr uint32_t kCharacters = 0x144;  // all characters are below this one

bool StandsForItself(uint32_t c) {
  return (c >= 0x21 && c <= 0x7E) || (c >= 0xA1 && c <= 0xAC) || (c >= 0xAE && c <= 0xFF);
}

struct Table {
  std::array<uint32_t, 256> character;
  std::array<int, kCharacters> byte;

  Table() {
    byte.fill(-1);
    uint32_t other = kFirstOther;
    for (uint32_t b = 0; b < 256; ++b) {
      character[b] = StandsForItself(b) ? b : other++;
      byte[character[b]] = static_cast<int>(b);
    }
  }
};

const Table& ByteTable() {
  static const Table table;
  return table;
}

}  // namespace

std::string ByteLevelCharacter(uint8_t byte) {
  const uint32_t c = ByteTable().character[byte];
  if (c < 0x80) return std::string(1, static_cast<char>(c));
  return {static_cast<char>(0xC0 | c >> 6), static_cast<char>(0x80 | (c & 0x3F))};
}

std::optional<std::string> BytesOfToken(absl::string_view token) {
  std::string bytes;
  for (size_t at = 0; at < token.size();) {
    const uint32_t c = NextCodePoint(token, &at);
    if (c >= kCharacters || ByteTable().byte[c] < 0) return std::nullopt;
    bytes += static_cast<char>(ByteTable().byte[c]);
  }
  return bytes;
}

}  // namespace burst
