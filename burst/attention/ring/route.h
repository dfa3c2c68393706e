// Routes: on which rank each block of a ring is in each round, and how its gradients return.
//
// There are M nodes of L ranks; rank n L + i is number i of node n. A flat ring has one node. In
// round m L + k, with m < M and k < L, the block of rank (n, i) is on the rank
//
//   (n + m mod M, i + o(k) mod L),   o = 0, 1, -1, 2, -2, ...
//
// Source: the double ring of LoongTrain (Gu et al., arXiv 2406.18485) and BurstEngine (arXiv
// 2509.19836). A block visits one node after the other:
//
//   - It enters a node at the rank of its own number (k = 0) and visits the other ranks from there.
//   - Meanwhile a copy crosses to the next node. It is sent in round m L and needed in round
//     (m + 1) L, so its transfer runs beside L rounds of computation.
//
// A block makes M L - 1 transfers, as in a flat ring: M (L - 1) within nodes, only M - 1 between
// them.
//
// Within a node a block moves in both directions, one step in each every two rounds. The rank of
// round k sends it during round k + 1 to the rank of round k + 2. Round 0 feeds rounds 1 and 2. The
// gradients are the reason. The gradient of a block is sent after round k and received by the rank
// of round k + 2 before that round, which then adds to it in place. In a ring of one direction it
// would arrive while that rank computes its own part, and the two parts would have to be added
// afterward. Here that happens only once in a node: after round L - 2 a gradient goes to the rank
// of round L - 1. That rank adds it to its own part and so has the node's total. From there, in
// round m L + L - 1, the gradient goes
//
//    m = 0:            to its owner, within the node;
//    0 < m < M - 1:    to the same round of the next node, while that node computes its L rounds;
//    m = M - 1 > 0:    to its owner, between nodes.
//
// So a gradient makes as many transfers as its block, over the same links. The owner defers a part
// of the work on its own block, and computes it while the last transfer runs.
//
// A block goes only as far as the last rank that needs it, and a gradient starts at the first rank
// that has a part of it. Every rank knows the whole route, so a transfer that no rank needs is
// neither sent nor expected.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

namespace burst {

enum class Link { kIntra = 0, kInter = 1 };  // within a node, between nodes
inline constexpr int kNumLinks = 2;
inline constexpr Link kLinks[] = {Link::kIntra, Link::kInter};

// One value for each link.
template <typename T>
class PerLink {
 public:
  T& operator[](Link link) { return values_[static_cast<int>(link)]; }
  const T& operator[](Link link) const { return values_[static_cast<int>(link)]; }
  T total() const { return values_[0] + values_[1]; }

 private:
  std::array<T, kNumLinks> values_ = {};
};

// Rows of a block that follow each other.
struct BlockRows {
  int64_t begin, count;
};

// A message sent and a message received, of which either may be missing.
struct RingTransfer {
  int to = -1;        // the receiver of this rank's message; -1: none
  int from = -1;      // the sender of the message to this rank; -1: none
  int arriving = -1;  // the owner of the block, or gradient, that this rank receives
};

// A round, as one rank sees it, and the transfers that begin with it. Both ends of a transfer name
// it in the same round.
struct RingRound {
  int source = 0;        // the owner of the block that is here
  bool compute = false;  // some query sees some key
  // Transfers of blocks that begin with the round. With kIntra, a rank sends the block of the
  // previous round (in the first round of a node: of this round). It receives the block of the next
  // round by the end of this one. With kInter, in the first round of a node only, it sends this
  // round's block. It receives the block of the next node's first round by the end of this node's
  // last round.
  PerLink<RingTransfer> block;
  // Transfers of gradients that begin when the round is done. Sends the gradient of the round's
  // block, with this rank's part added. Receives the gradient of a later round's block, or of its
  // own. It comes by the end of the next round (kIntra) or of the next node's last round (kInter).
  PerLink<RingTransfer> gradient;
};

// All rounds of one rank. Round 0 is its own block.
struct RingRoute {
  int rank = 0;
  std::vector<int64_t> lengths;  // the number of tokens of every rank's block that are sent
  std::vector<RingRound> rounds;
  int ranks_per_node = 1;  // L; all ranks in a flat ring
  // Tokens that all ranks together send. Times the bytes of a token: the bytes they send.
  PerLink<int64_t> block_tokens, gradient_tokens;
};

// The route of `rank` among lengths.size() ranks, a multiple of ranks_per_node. `lengths`: tokens
// of each rank's block that are sent. needed(block, host): the block of rank `block` has work on
// rank `host`.
RingRoute MakeRingRoute(int rank, int ranks_per_node, const std::vector<int64_t>& lengths,
                        const std::function<bool(int block, int host)>& needed);

// Whether this rank sends or receives a block during the round of `source` or a later one.
bool MovesBlocksFrom(const RingRoute& route, int source);

// Whether a part of the gradient of the rank's own block returns while rounds are still to come. In
// a flat ring it never does.
bool OwnGradientReturnsEarly(const RingRoute& route);

}  // namespace burst
