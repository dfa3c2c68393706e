// Where the blocks of a ring are in each round, and how their gradients come home.
//
// M nodes of L ranks; rank n L + i is number i of node n. One node (M = 1): a flat ring. In round
// m L + k, with m < M and k < L, the block of rank (n, i) is at the rank
//
//   (n + m mod M, i + o(k) mod L),   o = 0, 1, -1, 2, -2, ...
//
// The double ring of Gu et al., "LoongTrain" (arXiv 2406.18485), and BurstEngine (arXiv
// 2509.19836): a block visits a node at a time. It enters the node at its own number (k = 0) and
// goes on to the ranks of the node, while one copy of it crosses to the next node: it leaves in
// round m L and is needed in round (m + 1) L, so that L rounds hide it. A block makes M (L - 1)
// hops within nodes and M - 1 between them, of the M L - 1 that a flat ring makes.
//
// Within a node a block spreads both ways, a step each way every two rounds: the rank of round k
// sends it during round k + 1 to that of round k + 2 (round 0 feeds rounds 1 and 2). This is for
// the sake of the gradients. That of a block leaves after round k and has round k + 1 to reach the
// rank of round k + 2, which finds it there when it begins and adds to it in place; in a ring of
// one direction it would arrive during the very round in which the rank computes its own part, and
// the two would have to be added afterwards. Here that happens only where the two ways end: after
// round L - 2 a gradient goes to the rank of round L - 1, which adds it to its own and so has the
// sum of the node. From there, in round m L + L - 1, it goes:
//
//   m = 0: home, within the node;
//   0 < m < M - 1: to the same round of the next node, across, hidden under its L rounds;
//   m = M - 1 > 0: home, across.
//
// So a gradient makes as many hops as its block, over the same links. The last one home is hidden
// by work that its owner has kept back.
//
// A block travels no further than it is needed; a gradient starts at the first rank that has a part
// of it. Every rank knows the whole pass, so a hop that nobody needs is neither sent nor expected.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

namespace burst {

enum class Link { kIntra = 0, kInter = 1 };  // within a node, between nodes
inline constexpr int kNumLinks = 2;
inline constexpr Link kLinks[] = {Link::kIntra, Link::kInter};

// One value a link.
template <typename T>
class PerLink {
 public:
  T& operator[](Link link) { return values_[static_cast<int>(link)]; }
  const T& operator[](Link link) const { return values_[static_cast<int>(link)]; }
  T total() const { return values_[0] + values_[1]; }

 private:
  std::array<T, kNumLinks> values_ = {};
};

// A message out and a message in, of which either may be missing.
struct RingTransfer {
  int to = -1;        // rank that is sent to; -1: nobody
  int from = -1;      // rank that is received from; -1: nobody
  int arriving = -1;  // whose block it is that arrives, or whose gradient
};

// A round of a pass, as one rank sees it, and the transfers that begin with it. Both ends of a
// transfer name it in the same round.
struct RingRound {
  int source = 0;        // whose block is at work
  bool compute = false;  // some pair of query and key is visible
  // Transfers of blocks that begin with the round. kIntra: sends the block of the previous round
  // (in the first round of a node: of this round) and receives that of the next round, by the end
  // of this one. kInter, in the first round of a node only: sends this round's block and receives
  // that of the next node's first round, by the end of this node's last round.
  PerLink<RingTransfer> block;
  // Transfers of gradients that begin when the round is done: sends the gradient of its block, with
  // this rank's part added, and receives that of a later round's block or of this rank's own, by
  // the end of the next round (kIntra) or of the next node's last round (kInter).
  PerLink<RingTransfer> gradient;
};

// A whole pass. Round 0 is the rank's own block.
struct RingRoute {
  std::vector<RingRound> rounds;
  // Tokens that all ranks together send; times the bytes of a token, the bytes they send.
  PerLink<int64_t> block_tokens, gradient_tokens;
};

// The pass of `rank` among lengths.size() ranks, a multiple of ranks_per_node. `lengths`: tokens of
// each rank's block. needed(block, host): the block of rank `block` has work on rank `host`.
RingRoute MakeRingRoute(int rank, int ranks_per_node, const std::vector<int64_t>& lengths,
                        const std::function<bool(int block, int host)>& needed);

}  // namespace burst
