// Compares BurstAttention, with ranks as threads, with naive double-precision attention over the
// undivided sequence. It covers the forward, both directions of the backward, and every layout and
// mask.

#include "burst/attention/burst_attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "burst/base/status.h"
#include "burst/comm/gpu/gpu_communicator.h"
#include "burst/device/device.h"
#include "burst/sequence/balance.h"
#include "tests/attention/ring_runs.h"
#include "tests/attention/sequence_problem.h"
#include "tests/testing/attention_reference.h"
#include "tests/testing/sanitizers.h"

namespace burst {
namespace {

IntervalMask Causal() { return {/*causal=*/true}; }

// (heads, kv heads), head_dim
class BurstAttentionSweep : public testing::TestWithParam<std::tuple<std::pair<int, int>, int>> {};

// Results in float32 are within 1e-5 of the largest element, over G x layouts x masks x lengths x
// directions.
TEST_P(BurstAttentionSweep, MatchesTheReference) {
  const auto [head_counts, head_dim] = GetParam();
  const auto [heads, kv_heads] = head_counts;
  for (int64_t seqlen : CasesOrFew<int64_t>({1, 7, 129, 1000}, 3)) {
    const Inputs inputs =
        RandomInputs(1, seqlen, heads, kv_heads, head_dim, DType::kFloat32, seqlen);
    for (const NamedMask& named : kMasks) {
      const IntervalMask mask = named.Of(seqlen);
      const AttentionResults expected =
          Reference(inputs, mask, 1 / std::sqrt(static_cast<double>(head_dim)));
      for (int world_size : {1, 2, 3, 4, 8}) {
        for (Layout layout : kLayouts) {
          for (BackwardDirection direction : kDirections) {
            if (world_size == 1 &&
                (layout != Layout::kZigzag || direction != BackwardDirection::kBurst)) {
              continue;  // one rank has no ring, so layouts and directions do not differ
            }
            SCOPED_TRACE(testing::Message()
                         << "seqlen " << seqlen << " " << named.name << " ranks " << world_size
                         << " " << Name(layout) << " " << Name(direction));
            BurstAttentionOptions options;
            options.layout = layout;
            options.backward = direction;
            AttentionResults actual;
            const absl::Status status = RunRing(world_size, options, inputs, mask, &actual);
            ASSERT_TRUE(status.ok()) << status;
            ExpectClose(actual, expected, 1e-5);
          }
        }
      }
    }
  }
}

std::string SweepName(const testing::TestParamInfo<BurstAttentionSweep::ParamType>& info) {
  const auto [head_counts, head_dim] = info.param;
  return std::to_string(head_counts.first) + "heads" + std::to_string(head_counts.second) + "kv" +
         std::to_string(head_dim) + "d";
}

INSTANTIATE_TEST_SUITE_P(HeadsAndDims, BurstAttentionSweep,
                         testing::Combine(testing::Values(std::make_pair(2, 2),   // multi-head
                                                          std::make_pair(4, 2),   // grouped
                                                          std::make_pair(3, 1)),  // multi-query
                                          testing::ValuesIn(CasesOrFew({16, 64, 80, 128}, 1))),
                         SweepName);

// Tests the double ring in double precision. It sends the bytes that the schedule announces for
// each kind of link.
TEST(BurstAttentionTest, DoubleRing) {
  const int64_t heads = 4, kv_heads = 2, head_dim = 16;
  for (int64_t seqlen : {5, 129}) {
    const Inputs inputs =
        RandomInputs(1, seqlen, heads, kv_heads, head_dim, DType::kFloat64, seqlen);
    for (const NamedMask& named : kMasks) {
      const IntervalMask mask = named.Of(seqlen);
      const AttentionResults expected = Reference(inputs, mask, 0.25);
      for (const auto& [ranks, per_node] : {std::pair(4, 2), std::pair(6, 3), std::pair(6, 2),
                                            std::pair(8, 2), std::pair(8, 4), std::pair(3, 1)}) {
        for (Layout layout : kLayouts) {
          for (BackwardDirection direction : kDirections) {
            SCOPED_TRACE(testing::Message() << "seqlen " << seqlen << " " << named.name << " ranks "
                                            << ranks << " a node " << per_node << " "
                                            << Name(layout) << " " << Name(direction));
            BurstAttentionOptions options;
            options.layout = layout;
            options.backward = direction;
            options.ranks_per_node = per_node;
            AttentionResults actual;
            RingTraffic forward, backward;
            const absl::Status status =
                RunRing(ranks, options, inputs, mask, &actual, &forward, &backward);
            ASSERT_TRUE(status.ok()) << status;
            ExpectClose(actual, expected, 1e-13 * seqlen);
            const TokenShard shard =
                layout == Layout::kBalanced
                    ? *TokenShard::Create(0, ranks, BalancedPositions(MaskOf(mask), seqlen, ranks))
                    : *TokenShard::Create(0, ranks, layout, seqlen);
            const RingSchedule schedule = *RingSchedule::Create(shard, MaskOf(mask), per_node);
            const RingRoute& keys = schedule.kv_route();
            const bool burst = direction == BackwardDirection::kBurst;
            const RingRoute& route = burst ? schedule.query_route() : keys;
            const int64_t q = heads * head_dim * 8, kv = 2 * kv_heads * head_dim * 8;
            for (Link link : kLinks) {
              EXPECT_EQ(forward.bytes(link), keys.block_tokens[link] * kv);
              EXPECT_EQ(backward.blocks[link].bytes,
                        route.block_tokens[link] * (burst ? 2 * q + 2 * heads * 8 : kv));
              EXPECT_EQ(backward.gradients[link].bytes,
                        route.gradient_tokens[link] * (burst ? q : kv));
            }
          }
        }
      }
    }
  }
}

// In double precision only rounding is left, so an error of method cannot hide.
TEST(BurstAttentionTest, DoublePrecisionAndBatchedDocuments) {
  const int64_t batch = 2, seqlen = 61;
  const Inputs inputs = RandomInputs(batch, seqlen, 4, 2, 24, DType::kFloat64, 5);
  BurstAttentionOptions options;
  options.softmax_scale = 0.37;
  for (bool causal : {false, true}) {
    for (int64_t window : {0, 9}) {
      const IntervalMask mask = {causal, window, {{0, 10, 11, 40}, {25}}};
      const AttentionResults expected = Reference(inputs, mask, 0.37);
      for (Layout layout : kLayouts) {
        for (BackwardDirection direction : kDirections) {
          options.layout = layout;
          options.backward = direction;
          AttentionResults actual;
          ASSERT_TRUE(RunRing(4, options, inputs, mask, &actual).ok());
          ExpectClose(actual, expected, 1e-13 * seqlen);
        }
      }
    }
  }
}

// Partial results and gradients in transit are float32, so the error does not grow with the ring.
TEST(BurstAttentionTest, ErrorDoesNotGrowWithTheRing) {
  const Inputs inputs = RandomInputs(1, 512, 2, 2, 64, DType::kFloat32, 9);
  const AttentionResults expected = Reference(inputs, {true, 0}, 0.125);
  const auto error = [&](int world_size) {
    AttentionResults actual;
    EXPECT_TRUE(RunRing(world_size, {}, inputs, Causal(), &actual).ok());
    return std::max({RelativeError(actual.dq, expected.dq), RelativeError(actual.dk, expected.dk),
                     RelativeError(actual.dv, expected.dv)});
  };
  const double single = error(1);
  for (int world_size : {2, 4, 8}) EXPECT_LE(error(world_size), 1.5 * single) << world_size;
}

TEST(BurstAttentionTest, BitwiseEqualFromRunToRun) {
  const Inputs inputs = RandomInputs(1, 333, 4, 2, 32, DType::kFloat32, 3);
  for (BackwardDirection direction : kDirections) {
    BurstAttentionOptions options;
    options.backward = direction;
    AttentionResults first, second;
    ASSERT_TRUE(RunRing(4, options, inputs, Causal(), &first).ok());
    ASSERT_TRUE(RunRing(4, options, inputs, Causal(), &second).ok());
    ExpectBitwiseEqual(first, second);
  }
}

// NaN in the tokens of one document, on any rank, changes no bit of another document's results.
TEST(BurstAttentionTest, NaNStaysInItsDocument) {
  constexpr int64_t kBegin = 90, kEnd = 201, kSeqlen = 333;
  const Inputs clean = RandomInputs(1, kSeqlen, 2, 1, 32, DType::kFloat32, 5);
  const auto other_rows = [&](const Tensor& t, int axis) {
    std::vector<float> values = t.Slice(axis, 0, kBegin).Contiguous().ToVector<float>();
    for (float x : t.Slice(axis, kEnd, kSeqlen - kEnd).Contiguous().ToVector<float>()) {
      values.push_back(x);
    }
    return values;
  };
  for (bool causal : {true, false}) {
    const IntervalMask mask = {causal, 0, {{0, kBegin, kEnd, 280}}};
    for (int world_size : {2, 3, 4}) {
      for (Layout layout : kLayouts) {
        for (BackwardDirection direction : kDirections) {
          BurstAttentionOptions options;
          options.layout = layout;
          options.backward = direction;
          AttentionResults expected, actual;
          ASSERT_TRUE(RunRing(world_size, options, clean, mask, &expected).ok());
          for (Tensor Inputs::*which : {&Inputs::q, &Inputs::k, &Inputs::v, &Inputs::dout}) {
            SCOPED_TRACE(testing::Message() << causal << " ranks " << world_size << " "
                                            << Name(layout) << " " << Name(direction));
            Inputs inputs = clean;
            inputs.*which = (clean.*which).Clone();
            const Tensor bad = (inputs.*which).Slice(1, kBegin, kEnd - kBegin);
            const Tensor nan = Tensor::Empty(bad.shape(), DType::kFloat32);
            nan.Fill(std::nan(""));
            bad.CopyFrom(nan);
            ASSERT_TRUE(RunRing(world_size, options, inputs, mask, &actual).ok());
            EXPECT_EQ(other_rows(actual.out, 1), other_rows(expected.out, 1));
            EXPECT_EQ(other_rows(actual.lse, 2), other_rows(expected.lse, 2));
            EXPECT_EQ(other_rows(actual.dq, 1), other_rows(expected.dq, 1));
            EXPECT_EQ(other_rows(actual.dk, 1), other_rows(expected.dk, 1));
            EXPECT_EQ(other_rows(actual.dv, 1), other_rows(expected.dv, 1));
          }
        }
      }
    }
  }
}

#ifdef BURST_TEST_CUDA
// Every rank has a GPU.
TEST(BurstAttentionTest, OverNccl) {
  const int most = std::min(CudaDeviceCount(), 4);
  if (most < 2) GTEST_SKIP() << "NCCL needs two GPUs";
  const int64_t seqlen = 1000;
  const Inputs inputs = RandomInputs(1, seqlen, 4, 2, 64, DType::kFloat32, 6);
  for (int world_size = 2; world_size <= most; ++world_size) {
    struct Run {
      NamedMask mask;
      BurstAttentionOptions options;
      AttentionResults results;
    };
    std::vector<Run> runs;
    for (const NamedMask& mask : kMasks) {
      for (Layout layout : kLayouts) {
        for (BackwardDirection direction : kDirections) {
          BurstAttentionOptions options;
          options.layout = layout;
          options.backward = direction;
          runs.push_back({mask, options, EmptyResults(inputs)});
          if (world_size != 4) continue;
          options.ranks_per_node = 2;
          runs.push_back({mask, options, EmptyResults(inputs)});
        }
      }
    }
    const absl::Status status = RunCudaRanks(world_size, [&](Communicator& comm) -> absl::Status {
      for (const Run& run : runs) {
        BURST_RETURN_IF_ERROR(RunRank(comm, run.options, inputs, run.mask.Of(seqlen), run.results));
      }
      return comm.Barrier();
    });
    ASSERT_TRUE(status.ok()) << status;
    for (const Run& run : runs) {
      SCOPED_TRACE(testing::Message()
                   << run.mask.name << " ranks " << world_size << " " << Name(run.options.layout)
                   << " " << Name(run.options.backward) << " a node "
                   << run.options.ranks_per_node);
      ExpectClose(run.results, Reference(inputs, run.mask.Of(seqlen), 0.125), 1e-5);
    }
  }
}
#endif

// Tests bfloat16 and float16 on a ring. Partial results and gradients in transit are float32. So
// the errors of a naive computation in that dtype bound the errors, as in no_worse.h.
void CheckOf16Bits(DType dtype, const HeadWidths& widths) {
  const absl::Status served = KernelsOf(kTestDevice).Check(kTestDevice, dtype, widths);
  if (!served.ok() && kTestDevice == DeviceType::kCuda) GTEST_SKIP() << served;
  const double rounding = dtype == DType::kFloat16 ? 0x1p-12 : 0x1p-9;
  const int64_t batch = 2, seqlen = 150, heads = 4, kv_heads = 2;
  Inputs inputs = RandomInputs(batch, seqlen, heads, kv_heads, widths, DType::kFloat32, 4);
  for (Tensor* x : {&inputs.q, &inputs.k, &inputs.v, &inputs.dout}) *x = x->To(dtype);
  const auto causal = [](int64_t, int64_t i, int64_t j) { return j <= i; };
  const auto reference = [&](DType rounded_to) {
    return NaiveAttention(inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse, 0.125, causal,
                          rounded_to);
  };
  const AttentionResults expected = reference(DType::kFloat64), naive = reference(dtype);
  // A result is rounded once. A gradient that is sent in bfloat16 is also rounded at every
  // transfer.
  const auto no_worse = [&](const Tensor& actual, const Tensor& bound, const Tensor& truth,
                            int roundings) {
    EXPECT_LE(RelativeError(actual, truth), 2 * RelativeError(bound, truth) + roundings * rounding);
  };
  for (const auto& [world_size, per_node, direction, ring_grad_dtype] :
       {std::tuple(1, 0, BackwardDirection::kBurst, RingGradDType::kFp32),
        std::tuple(2, 0, BackwardDirection::kBurst, RingGradDType::kFp32),
        std::tuple(2, 0, BackwardDirection::kRing, RingGradDType::kBf16),
        std::tuple(4, 0, BackwardDirection::kBurst, RingGradDType::kBf16),
        std::tuple(4, 0, BackwardDirection::kRing, RingGradDType::kFp32),
        std::tuple(4, 2, BackwardDirection::kBurst, RingGradDType::kFp32),
        std::tuple(4, 2, BackwardDirection::kRing, RingGradDType::kBf16)}) {
    SCOPED_TRACE(testing::Message() << world_size << " ranks, " << per_node << " a node, "
                                    << Name(direction) << ", " << Name(ring_grad_dtype));
    if (ring_grad_dtype == RingGradDType::kBf16 && dtype != DType::kBFloat16) continue;
    BurstAttentionOptions options;
    options.backward = direction;
    options.ranks_per_node = per_node;
    options.ring_grad_dtype = ring_grad_dtype;
    options.softmax_scale = 0.125;
    AttentionResults actual;
    RingTraffic forward, backward;
    const absl::Status status =
        RunRing(world_size, options, inputs, Causal(), &actual, &forward, &backward);
    ASSERT_TRUE(status.ok()) << status;
    const bool burst = direction == BackwardDirection::kBurst;
    const int transfers = ring_grad_dtype == RingGradDType::kBf16 ? world_size - 1 : 0;
    EXPECT_LE(RelativeError(actual.lse, expected.lse), 1e-5);
    no_worse(actual.out, naive.out, expected.out, 1);
    no_worse(actual.dq, naive.dq, expected.dq, 1 + (burst ? transfers : 0));
    no_worse(actual.dk, naive.dk, expected.dk, 1 + (burst ? 0 : transfers));
    no_worse(actual.dv, naive.dv, expected.dv, 1 + (burst ? 0 : transfers));

    // An element of a token and transfer has 2 bytes for q, 4 for lse and delta, and 4 or 2 for
    // gradients. With zigzag and a causal mask, every block visits every rank.
    const int64_t tokens = (world_size - 1) * batch * seqlen;
    const int64_t hq = heads * widths.head_dim, ho = heads * widths.value_dim;
    const int64_t hkv = kv_heads * (widths.head_dim + widths.value_dim);
    EXPECT_EQ(forward.blocks.total().bytes, tokens * hkv * 2);
    EXPECT_EQ(backward.blocks.total().bytes,
              tokens * (burst ? (hq + ho) * 2 + 2 * heads * 4 : hkv * 2));
    EXPECT_EQ(backward.gradients.total().bytes,
              tokens * (burst ? hq : hkv) * (ring_grad_dtype == RingGradDType::kBf16 ? 2 : 4));
  }
}

TEST(BurstAttentionTest, BFloat16) { CheckOf16Bits(DType::kBFloat16, 64); }
TEST(BurstAttentionTest, Float16) { CheckOf16Bits(DType::kFloat16, 64); }
TEST(BurstAttentionTest, BFloat16OfTwoWidths) { CheckOf16Bits(DType::kBFloat16, {192, 128}); }
TEST(BurstAttentionTest, Float16OfTwoWidths) { CheckOf16Bits(DType::kFloat16, {192, 128}); }

// A document reaches ten tokens into the other rank's part. The last call, with that rank's keys,
// leaves the other queries alone, but their sums are also converted.
TEST(BurstAttentionTest, FewQueriesSeeTheLastBlock) {
  Inputs inputs = RandomInputs(/*batch=*/2, /*seqlen=*/600, /*heads=*/4, /*kv_heads=*/2,
                               /*head_dim=*/64, DType::kFloat32, 5);
  for (Tensor* x : {&inputs.q, &inputs.k, &inputs.v, &inputs.dout}) *x = x->To(DType::kBFloat16);
  const auto document = [](int64_t i) { return i < 290 ? 0 : i < 310 ? 1 : 2; };
  const auto visible = [&](int64_t, int64_t i, int64_t j) {
    return j <= i && document(i) == document(j);
  };
  const auto reference = [&](DType rounded_to) {
    return NaiveAttention(inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse, 0.125, visible,
                          rounded_to);
  };
  const AttentionResults expected = reference(DType::kFloat64), naive = reference(DType::kBFloat16);
  const auto no_worse = [](const Tensor& actual, const Tensor& bound, const Tensor& truth) {
    EXPECT_LE(RelativeError(actual, truth), 2 * RelativeError(bound, truth) + 0x1p-9);
  };
  for (const BackwardDirection direction : kDirections) {
    SCOPED_TRACE(Name(direction));
    BurstAttentionOptions options;
    options.layout = Layout::kContiguous;
    options.backward = direction;
    AttentionResults actual;
    const absl::Status status =
        RunRing(2, options, inputs, {/*causal=*/true, /*window=*/0, {{0, 290, 310}}}, &actual);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_LE(RelativeError(actual.lse, expected.lse), 1e-5);
    no_worse(actual.out, naive.out, expected.out);
    no_worse(actual.dq, naive.dq, expected.dq);
    no_worse(actual.dk, naive.dk, expected.dk);
    no_worse(actual.dv, naive.dv, expected.dv);
  }
}

TEST(BurstAttentionTest, ErrorsAreClear) {
  const auto attention = *BurstAttention::Create({}, nullptr);
  const AttentionSchedule schedule = *attention->Schedule(8, Mask::Causal());
  const Inputs good = RandomInputs(1, 8, 4, 2, 8, DType::kFloat32, 1);
  const Inputs bad_heads = RandomInputs(1, 8, 4, 3, 8, DType::kFloat32, 1);
  const Inputs short_one = RandomInputs(1, 7, 4, 2, 8, DType::kFloat32, 1);
  AttentionResult result;
  const auto message = [&](const Tensor& q, const Tensor& k, const Tensor& v) {
    const absl::Status status = attention->Forward({&schedule, q, k, v}, &result);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_NE(message(bad_heads.q, bad_heads.k, bad_heads.v)
                .find("k: must have a number of heads that divides the 4 of q; got 3"),
            std::string::npos);
  EXPECT_NE(
      message(short_one.q, short_one.k, short_one.v).find("q: must have this rank's 8 tokens"),
      std::string::npos);
  EXPECT_NE(message(good.q, good.k, short_one.v).find("v: must be a float32 tensor [1, 8, 2, 8]"),
            std::string::npos);
  result.out = Tensor::Empty({3}, DType::kFloat32);
  EXPECT_NE(message(good.q, good.k, good.v).find("out: must be"), std::string::npos);

  BurstAttentionOptions options;
  EXPECT_FALSE(attention->Schedule(8, Mask::SlidingWindow(-1)).ok());
  for (int per_node : {2, 5, -1}) {
    EXPECT_TRUE(RunTestRanks(3, [&, per_node = per_node](Communicator& comm) -> absl::Status {
                  BurstAttentionOptions options;
                  options.ranks_per_node = per_node;
                  const auto made = BurstAttention::Create(options, &comm);
                  EXPECT_EQ(made.status().code(), absl::StatusCode::kInvalidArgument);
                  EXPECT_NE(made.status().message().find("ranks_per_node"), std::string::npos);
                  return absl::OkStatus();
                }).ok());
  }
  options = {};
  const bool on_cpu = kTestDevice == DeviceType::kCpu;
  options.kernels = &KernelsOf(DeviceType::kCpu);
  result = {};
  const auto with_cpu_kernels = *BurstAttention::Create(options, nullptr);
  EXPECT_EQ(with_cpu_kernels
                ->Forward({&schedule, good.q.To(kTestDevice), good.k.To(kTestDevice),
                           good.v.To(kTestDevice)},
                          &result)
                .message(),
            on_cpu ? "" : "the CPU's attention kernels serve tensors on the CPU only");
  options = {};
  options.ring_grad_dtype = RingGradDType::kBf16;
  const auto narrow = *BurstAttention::Create(options, nullptr);
  result = {};
  const absl::Status refused = narrow->Forward({&schedule, good.q, good.k, good.v}, &result);
  EXPECT_NE(
      refused.message().find("ring_grad_dtype: must be fp32 for tensors of float32; got bf16"),
      std::string::npos);
  EXPECT_FALSE(ParseRingGradDType("fp16").ok());
  EXPECT_FALSE(attention->Schedule(-5, Mask::Causal()).ok());
  EXPECT_FALSE(ParseBackwardDirection("sideways").ok());
}

}  // namespace
}  // namespace burst
