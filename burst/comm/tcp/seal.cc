#include "burst/comm/tcp/seal.h"

#include <sodium.h>

#include "burst/base/check.h"
#include "burst/comm/tcp/bytes.h"

namespace burst {
namespace {

static_assert(Seal::kTagBytes == crypto_aead_chacha20poly1305_ietf_ABYTES);
static_assert(sizeof(SessionKey) == crypto_aead_chacha20poly1305_ietf_KEYBYTES);

using Number = std::array<uint8_t, crypto_aead_chacha20poly1305_ietf_NPUBBYTES>;

Number NumberOf(uint64_t record) {
  Number number = {};
  PutNumber(record, number.data());
  return number;
}

}  // namespace

void Seal::Close(const void* data, size_t bytes, uint8_t* out) {
  const Number number = NumberOf(sent_++);
  const int failed = crypto_aead_chacha20poly1305_ietf_encrypt(
      out, nullptr, static_cast<const uint8_t*>(data), bytes, nullptr, 0, nullptr, number.data(),
      keys_.sends.data());
  BURST_CHECK_EQ(failed, 0);
}

bool Seal::Open(void* data, size_t bytes, const uint8_t* tag) {
  const Number number = NumberOf(received_++);
  auto* const text = static_cast<uint8_t*>(data);
  return crypto_aead_chacha20poly1305_ietf_decrypt_detached(text, nullptr, text, bytes, tag,
                                                            nullptr, 0, number.data(),
                                                            keys_.receives.data()) == 0;
}

}  // namespace burst
