// How many pairs of a query and a key the CPU's attention kernels compute under masks.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "burst/base/parallel.h"
#include "burst/kernels/cpu/flash_attention_cpu.h"
#include "tests/kernels/attention_problem.h"
#include "tests/testing/attention_reference.h"

namespace burst {
namespace {

struct Pairs {
  std::atomic<int64_t> forward{0}, backward{0};
};

// Runs the kernels, and compares with double precision.
void RunCounted(const Problem& problem, Pairs* pairs) {
  const AttentionResults result = UnfilledResults(problem);
  cpu::Forward(ForwardParams(problem, result), 0, &pairs->forward);
  const Tensor delta = DeltaOf(problem, result.out, KernelsOf(DeviceType::kCpu));
  cpu::Backward(BackwardParams(problem, result, delta), 0, &pairs->backward);
  ExpectClose(result, problem.Reference(), Tolerance(problem.q.dtype()));
}

constexpr int64_t kTile = 192;  // at least the queries, and the keys, of a tile

// Returns a problem with two documents of 40 queries, and `none` queries between that see nothing.
// A tile of keys holds the end of one document and the begin of the other.
Problem Apart(int64_t none) {
  constexpr int64_t kQueries = 40, kKeys = 400, kEnd = 150;
  const int64_t after = kQueries + none;
  Problem problem(1, after + kQueries, kKeys, 2, 1, 8, MaskKind::kFull, DType::kFloat32);
  for (int64_t i = 0; i < after + kQueries; ++i) {
    problem.mask.begin.push_back(i < kQueries ? 0 : kEnd);
    problem.mask.end.push_back(i < after ? kEnd : kKeys);
  }
  problem.mask.visible = [=](int64_t, int64_t i, int64_t j) {
    return (i < kQueries && j < kEnd) || (i >= after && j >= kEnd);
  };
  return problem;
}

TEST(ComputedPairsTest, QueriesThatSeeNothingCostNothing) {
  Pairs few;
  RunCounted(Apart(kTile), &few);
  for (const int64_t none : {2 * kTile, 5 * kTile, 20 * kTile}) {
    for (const int threads : {1, 3}) {
      const ScopedThreadPool pool(threads);
      Pairs many;
      RunCounted(Apart(none), &many);
      EXPECT_EQ(many.forward, few.forward) << none;
      EXPECT_EQ(many.backward, few.backward) << none;
    }
  }
}

// A run of queries that see the same keys is a rectangle, which begins and ends inside of tiles.
TEST(ComputedPairsTest, AreThoseOfTilesThatSomeQuerySees) {
  constexpr int64_t kLength = 2000;
  const int64_t tiles = (kLength + kTile - 1) / kTile + 1;
  for (const MaskKind kind :
       {MaskKind::kFull, MaskKind::kCausal, MaskKind::kWindow, MaskKind::kGap, MaskKind::kApart}) {
    SCOPED_TRACE(testing::Message() << kind);
    const Problem problem(1, kLength, kLength, 1, 1, 8, kind, DType::kFloat32);
    Pairs pairs;
    RunCounted(problem, &pairs);
    int64_t visible = 0;
    for (int64_t i = 0; i < kLength; ++i) {
      for (int64_t j = 0; j < kLength; ++j) visible += problem.mask.visible(0, i, j);
    }
    // Tiles along two edges hold hidden pairs.
    const int64_t most = visible + 2 * tiles * kTile * kTile;
    for (const int64_t computed : {pairs.forward.load(), pairs.backward.load()}) {
      EXPECT_GE(computed, visible);
      EXPECT_LE(computed, std::min(most, kLength * kLength));
    }
  }
}

}  // namespace
}  // namespace burst
