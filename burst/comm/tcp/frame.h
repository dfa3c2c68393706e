// The frames that connected ranks send each other. Each has a header of 24 bytes and, for some
// kinds, a payload. Pure functions on bytes.
//
// A message of at most kMaxEagerBytes is one frame, kMessage. A longer one is announced, and the
// receiver answers kGo as soon as it has a buffer for it. Its bytes then come in pieces, which are
// read into that buffer. So a header cannot make a receiver allocate more than kMaxEagerBytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "burst/comm/tcp/bytes.h"

namespace burst {

enum class FrameKind : uint32_t {
  kMessage = 1,    // a short message
  kAnnounce = 2,   // a long message waits; `bytes` is its length
  kGo = 3,         // the oldest announced message of this group and channel may be sent
  kPiece = 4,      // the next bytes of the oldest message that may be sent
  kHeartbeat = 5,  // `group`: milliseconds since a rank of the process has made progress
  kFinished = 6,   // no message follows
  kFailed = 7,     // the job has failed; the payload says why
  kReport = 8,     // the sender waits in vain: say where your rank is (burst/base/watchdog.h)
};

struct FrameHeader {
  FrameKind kind = FrameKind::kHeartbeat;
  uint32_t channel = 0;  // a Communicator's channel
  uint64_t group = 0;    // which communicator
  uint64_t bytes = 0;    // the length of the payload; kAnnounce: of the message
};

inline constexpr size_t kFrameHeaderBytes = 24;
inline constexpr uint64_t kMaxEagerBytes = 64 << 10;
inline constexpr uint64_t kMaxPieceBytes = 256 << 10;
inline constexpr uint64_t kMaxWordsBytes = 4 << 10;              // the most bytes of a kFailed
inline constexpr uint64_t kMaxMessageBytes = uint64_t{1} << 40;  // the longest message

using FrameHeaderBytes = std::array<uint8_t, kFrameHeaderBytes>;

FrameHeaderBytes ToBytes(const FrameHeader& header);

// `bytes`: kFrameHeaderBytes of them. InvalidArgument, which says what is wrong, for an unknown
// kind or channel, and for a length beyond the kind's limit.
absl::StatusOr<FrameHeader> ParseFrameHeader(ByteSpan bytes);

// How many bytes follow the header.
inline uint64_t PayloadBytes(const FrameHeader& header) {
  return header.kind == FrameKind::kAnnounce ? 0 : header.bytes;
}

}  // namespace burst
