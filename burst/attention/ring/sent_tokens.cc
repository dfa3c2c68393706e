#include "burst/attention/ring/sent_tokens.h"

#include <algorithm>
#include <limits>

namespace burst {
namespace {

using Positions = std::vector<int32_t>;

// More pieces, or a larger share of the block, are not worth a copy of the rows.
constexpr size_t kMostPieces = 64;
constexpr double kMostOfBlock = 0.75;

// Marks the tokens whose counterparts, queries or keys, are not all among the neighbors that the
// rank has. `starts` are the starts of the row's documents, or null.
void MarkRow(BlockOf block, const IntervalMask& mask, const Positions* starts, bool has_spans,
             int64_t seqlen, const Positions& positions, std::vector<bool>* needed) {
  constexpr int64_t kInfinity = std::numeric_limits<int32_t>::max();
  const int64_t window = mask.window > 0 ? std::min(mask.window, kInfinity) : kInfinity;
  const auto n = static_cast<int64_t>(positions.size());
  size_t next_document = 0;
  int64_t document_begin = 0, document_end = seqlen;
  for (int64_t first = 0; first < n;) {
    int64_t last = first + 1;  // [first, last): positions without a gap
    while (last < n && positions[last] == positions[last - 1] + 1) ++last;
    for (int64_t i = first; i < last; ++i) {
      const int64_t t = positions[i];
      if (starts != nullptr) {
        while (next_document < starts->size() && (*starts)[next_document] <= t) {
          document_begin = (*starts)[next_document++];
        }
        document_end = next_document < starts->size() ? (*starts)[next_document] : seqlen;
      }
      int64_t begin = document_begin, end = document_end;  // range of possible counterparts
      if (!has_spans) {
        begin = std::max(begin, t - window + 1);
        end = std::min(end, t + window);
        // Later tokens see a key, and a query sees earlier ones.
        if (mask.causal && block == BlockOf::kKeys) begin = t;
        if (mask.causal && block == BlockOf::kQueries) end = t + 1;
      }
      if (begin < positions[first] || end > positions[last - 1] + 1) (*needed)[i] = true;
    }
    first = last;
  }
}

}  // namespace

std::optional<Positions> NeededElsewhere(BlockOf block, const Mask& mask, int64_t seqlen,
                                         const Positions& positions) {
  const IntervalMask* const intervals = mask.intervals();
  if (intervals == nullptr || (intervals->documents.empty() && intervals->window == 0)) {
    return std::nullopt;
  }
  const DocumentStarts& documents = intervals->documents;
  const Spans& spans = intervals->spans;
  std::vector<bool> needed(positions.size());
  for (int64_t row = 0; row < intervals->rows(); ++row) {
    const Positions* const starts =
        documents.empty() ? nullptr : &documents[documents.size() == 1 ? 0 : row];
    const bool has_spans = !spans.empty() && !spans[spans.size() == 1 ? 0 : row].empty();
    MarkRow(block, *intervals, starts, has_spans, seqlen, positions, &needed);
  }
  Positions some;
  for (size_t i = 0; i < positions.size(); ++i) {
    if (needed[i]) some.push_back(positions[i]);
  }
  if (some.size() > kMostOfBlock * positions.size() ||
      FindRows(some, positions).size() > kMostPieces) {
    return std::nullopt;
  }
  return some;
}

std::vector<BlockRows> FindRows(const Positions& some, const Positions& all) {
  std::vector<BlockRows> rows;
  int64_t at = 0;
  for (const int32_t position : some) {
    while (all[at] != position) ++at;
    if (!rows.empty() && rows.back().begin + rows.back().count == at) {
      ++rows.back().count;
    } else {
      rows.push_back({at, 1});
    }
  }
  return rows;
}

}  // namespace burst
