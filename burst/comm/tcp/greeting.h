// The greeting of two processes of a job on a new connection. Pure functions on bytes.
//
//   caller -> listener   Hello   a magic number, the job's tag, a nonce
//   listener -> caller   Hello   the same, with its own nonce
//   caller -> listener   Claim   which rank it is, which it calls, of how many; and a proof
//   listener -> caller   Claim   the same, the other way round
//
// A proof is HMAC-SHA256 over both nonces, the listener's port and the claim, with a key made of
// the job's token. It shows that its sender knows the token now and makes this claim about this
// connection. The token itself is never sent. A process that hands the greeting on from another
// port proves nothing. The caller puts the port that it called into its proof, and the listener the
// port on which it listens. Nothing in a greeting is believed before its proof is checked. All
// lengths are fixed.
//
// Both ends then make keys for the frames that follow (seal.h). A process that handed the greeting
// on, at any port, does not know these keys.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "burst/comm/tcp/bytes.h"
#include "burst/comm/tcp/seal.h"

namespace burst {

using Nonce = std::array<uint8_t, 32>;
using Proof = std::array<uint8_t, 32>;
using JobKey = std::array<uint8_t, 32>;

struct Hello {
  // A tag of the job's name, which is not secret. It makes two jobs on neighboring ports part at
  // once.
  uint64_t job_tag = 0;
  Nonce nonce = {};
};

struct Claim {
  uint32_t rank = 0;
  uint32_t peer = 0;  // the rank that it speaks to
  uint32_t world_size = 0;
  Proof proof = {};
};

// Where a rank listens; an empty address: on the host of rank 0.
struct Place {
  std::string address;  // numeric
  uint16_t port = 0;    // for a Unix socket a part of its name (socket_folder.h)
};

inline constexpr size_t kHelloBytes = 48, kClaimBytes = 44, kPlaceBytes = 64;
using HelloBytes = std::array<uint8_t, kHelloBytes>;
using ClaimBytes = std::array<uint8_t, kClaimBytes>;
using PlaceBytes = std::array<uint8_t, kPlaceBytes>;

HelloBytes ToBytes(const Hello& hello);
ClaimBytes ToBytes(const Claim& claim);
PlaceBytes ToBytes(const Place& place);
// InvalidArgument unless `bytes` are such a message. A claim's proof is not checked here.
absl::StatusOr<Hello> ParseHello(ByteSpan bytes);
absl::StatusOr<Claim> ParseClaim(ByteSpan bytes);
absl::StatusOr<Place> ParsePlace(ByteSpan bytes);

// Returns a tag of a job's name. Two jobs with one token but different names have different keys
// and tags.
uint64_t JobTag(absl::string_view job);
JobKey MakeJobKey(absl::string_view token, absl::string_view job);
Nonce RandomNonce();

// The two ends of a connection. They have different proofs, so that no proof can be sent back to
// its maker.
enum class Side : uint8_t { kCaller = 1, kListener = 2 };

// The values that distinguish a connection from all others.
struct ConnectionName {
  Nonce caller, listener;
  uint16_t port = 0;  // the listener's port
};

Proof MakeProof(const JobKey& key, Side side, const ConnectionName& connection, const Claim& claim);
// Returns whether `side` made claim.proof. The time it takes does not depend on the answer.
bool IsProven(const JobKey& key, Side side, const ConnectionName& connection, const Claim& claim);

// The keys of the end `side`, after the greeting in which the caller made this claim.
SessionKeys MakeSessionKeys(const JobKey& key, Side side, const ConnectionName& connection,
                            const Claim& of_caller);

}  // namespace burst
