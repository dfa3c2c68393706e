#include "burst/sequence/balance.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>

#include "burst/base/check.h"

namespace burst {
namespace {

// Consecutive tokens that should be on one rank: a document, or a chunk if rows of a batch have
// different documents.
struct Unit {
  int32_t begin, end;
  int64_t pairs;  // (query, key) pairs that its queries see
};

struct Piece {
  int32_t begin, end;
  int rank;
};

// Returns the pairs that the first n queries of a document see. The document's end does not cut off
// their window.
int64_t CausalPairs(int64_t n, int64_t window) {
  const int64_t rising = std::min(n, window);
  return rising * (rising + 1) / 2 + (n - rising) * window;
}

// Returns the pairs that the queries [begin, end) of a document of `length` tokens see.
int64_t Pairs(const IntervalMask& mask, int64_t begin, int64_t end, int64_t length) {
  const int64_t window = mask.window > 0 ? std::min(mask.window, length) : length;
  const int64_t before = CausalPairs(end, window) - CausalPairs(begin, window);
  if (mask.causal) return before;
  // Keys after a query are counted as keys before it, seen from the document's end. Both counts
  // include the query itself.
  return before + CausalPairs(length - begin, window) - CausalPairs(length - end, window) -
         (end - begin);
}

// Returns the pairs that the queries [begin, end) of a sequence see.
int64_t PairsOfRow(const IntervalMask& mask, const std::vector<int32_t>& starts, int64_t seqlen,
                   int64_t begin, int64_t end) {
  int64_t pairs = 0;
  auto next = std::upper_bound(starts.begin(), starts.end(), begin);
  for (int64_t at = begin; at < end; ++next) {
    const int64_t document = next == starts.begin() ? 0 : *(next - 1);
    const int64_t document_end = next == starts.end() ? seqlen : *next;
    const int64_t last = std::min(end, document_end);
    pairs += Pairs(mask, at - document, last - document, document_end - document);
    at = last;
  }
  return pairs;
}

// Returns the pairs of the queries [0, q_end) and the keys [0, k_end) of a document.
int64_t PairsOfPrefixes(const IntervalMask& mask, int64_t q_end, int64_t k_end, int64_t length) {
  const int64_t window = mask.window > 0 ? std::min(mask.window, length) : length;
  // The pairs whose key is not after the query. A key is seen by the queries of its window.
  const auto before = [&](int64_t queries, int64_t keys) {
    keys = std::min(keys, queries);
    const int64_t whole = std::clamp<int64_t>(queries - window, 0, keys);  // keys of whole windows
    const int64_t first = queries - whole, last = queries - keys;
    return whole * window + (first * (first + 1) - last * (last + 1)) / 2;
  };
  if (mask.causal) return before(q_end, k_end);
  return before(q_end, k_end) + before(k_end, q_end) - std::min(q_end, k_end);
}

// A division of the tokens.
struct Division {
  std::vector<Piece> pieces;
  std::vector<int64_t> pairs;  // work of each rank
  // CostOf if the division is balanced, otherwise the busiest rank's pairs.
  double cost = std::numeric_limits<double>::infinity();
};

// The work that is divided.
struct Problem {
  const IntervalMask& mask;
  const int64_t seqlen;
  std::vector<int64_t> room;  // tokens of each rank

  int ranks() const { return static_cast<int>(room.size()); }
  // Returns the pairs that the queries [begin, end) of all rows see.
  int64_t PairsOf(int64_t begin, int64_t end) const {
    int64_t pairs = 0;
    for (const std::vector<int32_t>& starts : mask.documents) {
      pairs += PairsOfRow(mask, starts, seqlen, begin, end);
    }
    return pairs;
  }
};

// Orders the units by decreasing work; units with equal work keep their order.
void SortByWork(std::vector<Unit>* units) {
  std::stable_sort(units->begin(), units->end(),
                   [](const Unit& a, const Unit& b) { return a.pairs > b.pairs; });
}

std::vector<Unit> MakeUnits(const Problem& problem) {
  std::vector<int64_t> bounds = {0};
  if (problem.mask.documents.size() == 1) {
    for (const int32_t start : problem.mask.documents[0]) {
      if (start > 0) bounds.push_back(start);
    }
  } else {
    constexpr int64_t kChunksOfARank = 32;
    const int64_t chunks = std::min(problem.seqlen, kChunksOfARank * problem.ranks());
    for (int64_t i = 1; i < chunks; ++i) bounds.push_back(problem.seqlen * i / chunks);
  }
  bounds.push_back(problem.seqlen);
  std::vector<Unit> units;
  for (size_t i = 0; i + 1 < bounds.size(); ++i) {
    units.push_back({static_cast<int32_t>(bounds[i]), static_cast<int32_t>(bounds[i + 1]),
                     problem.PairsOf(bounds[i], bounds[i + 1])});
  }
  SortByWork(&units);
  return units;
}

// Cuts units so that none has more than `most` pairs, if it has more than one token. All but a
// unit's last part have as many pairs as fit.
std::vector<Unit> CutUnits(const Problem& problem, const std::vector<Unit>& units, int64_t most) {
  std::vector<Unit> cut;
  for (Unit unit : units) {
    while (unit.pairs > most && unit.end - unit.begin > 1) {
      int32_t fits = unit.begin + 1, too_far = unit.end;  // ends of a first part
      while (too_far - fits > 1) {
        const int32_t middle = fits + (too_far - fits) / 2;
        (problem.PairsOf(unit.begin, middle) <= most ? fits : too_far) = middle;
      }
      const int64_t pairs = problem.PairsOf(unit.begin, fits);
      cut.push_back({unit.begin, fits, pairs});
      unit = {fits, unit.end, unit.pairs - pairs};
    }
    cut.push_back(unit);
  }
  SortByWork(&cut);
  return cut;
}

// An attempt to deal the units.
class Dealer {
 public:
  Dealer(const Problem& problem, int64_t mean)
      : problem_(problem),
        ranks_(problem.ranks()),
        mean_(mean),
        room_(problem.room),
        pairs_(problem.room.size()) {}

  // Deals the units. A unit with more than 1 / fineness of a rank's work is spread over several
  // ranks.
  void Deal(const std::vector<Unit>& units, double fineness) {
    for (const Unit& unit : units) {
      const double shares =
          std::ceil(fineness * static_cast<double>(unit.pairs) / static_cast<double>(mean_));
      Spread(unit, static_cast<int>(std::clamp(shares, 1.0, 1.0 * ranks_)));
    }
    for (const Piece& piece : left_) Fill(piece);
  }

  Division division() const { return {pieces_, pairs_}; }

 private:
  static int64_t Length(const Unit& unit) { return unit.end - unit.begin; }

  // Returns whether the pieces of several ranks alternate as in zigzag, because later queries see
  // more.
  bool IsZigzag(const Unit& unit, int count) const {
    return problem_.mask.causal && count > 1 &&
           (problem_.mask.window == 0 || problem_.mask.window > Length(unit) / count);
  }

  // Spreads a unit over `count` neighboring ranks, or over more if they have no room. Documents
  // without room remain.
  void Spread(const Unit& unit, int count) {
    std::vector<int64_t> shares;
    for (int first = -1; first < 0 && count <= ranks_; ++count) {
      const int chunks = IsZigzag(unit, count) ? 2 * count : count;
      const auto member = [&](int chunk) { return std::min(chunk, 2 * count - 1 - chunk); };
      const auto begin = [&](int chunk) { return Length(unit) * chunk / chunks; };
      shares.assign(count, 0);
      for (int i = 0; i < chunks; ++i) shares[member(i)] += begin(i + 1) - begin(i);
      first = FindRoom(shares);
      if (first < 0 && count == 1) break;  // a short one fills a gap
      if (first < 0 && count < ranks_) continue;
      for (int i = 0; i < chunks; ++i) {
        const int rank = (std::max(first, 0) + member(i)) % ranks_;
        const int64_t end = std::min(begin(i + 1), begin(i) + room_[rank]);
        Give(unit, begin(i), end, rank);
        Leave(unit, end, begin(i + 1));
      }
      return;
    }
    Leave(unit, 0, Length(unit));
  }

  // Returns the first of the neighboring ranks that have room for these shares and whose busiest
  // rank has the least work, or -1.
  int FindRoom(const std::vector<int64_t>& shares) const {
    const auto count = static_cast<int>(shares.size());
    int best = -1;
    int64_t least = std::numeric_limits<int64_t>::max();
    for (int first = 0; first < (count == ranks_ ? 1 : ranks_); ++first) {
      int64_t busiest = 0;
      bool fits = true;
      for (int i = 0; i < count && fits; ++i) {
        const int rank = (first + i) % ranks_;
        fits = room_[rank] >= shares[i];
        busiest = std::max(busiest, pairs_[rank]);
      }
      if (!fits || busiest >= least) continue;
      best = first;
      least = busiest;
    }
    return best;
  }

  // Deals pieces to ranks with room, the least busy first.
  void Fill(const Piece& piece) {
    for (int64_t begin = piece.begin; begin < piece.end;) {
      int best = -1;
      for (int rank = 0; rank < ranks_; ++rank) {
        if (room_[rank] > 0 && (best < 0 || pairs_[rank] < pairs_[best])) best = rank;
      }
      BURST_CHECK(best >= 0);
      if (room_[best] < piece.end - begin && begin == piece.begin) {
        best = MakeRoom(piece.end - begin, best);
      }
      const int64_t end = std::min<int64_t>(piece.end, begin + room_[best]);
      Give(begin, end, problem_.PairsOf(begin, end), best);
      begin = end;
    }
  }

  // Makes room for `tokens` on a rank, so that a short document need not be cut. Another document,
  // cut between that rank and `from`, is cut elsewhere: its part on `from` takes the room there.
  // Returns the rank, or `from` if there is none.
  int MakeRoom(int64_t tokens, int from) {
    const auto moved = static_cast<int32_t>(room_[from]);
    for (Piece& first : pieces_) {
      const auto next = by_begin_.find(first.end);
      if (next == by_begin_.end() || BeginsDocument(first.end)) continue;
      Piece& second = pieces_[next->second];
      const bool grows = first.rank == from;  // the first part
      const Piece& shrinks = grows ? second : first;
      const int to = shrinks.rank;
      if ((second.rank == from) == grows || room_[to] + moved < tokens) continue;
      if (shrinks.end - shrinks.begin <= moved) continue;
      const int32_t cut = first.end + (grows ? moved : -moved);
      const int64_t pairs = problem_.PairsOf(std::min(cut, first.end), std::max(cut, first.end));
      by_begin_[cut] = next->second;
      by_begin_.erase(next);
      first.end = second.begin = cut;
      pairs_[from] += pairs;
      pairs_[to] -= pairs;
      room_[from] = 0;
      room_[to] += moved;
      return to;
    }
    return from;
  }
  bool BeginsDocument(int32_t position) const {
    for (const std::vector<int32_t>& starts : problem_.mask.documents) {
      if (std::binary_search(starts.begin(), starts.end(), position)) return true;
    }
    return false;
  }

  // Gives a rank the unit's tokens [begin, end).
  void Give(const Unit& unit, int64_t begin, int64_t end, int rank) {
    begin += unit.begin;
    end += unit.begin;
    const bool whole = begin == unit.begin && end == unit.end;
    Give(begin, end, whole ? unit.pairs : problem_.PairsOf(begin, end), rank);
  }
  void Give(int64_t begin, int64_t end, int64_t pairs, int rank) {
    if (begin == end) return;
    by_begin_[static_cast<int32_t>(begin)] = pieces_.size();
    pieces_.push_back({static_cast<int32_t>(begin), static_cast<int32_t>(end), rank});
    room_[rank] -= end - begin;
    pairs_[rank] += pairs;
  }
  void Leave(const Unit& unit, int64_t begin, int64_t end) {
    if (begin == end) return;
    left_.push_back(
        {static_cast<int32_t>(unit.begin + begin), static_cast<int32_t>(unit.begin + end), -1});
  }

  const Problem& problem_;
  const int ranks_;
  const int64_t mean_;
  std::vector<int64_t> room_, pairs_;  // for each rank, tokens that it lacks and work that it has
  std::vector<Piece> pieces_, left_;
  std::map<int32_t, size_t> by_begin_;  // pieces_, by the begin
};

// Returns the division of the contiguous or the zigzag layout.
Division InLayout(const Problem& problem, Layout layout) {
  Division division;
  division.pairs.resize(problem.ranks());
  const int chunks = (layout == Layout::kZigzag ? 2 : 1) * problem.ranks();
  int64_t begin = 0, end = 0;
  for (int i = 0; i < chunks; ++i, begin = end) {
    const int rank = std::min(i, 2 * problem.ranks() - 1 - i);
    // In both each rank has as many tokens as in zigzag.
    end = layout == Layout::kZigzag ? problem.seqlen * (i + 1) / chunks : end + problem.room[rank];
    if (begin == end) continue;
    division.pieces.push_back({static_cast<int32_t>(begin), static_cast<int32_t>(end), rank});
    division.pairs[rank] += problem.PairsOf(begin, end);
  }
  return division;
}

// Estimates how many tokens the ranks of a flat ring send. A rank sends the tokens that queries of
// other ranks see, within a document and the window. In each direction they go as far as the last
// rank that needs some. With several rows, or several pieces that the same queries see, this is an
// upper bound.
int64_t EstimateSent(const Problem& problem, const std::vector<Piece>& in_order) {
  const int ranks = problem.ranks();
  const int64_t window = problem.mask.window > 0 ? problem.mask.window : problem.seqlen;
  std::vector<int64_t> tokens(ranks);
  std::vector<int> forward(ranks), back(ranks);  // how far
  for (const std::vector<int32_t>& starts : problem.mask.documents) {
    for (size_t i = 0; i < in_order.size(); ++i) {
      const Piece& piece = in_order[i];
      int64_t needed = 0;
      const auto seen_from = [&](const Piece& other, int64_t distance, int64_t length) {
        if (other.rank == piece.rank) return;
        needed = std::max(needed, std::min(length, window - 1 - distance));
        const int offset = (other.rank - piece.rank + ranks) % ranks;
        int& reach = offset <= ranks / 2 ? forward[piece.rank] : back[piece.rank];
        reach = std::max(reach, offset <= ranks / 2 ? offset : ranks - offset);
      };
      // The queries after the piece, in the document in which it ends.
      const auto next = std::lower_bound(starts.begin(), starts.end(), piece.end);
      const int64_t last_end = next == starts.end() ? problem.seqlen : *next;
      const int64_t last_begin = next == starts.begin() ? 0 : *(next - 1);
      for (size_t j = i + 1; j < in_order.size(); ++j) {
        const int64_t distance = in_order[j].begin - piece.end;
        if (in_order[j].begin >= last_end || distance >= window - 1) break;
        seen_from(in_order[j], distance, piece.end - std::max<int64_t>(piece.begin, last_begin));
      }
      // The queries before the piece, in the document in which it begins.
      const auto first = std::upper_bound(starts.begin(), starts.end(), piece.begin);
      const int64_t first_begin = first == starts.begin() ? 0 : *(first - 1);
      const int64_t first_end = first == starts.end() ? problem.seqlen : *first;
      for (size_t j = problem.mask.causal ? 0 : i; j-- > 0;) {
        const int64_t distance = piece.begin - in_order[j].end;
        if (in_order[j].end <= first_begin || distance >= window - 1) break;
        seen_from(in_order[j], distance, std::min<int64_t>(piece.end, first_end) - piece.begin);
      }
      tokens[piece.rank] += needed;
    }
  }
  int64_t sent = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    sent += std::min(tokens[rank], problem.room[rank]) * (forward[rank] + back[rank]);
  }
  return sent;
}

// Returns the pairs of each rank whose query and key it has.
std::vector<int64_t> OwnPairs(const Problem& problem, const std::vector<Piece>& in_order) {
  std::vector<int64_t> own(problem.ranks());
  std::vector<Piece> parts;  // of pieces, in one document and counted from its begin
  for (const std::vector<int32_t>& starts : problem.mask.documents) {
    auto first = in_order.begin();  // the first piece that reaches the document
    for (size_t d = 0; d <= starts.size(); ++d) {
      const int32_t begin = d == 0 ? 0 : starts[d - 1];
      const auto end = static_cast<int32_t>(d == starts.size() ? problem.seqlen : starts[d]);
      while (first != in_order.end() && first->end <= begin) ++first;
      parts.clear();
      for (auto piece = first; piece != in_order.end() && piece->begin < end; ++piece) {
        parts.push_back({std::max(piece->begin, begin) - begin, std::min(piece->end, end) - begin,
                         piece->rank});
      }
      const auto pairs = [&](int64_t q_end, int64_t k_end) {
        return PairsOfPrefixes(problem.mask, q_end, k_end, end - begin);
      };
      for (const Piece& q : parts) {
        for (const Piece& k : parts) {
          if (q.rank != k.rank) continue;
          own[q.rank] += pairs(q.end, k.end) - pairs(q.begin, k.end) - pairs(q.end, k.begin) +
                         pairs(q.begin, k.begin);
        }
      }
    }
  }
  return own;
}

// Estimates the time of a division, in pairs. Pairs with another rank's keys take longer, because
// they are a second call, and a token sent takes as long as some pairs. Both factors were measured
// with 64 heads on 8 of 128 and 8K tokens a GPU, over NVLink.
double CostOf(const Problem& problem, const Division& division) {
  constexpr double kElsewhere = 1.5, kSentToken = 300;
  const std::vector<int64_t> own = OwnPairs(problem, division.pieces);
  double most = 0;
  for (size_t rank = 0; rank < own.size(); ++rank) {
    const auto here = static_cast<double>(own[rank]);
    most = std::max(most, here + kElsewhere * (static_cast<double>(division.pairs[rank]) - here));
  }
  const auto sent = static_cast<double>(EstimateSent(problem, division.pieces));
  return most + kSentToken * sent / problem.ranks();
}

Division Divide(const Problem& problem) {
  const std::vector<Unit> units = MakeUnits(problem);
  int64_t total = 0;
  for (const Unit& unit : units) total += unit.pairs;
  const int64_t mean = std::max<int64_t>(1, total / problem.ranks());
  constexpr double kBalanced = 1.05;
  Division best;
  // Takes a division that is better: balanced and of a lower cost, or else of less work for the
  // busiest rank. Returns whether the division is balanced.
  bool is_balanced = false;
  const auto consider = [&](Division division) {
    std::sort(division.pieces.begin(), division.pieces.end(),
              [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
    division.cost =
        static_cast<double>(*std::max_element(division.pairs.begin(), division.pairs.end()));
    const bool balanced = division.cost <= kBalanced * static_cast<double>(mean);
    if (balanced) division.cost = CostOf(problem, division);
    if (balanced == is_balanced ? division.cost < best.cost : balanced) best = std::move(division);
    is_balanced |= balanced;
    return balanced;
  };
  for (const Layout layout : {Layout::kZigzag, Layout::kContiguous}) {
    consider(InLayout(problem, layout));
  }
  // A document with little more work than a rank's share keeps most of its tokens together.
  for (const double part : {1., 0.98, 0.96, 0.94, 0.92, 0.9, 0.87, 0.84, 0.8, 0.75, 0.7}) {
    const auto most = static_cast<int64_t>(part * static_cast<double>(mean));
    if (units.empty() || units.front().pairs <= most) continue;
    Dealer dealer(problem, mean);
    dealer.Deal(CutUnits(problem, units, most), /*fineness=*/0);
    consider(dealer.division());
  }
  for (const double fineness : {1., 1.5, 2., 3., 4., 6., 8., 12., 16., 24., 32., 64., 128.}) {
    Dealer dealer(problem, mean);
    dealer.Deal(units, fineness);
    if (consider(dealer.division())) break;
  }
  return best;
}

}  // namespace

std::vector<std::vector<int32_t>> BalancedPositions(const Mask& mask, int64_t seqlen, int groups,
                                                    int group_size) {
  const int ranks = groups * group_size;
  std::vector<std::vector<int32_t>> positions(ranks);
  const IntervalMask* const intervals = mask.intervals();
  if (intervals == nullptr || intervals->documents.empty()) {
    for (int rank = 0; rank < ranks; ++rank) {
      positions[rank] = LocalPositions(Layout::kZigzag, seqlen, rank, ranks);
    }
    return positions;
  }
  std::vector<int64_t> length;
  Problem problem = {*intervals, seqlen, std::vector<int64_t>(groups)};
  for (int rank = 0; rank < ranks; ++rank) {
    length.push_back(LocalLength(Layout::kZigzag, seqlen, rank, ranks));
    problem.room[rank / group_size] += length[rank];
    positions[rank].reserve(length[rank]);
  }
  std::vector<int> next(groups);  // the rank of each group that is not full yet
  for (int group = 0; group < groups; ++group) next[group] = group * group_size;
  for (const Piece& piece : Divide(problem).pieces) {
    for (int32_t begin = piece.begin; begin < piece.end;) {
      int& rank = next[piece.rank];
      std::vector<int32_t>& own = positions[rank];
      const auto at = static_cast<int64_t>(own.size());
      const int64_t count = std::min<int64_t>(piece.end - begin, length[rank] - at);
      own.resize(at + count);
      std::iota(own.begin() + at, own.end(), begin);
      begin += static_cast<int32_t>(count);
      if (at + count == length[rank]) ++rank;
    }
  }
  return positions;
}

}  // namespace burst
