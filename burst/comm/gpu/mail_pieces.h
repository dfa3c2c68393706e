// Cuts messages into the pieces that pass through a mailbox (peer_mail.h), and orders them.
//
// A mailbox has kMailSlots slots, which serve the pieces of one sender in turn. The sender fills
// the slot of piece number n once piece n - kMailSlots was copied out of it. So "send n" waits for
// "receive n - kMailSlots", and "receive n" for "send n".
//
// Short messages of a Post come first: their flags and their copies out then take their time while
// the long ones are on their way. Both ranks know the sizes, so they agree.
//
// A rank queues its pieces in turns: the first piece to every rank, the first piece from every
// rank, then the second ones. Ranks that post the same messages therefore wait only for earlier
// turns, or for sends of this turn, which they queue before its receives. So no rank waits for
// ever, even where the GPU runs all streams of a process one after the other (with
// CUDA_DEVICE_MAX_CONNECTIONS=1 it may).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <set>
#include <vector>

#include "absl/types/span.h"
#include "burst/comm/communicator.h"

namespace burst {

inline constexpr uint32_t kMailSlots = 2;
static_assert((uint64_t{1} << 32) % kMailSlots == 0, "piece numbers wrap around");

// The distances from a rank to the ranks that a flat ring sends to on the channel: both neighbors.
// Gradients also return from the opposite rank (burst/attention/ring/route.h).
inline std::set<int> RingDistances(int world_size, Channel channel) {
  std::set<int> distances = {1, world_size - 1};
  if (channel == Channel::kGradient) distances.insert(std::max(1, world_size / 2));
  return distances;
}

struct MailPiece {
  bool sends;
  size_t message;  // an index into the Post's sends or receives
  int64_t offset, bytes;
  bool is_last;     // of its message
  uint32_t number;  // from 1, among the pieces between the two ranks in this direction
  int turn;         // from 0, among these pieces of one Post

  uint32_t slot() const { return (number - 1) % kMailSlots; }
};

// Numbers the pieces of one rank on one channel.
class MailPieces {
 public:
  MailPieces(int world_size, int64_t piece_bytes)
      : piece_bytes_(piece_bytes), sent_(world_size), received_(world_size) {}

  // Cuts the messages of a Post, in the order in which the rank queues the pieces. The result is
  // valid until the next call.
  const std::vector<MailPiece>& Cut(absl::Span<const SendBuffer> sends,
                                    absl::Span<const ReceiveBuffer> receives) {
    pieces_.clear();
    Append(/*are_sends=*/true, sends, &sent_);
    Append(/*are_sends=*/false, receives, &received_);
    std::stable_sort(pieces_.begin(), pieces_.end(), [](const MailPiece& a, const MailPiece& b) {
      return a.turn != b.turn ? a.turn < b.turn : a.sends && !b.sends;
    });
    return pieces_;
  }

 private:
  template <typename Buffer>
  void Append(bool are_sends, absl::Span<const Buffer> messages, std::vector<uint32_t>* numbers) {
    before_ = *numbers;
    by_size_.resize(messages.size());
    std::iota(by_size_.begin(), by_size_.end(), size_t{0});
    std::stable_sort(by_size_.begin(), by_size_.end(),
                     [&](size_t a, size_t b) { return messages[a].bytes < messages[b].bytes; });
    for (const size_t i : by_size_) {
      const int peer = messages[i].peer;
      for (int64_t offset = 0; offset < messages[i].bytes; offset += piece_bytes_) {
        const int64_t bytes = std::min(piece_bytes_, messages[i].bytes - offset);
        const auto turn = static_cast<int>((*numbers)[peer] - before_[peer]);
        pieces_.push_back({are_sends, i, offset, bytes, offset + bytes == messages[i].bytes,
                           ++(*numbers)[peer], turn});
      }
    }
  }

  const int64_t piece_bytes_;
  std::vector<uint32_t> sent_, received_;  // the last piece's number, by peer
  std::vector<uint32_t> before_;
  std::vector<size_t> by_size_;
  std::vector<MailPiece> pieces_;
};

}  // namespace burst
