#include "burst/comm/tcp/frame.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "burst/comm/communicator.h"

namespace burst {
namespace {

struct Limits {
  uint64_t least, most;  // bounds of `bytes`
};

absl::StatusOr<Limits> LimitsOf(uint32_t kind) {
  switch (static_cast<FrameKind>(kind)) {
    case FrameKind::kMessage:
      return Limits{1, kMaxEagerBytes};
    case FrameKind::kAnnounce:
      return Limits{kMaxEagerBytes + 1, kMaxMessageBytes};
    case FrameKind::kPiece:
      return Limits{1, kMaxPieceBytes};
    case FrameKind::kFailed:
      return Limits{0, kMaxWordsBytes};
    case FrameKind::kGo:
    case FrameKind::kHeartbeat:
    case FrameKind::kFinished:
    case FrameKind::kReport:
      return Limits{0, 0};
  }
  return absl::InvalidArgumentError(absl::StrCat("a frame of the unknown kind ", kind));
}

}  // namespace

FrameHeaderBytes ToBytes(const FrameHeader& header) {
  FrameHeaderBytes bytes;
  PutNumber(static_cast<uint32_t>(header.kind), &bytes[0]);
  PutNumber(header.channel, &bytes[4]);
  PutNumber(header.group, &bytes[8]);
  PutNumber(header.bytes, &bytes[16]);
  return bytes;
}

absl::StatusOr<FrameHeader> ParseFrameHeader(ByteSpan bytes) {
  if (bytes.size() != kFrameHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrCat("a frame header of ", bytes.size(), " bytes"));
  }
  FrameHeader header;
  const auto kind = GetNumber<uint32_t>(&bytes[0]);
  header.channel = GetNumber<uint32_t>(&bytes[4]);
  header.group = GetNumber<uint64_t>(&bytes[8]);
  header.bytes = GetNumber<uint64_t>(&bytes[16]);
  const absl::StatusOr<Limits> limits = LimitsOf(kind);
  if (!limits.ok()) return limits.status();
  header.kind = static_cast<FrameKind>(kind);
  if (header.channel >= kNumChannels) {
    return absl::InvalidArgumentError(absl::StrCat("a frame of the channel ", header.channel));
  }
  if (header.bytes < limits->least || header.bytes > limits->most) {
    return absl::InvalidArgumentError(absl::StrCat("a frame of kind ", kind, " with ", header.bytes,
                                                   " bytes, not ", limits->least, " to ",
                                                   limits->most));
  }
  return header;
}

}  // namespace burst
