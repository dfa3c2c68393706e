#include "burst/attention/ring/route.h"

#include "burst/base/check.h"

namespace burst {
namespace {

class Tour {
 public:
  Tour(int world_size, int ranks_per_node)
      : nodes_(world_size / ranks_per_node), ranks_per_node_(ranks_per_node) {}

  int nodes() const { return nodes_; }
  int ranks_per_node() const { return ranks_per_node_; }
  int num_rounds() const { return nodes_ * ranks_per_node_; }

  // The rank that has a block in round t, and the rank whose block is on `rank` then.
  int Host(int block, int t) const { return Moved(block, t / ranks_per_node_, Offset(t)); }
  int Source(int rank, int t) const { return Moved(rank, -(t / ranks_per_node_), -Offset(t)); }

  // The round whose rank sends the block of round t within the node; t is not the node's first.
  int Sender(int t) const {
    const int k = t % ranks_per_node_;
    return t - (k <= 2 ? k : 2);
  }

  // Where a gradient goes after round t.
  struct Hop {
    Link link;
    int round;  // to the rank that has the block in this round; -1: home
  };
  Hop AfterRound(int t) const {
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

// The way of one block, by round.
struct Path {
  std::vector<bool> present;  // the block is on the round's rank
  std::vector<bool> active;   // its gradient leaves that rank: it or a rank before has added to it
};

Path MakePath(const Tour& tour, int block, const std::function<bool(int, int)>& needed) {
  const int rounds = tour.num_rounds(), per_node = tour.ranks_per_node();
  Path path;
  for (int t = 0; t < rounds; ++t) path.present.push_back(needed(block, tour.Host(block, t)));
  path.active = path.present;
  path.present[0] = true;
  path.active[0] = false;  // the owner's own part stays with it
  for (int t = rounds - 1; t > 0; --t) {
    if (!path.present[t]) continue;
    path.present[t % per_node == 0 ? t - per_node : tour.Sender(t)] = true;
  }
  for (int t = 0; t < rounds; ++t) {
    const Tour::Hop hop = tour.AfterRound(t);
    if (path.active[t] && hop.round >= 0) path.active[hop.round] = true;
  }
  return path;
}

}  // namespace

RingRoute MakeRingRoute(int rank, int ranks_per_node, const std::vector<int64_t>& lengths,
                        const std::function<bool(int block, int host)>& needed) {
  const int world_size = static_cast<int>(lengths.size());
  BURST_CHECK(ranks_per_node > 0 && world_size % ranks_per_node == 0)
      << world_size << " in nodes of " << ranks_per_node;
  const Tour tour(world_size, ranks_per_node);
  RingRoute pass;
  std::vector<Path> paths;
  for (int block = 0; block < world_size; ++block) {
    const Path& path = paths.emplace_back(MakePath(tour, block, needed));
    for (int t = 1; t < world_size; ++t) {
      const Link link = t % ranks_per_node == 0 ? Link::kInter : Link::kIntra;
      if (path.present[t]) pass.block_tokens[link] += lengths[block];
      if (path.active[t]) pass.gradient_tokens[tour.AfterRound(t).link] += lengths[block];
    }
  }
  const auto send_block = [&](int block, int round, RingTransfer* transfer) {
    if (paths[block].present[round]) transfer->to = tour.Host(block, round);
  };
  const auto receive_block = [&](int round, int sender, RingTransfer* transfer) {
    const int block = tour.Source(rank, round);
    if (!paths[block].present[round]) return;
    transfer->from = tour.Host(block, sender);
    transfer->arriving = block;
  };
  for (int t = 0; t < world_size; ++t) {
    RingRound& round = pass.rounds.emplace_back();
    round.source = tour.Source(rank, t);
    round.compute = needed(round.source, rank);
    if ((t + 1) % ranks_per_node != 0) {
      const int sender = tour.Sender(t + 1);
      send_block(tour.Source(rank, sender), t + 1, &round.block[Link::kIntra]);
      receive_block(t + 1, sender, &round.block[Link::kIntra]);
    }
    if (t % ranks_per_node == 0 && t + ranks_per_node < world_size) {
      send_block(round.source, t + ranks_per_node, &round.block[Link::kInter]);
      receive_block(t + ranks_per_node, t, &round.block[Link::kInter]);
    }

    const Tour::Hop hop = tour.AfterRound(t);
    RingTransfer& gradient = round.gradient[hop.link];
    if (paths[round.source].active[t]) {
      gradient.to = hop.round < 0 ? round.source : tour.Host(round.source, hop.round);
    }
    const int arriving = hop.round < 0 ? rank : tour.Source(rank, hop.round);
    if (paths[arriving].active[t]) {
      gradient.from = tour.Host(arriving, t);
      gradient.arriving = arriving;
    }
  }
  return pass;
}

}  // namespace burst
