#include "burst/sequence/token_exchange.h"

#include <cstdint>
#include <vector>

#include "burst/base/check.h"
#include "burst/base/status.h"

namespace burst {
namespace {

constexpr int kTokenAxis = 1;

// Returns a new tensor like `like`, with another number of tokens.
Tensor EmptyWith(const Tensor& like, int64_t tokens) {
  Shape shape = like.shape();
  shape[kTokenAxis] = tokens;
  return Tensor::Empty(shape, like.dtype(), like.device());
}

// Returns the number of elements of each rank's tokens. In a message, the ranks' tokens follow one
// another.
std::vector<int64_t> Counts(const TokenShard& shard, const Tensor& like) {
  int64_t token = like.dim(0);
  for (int64_t axis = kTokenAxis + 1; axis < like.ndim(); ++axis) token *= like.dim(axis);
  std::vector<int64_t> counts;
  for (int r = 0; r < shard.group().size; ++r) counts.push_back(token * shard.local_length(r));
  return counts;
}

// Returns whether that order is also the order of positions, so that nothing has to be moved.
bool InOrder(const TokenShard& shard, const Tensor& like) {
  int64_t begin = 0;
  for (int r = 0; r < shard.group().size; ++r) {
    for (const TokenRun& run : shard.runs(r)) {
      if (run.begin != begin || run.step != 1) return false;
      begin += run.count;
    }
  }
  return like.dim(0) == 1;
}

// Calls copy(part of own, the same tokens in all) for each run of a rank's tokens.
template <typename Copy>
void ForEachRun(const TokenShard& shard, int group_rank, const Tensor& own, const Tensor& all,
                Copy copy) {
  for (const TokenRun& run : shard.runs(group_rank)) {
    copy(own.Slice(kTokenAxis, run.first, run.count),
         all.Slice(kTokenAxis, run.begin, run.count, run.step));
  }
}

// Copies for every rank of the group. `parts` are their tokens, one rank after the other.
template <typename Copy>
void ForEachPart(const TokenShard& shard, const Tensor& parts, const Tensor& all, Copy copy) {
  const std::vector<int64_t> counts = Counts(shard, all);
  int64_t begin = 0;
  for (int r = 0; r < shard.group().size; ++r) {
    Shape shape = all.shape();
    shape[kTokenAxis] = shard.local_length(r);
    ForEachRun(shard, r, parts.Slice(0, begin, counts[r]).View(shape), all, copy);
    begin += counts[r];
  }
}

}  // namespace

absl::Status TokenExchange::PostGather(const TokenShard& shard, const Tensor& own,
                                       Pending* pending) const {
  BURST_CHECK(own.is_contiguous() && own.dim(kTokenAxis) == shard.local_length(group_->rank()));
  pending->result = EmptyWith(own, shard.group_length());
  pending->parts = InOrder(shard, own)
                       ? Tensor()
                       : Tensor::Empty({pending->result.numel()}, own.dtype(), own.device());
  return group_->PostAllGatherParts(own, Counts(shard, own),
                                    pending->parts.null() ? pending->result : pending->parts);
}

Tensor TokenExchange::Gathered(const TokenShard& shard, const Pending& pending) {
  if (pending.parts.null()) return pending.result;
  ForEachPart(shard, pending.parts, pending.result,
              [](const Tensor& part, const Tensor& place) { place.CopyFrom(part); });
  return pending.result;
}

absl::Status TokenExchange::Gather(const TokenShard& shard, const Tensor& own, Tensor* all) const {
  Pending pending;
  BURST_RETURN_IF_ERROR(PostGather(shard, own, &pending));
  BURST_RETURN_IF_ERROR(Wait());
  *all = Gathered(shard, pending);
  return absl::OkStatus();
}

absl::Status TokenExchange::PostReduceScatter(const TokenShard& shard, const Tensor& all,
                                              Pending* pending) const {
  BURST_CHECK(all.is_contiguous() && all.dim(kTokenAxis) == shard.group_length());
  pending->result = EmptyWith(all, shard.local_length(group_->rank()));
  pending->parts = all;
  if (!InOrder(shard, all)) {
    pending->parts = Tensor::Empty({all.numel()}, all.dtype(), all.device());
    ForEachPart(shard, pending->parts, all,
                [](const Tensor& part, const Tensor& place) { part.CopyFrom(place); });
  }
  return group_->PostReduceScatterSum(pending->parts, Counts(shard, all), pending->result);
}

absl::Status TokenExchange::ReduceScatter(const TokenShard& shard, const Tensor& all,
                                          Tensor* own) const {
  Pending pending;
  BURST_RETURN_IF_ERROR(PostReduceScatter(shard, all, &pending));
  BURST_RETURN_IF_ERROR(Wait());
  *own = pending.result;
  return absl::OkStatus();
}

Tensor TokenExchange::Own(const TokenShard& shard, const Tensor& all) {
  const int group_rank = shard.group().group_rank;
  const Tensor own = EmptyWith(all, shard.local_length(group_rank));
  ForEachRun(shard, group_rank, own, all,
             [](const Tensor& part, const Tensor& place) { part.CopyFrom(place); });
  return own;
}

}  // namespace burst
