#include "burst/attention/ring/route.h"

#include <algorithm>

#include "burst/base/check.h"

namespace burst {
namespace {

// Tells where blocks are in each round (route.h).
class Itinerary {
 public:
  Itinerary(int world_size, int ranks_per_node)
      : nodes_(world_size / ranks_per_node), ranks_per_node_(ranks_per_node) {}

  int nodes() const { return nodes_; }
  int ranks_per_node() const { return ranks_per_node_; }
  int num_rounds() const { return nodes_ * ranks_per_node_; }

  // Host is the rank that has a block in round t. Source is the rank whose block is on `rank` in
  // round t.
  int Host(int block, int t) const { return Moved(block, t / ranks_per_node_, Offset(t)); }
  int Source(int rank, int t) const { return Moved(rank, -(t / ranks_per_node_), -Offset(t)); }

  // Returns the round whose rank sends the block of round t within the node. t is not the node's
  // first round.
  int Sender(int t) const {
    const int k = t % ranks_per_node_;
    return t - (k <= 2 ? k : 2);
  }

  // The next place of a gradient after round t.
  struct Next {
    Link link;
    int round;  // the round whose rank gets the gradient; -1: the block's owner gets it
  };
  Next AfterRound(int t) const {
    const int m = t / ranks_per_node_, k = t % ranks_per_node_, last = ranks_per_node_ - 1;
    if (k < last) return {Link::kIntra, t + (k == last - 1 ? 1 : 2)};
    if (m == 0) return {Link::kIntra, -1};
    return {Link::kInter, m == nodes_ - 1 ? -1 : t + ranks_per_node_};
  }

 private:
  int Offset(int t) const {
    const int k = t % ranks_per_node_;
    return k % 2 == 1 ? (k + 1) / 2 : -k / 2;
  }
  int Moved(int rank, int nodes, int numbers) const {
    const int node = rank / ranks_per_node_ + nodes, number = rank % ranks_per_node_ + numbers;
    return (node + nodes_) % nodes_ * ranks_per_node_ +
           (number + ranks_per_node_) % ranks_per_node_;
  }

  const int nodes_, ranks_per_node_;
};

// The route of one block, round by round.
struct Path {
  std::vector<bool> present;  // whether the block is on the round's rank
  // Whether that rank sends a gradient: it or an earlier rank has added to it.
  std::vector<bool> active;
};

Path MakePath(const Itinerary& itinerary, int block, const std::function<bool(int, int)>& needed) {
  const int rounds = itinerary.num_rounds(), per_node = itinerary.ranks_per_node();
  Path path;
  for (int t = 0; t < rounds; ++t) path.present.push_back(needed(block, itinerary.Host(block, t)));
  path.active = path.present;
  path.present[0] = true;
  path.active[0] = false;  // the owner keeps its own part
  for (int t = rounds - 1; t > 0; --t) {
    if (!path.present[t]) continue;
    path.present[t % per_node == 0 ? t - per_node : itinerary.Sender(t)] = true;
  }
  for (int t = 0; t < rounds; ++t) {
    const Itinerary::Next next = itinerary.AfterRound(t);
    if (path.active[t] && next.round >= 0) path.active[next.round] = true;
  }
  return path;
}

}  // namespace

RingRoute MakeRingRoute(int rank, int ranks_per_node, const std::vector<int64_t>& lengths,
                        const std::function<bool(int block, int host)>& needed) {
  const int world_size = static_cast<int>(lengths.size());
  BURST_CHECK(ranks_per_node > 0 && world_size % ranks_per_node == 0)
      << world_size << " in nodes of " << ranks_per_node;
  const Itinerary itinerary(world_size, ranks_per_node);
  RingRoute route;
  route.rank = rank;
  route.lengths = lengths;
  route.ranks_per_node = ranks_per_node;
  std::vector<Path> paths;
  for (int block = 0; block < world_size; ++block) {
    const Path& path = paths.emplace_back(MakePath(itinerary, block, needed));
    for (int t = 1; t < world_size; ++t) {
      const Link link = t % ranks_per_node == 0 ? Link::kInter : Link::kIntra;
      if (path.present[t]) route.block_tokens[link] += lengths[block];
      if (path.active[t]) route.gradient_tokens[itinerary.AfterRound(t).link] += lengths[block];
    }
  }
  const auto send_block = [&](int block, int round, RingTransfer* transfer) {
    if (paths[block].present[round]) transfer->to = itinerary.Host(block, round);
  };
  const auto receive_block = [&](int round, int sender, RingTransfer* transfer) {
    const int block = itinerary.Source(rank, round);
    if (!paths[block].present[round]) return;
    transfer->from = itinerary.Host(block, sender);
    transfer->arriving = block;
  };
  for (int t = 0; t < world_size; ++t) {
    RingRound& round = route.rounds.emplace_back();
    round.source = itinerary.Source(rank, t);
    round.compute = needed(round.source, rank);
    if ((t + 1) % ranks_per_node != 0) {
      const int sender = itinerary.Sender(t + 1);
      send_block(itinerary.Source(rank, sender), t + 1, &round.block[Link::kIntra]);
      receive_block(t + 1, sender, &round.block[Link::kIntra]);
    }
    if (t % ranks_per_node == 0 && t + ranks_per_node < world_size) {
      send_block(round.source, t + ranks_per_node, &round.block[Link::kInter]);
      receive_block(t + ranks_per_node, t, &round.block[Link::kInter]);
    }

    const Itinerary::Next next = itinerary.AfterRound(t);
    RingTransfer& gradient = round.gradient[next.link];
    if (paths[round.source].active[t]) {
      gradient.to = next.round < 0 ? round.source : itinerary.Host(round.source, next.round);
    }
    const int arriving = next.round < 0 ? rank : itinerary.Source(rank, next.round);
    if (paths[arriving].active[t]) {
      gradient.from = itinerary.Host(arriving, t);
      gradient.arriving = arriving;
    }
  }
  return route;
}

bool MovesBlocksFrom(const RingRoute& route, int source) {
  const auto moves = [&](Link link, size_t first) {
    return std::any_of(route.rounds.begin() + first, route.rounds.end(),
                       [&](const RingRound& round) {
                         return round.block[link].to >= 0 || round.block[link].from >= 0;
                       });
  };
  size_t t = 0;
  while (route.rounds[t].source != source) ++t;
  // A block that crosses between nodes is on its way during all rounds of a node.
  return moves(Link::kIntra, t) || moves(Link::kInter, t - t % route.ranks_per_node);
}

bool OwnGradientReturnsEarly(const RingRoute& route) {
  for (size_t t = 0; t + 1 < route.rounds.size(); ++t) {
    for (Link link : kLinks) {
      if (route.rounds[t].gradient[link].arriving == route.rank) return true;
    }
  }
  return false;
}

}  // namespace burst
