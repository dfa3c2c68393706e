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
// sends it during round k + 1 to that of round k + 2 (round 0 feeds rounds 1 and 2). What this is
// good for are gradients. That of a block leaves after round k and has round k + 1 to reach the
// rank of round k + 2, which finds it there when it begins and adds to it in place; in a ring of
// one direction it would arrive during the very round in which the rank computes its own part, and
// they would have to be added afterwards. Here only the ends of the two ways meet so: after round
// L - 2 a gradient goes to the rank of round L - 1, which adds it to its own and has the sum of the
// node. From there, round m L + L - 1:
//
//   m = 0: home, within the node;
//   0 < m < M - 1: to the same round of the next node, across, hidden under its L rounds;
//   m = M - 1 > 0: home, across.
//
// So a gradient makes as many hops as its block, over the same links. The last one home is hidden
// by work that its owner has kept back.
//
// A block travels no further than it is needed; a gradient begins where something is added. All
// ranks know all of it, so a hop that nobody needs is neither sent nor expected.
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
  // Begin with the round. kIntra: the block of the round before (in the first round of a node: this
  // round's) goes out, that of the next round comes in, by its end. kInter, in the first round of a
  // node: this round's block goes out, that of the next node's first round comes in, by the end of
  // this node's last round.
  PerLink<RingTransfer> block;
  // Begin when the round is done: the gradient of its block goes out, with this rank's part added.
  // What comes in, the gradient of a later round's block or of this rank's own, is there at the end
  // of the next round (kIntra) or of the next node's last round (kInter).
  PerLink<RingTransfer> gradient;
};

// A whole pass. Round 0 is the rank's own block.
struct RingPass {
  std::vector<RingRound> rounds;
  // Tokens that all ranks together send: multiply by the bytes of a token.
  PerLink<int64_t> block_tokens, gradient_tokens;
};

// The pass of `rank` among lengths.size() ranks, a multiple of ranks_per_node. `lengths`: tokens of
// each rank's block. needed(block, host): the block of rank `block` has work on rank `host`.
RingPass MakeRingPass(int rank, int ranks_per_node, const std::vector<int64_t>& lengths,
                      const std::function<bool(int block, int host)>& needed);

}  // namespace burst
