// Moves the bytes of PeerConnections: frames to a peer, and frames from it.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/status.h"
#include "burst/base/watchdog.h"
#include "burst/comm/tcp/peer_connections.h"

namespace burst {
namespace {

using std::chrono::steady_clock;

constexpr int64_t kMaxTurnBytes = 1 << 20;  // bytes of one connection before the others have a turn
}  // namespace

bool PeerConnections::HasOutput(const Peer& peer) const {
  if (peer.socket.fd() < 0) return false;
  return !peer.outgoing.empty() || std::any_of(peer.sending.begin(), peer.sending.end(),
                                               [](const auto& queue) { return !queue.empty(); });
}

// Queues a piece of the next channel that has one. Channels take turns, so that none waits for
// another's long message.
bool PeerConnections::NextPiece(Peer* peer) {
  for (int turn = 1; turn <= kNumChannels; ++turn) {
    const int channel = (peer->last_channel + turn) % kNumChannels;
    if (peer->sending[channel].empty()) continue;
    peer->last_channel = channel;
    Transfer* const transfer = peer->sending[channel].front();
    const uint64_t bytes = std::min<uint64_t>(kMaxPieceBytes, transfer->bytes - transfer->moved);
    const FrameHeader header = {FrameKind::kPiece, uint32_t(channel), transfer->group, bytes};
    const char* const piece = transfer->data + transfer->moved;
    Outgoing frame;
    if (peer->seal.has_value()) {
      frame.head = Sealed(peer, header, {piece, bytes});
    } else {
      const FrameHeaderBytes text = ToBytes(header);
      frame.head.assign(text.begin(), text.end());
      frame.tail = piece;
      frame.tail_bytes = bytes;
    }
    frame.transfer = transfer;
    transfer->moved += bytes;
    frame.is_last = transfer->moved == transfer->bytes;
    if (transfer->moved == transfer->bytes) peer->sending[channel].pop_front();
    peer->outgoing.push_back(std::move(frame));
    return true;
  }
  return false;
}

void PeerConnections::WriteTo(int index) {
  Peer& peer = peers_[index];
  for (int64_t turn = 0; turn < kMaxTurnBytes && peer.socket.fd() >= 0;) {
    if (peer.outgoing.empty() && !NextPiece(&peer)) return;
    Outgoing& frame = peer.outgoing.front();
    const size_t head = std::min(frame.written, frame.head.size()), tail = frame.written - head;
    iovec parts[] = {{&frame.head[0] + head, frame.head.size() - head},
                     {const_cast<char*>(frame.tail) + tail, frame.tail_bytes - tail}};
    msghdr message = {};
    message.msg_iov = parts;
    message.msg_iovlen = frame.tail_bytes > 0 ? 2 : 1;
    const ssize_t n = sendmsg(peer.socket.fd(), &message, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    // The other end may have sent the reason before it closed, so reading goes on.
    if (n < 0) {
      peer.outgoing.clear();
      for (auto& queue : peer.sending) queue.clear();
      return;
    }
    turn += n;
    frame.written += n;
    if (frame.written < frame.size()) continue;
    if (frame.transfer != nullptr && frame.is_last) {
      frame.transfer->done = true;
      changed_.notify_all();
    }
    peer.outgoing.pop_front();
  }
}

void PeerConnections::ReadFrom(int index) {
  Peer& peer = peers_[index];
  for (int64_t turn = 0; turn < kMaxTurnBytes && peer.socket.fd() >= 0;) {
    // The payload's place takes its bytes, and the buffer takes the bytes after them.
    iovec parts[2];
    size_t direct = 0;
    if (peer.frame.has_value()) {
      direct = PayloadBytes(*peer.frame) - peer.payload_read;
      char* const place =
          peer.into != nullptr ? peer.into->data + peer.into->moved : &peer.payload[0];
      parts[0] = {place + peer.payload_read, direct};
    }
    parts[direct > 0] = {peer.buffer.data() + peer.end, peer.buffer.size() - peer.end};
    const ssize_t n = readv(peer.socket.fd(), parts, direct > 0 ? 2 : 1);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) return Lose(index, "its connection closed");
    turn += n;
    peer.heard = steady_clock::now();
    const size_t used = std::min<size_t>(direct, n);
    peer.payload_read += used;
    peer.end += n - used;
    if (peer.garbled) {
      peer.end = 0;
      continue;
    }
    const absl::Status status = UseBuffer(index);
    if (!status.ok()) {
      peer.garbled = true;
      peer.frame.reset();
      peer.begin = peer.end = 0;
      return SetFailure(absl::UnavailableError(
          absl::StrCat(Who(index), " sent ", std::string(status.message()))));
    }
  }
}

// Handles all frames that are whole, and begins the next one.
absl::Status PeerConnections::UseBuffer(int index) {
  Peer& peer = peers_[index];
  const size_t tag = peer.seal.has_value() ? Seal::kTagBytes : 0;
  while (true) {
    if (!peer.frame.has_value()) {
      if (peer.end - peer.begin < kFrameHeaderBytes + tag) break;
      uint8_t* const header = peer.buffer.data() + peer.begin;
      BURST_RETURN_IF_ERROR(
          OpenRecord(&peer, header, kFrameHeaderBytes, header + kFrameHeaderBytes));
      BURST_ASSIGN_OR_RETURN(peer.frame,
                             ParseFrameHeader(absl::MakeConstSpan(header, kFrameHeaderBytes)));
      peer.begin += kFrameHeaderBytes + tag;
      BURST_RETURN_IF_ERROR(BeginPayload(index));
    }
    const uint64_t bytes = PayloadBytes(*peer.frame);
    const size_t here = std::min<uint64_t>(bytes - peer.payload_read, peer.end - peer.begin);
    char* const place =
        peer.into != nullptr ? peer.into->data + peer.into->moved : &peer.payload[0];
    if (here > 0) {
      std::memcpy(place + peer.payload_read, peer.buffer.data() + peer.begin, here);
      peer.begin += here;
      peer.payload_read += here;
    }
    if (peer.payload_read < bytes) break;
    if (bytes > 0) {
      if (peer.end - peer.begin < tag) break;
      BURST_RETURN_IF_ERROR(OpenRecord(&peer, place, bytes, peer.buffer.data() + peer.begin));
      peer.begin += tag;
    }
    const absl::Status status = Dispatch(index);
    peer.frame.reset();
    peer.dropped = false;
    BURST_RETURN_IF_ERROR(status);
  }
  // The rest, less than a header and a tag unless a payload continues, moves to the front.
  std::copy(peer.buffer.begin() + peer.begin, peer.buffer.begin() + peer.end, peer.buffer.begin());
  peer.end -= peer.begin;
  peer.begin = 0;
  return absl::OkStatus();
}

absl::Status PeerConnections::OpenRecord(Peer* peer, void* data, size_t bytes, const uint8_t* tag) {
  if (!peer->seal.has_value()) return absl::OkStatus();
  if (peer->dropped) {
    peer->seal->Skip();
    return absl::OkStatus();
  }
  if (peer->seal->Open(data, bytes, tag)) return absl::OkStatus();
  return absl::InvalidArgumentError("a frame that was changed on its way: its seal is broken");
}

// Finds the place for the frame's payload.
absl::Status PeerConnections::BeginPayload(int index) {
  Peer& peer = peers_[index];
  peer.payload_read = 0;
  peer.into = nullptr;
  if (peer.frame->kind == FrameKind::kPiece && failure_.ok()) {
    auto& coming = peer.coming[peer.frame->channel];
    if (coming.empty() || coming.front()->group != peer.frame->group ||
        peer.frame->bytes > uint64_t(coming.front()->bytes - coming.front()->moved)) {
      return absl::InvalidArgumentError("a piece of a message that nobody asked for");
    }
    peer.into = coming.front();
    return absl::OkStatus();
  }
  peer.payload.resize(PayloadBytes(*peer.frame));
  return absl::OkStatus();
}

absl::Status PeerConnections::Dispatch(int index) {
  Peer& peer = peers_[index];
  const FrameHeader& frame = *peer.frame;
  const int channel = static_cast<int>(frame.channel);
  switch (frame.kind) {
    case FrameKind::kMessage:
    case FrameKind::kAnnounce:
      if (!failure_.ok()) break;
      Arrive({frame.group, channel, index},
             {std::move(peer.payload), frame.bytes, frame.kind == FrameKind::kAnnounce});
      peer.payload.clear();
      if (peer.unexpected_bytes > options_.unexpected_bytes) {
        return absl::InvalidArgumentError("more messages than this rank waits for");
      }
      break;
    case FrameKind::kGo: {
      if (!failure_.ok()) break;
      const auto found = peer.announced.find({frame.group, channel});
      if (found == peer.announced.end()) {
        return absl::InvalidArgumentError("an answer to a message that was not announced");
      }
      if (Transfer* const transfer = found->second.front(); transfer != nullptr) {
        peer.sending[channel].push_back(transfer);
      }
      found->second.pop_front();
      if (found->second.empty()) peer.announced.erase(found);
      break;
    }
    case FrameKind::kPiece: {
      if (peer.into == nullptr) break;  // the job has failed meanwhile
      Transfer* const receive = std::exchange(peer.into, nullptr);
      receive->moved += frame.bytes;
      if (receive->moved < receive->bytes) break;
      receive->done = true;
      peer.coming[channel].pop_front();
      changed_.notify_all();
      break;
    }
    case FrameKind::kHeartbeat:
      ProgressElsewhere(static_cast<int64_t>(std::min<uint64_t>(frame.group, INT64_MAX)));
      break;
    case FrameKind::kReport:
      ReportProgress();
      break;
    case FrameKind::kFinished:
      peer.finished = true;
      changed_.notify_all();
      break;
    case FrameKind::kFailed:
      SetFailure(absl::UnavailableError(peer.payload));
      break;
  }
  return absl::OkStatus();
}

}  // namespace burst
