#include "burst/attention/ring/chunk_masks.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "burst/base/check.h"
#include "burst/sequence/balance.h"

namespace burst {
namespace {

// Documents as chunks see them: one starts where a chunk does in which a document starts.
DocumentStarts ChunksOf(DocumentStarts documents, int64_t chunk) {
  for (std::vector<int32_t>& starts : documents) {
    for (int32_t& start : starts) start /= static_cast<int32_t>(chunk);
    starts.erase(std::unique(starts.begin(), starts.end()), starts.end());
  }
  return documents;
}

}  // namespace

KeyRanges ChunkMasks::RangesOf(int64_t row, int64_t index, DeviceType device) const {
  KeyRanges ranges = visible.ranges(device);
  const int64_t first = (rows == 1 ? 0 : row) * visible.q_len + index * chunk;
  ranges.most_queries = 0;  // of begin and end, which are counted from each chunk's first key
  ranges.begin += first;
  ranges.end += first;
  ranges.batch_stride = rows == 1 ? 0 : visible.q_len;
  return ranges;
}

ChunkMasks ComputeChunkMasks(const Mask& mask, const std::vector<int32_t>& positions,
                             int64_t seqlen, int64_t chunk) {
  std::vector<int32_t> all(seqlen);
  std::iota(all.begin(), all.end(), 0);
  ChunkMasks masks;
  masks.chunk = chunk;
  masks.visible = KernelKeys(std::move(mask.Between(positions, all, kListBlock).parts[0]));
  masks.visible.all = false;  // RangesOf counts on begin and end
  masks.rows = masks.visible.rows;
  masks.count = static_cast<int64_t>(positions.size()) / chunk;
  for (int64_t i = 0; i < static_cast<int64_t>(positions.size()); ++i) {
    BURST_CHECK_EQ(positions[i], positions[i / chunk * chunk] + i % chunk) << "no whole chunks";
  }
  for (int64_t first = 0; first < masks.rows * masks.visible.q_len; first += chunk) {
    int32_t* const begins = masks.visible.begin.data() + first;
    int32_t* const ends = masks.visible.end.data() + first;
    // Neither begins nor ends ever decrease.
    const bool whole = chunk == seqlen;
    const int32_t begin = whole ? 0 : begins[0];
    const int32_t end = whole ? static_cast<int32_t>(seqlen) : std::max(begin, ends[chunk - 1]);
    masks.keys.push_back({begin, end - begin});
    for (int64_t i = 0; i < chunk; ++i) {
      begins[i] -= begin;
      ends[i] -= begin;
    }
  }
  return masks;
}

std::vector<std::vector<int32_t>> ChunkPositions(Layout layout, const Mask& mask, int64_t seqlen,
                                                 int64_t chunk, int ranks) {
  BURST_CHECK(chunk >= 1 && seqlen % chunk == 0) << seqlen << " tokens in chunks of " << chunk;
  const int64_t chunks = seqlen / chunk;
  std::vector<std::vector<int32_t>> owned(ranks);
  const IntervalMask& intervals = *mask.intervals();
  if (layout == Layout::kBalanced && !intervals.documents.empty() && chunks > 0) {
    const int64_t window = intervals.window / chunk + (intervals.window % chunk != 0);
    owned = BalancedPositions(Mask::SlidingWindow(window, intervals.causal)
                                  .WithDocuments(ChunksOf(intervals.documents, chunk)),
                              chunks, ranks);
  } else {
    for (int rank = 0; rank < ranks; ++rank) {
      owned[rank] = LocalPositions(layout, chunks, rank, ranks);
    }
  }
  std::vector<std::vector<int32_t>> positions(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    for (const int32_t index : owned[rank]) {
      for (int64_t i = 0; i < chunk; ++i) {
        positions[rank].push_back(static_cast<int32_t>(index * chunk + i));
      }
    }
  }
  return positions;
}

}  // namespace burst
