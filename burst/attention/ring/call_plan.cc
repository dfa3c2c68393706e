#include "burst/attention/ring/call_plan.h"

#include <algorithm>
#include <utility>

#include "burst/base/check.h"

namespace burst {
namespace {

void Append(int64_t head, HeadRange* range) {
  if (range->empty()) *range = {head, head};
  BURST_CHECK_EQ(range->end, head);  // heads that begin or end together are neighbors
  ++range->end;
}

std::vector<PlannedCall> CallsOf(const KernelMask& mask, bool takes_blocks) {
  using Form = MaskPart::Form;
  std::vector<PlannedCall> calls;
  const auto add = [&](Form form, size_t count) {
    for (size_t i = 0; i < count; ++i) calls.push_back({{form, i}, {}, {}});
  };
  if (!mask.blocks.none() && takes_blocks) add(Form::kBlocks, 1);
  if (!mask.blocks.none() && !takes_blocks) {
    add(Form::kBlocksAsIntervals, mask.blocks.parts().size());
  }
  add(Form::kIntervals, mask.parts.size());
  return calls;
}

// Heads that belong together: a KV head with the query heads that share it. If all query heads
// share one KV head, the query heads are divided, and their gradients add up. A division by tokens
// would cost more. Every key tile would be loaded twice, and its gradients stored twice.
struct HeadGroups {
  int64_t count, queries;
  bool one_kv_head;

  HeadRange Queries(int64_t begin, int64_t end) const { return {begin * queries, end * queries}; }
  HeadRange Keys(int64_t begin, int64_t end) const {
    if (begin == end) return {begin, end};
    return one_kv_head ? HeadRange{0, 1} : HeadRange{begin, end};
  }
};

// Adds the calls of one block, for some groups of heads.
class StepMaker {
 public:
  StepMaker(const CallPlanKey& key, const std::vector<KernelMask>& masks, CallPlan* plan)
      : masks_(masks), takes_blocks_(key.takes_blocks), plan_(*plan) {
    const int64_t count = key.num_kv_heads > 1 ? key.num_kv_heads : key.num_heads;
    groups_ = {count, count == 0 ? 0 : key.num_heads / count, key.num_kv_heads == 1};
  }
  int64_t num_groups() const { return groups_.count; }
  void Add(int source, int64_t begin, int64_t end) {
    PlannedStep step = {source, groups_.Queries(begin, end), groups_.Keys(begin, end), {}};
    if (begin < end) step.calls = CallsOf(masks_[source], takes_blocks_);
    plan_.steps.push_back(std::move(step));
  }

 private:
  const std::vector<KernelMask>& masks_;
  const bool takes_blocks_;
  CallPlan& plan_;
  HeadGroups groups_;
};

// Adds the steps of a call. A backward computes the rank's own block in two steps: one while the
// first transfers run, one while the last gradients return. In a flat ring the two are equal.
// Between nodes the last transfer takes longer, and the second step is three quarters.
void AddSteps(const CallPlanKey& key, const RingRoute& route, StepMaker* steps) {
  const auto ranks = static_cast<int>(route.lengths.size());
  const int64_t groups = steps->num_groups();
  const bool divides = key.pass != RingPass::kForward && ranks > 1;
  const int64_t cut = divides ? groups / (route.ranks_per_node == ranks ? 2 : 4) : groups;
  steps->Add(route.rank, 0, cut);
  for (int i = 1; i < ranks; ++i) {
    if (route.rounds[i].compute) steps->Add(route.rounds[i].source, 0, groups);
  }
  if (divides) steps->Add(route.rank, cut, groups);
}

// Says which calls of one side's sums are the first and the last. The sums of a block that visits
// get the calls of its own step only; all other calls add to those of this rank's block.
class SideCalls {
 public:
  SideCalls(const CallPlan& plan, int rank, bool travels, int64_t num_heads,
            HeadRange PlannedStep::*heads, HeadCalls::Ends PlannedCall::*ends)
      : rank_(rank), travels_(travels), heads_(heads), ends_(ends), own_(num_heads) {
    for (const PlannedStep& step : plan.steps) {
      if (IsOwn(step)) own_.Announce(step.*heads, static_cast<int64_t>(step.calls.size()));
    }
  }
  bool ForAllHeads() const { return own_.ForAllHeads(); }
  void OnlyAdd() { own_.OnlyAdd(); }
  void Fill(PlannedStep* step) {
    HeadCalls visiting((step->*heads_).end);
    visiting.Announce(step->*heads_, static_cast<int64_t>(step->calls.size()));
    HeadCalls& calls = IsOwn(*step) ? own_ : visiting;
    for (PlannedCall& call : step->calls) call.*ends_ = calls.Next(step->*heads_);
  }

 private:
  bool IsOwn(const PlannedStep& step) const { return !travels_ || step.source == rank_; }

  const int rank_;
  const bool travels_;
  HeadRange PlannedStep::*const heads_;
  HeadCalls::Ends PlannedCall::*const ends_;
  HeadCalls own_;
};

// Calls f(batch row, query, end) for the ranges [query, end) of queries that see some key of a part
// of a mask. A plan's masks have dropped their intervals (CountForSimulation): then for all
// queries.
template <typename Function>
void ForEachSeeing(const MaskPart& part, const KernelMask& mask, Function f) {
  const KernelKeys* const keys = part.IntervalsOf(mask);
  if (keys == nullptr) {
    const KernelBlocks& blocks = mask.blocks;
    const int64_t queries = blocks.query_blocks();
    for (int64_t i = 0; i < blocks.rows * queries; ++i) {
      const int64_t row = i / queries, block = i % queries, at = row * (queries + 1) + block;
      if (blocks.key_begin[at] == blocks.key_begin[at + 1]) continue;
      f(row, block * blocks.block, std::min((block + 1) * blocks.block, blocks.q_len));
    }
    return;
  }
  for (int64_t row = 0; row < keys->rows; ++row) {
    if (keys->all || keys->begin.empty()) {
      f(row, 0, keys->q_len);
      continue;
    }
    for (int64_t query = 0; query < keys->q_len; ++query) {
      const int64_t at = row * keys->q_len + query;
      if (keys->begin[at] < keys->end[at]) f(row, query, query + 1);
    }
  }
}

// Sets which call finishes each group of rows of O, and the rows of each call.
void SetRows(const std::vector<KernelMask>& masks, CallPlan* plan) {
  int64_t q_len = 0, batch = 1;
  for (const KernelMask& mask : masks) {
    q_len = std::max(q_len, mask.blocks.q_len);
    if (!mask.blocks.none()) batch = std::max(batch, mask.blocks.rows);
    for (const KernelKeys& part : mask.parts) {
      q_len = std::max(q_len, part.q_len);
      batch = std::max(batch, part.rows);
    }
  }
  const int64_t groups = (q_len + kRowGroup - 1) / kRowGroup;
  plan->last_calls.assign(batch * groups, 0);
  plan->batch_stride = batch == 1 ? 0 : groups;
  int32_t number = 0;
  for (PlannedStep& step : plan->steps) {
    for (PlannedCall& call : step.calls) {
      int64_t begin = q_len, end = 0;
      const KernelMask& mask = masks[step.source];
      const KernelKeys* const keys = call.part.IntervalsOf(mask);
      const bool same = batch > 1 && (keys != nullptr ? keys->rows : mask.blocks.rows) == 1;
      ForEachSeeing(call.part, mask, [&](int64_t row, int64_t first, int64_t last) {
        begin = std::min(begin, first);
        end = std::max(end, last);
        for (int64_t b = same ? 0 : row; b < (same ? batch : row + 1); ++b) {
          for (int64_t g = first / kRowGroup; g <= (last - 1) / kRowGroup; ++g) {
            plan->last_calls[b * groups + g] = number;
          }
        }
      });
      if (begin < end) call.rows = {begin, end - begin};
      ++number;
    }
  }
}

}  // namespace

RowCalls CallPlan::RowsOf(int32_t number, const PlannedCall& call, DeviceType device) const {
  return {last_calls_on_device.On(device, last_calls), batch_stride, number, call.rows.begin,
          call.rows.begin + call.rows.count};
}

void HeadCalls::Announce(const HeadRange& heads, int64_t calls) {
  for (int64_t head = heads.begin; head < heads.end; ++head) calls_[head].left += calls;
}

bool HeadCalls::ForAllHeads() const {
  return std::all_of(calls_.begin(), calls_.end(),
                     [](const Calls& calls) { return calls.begun || calls.left > 0; });
}

void HeadCalls::OnlyAdd() {
  for (Calls& calls : calls_) calls.begun = true;
}

HeadCalls::Ends HeadCalls::Next(const HeadRange& heads) {
  Ends ends;
  for (int64_t head = heads.begin; head < heads.end; ++head) {
    Calls& calls = calls_[head];
    BURST_CHECK_GT(calls.left, 0);
    if (!calls.begun) Append(head - heads.begin, &ends.first);
    calls.begun = true;
    if (--calls.left == 0) Append(head - heads.begin, &ends.last);
  }
  return ends;
}

const KernelKeys* MaskPart::IntervalsOf(const KernelMask& mask) const {
  if (form == Form::kBlocks) return nullptr;
  return form == Form::kIntervals ? &mask.parts[index] : &mask.blocks.parts()[index];
}

void MaskPart::SetMask(const KernelMask& mask, DeviceType device,
                       FlashAttentionShape* shape) const {
  const KernelKeys* const keys = IntervalsOf(mask);
  shape->visible = keys != nullptr ? keys->ranges(device) : KeyRanges();
  shape->blocks = keys != nullptr ? KeyBlocks() : mask.blocks.lists(device);
}

CallPlan MakeCallPlan(const CallPlanKey& key, const RingRoute& route,
                      const std::vector<KernelMask>& masks, bool sends_all) {
  CallPlan plan;
  StepMaker steps(key, masks, &plan);
  AddSteps(key, route, &steps);
  const bool forward = key.pass == RingPass::kForward;
  const bool queries_travel = key.pass == RingPass::kBurstBackward;
  SideCalls queries(plan, route.rank, queries_travel, key.num_heads, &PlannedStep::queries,
                    &PlannedCall::queries);
  SideCalls keys(plan, route.rank, !queries_travel, key.num_kv_heads, &PlannedStep::keys,
                 &PlannedCall::keys);
  size_t calls = 0;
  for (const PlannedStep& step : plan.steps) calls += step.calls.size();
  plan.one_call = calls == 1 && (forward || route.lengths.size() == 1);
  if (!forward && !plan.one_call) {
    const bool early = sends_all && OwnGradientReturnsEarly(route);
    plan.clears_queries = !queries.ForAllHeads() || (queries_travel && early);
    plan.clears_keys = !keys.ForAllHeads() || (!queries_travel && early);
  }
  if (plan.clears_queries) queries.OnlyAdd();
  if (plan.clears_keys) keys.OnlyAdd();
  for (PlannedStep& step : plan.steps) {
    queries.Fill(&step);
    keys.Fill(&step);
  }
  plan.last_converts = queries_travel && !plan.one_call && !plan.clears_keys;
  if (forward && !plan.one_call) SetRows(masks, &plan);
  return plan;
}

}  // namespace burst
