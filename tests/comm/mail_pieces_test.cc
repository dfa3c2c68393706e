// Tests the order of pieces by running ranks whose streams a GPU runs one after the other.
#include "burst/comm/gpu/mail_pieces.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "burst/base/philox.h"

namespace burst {
namespace {

constexpr int64_t kPieceBytes = 128;
const char kData[1] = {};

// The lengths of the messages of one Post between two ranks: the same for both.
std::vector<int64_t> Lengths(int post, int from, int to) {
  const PhiloxCounter random = Philox(7, post, from * 100 + to);
  std::vector<int64_t> lengths(random[0] % 5);
  for (size_t i = 0; i < lengths.size(); ++i) {
    lengths[i] = 1 + Philox(8, post * 10 + i, from * 100 + to)[0] % (11 * kPieceBytes);
  }
  return lengths;
}

struct Messages {
  std::vector<SendBuffer> sends;
  std::vector<ReceiveBuffer> receives;
};

// What a rank posts: messages on the lines of a ring.
Messages PostOf(int post, int rank, int size) {
  Messages messages;
  for (const int distance : RingDistances(size, Channel::kGradient)) {
    const int to = (rank + distance) % size, from = (rank + size - distance) % size;
    for (const int64_t bytes : Lengths(post, rank, to))
      messages.sends.push_back({kData, bytes, to});
    for (const int64_t bytes : Lengths(post, from, rank)) {
      messages.receives.push_back({const_cast<char*>(kData), bytes, from});
    }
  }
  return messages;
}

TEST(RingDistances, AreThoseOfBothNeighborsAndForGradientsTheOppositeRank) {
  EXPECT_EQ(RingDistances(2, Channel::kRead), (std::set<int>{1}));
  EXPECT_EQ(RingDistances(2, Channel::kGradient), (std::set<int>{1}));
  EXPECT_EQ(RingDistances(3, Channel::kGradient), (std::set<int>{1, 2}));
  EXPECT_EQ(RingDistances(8, Channel::kRead), (std::set<int>{1, 7}));
  EXPECT_EQ(RingDistances(8, Channel::kGradient), (std::set<int>{1, 4, 7}));
}

TEST(MailPieces, CoverEachMessageInOrderAndUseTheSlotsInTurn) {
  MailPieces pieces(5, kPieceBytes);
  std::map<std::pair<bool, int>, uint32_t> numbers;
  for (int post = 0; post < 40; ++post) {
    const Messages messages = PostOf(post, /*rank=*/2, /*size=*/5);
    std::map<std::pair<bool, size_t>, int64_t> covered;
    for (const MailPiece& piece : pieces.Cut(messages.sends, messages.receives)) {
      const int peer =
          piece.sends ? messages.sends[piece.message].peer : messages.receives[piece.message].peer;
      const uint32_t number = ++numbers[{piece.sends, peer}];
      EXPECT_EQ(piece.number, number);
      EXPECT_EQ(piece.slot(), (number - 1) % kMailSlots);
      int64_t& end = covered[{piece.sends, piece.message}];
      EXPECT_EQ(piece.offset, end);
      EXPECT_LE(piece.bytes, kPieceBytes);
      end += piece.bytes;
      const int64_t whole = piece.sends ? messages.sends[piece.message].bytes
                                        : messages.receives[piece.message].bytes;
      EXPECT_EQ(piece.is_last, end == whole);
    }
    EXPECT_EQ(covered.size(), messages.sends.size() + messages.receives.size());
    for (const auto& [which, end] : covered) {
      EXPECT_EQ(end, which.first ? messages.sends[which.second].bytes
                                 : messages.receives[which.second].bytes);
    }
  }
}

TEST(MailPiecesTest, ShortMessagesComeFirst) {
  MailPieces pieces(/*world_size=*/2, kPieceBytes);
  const std::vector<SendBuffer> sends = {
      {nullptr, 2 * kPieceBytes, 1}, {nullptr, 8, 1}, {nullptr, kPieceBytes, 1}, {nullptr, 8, 1}};
  std::vector<size_t> order;
  for (const MailPiece& piece : pieces.Cut(sends, {})) order.push_back(piece.message);
  EXPECT_EQ(order, (std::vector<size_t>{1, 3, 2, 0, 0}));
}

// A piece with its other rank and its Post, to name it on both sides.
struct Queued {
  MailPiece piece;
  int peer, post;
};

// Runs ranks whose GPUs run their queues one piece at a time, each when its flag allows it.
// Returns whether all queues come to their end. `order` may change a Post's order.
bool AllEnd(int size, int posts, const std::function<void(std::vector<Queued>*)>& order) {
  std::vector<std::vector<Queued>> queues(size);
  for (int rank = 0; rank < size; ++rank) {
    MailPieces pieces(size, kPieceBytes);
    for (int post = 0; post < posts; ++post) {
      const Messages messages = PostOf(post, rank, size);
      std::vector<Queued> queued;
      for (const MailPiece& piece : pieces.Cut(messages.sends, messages.receives)) {
        queued.push_back({piece,
                          piece.sends ? messages.sends[piece.message].peer
                                      : messages.receives[piece.message].peer,
                          post});
      }
      order(&queued);
      queues[rank].insert(queues[rank].end(), queued.begin(), queued.end());
    }
  }
  // By sender and receiver: the flags, and what each slot holds.
  struct Mailbox {
    uint32_t arrived = 0, freed = 0;
    std::map<uint32_t, std::tuple<int, uint32_t, int64_t>> slots;  // Post, number, bytes
  };
  std::map<std::pair<int, int>, Mailbox> mailboxes;
  std::vector<size_t> at(size);
  for (bool moved = true; std::exchange(moved, false);) {
    for (int rank = 0; rank < size; ++rank) {
      if (at[rank] == queues[rank].size()) continue;
      const auto& [piece, peer, post] = queues[rank][at[rank]];
      Mailbox& box = mailboxes[piece.sends ? std::pair(rank, peer) : std::pair(peer, rank)];
      const std::tuple<int, uint32_t, int64_t> content = {post, piece.number, piece.bytes};
      if (piece.sends) {
        if (box.freed + kMailSlots < piece.number) continue;
        box.slots[piece.slot()] = content;
        box.arrived = piece.number;
      } else {
        if (box.arrived < piece.number) continue;
        EXPECT_EQ(box.slots[piece.slot()], content);
        box.freed = piece.number;
      }
      ++at[rank];
      moved = true;
    }
  }
  for (int rank = 0; rank < size; ++rank) {
    if (at[rank] != queues[rank].size()) return false;
  }
  return true;
}

TEST(MailPieces, ComeToTheirEndOnGpusThatRunOneStreamAtATime) {
  for (int size = 2; size <= 9; ++size) {
    EXPECT_TRUE(AllEnd(size, /*posts=*/50, [](auto*) {})) << size << " ranks";
  }
}

// Shows that the run above can fail: ranks that queue all sends before all receives stand still.
TEST(MailPieces, WouldStandStillWithAllSendsFirst) {
  EXPECT_FALSE(AllEnd(2, /*posts=*/50, [](std::vector<Queued>* queued) {
    std::stable_sort(queued->begin(), queued->end(), [](const Queued& a, const Queued& b) {
      return a.piece.sends && !b.piece.sends;
    });
  }));
}

}  // namespace
}  // namespace burst
