#include "burst/sequence/token_shard.h"

#include <algorithm>
#include <limits>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "burst/base/enum_names.h"

namespace burst {
namespace {

constexpr EnumName<Layout> kLayouts[] = {{Layout::kContiguous, "contiguous"},
                                         {Layout::kZigzag, "zigzag"},
                                         {Layout::kStriped, "striped"},
                                         {Layout::kBalanced, "balanced"}};

// Returns the begin of chunk `index` of `chunks` nearly equal ones.
int64_t ChunkBegin(int64_t seqlen, int64_t index, int64_t chunks) {
  return seqlen * index / chunks;
}

void AppendChunk(int64_t seqlen, int64_t index, int64_t chunks, std::vector<int32_t>* positions) {
  const int64_t end = ChunkBegin(seqlen, index + 1, chunks);
  for (int64_t t = ChunkBegin(seqlen, index, chunks); t < end; ++t) {
    positions->push_back(static_cast<int32_t>(t));
  }
}

int64_t ChunkLength(int64_t seqlen, int64_t index, int64_t chunks) {
  return ChunkBegin(seqlen, index + 1, chunks) - ChunkBegin(seqlen, index, chunks);
}

// Returns the places of the positions `local` among `all`. Both increase. Every layout needs only a
// few runs.
std::vector<TokenRun> FindRuns(const std::vector<int32_t>& local, const std::vector<int32_t>& all) {
  std::vector<TokenRun> runs;
  int64_t at = 0;
  for (int64_t i = 0; i < static_cast<int64_t>(local.size()); ++i, ++at) {
    while (all[at] != local[i]) ++at;
    if (!runs.empty()) {
      TokenRun& run = runs.back();
      const int64_t step = at - (run.begin + (run.count - 1) * run.step);
      if (run.count == 1) run.step = step;
      if (step == run.step) {
        ++run.count;
        continue;
      }
    }
    runs.push_back({i, at, 1, 1});
  }
  return runs;
}

}  // namespace

absl::StatusOr<Layout> ParseLayout(absl::string_view name) { return ParseName(name, kLayouts); }
const char* Name(Layout layout) { return NameOf(layout, kLayouts); }

std::vector<int32_t> LocalPositions(Layout layout, int64_t seqlen, int rank, int world_size) {
  BURST_CHECK(world_size > 0 && rank >= 0 && rank < world_size);
  std::vector<int32_t> positions;
  positions.reserve(seqlen / world_size + 2);
  switch (layout) {
    case Layout::kContiguous:
      AppendChunk(seqlen, rank, world_size, &positions);
      break;
    case Layout::kZigzag:
    case Layout::kBalanced:
      AppendChunk(seqlen, rank, 2 * world_size, &positions);
      AppendChunk(seqlen, 2 * world_size - 1 - rank, 2 * world_size, &positions);
      break;
    case Layout::kStriped:
      for (int64_t t = rank; t < seqlen; t += world_size) {
        positions.push_back(static_cast<int32_t>(t));
      }
      break;
  }
  return positions;
}

int64_t LocalLength(Layout layout, int64_t seqlen, int rank, int world_size) {
  BURST_CHECK(world_size > 0 && rank >= 0 && rank < world_size);
  switch (layout) {
    case Layout::kContiguous:
      return ChunkLength(seqlen, rank, world_size);
    case Layout::kZigzag:
    case Layout::kBalanced:
      return ChunkLength(seqlen, rank, 2 * world_size) +
             ChunkLength(seqlen, 2 * world_size - 1 - rank, 2 * world_size);
    case Layout::kStriped:
      return (seqlen - rank + world_size - 1) / world_size;
  }
  return 0;
}

absl::StatusOr<TokenShard> TokenShard::Create(int group_index, int num_groups, Layout layout,
                                              int64_t seqlen, const RankGroup& group) {
  constexpr int64_t kLimit = std::numeric_limits<int32_t>::max();
  if (seqlen < 0 || seqlen >= kLimit) {
    return absl::InvalidArgumentError(
        absl::StrCat("seqlen ", seqlen, " is not in [0, ", kLimit, ")"));
  }
  return Make(group_index, num_groups, seqlen, group, [&](int rank) {
    return LocalPositions(layout, seqlen, rank, num_groups * group.size);
  });
}

absl::StatusOr<TokenShard> TokenShard::Create(int group_index, int num_groups,
                                              const std::vector<std::vector<int32_t>>& positions,
                                              const RankGroup& group) {
  const int ranks = num_groups * group.size;
  if (positions.size() != static_cast<size_t>(ranks)) {
    return absl::InvalidArgumentError(
        absl::StrCat("positions of ", positions.size(), " ranks for ", ranks));
  }
  size_t seqlen = 0;
  for (const std::vector<int32_t>& local : positions) seqlen += local.size();
  std::vector<bool> seen(seqlen);
  for (int rank = 0; rank < ranks; ++rank) {
    int64_t previous = -1;
    for (const int32_t position : positions[rank]) {
      if (position <= previous || static_cast<size_t>(position) >= seqlen || seen[position]) {
        return absl::InvalidArgumentError(absl::StrCat(
            "position ", position, " of rank ", rank,
            " is out of order, there twice, or beyond the ", seqlen, " tokens of all ranks"));
      }
      previous = position;
      seen[position] = true;
    }
  }
  return Make(group_index, num_groups, static_cast<int64_t>(seqlen), group,
              [&](int rank) { return positions[rank]; });
}

TokenShard TokenShard::Make(int group_index, int num_groups, int64_t seqlen, const RankGroup& group,
                            const std::function<std::vector<int32_t>(int rank)>& positions_of) {
  BURST_CHECK(num_groups > 0 && group_index >= 0 && group_index < num_groups)
      << "group " << group_index << " of " << num_groups;
  BURST_CHECK(group.size > 0 && group.group_rank >= 0 && group.group_rank < group.size)
      << "rank " << group.group_rank << " of a group of " << group.size;
  TokenShard shard;
  shard.group_index_ = group_index;
  shard.seqlen_ = seqlen;
  shard.group_ = group;
  shard.local_ = Share([&] {
    Positions local;
    for (int g = 0; g < group.size; ++g) {
      local.push_back(positions_of(group_index * group.size + g));
    }
    return local;
  });
  shard.positions_ = Share([&] {
    Positions all(num_groups);
    for (int rank = 0; rank < num_groups * group.size; ++rank) {
      const std::vector<int32_t> local = positions_of(rank);
      std::vector<int32_t>& positions = all[rank / group.size];
      positions.insert(positions.end(), local.begin(), local.end());
    }
    for (std::vector<int32_t>& positions : all) {
      if (group.size > 1) std::sort(positions.begin(), positions.end());
    }
    return all;
  });
  for (const std::vector<int32_t>& local : *shard.local_) {
    shard.runs_.push_back(FindRuns(local, shard.group_positions(group_index)));
  }
  return shard;
}

// A plan has many ranks in one process, each of which knows the tokens of all. They take turns, so
// that few hold positions of their own.
std::shared_ptr<const TokenShard::Positions> TokenShard::Share(
    const std::function<Positions()>& make) {
  static std::mutex mutex;
  static auto* const shared = new std::vector<std::weak_ptr<const Positions>>;
  std::lock_guard<std::mutex> lock(mutex);
  Positions positions = make();
  shared->erase(std::remove_if(shared->begin(), shared->end(),
                               [](const auto& other) { return other.expired(); }),
                shared->end());
  for (const std::weak_ptr<const Positions>& weak : *shared) {
    std::shared_ptr<const Positions> other = weak.lock();
    if (other != nullptr && *other == positions) return other;
  }
  auto made = std::make_shared<const Positions>(std::move(positions));
  shared->push_back(made);
  return made;
}

TokenShard TokenShard::Prefix(int64_t tokens) const {
  BURST_CHECK(tokens >= 0 && tokens <= seqlen_) << tokens << " of " << seqlen_ << " tokens";
  TokenShard prefix = *this;
  prefix.seqlen_ = tokens;
  const auto shorten = [&](Positions lists) {
    for (std::vector<int32_t>& positions : lists) {
      positions.erase(std::lower_bound(positions.begin(), positions.end(), tokens),
                      positions.end());
    }
    return lists;
  };
  prefix.positions_ = Share([&] { return shorten(*positions_); });
  prefix.local_ = Share([&] { return shorten(*local_); });
  prefix.runs_.clear();
  for (const std::vector<int32_t>& local : *prefix.local_) {
    prefix.runs_.push_back(FindRuns(local, prefix.group_positions(group_index_)));
  }
  return prefix;
}

int64_t TokenShard::max_group_length() const {
  int64_t longest = 0;
  for (const std::vector<int32_t>& positions : *positions_) {
    longest = std::max(longest, static_cast<int64_t>(positions.size()));
  }
  return longest;
}

}  // namespace burst
