#include "burst/attention/token_exchange.h"

#include <cstdint>
#include <vector>

#include "burst/base/check.h"
#include "burst/base/status.h"

namespace burst {
namespace {

constexpr int kTokenAxis = 1;

int64_t Held(const RingSchedule& schedule, int member) {
  return static_cast<int64_t>(schedule.held(member).size());
}

// A new tensor like `like`, with another number of tokens.
Tensor EmptyWith(const Tensor& like, int64_t tokens) {
  Shape shape = like.shape();
  shape[kTokenAxis] = tokens;
  return Tensor::Empty(shape, like.dtype(), like.device());
}

// Elements of each member's tokens, by which they lie one behind the other when they travel.
std::vector<int64_t> Counts(const RingSchedule& schedule, const Tensor& like) {
  int64_t token = like.dim(0);
  for (int64_t axis = kTokenAxis + 1; axis < like.ndim(); ++axis) token *= like.dim(axis);
  std::vector<int64_t> counts;
  for (int m = 0; m < schedule.group().size; ++m) counts.push_back(token * Held(schedule, m));
  return counts;
}

// Whether they lie so in order of position too.
bool InOrder(const RingSchedule& schedule, const Tensor& like) {
  int64_t begin = 0;
  for (int m = 0; m < schedule.group().size; ++m) {
    for (const TokenRun& run : schedule.runs(m)) {
      if (run.begin != begin || run.step != 1) return false;
      begin += run.count;
    }
  }
  return like.dim(0) == 1;
}

// Calls copy(tokens of a member among its own, the same among all) for each run of them.
template <typename Copy>
void ForEachRun(const RingSchedule& schedule, int member, const Tensor& own, const Tensor& all,
                Copy copy) {
  for (const TokenRun& run : schedule.runs(member)) {
    copy(own.Slice(kTokenAxis, run.first, run.count),
         all.Slice(kTokenAxis, run.begin, run.count, run.step));
  }
}

// The same for every member, whose tokens are `parts`, one behind the other.
template <typename Copy>
void ForEachPart(const RingSchedule& schedule, const Tensor& parts, const Tensor& all, Copy copy) {
  const std::vector<int64_t> counts = Counts(schedule, all);
  int64_t begin = 0;
  for (int m = 0; m < schedule.group().size; ++m) {
    Shape shape = all.shape();
    shape[kTokenAxis] = Held(schedule, m);
    ForEachRun(schedule, m, parts.Slice(0, begin, counts[m]).View(shape), all, copy);
    begin += counts[m];
  }
}

}  // namespace

absl::Status TokenExchange::Gather(const RingSchedule& schedule, const Tensor& own,
                                   Tensor* all) const {
  BURST_CHECK(own.is_contiguous() && own.dim(kTokenAxis) == Held(schedule, group_->rank()));
  *all = EmptyWith(own, schedule.length());
  const std::vector<int64_t> counts = Counts(schedule, own);
  if (InOrder(schedule, own)) return group_->AllGatherParts(own, counts, *all);
  const Tensor parts = Tensor::Empty({all->numel()}, own.dtype(), own.device());
  BURST_RETURN_IF_ERROR(group_->AllGatherParts(own, counts, parts));
  ForEachPart(schedule, parts, *all,
              [](const Tensor& part, const Tensor& place) { place.CopyFrom(part); });
  return absl::OkStatus();
}

absl::Status TokenExchange::ReduceScatter(const RingSchedule& schedule, const Tensor& all,
                                          Tensor* own) const {
  BURST_CHECK(all.is_contiguous() && all.dim(kTokenAxis) == schedule.length());
  *own = EmptyWith(all, Held(schedule, group_->rank()));
  const std::vector<int64_t> counts = Counts(schedule, all);
  if (InOrder(schedule, all)) return group_->ReduceScatterSum(all, counts, *own);
  const Tensor parts = Tensor::Empty({all.numel()}, all.dtype(), all.device());
  ForEachPart(schedule, parts, all,
              [](const Tensor& part, const Tensor& place) { part.CopyFrom(place); });
  return group_->ReduceScatterSum(parts, counts, *own);
}

Tensor TokenExchange::Own(const RingSchedule& schedule, const Tensor& all) {
  const int member = schedule.group().member;
  const Tensor own = EmptyWith(all, Held(schedule, member));
  ForEachRun(schedule, member, own, all,
             [](const Tensor& part, const Tensor& place) { part.CopyFrom(place); });
  return own;
}

}  // namespace burst
