// Checks plans of calls by brute force. The test walks through every plan, head by head, with sums
// that hold garbage until a call assigns them. HeadCalls has tests of its own.

#include "burst/attention/ring/call_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "burst/attention/ring/schedule.h"
#include "tests/mask/mask_cases.h"

namespace burst {
namespace {

constexpr RingPass kPasses[] = {RingPass::kForward, RingPass::kBurstBackward,
                                RingPass::kRingBackward};
constexpr std::pair<int64_t, int64_t> kHeads[] = {{1, 1}, {3, 1}, {4, 4}, {6, 2}, {10, 5}};

RingSchedule Schedule(const Mask& mask, const TokenShard& shard, int per_node = 0) {
  auto schedule = RingSchedule::Create(shard, mask, per_node);
  EXPECT_TRUE(schedule.ok()) << schedule.status();
  return *std::move(schedule);
}

// The sum of one head of O, dQ, or dK and dV.
struct Sum {
  bool begun = false, ended = false;
};
using Sums = std::vector<Sum>;

// Plays what a call does to the heads of its step.
void Play(const HeadRange& heads, const HeadCalls::Ends& ends, Sums* sums) {
  for (int64_t head = heads.begin; head < heads.end; ++head) {
    Sum& sum = (*sums)[head];
    EXPECT_EQ(ends.first.has(head - heads.begin), !sum.begun);
    EXPECT_FALSE(sum.ended);
    sum.begun = true;
    sum.ended = ends.last.has(head - heads.begin);
  }
}

void ExpectEnded(const Sums& sums, const HeadRange& heads) {
  for (int64_t head = heads.begin; head < heads.end; ++head) EXPECT_TRUE(sums[head].ended);
}

int64_t Count(const HeadRange& heads) { return heads.end - heads.begin; }

// Walks through the plan of one rank.
class Walk {
 public:
  Walk(const RingSchedule& schedule, const CallPlanKey& key)
      : schedule_(schedule),
        key_(key),
        plan_(schedule.calls(key)),
        queries_travel_(key.pass == RingPass::kBurstBackward),
        route_(queries_travel_ ? schedule.query_route() : schedule.kv_route()),
        sends_all_((queries_travel_ ? schedule.query_rows() : schedule.key_rows()) == nullptr),
        ranks_(static_cast<int>(route_.lengths.size())) {}

  void Check() {
    CheckSources();
    CheckHeads();
    CheckSums();
    CheckFlags();
    CheckRows();
  }

 private:
  bool forward() const { return key_.pass == RingPass::kForward; }
  const KernelMask& MaskOf(int source) const {
    return queries_travel_ ? schedule_.for_queries_of(source) : schedule_.for_keys_of(source);
  }

  // The steps follow Ring::Run.
  void CheckSources() {
    std::vector<int> expected = {route_.rank}, sources;
    for (int i = 1; i < ranks_; ++i) {
      if (route_.rounds[i].compute) expected.push_back(route_.rounds[i].source);
    }
    if (!forward() && ranks_ > 1) expected.push_back(route_.rank);
    for (const PlannedStep& step : plan_.steps) sources.push_back(step.source);
    EXPECT_EQ(sources, expected);
  }

  // Every head computes the whole mask of every block once, with the KV head it reads.
  void CheckHeads() {
    std::vector<std::vector<int64_t>> pairs(ranks_, std::vector<int64_t>(key_.num_heads));
    const int64_t group = key_.num_heads / key_.num_kv_heads;
    for (const PlannedStep& step : plan_.steps) {
      EXPECT_EQ(step.calls.empty(), step.queries.empty());
      for (int64_t head = step.queries.begin; head < step.queries.end; ++head) {
        EXPECT_EQ((head - step.queries.begin) / (Count(step.queries) / Count(step.keys)),
                  head / group - step.keys.begin);
        for (const PlannedCall& call : step.calls) {
          const KernelMask& mask = MaskOf(step.source);
          const KernelKeys* const keys = call.part.IntervalsOf(mask);
          EXPECT_TRUE(keys != nullptr || key_.takes_blocks);
          pairs[step.source][head] += keys != nullptr ? keys->pairs : mask.blocks.pairs;
        }
      }
    }
    for (int source = 0; source < ranks_; ++source) {
      for (int64_t seen : pairs[source]) EXPECT_EQ(seen, MaskOf(source).pairs());
    }
  }

  // The first call assigns a sum that held garbage, the last call is the last.
  void CheckSums() {
    Sums queries(key_.num_heads, {plan_.clears_queries}), keys(key_.num_kv_heads);
    for (Sum& sum : keys) sum.begun = plan_.clears_keys;
    for (const PlannedStep& step : plan_.steps) {
      const bool visits = step.source != route_.rank;
      Sums visiting_queries(key_.num_heads), visiting_keys(key_.num_kv_heads);
      Sums& of_queries = visits && queries_travel_ ? visiting_queries : queries;
      Sums& of_keys = visits && !queries_travel_ ? visiting_keys : keys;
      for (const PlannedCall& call : step.calls) {
        Play(step.queries, call.queries, &of_queries);
        Play(step.keys, call.keys, &of_keys);
      }
      if (visits)
        ExpectEnded(queries_travel_ ? of_queries : of_keys,
                    queries_travel_ ? step.queries : step.keys);
    }
    for (const Sum& sum : queries) EXPECT_TRUE(sum.begun);
    for (const Sum& sum : keys) EXPECT_TRUE(sum.begun);
    if (forward()) ExpectEnded(queries, {0, key_.num_heads});
    if (plan_.last_converts) ExpectEnded(keys, {0, key_.num_kv_heads});
  }

  void CheckFlags() {
    size_t calls = 0;
    for (const PlannedStep& step : plan_.steps) calls += step.calls.size();
    EXPECT_EQ(plan_.one_call, calls == 1 && (forward() || ranks_ == 1));
    // What returns early is added to a sum, which must hold something.
    const bool early = !forward() && sends_all_ && OwnGradientReturnsEarly(route_);
    EXPECT_TRUE(!early || (queries_travel_ ? plan_.clears_queries : plan_.clears_keys));
    EXPECT_FALSE((forward() || plan_.one_call) && (plan_.clears_queries || plan_.clears_keys));
    EXPECT_FALSE(key_.pass != RingPass::kBurstBackward && plan_.last_converts);
    if (key_.pass == RingPass::kBurstBackward) {
      EXPECT_EQ(plan_.last_converts, !plan_.one_call && !plan_.clears_keys);
    }
  }

  // A group of rows is finished by the last call in which one of its rows sees a key.
  void CheckRows() {
    const int64_t q_len = schedule_.shard().group_length();
    EXPECT_EQ(plan_.last_calls.empty(), !forward() || plan_.one_call || q_len == 0);
    if (plan_.last_calls.empty()) return;
    const int64_t groups = (q_len + kRowGroup - 1) / kRowGroup;
    const auto rows = static_cast<int64_t>(plan_.last_calls.size()) / groups;
    EXPECT_EQ(plan_.batch_stride, rows == 1 ? 0 : groups);
    std::vector<int32_t> expected(rows * groups);
    int32_t number = 0;
    for (const PlannedStep& step : plan_.steps) {
      for (const PlannedCall& call : step.calls) {
        std::vector<bool> sees(q_len);
        for (int64_t row = 0; row < rows; ++row) {
          for (int64_t i = 0; i < q_len; ++i) {
            if (!Sees(MaskOf(step.source), call.part, row, i)) continue;
            sees[i] = true;
            expected[row * groups + i / kRowGroup] = number;
          }
        }
        const auto first = std::find(sees.begin(), sees.end(), true);
        const auto last = std::find(sees.rbegin(), sees.rend(), true);
        EXPECT_EQ(call.rows.count, first == sees.end() ? 0 : last.base() - first);
        EXPECT_EQ(call.rows.begin, first == sees.end() ? 0 : first - sees.begin());
        const RowCalls of_kernel = plan_.RowsOf(number, call, DeviceType::kCpu);
        EXPECT_EQ(of_kernel.call, number++);
        EXPECT_EQ(of_kernel.end - of_kernel.begin, call.rows.count);
      }
    }
    EXPECT_EQ(plan_.last_calls, expected);
  }

  // Returns whether a query sees a key of a part.
  static bool Sees(const KernelMask& mask, const MaskPart& part, int64_t row, int64_t i) {
    const KernelKeys* const keys = part.IntervalsOf(mask);
    if (keys == nullptr) {
      const KernelBlocks& blocks = mask.blocks;
      const int64_t at =
          (blocks.rows == 1 ? 0 : row) * (blocks.query_blocks() + 1) + i / blocks.block;
      return blocks.key_begin[at] < blocks.key_begin[at + 1];
    }
    const int64_t at = (keys->rows == 1 ? 0 : row) * keys->q_len + i;
    return keys->all || keys->begin[at] < keys->end[at];
  }

  const RingSchedule& schedule_;
  const CallPlanKey key_;
  const CallPlan& plan_;
  const bool queries_travel_;
  const RingRoute& route_;
  const bool sends_all_;
  const int ranks_;
};

void WalkAll(const char* name, const Mask& mask, Layout layout, int64_t seqlen, int ranks,
             int per_node) {
  for (int rank = 0; rank < ranks; ++rank) {
    const RingSchedule schedule =
        Schedule(mask, *TokenShard::Create(rank, ranks, layout, seqlen), per_node);
    for (RingPass pass : kPasses) {
      for (const bool takes_blocks : {false, true}) {
        for (const auto& [heads, kv_heads] : kHeads) {
          SCOPED_TRACE(testing::Message()
                       << name << ", " << seqlen << " tokens, rank " << rank << " of " << ranks
                       << ", nodes of " << per_node << ", pass " << static_cast<int>(pass) << ", "
                       << heads << " heads, " << kv_heads << " KV heads");
          Walk(schedule, {pass, takes_blocks, heads, kv_heads}).Check();
          if (testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

TEST(CallPlanTest, EveryHeadComputesEveryBlockOnceAndSumsBeginAndEnd) {
  for (const MaskCase& c : MaskCases()) {
    for (Layout layout : {Layout::kContiguous, Layout::kZigzag, Layout::kStriped}) {
      for (int64_t seqlen : {0, 1, 7, 33}) {
        for (const auto& [ranks, per_node] :
             {std::pair{1, 0}, {2, 0}, {3, 0}, {4, 2}, {6, 3}, {8, 2}}) {
          WalkAll(c.name, MaskOf(c, seqlen), layout, seqlen, ranks, per_node);
          if (HasFailure()) return;
        }
      }
    }
  }
}

// Whole blocks are one call for kernels that take lists. Other kernels get them as intervals.
TEST(CallPlanTest, KernelsThatTakeNoListsGetIntervals) {
  constexpr int64_t kSeqlen = 8 * kListBlock;
  const Mask mask = Mask::Slices({BlockSlices(
      kSeqlen, kListBlock, {{0}, {1}, {0, 2}, {3}, {0, 2, 4}, {}, {1, 6}, {7}}, false)});
  for (const int ranks : {1, 2}) {
    WalkAll("whole blocks", mask, Layout::kContiguous, kSeqlen, ranks, /*per_node=*/0);
    const auto shard = TokenShard::Create(/*group_index=*/0, ranks, Layout::kContiguous, kSeqlen);
    const RingSchedule schedule = Schedule(mask, *shard);
    const auto calls = [&](bool takes_blocks) {
      return schedule.calls({RingPass::kForward, takes_blocks, 2, 2}).steps.front().calls;
    };
    EXPECT_EQ(calls(true).front().part.form, MaskPart::Form::kBlocks);
    EXPECT_EQ(calls(false).front().part.form, MaskPart::Form::kBlocksAsIntervals);
    EXPECT_GT(calls(false).size(), calls(true).size());
  }
}

TEST(CallPlanTest, TheOwnBlockIsTwoHalvesInAFlatRingAndAQuarterFirstBetweenNodes) {
  const CallPlanKey key = {RingPass::kBurstBackward, false, 16, 8};
  const auto first_step = [&](int per_node) {
    const auto shard = TokenShard::Create(/*group_index=*/0, 4, Layout::kZigzag, 32);
    return Schedule(Mask::Causal(), *shard, per_node).calls(key).steps.front();
  };
  EXPECT_EQ(first_step(0).queries.end, 8);
  EXPECT_EQ(first_step(0).keys.end, 4);
  EXPECT_EQ(first_step(2).queries.end, 4);
  EXPECT_EQ(first_step(2).keys.end, 2);
}

// Rank 0 of a causal mask in contiguous blocks sees its own keys only.
TEST(CallPlanTest, ARankWithoutOtherKeysMakesOneCall) {
  const auto shard = TokenShard::Create(/*group_index=*/0, 4, Layout::kContiguous, 32);
  const RingSchedule schedule = Schedule(Mask::Causal(), *shard);
  EXPECT_TRUE(schedule.calls({RingPass::kForward, false, 2, 2}).one_call);
  // Its dK and dV are added up with those of other ranks, in two halves of the heads.
  EXPECT_FALSE(schedule.calls({RingPass::kRingBackward, false, 2, 2}).one_call);
}

TEST(CallPlanTest, AScheduleMakesAPlanOnceAndItsCopiesShareIt) {
  const auto shard = TokenShard::Create(/*group_index=*/1, 2, Layout::kZigzag, 32);
  RingSchedule schedule = Schedule(Mask::Causal(), *shard);
  const CallPlanKey key = {RingPass::kForward, false, 4, 2};
  const CallPlan* const plan = &schedule.calls(key);
  EXPECT_EQ(&schedule.calls(key), plan);
  EXPECT_NE(&schedule.calls({RingPass::kForward, false, 4, 4}), plan);
  EXPECT_NE(&schedule.calls({RingPass::kForward, true, 4, 2}), plan);
  EXPECT_NE(&schedule.calls({RingPass::kRingBackward, false, 4, 2}), plan);
  const RingSchedule copy = schedule;
  EXPECT_EQ(&copy.calls(key), plan);
  const RingSchedule moved = std::move(schedule);
  EXPECT_EQ(&moved.calls(key), plan);
  EXPECT_NE(&moved.Prefix(16).calls(key), plan);
}

void ExpectRange(const HeadRange& range, int64_t begin, int64_t end) {
  EXPECT_EQ(range.begin, begin);
  EXPECT_EQ(range.end, end);
}

// The calls are a ring's calls: half of the heads, all heads twice, and the other half.
TEST(HeadCallsTest, HalvesBeginAndEndInDifferentCalls) {
  HeadCalls calls(5);
  calls.Announce({0, 2}, 1);
  calls.Announce({0, 5}, 2);
  calls.Announce({2, 5}, 1);
  EXPECT_TRUE(calls.ForAllHeads());
  HeadCalls::Ends ends = calls.Next({0, 2});
  ExpectRange(ends.first, 0, 2);
  EXPECT_TRUE(ends.last.empty());
  ends = calls.Next({0, 5});
  ExpectRange(ends.first, 2, 5);
  EXPECT_TRUE(ends.last.empty());
  ends = calls.Next({0, 5});
  EXPECT_TRUE(ends.first.empty());
  ExpectRange(ends.last, 0, 2);
  ends = calls.Next({2, 5});
  EXPECT_TRUE(ends.first.empty());
  ExpectRange(ends.last, 0, 3);  // counted from head 2
}

TEST(HeadCallsTest, OneCallIsFirstAndLast) {
  HeadCalls calls(3);
  calls.Announce({0, 3}, 1);
  const HeadCalls::Ends ends = calls.Next({0, 3});
  ExpectRange(ends.first, 0, 3);
  ExpectRange(ends.last, 0, 3);
}

TEST(HeadCallsTest, HeadsWithoutACallMustBeFilled) {
  HeadCalls calls(4);
  calls.Announce({0, 2}, 1);
  EXPECT_FALSE(calls.ForAllHeads());
  calls.OnlyAdd();
  EXPECT_TRUE(calls.ForAllHeads());
  const HeadCalls::Ends ends = calls.Next({0, 2});
  EXPECT_TRUE(ends.first.empty());
  ExpectRange(ends.last, 0, 2);
}

}  // namespace
}  // namespace burst
