// Which tokens of a sequence are local to each rank.
//
// A layout spreads the tokens over G ranks:
//    contiguous  the sequence is cut into G chunks; rank r has chunk r.
//    zigzag      it is cut into 2G chunks; rank r has chunks r and 2G-1-r, so that under a causal
//                mask every rank has the same work.
//    striped     rank r has the tokens t with t mod G = r (Brandon et al., arXiv 2311.09431).
//    balanced    as zigzag, unless there are packed documents: these are dealt to the ranks as a
//                whole where that gives every rank nearly the same work (BalancedPositions,
//                burst/sequence/balance.h). The lengths are those of zigzag.
//
// The length need not be divisible: chunks differ by at most one token, and some may be empty.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace burst {

enum class Layout { kContiguous, kZigzag, kStriped, kBalanced };

absl::StatusOr<Layout> ParseLayout(absl::string_view name);  // "contiguous", "zigzag", ...
const char* Name(Layout layout);

// The global positions of the tokens on `rank`, increasing, and their number. Every position of [0,
// seqlen) is on exactly one of the world_size ranks. Without packed documents.
std::vector<int32_t> LocalPositions(Layout layout, int64_t seqlen, int rank, int world_size);
int64_t LocalLength(Layout layout, int64_t seqlen, int rank, int world_size);

// Neighboring ranks that exchange tokens among themselves (Ulysses, tensor parallelism) and act
// toward all others as one. Rank index * size + group_rank belongs to group `index`.
struct RankGroup {
  int size = 1;
  int group_rank = 0;  // this rank's number, in [0, size)
};

// A run of one rank's tokens within its group's: for 0 <= i < count, token first + i of the rank is
// token begin + i * step of the group.
struct TokenRun {
  int64_t first, begin, count, step;
};

// The tokens of this rank, of its group and of all other groups. A pure function of its arguments:
// every rank knows the tokens of every other rank. Without groups, a group is one rank.
class TokenShard {
 public:
  // For group `group_index` of `num_groups`. `layout` spreads the tokens over all ranks: the
  // groups times their size. InvalidArgument for a seqlen that is negative or no int32.
  static absl::StatusOr<TokenShard> Create(int group_index, int num_groups, Layout layout,
                                           int64_t seqlen, const RankGroup& group = {});

  // Makes a shard of tokens that are spread in another way. positions[rank], for all ranks, are
  // increasing and hold every position of [0, seqlen) once; otherwise InvalidArgument.
  static absl::StatusOr<TokenShard> Create(int group_index, int num_groups,
                                           const std::vector<std::vector<int32_t>>& positions,
                                           const RankGroup& group = {});

  // The first `tokens` tokens of the sequence alone, on the ranks that have them.
  TokenShard Prefix(int64_t tokens) const;

  int group_index() const { return group_index_; }  // this rank's group, in [0, num_groups())
  int num_groups() const { return static_cast<int>(positions_->size()); }
  const RankGroup& group() const { return group_; }
  int64_t seqlen() const { return seqlen_; }  // the whole sequence's length in tokens

  // The tokens of this rank: global positions, increasing, and their number.
  const std::vector<int32_t>& local_positions() const { return local_positions(group_.group_rank); }
  int64_t local_length() const { return local_length(group_.group_rank); }

  // The tokens of another rank of this group, and where they are among the group's.
  const std::vector<int32_t>& local_positions(int group_rank) const {
    return (*local_)[group_rank];
  }
  int64_t local_length(int group_rank) const {
    return static_cast<int64_t>((*local_)[group_rank].size());
  }
  const std::vector<TokenRun>& runs(int group_rank) const { return runs_[group_rank]; }

  // The tokens of a whole group: global positions, increasing, and their number.
  const std::vector<int32_t>& group_positions(int index) const { return (*positions_)[index]; }
  int64_t group_length(int index) const {
    return static_cast<int64_t>((*positions_)[index].size());
  }
  int64_t group_length() const { return group_length(group_index_); }  // this rank's group's
  int64_t max_group_length() const;

 private:
  TokenShard() = default;
  static TokenShard Make(int group_index, int num_groups, int64_t seqlen, const RankGroup& group,
                         const std::function<std::vector<int32_t>(int rank)>& positions_of);

  // The tokens by group, or by rank of a group.
  using Positions = std::vector<std::vector<int32_t>>;
  // Returns what `make` returns, or equal positions that another shard of the process has.
  static std::shared_ptr<const Positions> Share(const std::function<Positions()>& make);

  int group_index_ = 0;
  int64_t seqlen_ = 0;
  RankGroup group_;
  std::shared_ptr<const Positions> positions_;  // by group; ranks of one process share them
  std::shared_ptr<const Positions> local_;      // by rank of this group; shared, too
  std::vector<std::vector<TokenRun>> runs_;     // by rank of this group
};

}  // namespace burst
