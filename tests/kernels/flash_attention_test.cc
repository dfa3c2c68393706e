// The attention kernels against naive attention in double precision: masks, lengths, tiles, lists
// of blocks, threads.

#include "burst/kernels/flash_attention.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "benchmarks/study/study.h"
#include "burst/base/parallel.h"
#include "burst/tensor/tensor.h"
#include "tests/kernels/attention_problem.h"
#include "tests/testing/attention_reference.h"
#include "tests/testing/test_device.h"

namespace burst {
namespace {

const AttentionKernels& Kernels() { return KernelsOf(kTestDevice); }

// ---- The sweep.

class SweepTest
    : public testing::TestWithParam<std::tuple<Heads, int64_t /*head_dim*/, Lengths, MaskKind>> {};

TEST_P(SweepTest, EqualsNaiveAttention) {
  const auto [heads, d, lengths, kind] = GetParam();
  const int64_t batch = lengths.q_len < 100 ? 2 : 1;
  const ScopedThreadPool pool(d == 64 ? 2 : 1);
  AttentionResults reference;
  for (DType dtype : {DType::kFloat32, DType::kFloat64}) {
    SCOPED_TRACE(Name(dtype));
    if (!Kernels().Check(kTestDevice, dtype, d).ok()) {
      // These blocks have 99 KB of shared memory.
      EXPECT_TRUE(kTestDevice == DeviceType::kCuda && dtype == DType::kFloat64 && d > 128);
      continue;
    }
    if (kind == MaskKind::kBlocks && !Kernels().TakesBlocks(dtype, d)) {
      EXPECT_EQ(kTestDevice, DeviceType::kCuda);
      continue;
    }
    const Problem problem(batch, lengths.q_len, lengths.k_len, heads.heads, heads.kv_heads, d, kind,
                          dtype);
    // The inputs are the same numbers in both precisions.
    if (reference.out.null()) reference = problem.Reference();
    ExpectClose(RunAttention(problem), reference, Tolerance(dtype));
  }
}

std::string SweepName(const testing::TestParamInfo<SweepTest::ParamType>& info) {
  const auto [heads, d, lengths, kind] = info.param;
  std::ostringstream name;
  name << kind << "_heads" << heads.heads << "on" << heads.kv_heads << "_d" << d << "_"
       << lengths.q_len << "x" << lengths.k_len;
  return name.str();
}

INSTANTIATE_TEST_SUITE_P(Short, SweepTest,
                         testing::Combine(testing::Values(Heads{2, 2}, Heads{4, 2}, Heads{3, 1}),
                                          testing::Values(7, 16, 64, 80, 128),
                                          testing::Values(Lengths{0, 5}, Lengths{5, 0},
                                                          Lengths{1, 1}, Lengths{7, 7},
                                                          Lengths{1, 129}, Lengths{70, 33}),
                                          kIntervalMasks),
                         SweepName);

INSTANTIATE_TEST_SUITE_P(Medium, SweepTest,
                         testing::Combine(testing::Values(Heads{1, 1}, Heads{3, 1}),
                                          testing::Values(7, 64, 80),
                                          testing::Values(Lengths{129, 129}, Lengths{131, 300}),
                                          kIntervalMasks),
                         SweepName);

// These cases have several tiles and chunks in every direction.
INSTANTIATE_TEST_SUITE_P(Long, SweepTest,
                         testing::Combine(testing::Values(Heads{1, 1}), testing::Values(16, 64),
                                          testing::Values(Lengths{1000, 1000}, Lengths{700, 250}),
                                          kIntervalMasks),
                         SweepName);
INSTANTIATE_TEST_SUITE_P(Wide, SweepTest,
                         testing::Combine(testing::Values(Heads{1, 1}),
                                          testing::Values(1, 128, 200, 256),
                                          testing::Values(Lengths{260, 300}),
                                          testing::Values(MaskKind::kFull, MaskKind::kCausal)),
                         SweepName);

// These masks are lists of blocks.
INSTANTIATE_TEST_SUITE_P(Lists, SweepTest,
                         testing::Combine(testing::Values(Heads{2, 2}, Heads{3, 1}),
                                          testing::Values(7, 64, 80),
                                          testing::Values(Lengths{0, 5}, Lengths{5, 0},
                                                          Lengths{1, 129}, Lengths{70, 33},
                                                          Lengths{128, 128}, Lengths{131, 300},
                                                          Lengths{700, 250}, Lengths{900, 1100}),
                                          testing::Values(MaskKind::kBlocks)),
                         SweepName);

// ---- Tiles of other sizes.

TEST(TiledKernelsTest, SayWhatGpusHave) {
  for (int64_t tile_keys : {1, 1 << 30}) {
    const AttentionKernels& kernels = TiledKernels(tile_keys);
    EXPECT_TRUE(kernels.Check(DeviceType::kCpu, DType::kFloat32, 64).ok());
    EXPECT_TRUE(kernels.Check(DeviceType::kCpu, DType::kBFloat16, 64).ok());
    EXPECT_FALSE(kernels.Check(DeviceType::kCpu, DType::kFloat8E4M3, 64).ok());
    const absl::Status gpu = kernels.Check(DeviceType::kCuda, DType::kFloat32, 64);
    EXPECT_EQ(gpu.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(gpu.message().find("128, 176 or 192 keys on Hopper"), std::string::npos) << gpu;
  }
}

class TileKeysTest
    : public testing::TestWithParam<std::tuple<Heads, int64_t /*head_dim*/, Lengths, MaskKind>> {};

// The tolerance is the one of the kernels' own tiles. A sum over n keys rounds n times with any
// tile. Rescaling it for a new maximum happens at most once a tile, and there are at most n tiles,
// so rounding at most doubles.
TEST_P(TileKeysTest, EqualsNaiveAttention) {
  if (kTestDevice != DeviceType::kCpu) GTEST_SKIP() << "GPU kernels have tiles of their own";
  const auto [heads, d, lengths, kind] = GetParam();
  const ScopedThreadPool pool(2);
  AttentionResults reference;
  for (DType dtype : {DType::kFloat32, DType::kFloat64}) {
    const Problem problem(/*batch=*/1, lengths.q_len, lengths.k_len, heads.heads, heads.kv_heads, d,
                          kind, dtype);
    if (reference.out.null()) reference = problem.Reference();
    for (int64_t tile_keys : {1, 5, 16, 33, 64, 96, 100, 128, 250, 512, 1 << 30}) {
      SCOPED_TRACE(testing::Message() << Name(dtype) << ", tiles of " << tile_keys);
      ExpectClose(RunAttention(problem, TiledKernels(tile_keys)), reference, Tolerance(dtype));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Short, TileKeysTest,
                         testing::Combine(testing::Values(Heads{3, 1}), testing::Values(7, 64),
                                          testing::Values(Lengths{0, 5}, Lengths{5, 0},
                                                          Lengths{1, 1}, Lengths{1, 129},
                                                          Lengths{70, 33}, Lengths{131, 300}),
                                          kIntervalMasks),
                         SweepName);
INSTANTIATE_TEST_SUITE_P(Long, TileKeysTest,
                         testing::Combine(testing::Values(Heads{1, 1}), testing::Values(20),
                                          testing::Values(Lengths{1000, 1000}, Lengths{700, 550}),
                                          kIntervalMasks),
                         SweepName);

// Tiles have every size, from one key to more than all keys.
TEST(EveryTileTest, EqualsNaiveAttention) {
  if (kTestDevice != DeviceType::kCpu) GTEST_SKIP() << "GPU kernels have tiles of their own";
  const Problem problem(1, 210, 150, 2, 1, 8, MaskKind::kCausal, DType::kFloat32);
  const AttentionResults reference = problem.Reference();
  for (int64_t tile_keys = 1; tile_keys <= 152; ++tile_keys) {
    SCOPED_TRACE(tile_keys);
    ExpectClose(RunAttention(problem, TiledKernels(tile_keys)), reference,
                Tolerance(DType::kFloat32));
  }
}

// Tiles of one key differ in the last bits, because threads share the backward of a head tile by
// tile. The CPU kernels' own tiles, of 96 keys forward and 128 backward (docs/kernels.md), do not
// differ.
TEST(EveryTileTest, TheirOwnSizesAreThoseOfThePage) {
  if (kTestDevice != DeviceType::kCpu) GTEST_SKIP() << "GPU kernels have tiles of their own";
  const ScopedThreadPool pool(2);
  const Problem problem(1, 600, 600, 1, 1, 64, MaskKind::kCausal, DType::kFloat32);
  const AttentionResults own = RunAttention(problem),
                         forward = RunAttention(problem, TiledKernels(96));
  EXPECT_EQ(forward.out.ToVector<float>(), own.out.ToVector<float>());
  EXPECT_EQ(forward.lse.ToVector<float>(), own.lse.ToVector<float>());
  EXPECT_NE(RunAttention(problem, TiledKernels(1)).out.ToVector<float>(),
            own.out.ToVector<float>());
  const auto gradients = [&](int64_t tile_keys) {
    const AttentionKernels& kernels = TiledKernels(tile_keys);
    AttentionResults result = UnfilledResults(problem);
    result.out = own.out;
    result.lse = own.lse;
    kernels.Backward(BackwardParams(problem, result, DeltaOf(problem, own.out, kernels)));
    return result;
  };
  ExpectBitwiseEqual(gradients(128), own);
  EXPECT_NE(gradients(1).dq.ToVector<float>(), own.dq.ToVector<float>());
}

// ---- Lists of blocks.

// Several calls, some of them without a block, merge out and lse and add up gradients.
TEST(ListsTest, CallsAddUp) {
  for (DType dtype : {DType::kFloat32, DType::kFloat64}) {
    SCOPED_TRACE(Name(dtype));
    if (!Kernels().TakesBlocks(dtype, 20)) GTEST_SKIP() << "no kernels for lists";
    constexpr int64_t kBatch = 2, kQueries = 500, kKeys = 700, kCalls = 4;
    const Problem problem(kBatch, kQueries, kKeys, 4, 2, 20, MaskKind::kBlocks, dtype);
    const AttentionResults result = UnfilledResults(problem);
    std::vector<TestMask> masks(kCalls);
    const auto visible = problem.mask.visible;
    for (int64_t call = 0; call < kCalls; ++call) {
      masks[call].SetBlocks(kBatch, kQueries, kKeys, [=](int64_t b, int64_t i, int64_t j) {
        return j % (kCalls - 1) == call && visible(b, i * kListBlock, j * kListBlock);
      });
      FlashForwardParams params = ForwardParams(problem, result);
      params.shape.blocks = masks[call].blocks();
      params.merge = call > 0;
      Kernels().Forward(params);
    }
    const Tensor delta = DeltaOf(problem, result.out, Kernels());
    for (const TestMask& mask : masks) {
      FlashBackwardParams params = BackwardParams(problem, result, delta);
      params.shape.blocks = mask.blocks();
      Kernels().Backward(params);
    }
    ExpectClose(result, problem.Reference(), Tolerance(dtype));
  }
}

// Results have the same bits with any number of threads.
TEST(ListsTest, ThreadsChangeNoBit) {
  if (kTestDevice != DeviceType::kCpu) GTEST_SKIP() << "threads are the CPU's";
  const Problem problem(1, 900, 1100, 3, 1, 16, MaskKind::kBlocks, DType::kFloat32);
  AttentionResults one;
  for (int threads : {1, 2, 5}) {
    const ScopedThreadPool pool(threads);
    const AttentionResults result = RunAttention(problem);
    if (threads == 1) one = result;
    ExpectBitwiseEqual(result, one);
  }
}

// ---- What the sweep does not reach.

// The lengths are those around the edges of tiles and of vectors.
TEST(LengthsTest, Every) {
  for (int64_t length = 1; length <= 290; ++length) {
    SCOPED_TRACE(length);
    const Problem problem(1, length, length, 1, 1, 8, MaskKind::kCausal, DType::kFloat32);
    ExpectClose(RunAttention(problem), problem.Reference(), 1e-5);
  }
}

// Two threads take two of three KV heads whole and share the third. Five threads share all. There
// are several chunks of queries and spans of keys, and query heads that add to the same dK and dV.
TEST(ThreadsTest, SameBitsForAnyNumber) {
  for (const MaskKind mask : {MaskKind::kCausal, MaskKind::kFull, MaskKind::kWindow}) {
    for (const int64_t kv_heads : {1, 3}) {
      const Problem problem(1, 1100, 1100, 3, kv_heads, 16, mask, DType::kFloat32);
      const AttentionResults one = RunAttention(problem);
      ExpectClose(one, problem.Reference(), 1e-5);
      for (const int threads : {2, 3, 5, 8}) {
        const ScopedThreadPool pool(threads);
        for (int repetition = 0; repetition < 3; ++repetition) {
          ExpectBitwiseEqual(RunAttention(problem), one);
        }
      }
    }
  }
}

}  // namespace
}  // namespace burst
