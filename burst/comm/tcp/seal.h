// Seals the messages of two ranks over TCP. Every record is encrypted and authenticated with
// ChaCha20-Poly1305 (RFC 8439; libsodium), by keys that only these two ranks have.
//
// Each direction has a key of its own, and a record's nonce is its number in that direction. So a
// record that was changed, repeated, left out, sent back or taken from another connection does not
// open. Ranks of one host talk over Unix sockets (socket_folder.h), which need no seal.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace burst {

using SessionKey = std::array<uint8_t, 32>;

// The keys of one end of a connection.
struct SessionKeys {
  SessionKey sends, receives;
};

class Seal {
 public:
  static constexpr size_t kTagBytes = 16;

  explicit Seal(const SessionKeys& keys) : keys_(keys) {}

  // Writes the next record, `bytes` + kTagBytes long, to `out`.
  void Close(const void* data, size_t bytes, uint8_t* out);
  // Decrypts the next record in place; `tag`: the kTagBytes behind it. Returns false and leaves the
  // data unchanged unless the other end sent this record.
  bool Open(void* data, size_t bytes, const uint8_t* tag);
  // Skips a record that nobody needs.
  void Skip() { ++received_; }

 private:
  SessionKeys keys_;
  uint64_t sent_ = 0, received_ = 0;  // records
};

}  // namespace burst
