// Compares every way to spread attention over ranks, which are threads, with naive double-precision
// attention over the undivided sequence: Ulysses, its hybrid with the ring, and rings alone.

#include "burst/attention/strategy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "benchmarks/study/study.h"
#include "burst/attention/attention_ranks.h"
#include "burst/attention/ulysses_attention.h"
#include "burst/base/status.h"
#include "burst/comm/gpu/gpu_communicator.h"
#include "burst/device/device.h"
#include "tests/attention/sequence_problem.h"
#include "tests/testing/attention_reference.h"

namespace burst {
namespace {

absl::Status RunRank(Strategy strategy, const BurstAttentionOptions& options, int group_size,
                     const Inputs& inputs, const Mask& mask, const AttentionResults& results,
                     Communicator& comm) {
  BURST_ASSIGN_OR_RETURN(const auto attention,
                         CreateAttention(strategy, options, group_size, &comm));
  BURST_ASSIGN_OR_RETURN(const AttentionSchedule schedule,
                         attention->Schedule(inputs.q.dim(1), mask));
  return AttendOnRank(*attention, schedule, inputs, results);
}

AttentionResults RunStrategy(Strategy strategy, const BurstAttentionOptions& options, int ranks,
                             int group_size, const Inputs& inputs, const Mask& mask) {
  const AttentionResults results = EmptyResults(inputs);
  const absl::Status status = RunTestRanks(ranks, [&](Communicator& comm) {
    return RunRank(strategy, options, group_size, inputs, mask, results, comm);
  });
  EXPECT_TRUE(status.ok()) << status;
  return results;
}

class StrategySweep : public testing::TestWithParam<std::pair<int, int>> {};  // heads, kv heads

// Results in float32 are within 1e-5 of the largest element, over ranks x groups x layouts x masks
// x lengths.
TEST_P(StrategySweep, MatchesTheReference) {
  const auto [heads, kv_heads] = GetParam();
  const int64_t head_dim = 16;
  for (int64_t seqlen : {1, 7, 129}) {
    const Inputs inputs =
        RandomInputs(1, seqlen, heads, kv_heads, head_dim, DType::kFloat32, seqlen);
    for (const NamedMask& named : kMasks) {
      const IntervalMask mask = named.Of(seqlen);
      const AttentionResults expected = Reference(inputs, mask, 0.25);
      const auto check = [&](Strategy strategy, Layout layout, int ranks, int group_size) {
        SCOPED_TRACE(testing::Message()
                     << "seqlen " << seqlen << " " << named.name << " " << Name(strategy) << " "
                     << Name(layout) << " ranks " << ranks << " groups of " << group_size);
        BurstAttentionOptions options;
        options.layout = layout;
        ExpectClose(RunStrategy(strategy, options, ranks, group_size, inputs, MaskOf(mask)),
                    expected, 1e-5);
      };
      check(Strategy::kSingle, Layout::kZigzag, 1, 1);
      for (Layout layout : kLayouts) {
        for (int ranks : {1, 2, 4}) {
          check(Strategy::kUlysses, layout, ranks, 1);
          for (int group_size = 1; group_size < ranks; group_size *= 2) {
            check(Strategy::kBurstUlysses, layout, ranks, group_size);
          }
        }
        check(Strategy::kRing, layout, 4, 1);
        check(Strategy::kBurst, layout, 2, 1);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Heads, StrategySweep,
                         testing::Values(std::make_pair(4, 4),   // multi-head
                                         std::make_pair(8, 4),   // grouped
                                         std::make_pair(4, 2),   // replicated on groups of four
                                         std::make_pair(4, 1)),  // multi-query
                         [](const auto& info) {
                           return std::to_string(info.param.first) + "heads" +
                                  std::to_string(info.param.second) + "kv";
                         });

// Rings connect groups over nodes. A node of four ranks holds two groups of two.
TEST(StrategyTest, DoubleRing) {
  const int64_t seqlen = 61;
  const Inputs inputs = RandomInputs(1, seqlen, 4, 2, 16, DType::kFloat64, 7);
  for (const NamedMask& named : kMasks) {
    const IntervalMask mask = named.Of(seqlen);
    const AttentionResults expected = Reference(inputs, mask, 0.25);
    for (Layout layout : kLayouts) {
      for (BackwardDirection direction : {BackwardDirection::kBurst, BackwardDirection::kRing}) {
        BurstAttentionOptions options;
        options.layout = layout;
        options.backward = direction;
        options.ranks_per_node = 4;
        ExpectClose(RunStrategy(Strategy::kBurstUlysses, options, 8, 2, inputs, MaskOf(mask)),
                    expected, 1e-13 * seqlen);
        options.ranks_per_node = 2;
        ExpectClose(RunStrategy(Strategy::kBurstUlysses, options, 4, 2, inputs, MaskOf(mask)),
                    expected, 1e-13 * seqlen);
        ExpectClose(RunStrategy(Strategy::kBurst, options, 4, 1, inputs, MaskOf(mask)), expected,
                    1e-13 * seqlen);
      }
    }
  }
}

// Values have another width than queries and keys, as in multi-head latent attention.
TEST(StrategyTest, HeadsOfTwoWidths) {
  const int64_t seqlen = 61;
  for (const HeadWidths& widths : {HeadWidths(24, 16), HeadWidths(8, 20)}) {
    const Inputs inputs = RandomInputs(2, seqlen, 4, 2, widths, DType::kFloat64, 9);
    const double scale = 1 / std::sqrt(static_cast<double>(widths.head_dim));
    for (const NamedMask& named : kMasks) {
      const IntervalMask mask = named.Of(seqlen);
      const AttentionResults expected = Reference(inputs, mask, scale);
      for (Layout layout : kLayouts) {
        for (const auto& [strategy, ranks, group_size] :
             {std::tuple(Strategy::kSingle, 1, 1), std::tuple(Strategy::kBurst, 2, 1),
              std::tuple(Strategy::kBurst, 3, 1), std::tuple(Strategy::kRing, 4, 1),
              std::tuple(Strategy::kUlysses, 4, 1), std::tuple(Strategy::kBurstUlysses, 4, 2)}) {
          SCOPED_TRACE(testing::Message() << ToString(widths) << " " << named.name << " "
                                          << Name(strategy) << " " << Name(layout));
          BurstAttentionOptions options;
          options.layout = layout;
          if (ranks == 3) options.backward = BackwardDirection::kBurst;
          ExpectClose(RunStrategy(strategy, options, ranks, group_size, inputs, MaskOf(mask)),
                      expected, 1e-13 * seqlen);
        }
      }
    }
  }
}

// In double precision only rounding is left. The cases have batch rows with different documents,
// the ring's two directions, and a group size that is not a power of two.
TEST(StrategyTest, DoublePrecisionAndBatchedDocuments) {
  const int64_t batch = 2, seqlen = 61;
  const Inputs inputs = RandomInputs(batch, seqlen, 6, 3, 24, DType::kFloat64, 5);
  BurstAttentionOptions options;
  options.softmax_scale = 0.37;
  for (bool causal : {false, true}) {
    const IntervalMask mask = {causal, /*window=*/9, {{0, 10, 11, 40}, {25}}};
    const AttentionResults expected = Reference(inputs, mask, 0.37);
    for (Layout layout : kLayouts) {
      for (BackwardDirection direction : {BackwardDirection::kBurst, BackwardDirection::kRing}) {
        options.layout = layout;
        options.backward = direction;
        const AttentionResults actual = RunStrategy(Strategy::kBurstUlysses, options, /*ranks=*/6,
                                                    /*group_size=*/3, inputs, MaskOf(mask));
        ExpectClose(actual, expected, 1e-13 * seqlen);
      }
    }
  }
}

// Spans are of each row or of one row, with documents and without. They are images in a text, a
// prefix-LM, and block-causal attention.
TEST(StrategyTest, SpansAreSeenWhole) {
  const int64_t batch = 2, seqlen = 150;
  const Inputs inputs = RandomInputs(batch, seqlen, 4, 2, 16, DType::kFloat64, 6);
  Spans blocks(1);
  for (int32_t begin = 0; begin < seqlen; begin += 40) {
    blocks[0].push_back({begin, std::min<int32_t>(begin + 40, seqlen)});
  }
  const IntervalMask masks[] = {
      {true, 0, {}, {{{3, 20}, {20, 21}, {90, 149}}, {{60, 140}}}},
      {true, 0, {{0, 50}, {130}}, {{{0, 30}, {50, 70}}, {{0, 100}, {140, 150}}}},
      {true, 0, {}, blocks},
      {true, 25, {{0, 50, 100}}, {{{10, 45}}, {}}},
      {false, 9, {}, {{{70, 120}}}}};
  for (const IntervalMask& mask : masks) {
    const AttentionResults expected = Reference(inputs, mask, 0.25);
    for (const Layout layout : kLayouts) {
      for (BackwardDirection direction : {BackwardDirection::kBurst, BackwardDirection::kRing}) {
        BurstAttentionOptions options;
        options.layout = layout;
        const auto check = [&](Strategy strategy, int ranks, int group_size) {
          options.backward = HasDirections(strategy) ? direction : BackwardDirection::kAuto;
          SCOPED_TRACE(testing::Message() << "case " << &mask - masks << " " << Name(strategy)
                                          << " " << Name(layout) << " ranks " << ranks);
          ExpectClose(RunStrategy(strategy, options, ranks, group_size, inputs, MaskOf(mask)),
                      expected, 1e-13 * seqlen);
        };
        check(Strategy::kSingle, 1, 1);
        check(Strategy::kBurst, 3, 1);
        check(Strategy::kUlysses, 2, 1);
        check(Strategy::kBurstUlysses, 4, 2);
      }
    }
  }
}

// The slices are trees, global tokens with a window, sparse blocks, and random ones.
TEST(StrategyTest, SlicesAreTheMask) {
  const int64_t batch = 2, seqlen = 150;
  const Inputs inputs = RandomInputs(batch, seqlen, 4, 2, 16, DType::kFloat64, 8);
  std::mt19937 bits(3);
  const auto below = [&](int n) { return static_cast<int32_t>(bits() % n); };
  std::vector<std::vector<int32_t>> sparse(15);
  for (auto& key_blocks : sparse) {
    for (int32_t k = 0; k < 15; ++k) {
      if (below(5) == 0) key_blocks.push_back(k);
    }
  }
  const std::vector<MaskSlice> tree = TreeSlices(40, {31, 1, 78}),
                               global = WindowWithGlobalTokens(150, 20, {0, 1, 2, 77}, true),
                               blocks = BlockSlices(150, 10, sparse, /*causal=*/false);
  MaskSlices random(batch);
  for (std::vector<MaskSlice>& row : random) {
    for (int n = 0; n < 9; ++n) {
      const int32_t q = below(seqlen), k = below(seqlen);
      row.push_back({q, q + 1 + below(seqlen - q), k, k + 1 + below(seqlen - k),
                     static_cast<SliceKind>(below(4))});
    }
  }
  const MaskSlices cases[] = {{tree}, {tree, global}, {global}, {blocks}, random, {{}, tree}};
  for (const MaskSlices& slices : cases) {
    const AttentionResults expected =
        NaiveAttention(inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse, 0.25,
                       [&](int64_t b, int64_t i, int64_t j) { return Visible(slices, b, i, j); });
    for (const Layout layout : kLayouts) {
      for (BackwardDirection direction : {BackwardDirection::kBurst, BackwardDirection::kRing}) {
        BurstAttentionOptions options;
        options.layout = layout;
        const auto check = [&](Strategy strategy, int ranks, int group_size) {
          options.backward = HasDirections(strategy) ? direction : BackwardDirection::kAuto;
          SCOPED_TRACE(testing::Message() << "case " << &slices - cases << " " << Name(strategy)
                                          << " " << Name(layout) << " ranks " << ranks);
          const AttentionResults actual =
              RunStrategy(strategy, options, ranks, group_size, inputs, Mask::Slices(slices));
          ExpectClose(actual, expected, 1e-13 * seqlen);
        };
        check(Strategy::kSingle, 1, 1);
        check(Strategy::kBurst, 3, 1);
        check(Strategy::kUlysses, 2, 1);
        check(Strategy::kBurstUlysses, 4, 2);
      }
    }
  }
}

// Sparse blocks become lists of the kernels' blocks where they cover these whole. Diagonals, edges
// and other slices become ranges, also in kernels that take no lists.
TEST(StrategyTest, SparseBlocks) {
  const int64_t batch = 2, seqlen = 900;
  const Inputs inputs = RandomInputs(batch, seqlen, 4, 2, 16, DType::kFloat64, 10);
  std::mt19937 bits(4);
  const auto blocks = [&](int32_t size, bool causal) {
    std::vector<std::vector<int32_t>> chosen((seqlen + size - 1) / size);
    for (size_t i = 0; i < chosen.size(); ++i) {
      for (size_t j = 0; j < chosen.size(); ++j) {
        if (i == j || bits() % 3 == 0) chosen[i].push_back(static_cast<int32_t>(j));
      }
    }
    return BlockSlices(seqlen, size, chosen, causal);
  };
  std::vector<MaskSlice> mixed = blocks(128, true);
  for (const MaskSlice& slice : WindowWithGlobalTokens(seqlen, 50, {0, 1, 500}, true)) {
    mixed.push_back(slice);
  }
  const MaskSlices cases[] = {
      {blocks(128, false)}, {blocks(128, true), blocks(256, true)}, {blocks(100, true)}, {mixed}};
  for (const MaskSlices& slices : cases) {
    const AttentionResults expected =
        NaiveAttention(inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse, 0.25,
                       [&](int64_t b, int64_t i, int64_t j) { return Visible(slices, b, i, j); });
    for (const Layout layout : kLayouts) {
      BurstAttentionOptions options;
      options.layout = layout;
      const auto check = [&](Strategy strategy, int ranks, int group_size) {
        SCOPED_TRACE(testing::Message() << "case " << &slices - cases << " " << Name(strategy)
                                        << " " << Name(layout) << " ranks " << ranks);
        const AttentionResults actual =
            RunStrategy(strategy, options, ranks, group_size, inputs, Mask::Slices(slices));
        ExpectClose(actual, expected, 1e-13 * seqlen);
      };
      check(Strategy::kSingle, 1, 1);
      const RingSchedule alone =
          *RingSchedule::Create(*TokenShard::Create(0, 1, layout, seqlen), Mask::Slices(slices));
      EXPECT_EQ(alone.for_keys_of(0).blocks.none(), &slices - cases == 2);
      for (BackwardDirection direction : {BackwardDirection::kBurst, BackwardDirection::kRing}) {
        options.backward = direction;
        check(Strategy::kBurst, 3, 1);
      }
      options.backward = BackwardDirection::kAuto;
      check(Strategy::kUlysses, 2, 1);
      check(Strategy::kBurstUlysses, 4, 2);
      options.kernels = &NaiveKernels();
      if (kTestDevice == DeviceType::kCpu) check(Strategy::kSingle, 1, 1);
    }
  }
}

TEST(StrategyTest, SlicesOfOneCallHaveTheBitsOfThatMask) {
  const Inputs inputs = RandomInputs(1, 333, 4, 2, 32, DType::kFloat32, 9);
  const Mask slice = Mask::Slices({{{0, 333, 0, 333, SliceKind::kCausal}}});
  for (const int ranks : {1, 3}) {
    ExpectBitwiseEqual(RunStrategy(Strategy::kBurst, {}, ranks, 1, inputs, slice),
                       RunStrategy(Strategy::kBurst, {}, ranks, 1, inputs, Mask::Causal()));
  }
}

TEST(StrategyTest, BitwiseEqualFromRunToRun) {
  const Inputs inputs = RandomInputs(1, 333, 4, 2, 32, DType::kFloat32, 3);
  for (int group_size : {2, 4}) {
    const AttentionResults a =
        RunStrategy(Strategy::kBurstUlysses, {}, 4, group_size, inputs, Mask::Causal());
    const AttentionResults b =
        RunStrategy(Strategy::kBurstUlysses, {}, 4, group_size, inputs, Mask::Causal());
    ExpectBitwiseEqual(a, b);
  }
}

#ifdef BURST_TEST_CUDA
// Every rank has a GPU. Groups and rings are NCCL communicators that are split from the world's.
TEST(StrategyTest, OverNccl) {
  const int ranks = CudaDeviceCount() >= 4 ? 4 : 2;
  if (CudaDeviceCount() < 2) GTEST_SKIP() << "NCCL needs two GPUs";
  const int64_t seqlen = 1000;
  const Inputs inputs = RandomInputs(1, seqlen, 4, 2, 64, DType::kFloat32, 6);
  for (const NamedMask& named : kMasks) {
    const IntervalMask mask = named.Of(seqlen);
    const AttentionResults expected = Reference(inputs, mask, 0.125);
    for (Layout layout : kLayouts) {
      BurstAttentionOptions options;
      options.layout = layout;
      std::vector<AttentionResults> results;
      for (int size = 1; size <= ranks; size *= 2) results.push_back(EmptyResults(inputs));
      const absl::Status status = RunCudaRanks(ranks, [&](Communicator& comm) -> absl::Status {
        for (size_t i = 0; i < results.size(); ++i) {
          const int size = 1 << i;
          BurstAttentionOptions of_size = options;  // two nodes, where that leaves a ring
          if (size < ranks) of_size.ranks_per_node = ranks / 2;
          BURST_RETURN_IF_ERROR(RunRank(Strategy::kBurstUlysses, of_size, size, inputs,
                                        MaskOf(mask), results[i], comm));
        }
        return comm.Barrier();
      });
      ASSERT_TRUE(status.ok()) << status;
      for (size_t i = 0; i < results.size(); ++i) {
        SCOPED_TRACE(testing::Message()
                     << named.name << " " << Name(layout) << " groups of " << (1 << i));
        ExpectClose(results[i], expected, 1e-5);
      }
    }
  }
}
#endif

TEST(StrategyTest, ErrorsAreClear) {
  const auto message = [](Strategy strategy, BackwardDirection backward, int ranks, int group_size,
                          int ranks_per_node = 0) {
    std::string message;
    EXPECT_TRUE(RunTestRanks(ranks, [&](Communicator& comm) -> absl::Status {
                  BurstAttentionOptions options;
                  options.backward = backward;
                  options.ranks_per_node = ranks_per_node;
                  const auto made = CreateAttention(strategy, options, group_size, &comm);
                  EXPECT_EQ(made.status().code(), absl::StatusCode::kInvalidArgument);
                  if (comm.rank() == 0) message = std::string(made.status().message());
                  return absl::OkStatus();
                }).ok());
    return message;
  };
  using Direction = BackwardDirection;
  EXPECT_NE(message(Strategy::kSingle, Direction::kAuto, 2, 1).find("single"), std::string::npos);
  EXPECT_NE(message(Strategy::kBurstUlysses, Direction::kAuto, 4, 3).find("groups of 3"),
            std::string::npos);
  EXPECT_NE(
      message(Strategy::kUlysses, Direction::kBurst, 2, 1).find("the strategy ulysses; got burst"),
      std::string::npos);
  EXPECT_NE(message(Strategy::kRing, Direction::kBurst, 2, 1).find("the strategy ring; got burst"),
            std::string::npos);
  for (const auto& [strategy, ranks, group_size, ranks_per_node] :
       {std::tuple(Strategy::kUlysses, 2, 1, 2), std::tuple(Strategy::kRing, 4, 1, 3),
        std::tuple(Strategy::kBurstUlysses, 4, 2, 1), std::tuple(Strategy::kSingle, 1, 1, 1)}) {
    EXPECT_NE(message(strategy, Direction::kAuto, ranks, group_size, ranks_per_node)
                  .find("ranks_per_node"),
              std::string::npos);
  }
  EXPECT_FALSE(ParseStrategy("star").ok());

  for (Strategy strategy : {Strategy::kUlysses, Strategy::kBurstUlysses}) {
    const absl::Status status =
        CreateAttention(strategy, {}, 1, /*comm=*/nullptr, RankGroup{2, 0}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("groups of tensor parallelism"), std::string::npos) << status;
  }

  EXPECT_TRUE(CheckHeadsDivide("sp", 12, 3, 6).ok());
  EXPECT_EQ(
      CheckHeadsDivide("sp", 12, 3, 4).message(),
      "sp: must be 1, 3, 6, 12 ranks to share 12 heads (3 KV heads); got 4; give one of them");

  // These errors show only with the tensors: heads, tokens, and another strategy's schedule.
  const absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    BURST_ASSIGN_OR_RETURN(const auto attention, UlyssesAttention::Create({}, 2, &comm));
    BURST_ASSIGN_OR_RETURN(const AttentionSchedule schedule,
                           attention->Schedule(8, Mask::Causal()));
    const auto forward = [&](const AttentionSchedule& schedule, int64_t length, int64_t heads) {
      const Tensor x = Tensor::Zeros({1, length, heads, 8}, DType::kFloat32, kTestDevice);
      AttentionResult result;
      return std::string(attention->Forward({&schedule, x, x, x}, &result).message());
    };
    EXPECT_NE(forward(schedule, 4, 3).find("3 heads (3 KV heads)"), std::string::npos);
    EXPECT_NE(forward(schedule, 5, 2).find("q: must have this rank's 4 tokens"), std::string::npos);
    BURST_ASSIGN_OR_RETURN(
        const RingSchedule made,
        RingSchedule::Create(*TokenShard::Create(comm.rank(), 2, Layout::kZigzag, 8),
                             Mask::Causal()));
    EXPECT_NE(forward(AttentionSchedule(made), 4, 2).find("schedule: must be for rank"),
              std::string::npos);
    EXPECT_EQ(forward(schedule, 4, 2), "");
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Attentions of one communicator with any options use one set of groups and buffers. Calls of some
// do not change what others compute.
TEST(SharedRanks, ServeAttentionsOfDifferentOptions) {
  const absl::Status status = RunTestRanks(4, [&](Communicator& comm) -> absl::Status {
    const auto ranks = std::make_shared<AttentionRanks>(&comm);
    BURST_ASSIGN_OR_RETURN(const Ring* const flat, ranks->RingOf(0));
    BURST_ASSIGN_OR_RETURN(const Ring* const one_node, ranks->RingOf(4));
    BURST_ASSIGN_OR_RETURN(const Ring* const nodes, ranks->RingOf(2));
    BURST_ASSIGN_OR_RETURN(const auto* const groups, ranks->GroupsOf(2));
    EXPECT_EQ(flat, one_node);
    EXPECT_NE(flat, nodes);
    for (const Strategy strategy :
         {Strategy::kBurst, Strategy::kUlysses, Strategy::kBurstUlysses}) {
      const auto attend = [&](double scale, bool shares) -> absl::StatusOr<Tensor> {
        BurstAttentionOptions options;
        options.softmax_scale = scale;
        BURST_ASSIGN_OR_RETURN(const auto attention,
                               shares ? CreateAttentionOver(strategy, options, 2, ranks)
                                      : CreateAttention(strategy, options, 2, &comm));
        BURST_ASSIGN_OR_RETURN(const AttentionSchedule schedule,
                               attention->Schedule(16, Mask::Causal()));
        Tensor x = Tensor::Empty({1, 4, 4, 8}, DType::kFloat32);
        for (int64_t i = 0; i < x.numel(); ++i) {
          x.data<float>()[i] = static_cast<float>((i * 7 + comm.rank()) % 11) / 11;
        }
        x = x.To(kTestDevice);
        AttentionResult result;
        BURST_RETURN_IF_ERROR(attention->Forward({&schedule, x, x, x}, &result));
        return result.out.To(DeviceType::kCpu);
      };
      for (const double scale : {0.5, 1.5, 0.5}) {
        BURST_ASSIGN_OR_RETURN(const Tensor own, attend(scale, /*shares=*/false));
        BURST_ASSIGN_OR_RETURN(const Tensor shared, attend(scale, /*shares=*/true));
        EXPECT_EQ(shared.ToVector<float>(), own.ToVector<float>()) << Name(strategy);
      }
    }
    EXPECT_EQ(*ranks->RingOf(2), nodes);
    EXPECT_EQ(*ranks->GroupsOf(2), groups);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace burst
