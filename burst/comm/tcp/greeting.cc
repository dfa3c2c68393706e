#include "burst/comm/tcp/greeting.h"

#include <sodium.h>

#include <algorithm>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "burst/base/check.h"

namespace burst {
namespace {

constexpr uint64_t kMagic = 0x335652'5453525542;  // "BURSTRV3"
constexpr size_t kAddressBytes = kPlaceBytes - 4;

void InitializeSodium() {
  static const int initialized = sodium_init();
  BURST_CHECK(initialized >= 0) << "libsodium";
}

// HMAC-SHA256 of the parts, one after the other. All parts but the last have a fixed length.
class Hmac {
 public:
  Hmac(const void* key, size_t bytes) {
    InitializeSodium();
    crypto_auth_hmacsha256_init(&state_, static_cast<const uint8_t*>(key), bytes);
  }
  Hmac& Add(const void* data, size_t bytes) {
    crypto_auth_hmacsha256_update(&state_, static_cast<const uint8_t*>(data), bytes);
    return *this;
  }
  std::array<uint8_t, 32> Finish() {
    std::array<uint8_t, 32> result;
    crypto_auth_hmacsha256_final(&state_, result.data());
    return result;
  }

 private:
  crypto_auth_hmacsha256_state state_;
};

}  // namespace

HelloBytes ToBytes(const Hello& hello) {
  HelloBytes bytes;
  PutNumber(kMagic, &bytes[0]);
  PutNumber(hello.job_tag, &bytes[8]);
  std::copy(hello.nonce.begin(), hello.nonce.end(), &bytes[16]);
  return bytes;
}

ClaimBytes ToBytes(const Claim& claim) {
  ClaimBytes bytes;
  PutNumber(claim.rank, &bytes[0]);
  PutNumber(claim.peer, &bytes[4]);
  PutNumber(claim.world_size, &bytes[8]);
  std::copy(claim.proof.begin(), claim.proof.end(), &bytes[12]);
  return bytes;
}

PlaceBytes ToBytes(const Place& place) {
  BURST_CHECK(place.address.size() < kAddressBytes) << place.address;
  PlaceBytes bytes = {};
  std::copy(place.address.begin(), place.address.end(), bytes.begin());
  PutNumber(uint32_t{place.port}, &bytes[kAddressBytes]);
  return bytes;
}

absl::StatusOr<Hello> ParseHello(ByteSpan bytes) {
  if (bytes.size() != kHelloBytes || GetNumber<uint64_t>(&bytes[0]) != kMagic) {
    return absl::InvalidArgumentError("no greeting");
  }
  Hello hello;
  hello.job_tag = GetNumber<uint64_t>(&bytes[8]);
  std::copy(&bytes[16], &bytes[16] + hello.nonce.size(), hello.nonce.begin());
  return hello;
}

absl::StatusOr<Claim> ParseClaim(ByteSpan bytes) {
  if (bytes.size() != kClaimBytes) return absl::InvalidArgumentError("no claim");
  Claim claim;
  claim.rank = GetNumber<uint32_t>(&bytes[0]);
  claim.peer = GetNumber<uint32_t>(&bytes[4]);
  claim.world_size = GetNumber<uint32_t>(&bytes[8]);
  std::copy(&bytes[12], &bytes[12] + claim.proof.size(), claim.proof.begin());
  if (claim.rank >= claim.world_size) {
    return absl::InvalidArgumentError("a rank that is not below the number of ranks");
  }
  return claim;
}

absl::StatusOr<Place> ParsePlace(ByteSpan bytes) {
  if (bytes.size() != kPlaceBytes) return absl::InvalidArgumentError("no place");
  Place place;
  const auto* const text = reinterpret_cast<const char*>(bytes.data());
  place.address.assign(text, strnlen(text, kAddressBytes));
  const auto may_be_numeric = [](char c) {  // "fe80::1%eth0" too
    return absl::ascii_isalnum(c) || std::strchr(".:%-_", c) != nullptr;
  };
  const auto port = GetNumber<uint32_t>(&bytes[kAddressBytes]);
  if (!std::all_of(place.address.begin(), place.address.end(), may_be_numeric) ||
      place.address.size() == kAddressBytes || port == 0 || port > 65535) {
    return absl::InvalidArgumentError("no numeric address and port");
  }
  place.port = static_cast<uint16_t>(port);
  return place;
}

uint64_t JobTag(absl::string_view job) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (unsigned char c : job) hash = (hash ^ c) * 0x100000001b3;
  return hash;
}

JobKey MakeJobKey(absl::string_view token, absl::string_view job) {
  return Hmac(token.data(), token.size()).Add(job.data(), job.size()).Finish();
}

Nonce RandomNonce() {
  InitializeSodium();
  Nonce nonce;
  randombytes_buf(nonce.data(), nonce.size());
  return nonce;
}

namespace {

// Returns the signature that only a process of the job can make for a connection. `purpose`
// distinguishes proofs and keys.
std::array<uint8_t, 32> Sign(const JobKey& key, uint8_t purpose, const ConnectionName& connection,
                             const Claim& claim) {
  uint8_t port[2];
  PutNumber(connection.port, port);
  const ClaimBytes bytes = ToBytes(claim);
  return Hmac(key.data(), key.size())
      .Add(&purpose, sizeof(purpose))
      .Add(connection.caller.data(), connection.caller.size())
      .Add(connection.listener.data(), connection.listener.size())
      .Add(port, sizeof(port))
      .Add(bytes.data(), bytes.size() - claim.proof.size())
      .Finish();
}

// Returns the purpose of the key that seals what this side sends.
uint8_t KeyPurpose(Side side) { return 16 + static_cast<uint8_t>(side); }

}  // namespace

Proof MakeProof(const JobKey& key, Side side, const ConnectionName& connection,
                const Claim& claim) {
  return Sign(key, static_cast<uint8_t>(side), connection, claim);
}

bool IsProven(const JobKey& key, Side side, const ConnectionName& connection, const Claim& claim) {
  const Proof expected = MakeProof(key, side, connection, claim);
  return sodium_memcmp(expected.data(), claim.proof.data(), expected.size()) == 0;
}

SessionKeys MakeSessionKeys(const JobKey& key, Side side, const ConnectionName& connection,
                            const Claim& of_caller) {
  const Side other = side == Side::kCaller ? Side::kListener : Side::kCaller;
  return {Sign(key, KeyPurpose(side), connection, of_caller),
          Sign(key, KeyPurpose(other), connection, of_caller)};
}

}  // namespace burst
