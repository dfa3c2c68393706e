#include "burst/attention/exact_schedule.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "burst/base/status.h"
#include "burst/sequence/balance.h"

namespace burst {
namespace {

// Returns the documents in units of chunks. One starts at each chunk in which a document starts.
DocumentStarts ChunksOf(DocumentStarts documents, int64_t chunk) {
  for (std::vector<int32_t>& starts : documents) {
    for (int32_t& start : starts) start /= static_cast<int32_t>(chunk);
    starts.erase(std::unique(starts.begin(), starts.end()), starts.end());
  }
  return documents;
}

}  // namespace

absl::StatusOr<ExactSchedule> ExactSchedule::Create(TokenShard shard, int64_t chunk,
                                                    const Mask& mask) {
  BURST_CHECK(mask.intervals() != nullptr);
  BURST_RETURN_IF_ERROR(mask.CheckForSequence(shard.seqlen()));
  for (int rank = 0; rank < shard.num_groups(); ++rank) {
    const std::vector<int32_t>& positions = shard.group_positions(rank);
    for (size_t i = 0; i < positions.size(); ++i) {
      const size_t first = i / chunk * chunk;
      if (positions.size() % chunk == 0 && positions[first] % chunk == 0 &&
          positions[i] - positions[first] == static_cast<int64_t>(i - first)) {
        continue;
      }
      return absl::InvalidArgumentError(absl::StrCat("positions: must be whole chunks of ", chunk,
                                                     " tokens; rank ", rank, " has a part of one"));
    }
  }
  return ExactSchedule(std::move(shard), chunk, mask);
}

ExactSchedule::ExactSchedule(TokenShard shard, int64_t chunk, const Mask& mask)
    : shard_(std::move(shard)), chunk_(chunk) {
  const int64_t seqlen = shard_.seqlen();
  std::vector<int32_t> all(seqlen);
  std::iota(all.begin(), all.end(), 0);
  BlockMask between = mask.Between(shard_.local_positions(), all, kListBlock);
  visible_ = KernelKeys(std::move(between.parts[0]), mask.MaySeparateDocuments());
  visible_.all = false;  // RangesOf counts on begin and end
  for (int64_t first = 0; first < rows() * visible_.q_len; first += chunk) {
    int32_t* const begins = visible_.begin.data() + first;
    int32_t* const ends = visible_.end.data() + first;
    // Neither begins nor ends ever decrease.
    const bool whole = chunk == seqlen;
    const int32_t begin = whole ? 0 : begins[0];
    const int32_t end = whole ? static_cast<int32_t>(seqlen) : std::max(begin, ends[chunk - 1]);
    keys_.push_back({begin, end - begin});
    for (int64_t i = 0; i < chunk; ++i) {
      begins[i] -= begin;
      ends[i] -= begin;
    }
  }
}

KeyRanges ExactSchedule::RangesOf(int64_t row, int64_t index, DeviceType device) const {
  KeyRanges ranges = visible_.ranges(device);
  ranges.most_queries = 0;  // that bound is for begins and ends that are counted from one key
  const int64_t first = (rows() == 1 ? 0 : row) * visible_.q_len + index * chunk_;
  ranges.begin += first;
  ranges.end += first;
  ranges.batch_stride = rows() == 1 ? 0 : visible_.q_len;
  return ranges;
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
