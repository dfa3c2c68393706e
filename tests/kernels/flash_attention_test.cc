// Compares the attention kernels with naive attention in double precision.

#include "burst/kernels/flash_attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "burst/base/parallel.h"
#include "burst/kernels/merge.h"
#include "burst/kernels/study/study.h"
#include "burst/tensor/tensor.h"
#include "gtest/gtest.h"
#include "tests/kernels/attention_problem.h"
#include "tests/testing/attention_reference.h"
#include "tests/testing/test_device.h"

namespace burst {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The tolerance of max |error| / max |reference|, for scores of ordinary size.
double Tolerance(DType dtype) { return dtype == DType::kFloat32 ? 1e-5 : 1e-13; }

const AttentionKernels& Kernels() { return KernelsOf(kTestDevice); }

AttentionResults RunKernels(const Problem& problem, const AttentionKernels& kernels = Kernels()) {
  const FlashAttentionShape shape = problem.shape();
  const AttentionResults result = {Poisoned(problem.q), Poisoned(problem.dlse),
                                   Tensor::ZerosLike(problem.q), Tensor::ZerosLike(problem.k),
                                   Tensor::ZerosLike(problem.v)};
  const Tensor delta = Poisoned(problem.dlse);
  kernels.Forward({shape, Operand(problem.q), Operand(problem.k), Operand(problem.v),
                   Operand(result.out), result.lse.raw_data(), /*merge=*/false});
  kernels.Delta({shape, Operand(result.out), Operand(problem.dout), problem.dlse.raw_data(),
                 delta.raw_data()});
  kernels.Backward({shape, Operand(problem.q), Operand(problem.k), Operand(problem.v),
                    Operand(problem.dout), result.lse.raw_data(), delta.raw_data(),
                    Operand(result.dq), Operand(result.dk), Operand(result.dv)});
  return result;
}

// ---- The sweep.

struct Heads {
  int64_t heads, kv_heads;
};
struct Lengths {
  int64_t q_len, k_len;
};

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
    ExpectClose(RunKernels(problem), reference, Tolerance(dtype));
  }
}

std::string SweepName(const testing::TestParamInfo<SweepTest::ParamType>& info) {
  const auto [heads, d, lengths, kind] = info.param;
  std::ostringstream name;
  name << kind << "_heads" << heads.heads << "on" << heads.kv_heads << "_d" << d << "_"
       << lengths.q_len << "x" << lengths.k_len;
  return name.str();
}

const auto kAllMasks = testing::Values(MaskKind::kFull, MaskKind::kCausal, MaskKind::kWindow,
                                       MaskKind::kDocuments, MaskKind::kGap, MaskKind::kRandom);

INSTANTIATE_TEST_SUITE_P(Short, SweepTest,
                         testing::Combine(testing::Values(Heads{2, 2}, Heads{4, 2}, Heads{3, 1}),
                                          testing::Values(7, 16, 64, 80, 128),
                                          testing::Values(Lengths{0, 5}, Lengths{5, 0},
                                                          Lengths{1, 1}, Lengths{7, 7},
                                                          Lengths{1, 129}, Lengths{70, 33}),
                                          kAllMasks),
                         SweepName);

INSTANTIATE_TEST_SUITE_P(Medium, SweepTest,
                         testing::Combine(testing::Values(Heads{1, 1}, Heads{3, 1}),
                                          testing::Values(7, 64, 80),
                                          testing::Values(Lengths{129, 129}, Lengths{131, 300}),
                                          kAllMasks),
                         SweepName);

// These cases have several tiles and chunks in every direction.
INSTANTIATE_TEST_SUITE_P(Long, SweepTest,
                         testing::Combine(testing::Values(Heads{1, 1}), testing::Values(16, 64),
                                          testing::Values(Lengths{1000, 1000}, Lengths{700, 250}),
                                          kAllMasks),
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
    EXPECT_FALSE(kernels.Check(DeviceType::kCpu, DType::kBFloat16, 64).ok());
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
      ExpectClose(RunKernels(problem, TiledKernels(tile_keys)), reference, Tolerance(dtype));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Short, TileKeysTest,
                         testing::Combine(testing::Values(Heads{3, 1}), testing::Values(7, 64),
                                          testing::Values(Lengths{0, 5}, Lengths{5, 0},
                                                          Lengths{1, 1}, Lengths{1, 129},
                                                          Lengths{70, 33}, Lengths{131, 300}),
                                          kAllMasks),
                         SweepName);
INSTANTIATE_TEST_SUITE_P(Long, TileKeysTest,
                         testing::Combine(testing::Values(Heads{1, 1}), testing::Values(20),
                                          testing::Values(Lengths{1000, 1000}, Lengths{700, 550}),
                                          kAllMasks),
                         SweepName);

// Tiles have every size, from one key to more than all keys.
TEST(EveryTileTest, EqualsNaiveAttention) {
  if (kTestDevice != DeviceType::kCpu) GTEST_SKIP() << "GPU kernels have tiles of their own";
  const Problem problem(1, 210, 150, 2, 1, 8, MaskKind::kCausal, DType::kFloat32);
  const AttentionResults reference = problem.Reference();
  for (int64_t tile_keys = 1; tile_keys <= 152; ++tile_keys) {
    SCOPED_TRACE(tile_keys);
    ExpectClose(RunKernels(problem, TiledKernels(tile_keys)), reference,
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
  const AttentionResults own = RunKernels(problem), forward = RunKernels(problem, TiledKernels(96));
  EXPECT_EQ(forward.out.ToVector<float>(), own.out.ToVector<float>());
  EXPECT_EQ(forward.lse.ToVector<float>(), own.lse.ToVector<float>());
  EXPECT_NE(RunKernels(problem, TiledKernels(1)).out.ToVector<float>(), own.out.ToVector<float>());
  const auto gradients = [&](int64_t tile_keys) {
    const AttentionKernels& kernels = TiledKernels(tile_keys);
    const FlashAttentionShape shape = problem.shape();
    const Tensor delta = Poisoned(problem.dlse), dq = Poisoned(problem.q);
    const Tensor dk = Poisoned(problem.k), dv = Poisoned(problem.v);
    kernels.Delta({shape, Operand(own.out), Operand(problem.dout), problem.dlse.raw_data(),
                   delta.raw_data()});
    kernels.Backward({shape, Operand(problem.q), Operand(problem.k), Operand(problem.v),
                      Operand(problem.dout), own.lse.raw_data(), delta.raw_data(), Operand(dq),
                      Operand(dk), Operand(dv), /*assign=*/true});
    return AttentionResults{own.out, own.lse, dq, dk, dv};
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
    AttentionResults result = {Poisoned(problem.q), Poisoned(problem.dlse),
                               Tensor::ZerosLike(problem.q), Tensor::ZerosLike(problem.k),
                               Tensor::ZerosLike(problem.v)};
    std::vector<TestMask> masks(kCalls);
    const auto visible = problem.mask.visible;
    for (int64_t call = 0; call < kCalls; ++call) {
      masks[call].SetBlocks(kBatch, kQueries, kKeys, [=](int64_t b, int64_t i, int64_t j) {
        return j % (kCalls - 1) == call && visible(b, i * kListBlock, j * kListBlock);
      });
      FlashAttentionShape shape = problem.shape();
      shape.blocks = masks[call].blocks();
      Kernels().Forward({shape, Operand(problem.q), Operand(problem.k), Operand(problem.v),
                         Operand(result.out), result.lse.raw_data(), /*merge=*/call > 0});
    }
    const Tensor delta = Poisoned(problem.dlse);
    Kernels().Delta({problem.shape(), Operand(result.out), Operand(problem.dout),
                     problem.dlse.raw_data(), delta.raw_data()});
    for (const TestMask& mask : masks) {
      FlashAttentionShape shape = problem.shape();
      shape.blocks = mask.blocks();
      Kernels().Backward({shape, Operand(problem.q), Operand(problem.k), Operand(problem.v),
                          Operand(problem.dout), result.lse.raw_data(), delta.raw_data(),
                          Operand(result.dq), Operand(result.dk), Operand(result.dv)});
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
    const AttentionResults result = RunKernels(problem);
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
    ExpectClose(RunKernels(problem), problem.Reference(), 1e-5);
  }
}

class DTypeTest : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(All, DTypeTest, testing::Values(DType::kFloat32, DType::kFloat64),
                         [](const auto& info) { return std::string(Name(info.param)); });

TEST_P(DTypeTest, EmptyRowsHoldZeroAndMinusInfinity) {
  // The mask is causal with more queries than keys, so the first 60 see nothing.
  const Problem problem(1, 100, 40, 2, 1, 16, MaskKind::kCausal, GetParam());
  const AttentionResults result = RunKernels(problem);
  const Tensor out = result.out.Slice(1, 0, 60), dq = result.dq.Slice(1, 0, 60);
  for (double x : out.ToVector<double>()) ASSERT_EQ(x, 0);
  for (double x : dq.ToVector<double>()) ASSERT_EQ(x, 0);
  for (double x : result.lse.Slice(2, 0, 60).ToVector<double>()) ASSERT_EQ(x, -kInfinity);
  ExpectClose(result, problem.Reference(), Tolerance(GetParam()));
}

// Operands that are slices of fused tensors give the same bits, and nothing else is written.
TEST_P(DTypeTest, StridedOperands) {
  constexpr int64_t kBatch = 2, kSeqlen = 150, kHeads = 4, kKvHeads = 2, kDim = 20;
  constexpr int64_t kFused = kHeads + 2 * kKvHeads;
  const Problem contiguous(kBatch, kSeqlen, kSeqlen, kHeads, kKvHeads, kDim, MaskKind::kCausal,
                           GetParam());
  const AttentionResults expected = RunKernels(contiguous);

  const auto split = [](const Tensor& fused) {
    return std::array<Tensor, 3>{fused.Slice(2, 0, kHeads), fused.Slice(2, kHeads, kKvHeads),
                                 fused.Slice(2, kHeads + kKvHeads, kKvHeads)};
  };
  const Tensor qkv = Tensor::Empty({kBatch, kSeqlen, kFused, kDim}, GetParam(), kTestDevice);
  const Tensor dqkv = Tensor::Zeros({kBatch, kSeqlen, kFused, kDim}, GetParam(), kTestDevice);
  const auto [q, k, v] = split(qkv);
  const auto [dq, dk, dv] = split(dqkv);
  q.CopyFrom(contiguous.q);
  k.CopyFrom(contiguous.k);
  v.CopyFrom(contiguous.v);
  // out lies in the middle of a tensor that is one larger on every side.
  const Tensor frame =
      Tensor::Empty({kBatch, kSeqlen + 2, kHeads + 2, kDim + 2}, GetParam(), kTestDevice);
  frame.Fill(42);
  const Tensor out = frame.Slice(1, 1, kSeqlen).Slice(2, 1, kHeads).Slice(3, 1, kDim);
  const Tensor lse = Poisoned(contiguous.dlse), delta = Poisoned(contiguous.dlse);

  const FlashAttentionShape shape = contiguous.shape();
  Kernels().Forward(
      {shape, Operand(q), Operand(k), Operand(v), Operand(out), lse.raw_data(), false});
  Kernels().Delta({shape, Operand(out), Operand(contiguous.dout), contiguous.dlse.raw_data(),
                   delta.raw_data()});
  Kernels().Backward({shape, Operand(q), Operand(k), Operand(v), Operand(contiguous.dout),
                      lse.raw_data(), delta.raw_data(), Operand(dq), Operand(dk), Operand(dv)});
  ExpectBitwiseEqual({out, lse, dq, dk, dv}, expected);
  out.CopyFrom(Tensor::ZerosLike(out));
  double sum = 0;
  for (double x : frame.ToVector<double>()) sum += x;
  EXPECT_EQ(sum, 42.0 * (frame.numel() - out.numel()));
}

// Blocks of keys in any order, merged, are the attention over all keys, forward and backward.
TEST_P(DTypeTest, BlocksOfKeysMerge) {
  constexpr int64_t kBatch = 2, kLength = 310;
  for (MaskKind kind : {MaskKind::kFull, MaskKind::kCausal, MaskKind::kWindow, MaskKind::kRandom}) {
    SCOPED_TRACE(testing::Message() << kind);
    const Problem problem(kBatch, kLength, kLength, 4, 2, 24, kind, GetParam());
    const std::vector<std::array<int64_t, 2>> blocks = {
        {200, 310}, {7, 8}, {0, 7}, {8, 8}, {8, 200}};
    const AttentionResults result = {Poisoned(problem.q), Poisoned(problem.dlse),
                                     Tensor::ZerosLike(problem.q), Tensor::ZerosLike(problem.k),
                                     Tensor::ZerosLike(problem.v)};
    const Tensor delta = Poisoned(problem.dlse);

    bool merge = false;
    for (const auto& [begin, end] : blocks) {
      const KeyBlock block(problem, begin, end);
      Kernels().Forward({block.shape(), Operand(problem.q), block.Of(problem.k),
                         block.Of(problem.v), Operand(result.out), result.lse.raw_data(), merge});
      merge = true;
    }
    Kernels().Delta({problem.shape(), Operand(result.out), Operand(problem.dout),
                     problem.dlse.raw_data(), delta.raw_data()});
    for (const auto& [begin, end] : blocks) {
      const KeyBlock block(problem, begin, end);
      Kernels().Backward({block.shape(), Operand(problem.q), block.Of(problem.k),
                          block.Of(problem.v), Operand(problem.dout), result.lse.raw_data(),
                          delta.raw_data(), Operand(result.dq), block.Of(result.dk),
                          block.Of(result.dv)});
    }
    ExpectClose(result, problem.Reference(), Tolerance(GetParam()));
  }
}

TEST_P(DTypeTest, GradientsAccumulate) {
  const Problem problem(1, 90, 90, 2, 1, 16, MaskKind::kCausal, GetParam());
  const AttentionResults once = RunKernels(problem);
  const Tensor delta = Tensor::EmptyLike(problem.dlse);
  Kernels().Delta({problem.shape(), Operand(once.out), Operand(problem.dout),
                   problem.dlse.raw_data(), delta.raw_data()});
  const Tensor dq = once.dq.Clone(), dk = once.dk.Clone(), dv = once.dv.Clone();
  Kernels().Backward({problem.shape(), Operand(problem.q), Operand(problem.k), Operand(problem.v),
                      Operand(problem.dout), once.lse.raw_data(), delta.raw_data(), Operand(dq),
                      Operand(dk), Operand(dv)});
  once.dq.Scale(2);
  once.dk.Scale(2);
  once.dv.Scale(2);
  EXPECT_LE(RelativeError(dq, once.dq), Tolerance(GetParam()));
  EXPECT_LE(RelativeError(dk, once.dk), Tolerance(GetParam()));
  EXPECT_LE(RelativeError(dv, once.dv), Tolerance(GetParam()));
}

// The first call for a head assigns its gradients over any content.
TEST_P(DTypeTest, HeadsBeginInDifferentCalls) {
  for (int64_t d : {16, 40}) {
    Problem problem(2, 150, 110, 8, 4, d, MaskKind::kFull, GetParam());
    const BackwardInParts parts(&problem);
    const AttentionResults once = RunKernels(problem);
    const Tensor delta = Poisoned(problem.dlse);
    Kernels().Delta({problem.shape(), Operand(once.out), Operand(problem.dout),
                     problem.dlse.raw_data(), delta.raw_data()});
    for (const AttentionKernels* kernels : {&Kernels(), &NaiveKernels()}) {
      if (!kernels->Check(kTestDevice, GetParam(), d).ok()) continue;
      const AttentionResults sums = {once.out, once.lse, Poisoned(problem.q), Poisoned(problem.k),
                                     Poisoned(problem.v)};
      parts.Run(sums, once.lse, delta, Tensor(), Tensor(), /*deterministic=*/true,
                [&](const FlashBackwardParams& params) { kernels->Backward(params); });
      ExpectClose(sums, problem.Reference(), Tolerance(GetParam()));
    }
  }
}

// Assigned gradients have the bits of gradients that are added to zeros, in any memory, and
// strided.
TEST_P(DTypeTest, GradientsAreAssigned) {
  for (const Lengths lengths : {Lengths{90, 90}, Lengths{0, 9}, Lengths{9, 0}, Lengths{300, 40}}) {
    const Problem problem(2, lengths.q_len, lengths.k_len, 4, 2, 16, MaskKind::kCausal, GetParam());
    const AttentionResults expected = RunKernels(problem);
    const Tensor delta = Poisoned(problem.dlse);
    Kernels().Delta({problem.shape(), Operand(expected.out), Operand(problem.dout),
                     problem.dlse.raw_data(), delta.raw_data()});
    const auto strided = [](const Tensor& like) {
      Shape shape = like.shape();
      shape[2] += 3;
      const Tensor frame = Tensor::Empty(shape, like.dtype(), like.device());
      frame.Fill(kNaN);
      return frame.Slice(2, 1, like.dim(2));
    };
    const Tensor dq = strided(problem.q), dk = strided(problem.k), dv = strided(problem.v);
    Kernels().Backward({problem.shape(), Operand(problem.q), Operand(problem.k), Operand(problem.v),
                        Operand(problem.dout), expected.lse.raw_data(), delta.raw_data(),
                        Operand(dq), Operand(dk), Operand(dv), /*assign=*/true});
    ExpectBitwiseEqual({expected.out, expected.lse, dq, dk, dv}, expected);
  }
}

// A query whose lse is -inf has no probabilities, even if the mask shows it keys.
TEST_P(DTypeTest, RowsOfMinusInfinityHaveNoGradient) {
  const Problem problem(1, 40, 40, 1, 1, 16, MaskKind::kFull, GetParam());
  const Tensor lse = Tensor::EmptyLike(problem.dlse), delta = Tensor::ZerosLike(problem.dlse);
  lse.Fill(-kInfinity);
  const Tensor dq = Tensor::ZerosLike(problem.q), dk = Tensor::ZerosLike(problem.k);
  const Tensor dv = Tensor::ZerosLike(problem.v);
  Kernels().Backward({problem.shape(), Operand(problem.q), Operand(problem.k), Operand(problem.v),
                      Operand(problem.dout), lse.raw_data(), delta.raw_data(), Operand(dq),
                      Operand(dk), Operand(dv)});
  for (const Tensor& gradient : {dq, dk, dv}) {
    for (double x : gradient.ToVector<double>()) ASSERT_EQ(x, 0);
  }
}

TEST_P(DTypeTest, NoDlseIsZeroDlse) {
  const Problem problem(1, 40, 40, 1, 1, 16, MaskKind::kFull, GetParam());
  const Tensor zero = Tensor::ZerosLike(problem.dlse);
  const Tensor with = Poisoned(zero), without = Poisoned(zero);
  Kernels().Delta({problem.shape(), Operand(problem.q), Operand(problem.dout), zero.raw_data(),
                   with.raw_data()});
  Kernels().Delta(
      {problem.shape(), Operand(problem.q), Operand(problem.dout), nullptr, without.raw_data()});
  EXPECT_EQ(with.ToVector<double>(), without.ToVector<double>());
}

// Scores are far too large for exp. A score s carries an error of about eps |s|, which becomes the
// relative error of its probability.
TEST_P(DTypeTest, LargeScores) {
  const double epsilon = GetParam() == DType::kFloat32 ? 0x1p-23 : 0x1p-52;
  for (double magnitude : {3.0, 10.0, 100.0}) {
    const Problem problem(1, 200, 200, 2, 2, 64, MaskKind::kCausal, GetParam(), magnitude);
    const AttentionResults reference = problem.Reference();
    double largest = 0;
    for (double lse : reference.lse.ToVector<double>()) largest = std::max(largest, std::abs(lse));
    ExpectClose(RunKernels(problem), reference, 4 * epsilon * (8 + largest));
  }
}

// Errors of a plain softmax in float32, for one head without a mask. It takes one sum of products
// per score, scaled, less the largest score of the row.
struct NaiveErrors {
  double out = 0, lse = 0;  // sums of squares
};
NaiveErrors ErrorsOfNaiveFloat32(const Problem& problem, const AttentionResults& reference) {
  const std::vector<float> q = problem.q.ToVector<float>(), k = problem.k.ToVector<float>(),
                           v = problem.v.ToVector<float>();
  const std::vector<double> out = reference.out.ToVector<double>(),
                            lse = reference.lse.ToVector<double>();
  const int64_t d = problem.q.dim(3), keys = problem.k.dim(1);
  NaiveErrors errors;
  std::vector<float> p(keys);
  for (int64_t i = 0; i < problem.q.dim(1); ++i) {
    for (int64_t j = 0; j < keys; ++j) {
      float sum = 0;
      for (int64_t c = 0; c < d; ++c) sum = std::fma(q[i * d + c], k[j * d + c], sum);
      p[j] = sum * static_cast<float>(problem.softmax_scale);
    }
    const float largest = *std::max_element(p.begin(), p.end());
    float total = 0;
    for (float& x : p) total += x = std::exp(x - largest);
    errors.lse += std::pow(largest + std::log(total) - lse[i], 2);
    for (int64_t c = 0; c < d; ++c) {
      float sum = 0;
      for (int64_t j = 0; j < keys; ++j) sum += p[j] / total * v[j * d + c];
      errors.out += std::pow(sum - out[i * d + c], 2);
    }
  }
  return errors;
}

double SquaredDifference(const Tensor& a, const Tensor& b) {
  const std::vector<double> x = a.ToVector<double>(), y = b.ToVector<double>();
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += std::pow(x[i] - y[i], 2);
  return sum;
}

// Scores of nine million, where neighbors in float32 are 1 apart. The kernels must be about as
// exact as a plain softmax. The test compares root mean squares, because a single row is off by
// chance.
TEST(HugeScoresTest, NoWorseThanNaiveFloat32) {
  for (const float sign : {-1.f, 1.f}) {
    Problem problem(1, 400, 400, 1, 1, 128, MaskKind::kFull, DType::kFloat32);
    problem.softmax_scale = 1 / std::sqrt(128.0);
    const auto shifted = [](const Tensor& t, float scale, float shift) {
      std::vector<float> values = t.ToVector<float>();
      for (float& x : values) x = scale * (x + shift);
      return Tensor::FromVector(values, t.shape(), kTestDevice);
    };
    problem.q = shifted(problem.q, 1, 448);
    problem.k = shifted(problem.k, sign, 1880);
    const AttentionResults reference = problem.Reference(), result = RunKernels(problem);
    const NaiveErrors naive = ErrorsOfNaiveFloat32(problem, reference);
    EXPECT_LE(std::sqrt(SquaredDifference(result.lse, reference.lse)), 1.2 * std::sqrt(naive.lse));
    EXPECT_LE(std::sqrt(SquaredDifference(result.out, reference.out)), 1.5 * std::sqrt(naive.out));
  }
}

// A mask never hides a NaN from a query that sees its key, which gets NaN. Other queries do not
// change.
TEST_P(DTypeTest, NaNReachesThoseWhoSeeIt) {
  constexpr int64_t kLength = 200, kBad = 120;
  const Problem problem(1, kLength, kLength, 1, 1, 16, MaskKind::kCausal, GetParam());
  problem.k.Slice(1, kBad, 1).Fill(kNaN);
  const AttentionResults result = RunKernels(problem);
  const std::vector<double> lse = result.lse.ToVector<double>();
  const std::vector<double> out = result.out.ToVector<double>();
  for (int64_t i = 0; i < kLength; ++i) {
    EXPECT_EQ(std::isnan(lse[i]), i >= kBad) << i;
    EXPECT_EQ(std::isnan(out[i * 16]), i >= kBad) << i;
  }
}

// Two threads take two of three KV heads whole and share the third. Five threads share all. There
// are several chunks of queries and spans of keys, and query heads that add to the same dK and dV.
TEST(ThreadsTest, SameBitsForAnyNumber) {
  for (const MaskKind mask : {MaskKind::kCausal, MaskKind::kFull, MaskKind::kWindow}) {
    for (const int64_t kv_heads : {1, 3}) {
      const Problem problem(1, 1100, 1100, 3, kv_heads, 16, mask, DType::kFloat32);
      const AttentionResults one = RunKernels(problem);
      ExpectClose(one, problem.Reference(), 1e-5);
      for (const int threads : {2, 3, 5, 8}) {
        const ScopedThreadPool pool(threads);
        for (int repetition = 0; repetition < 3; ++repetition) {
          ExpectBitwiseEqual(RunKernels(problem), one);
        }
      }
    }
  }
}

template <typename T>
void CheckMerge() {
  constexpr double kTolerance = 4 * std::numeric_limits<T>::epsilon();
  for (double a : {-1000.0, -90.0, -1.0, 0.0, 3.5, 89.0, 1e4}) {
    for (double b : {-1000.0, -88.5, -1.0, 0.25, 100.0, 1e4}) {
      const double m = std::max(a, b), sum = std::exp(a - m) + std::exp(b - m);
      const MergeWeights<T> merged = Merge(static_cast<T>(a), static_cast<T>(b));
      EXPECT_NEAR(merged.lse, m + std::log(sum), kTolerance * std::max(1.0, std::abs(m)));
      EXPECT_NEAR(merged.a, std::exp(a - m) / sum, kTolerance);
      EXPECT_NEAR(merged.b, std::exp(b - m) / sum, kTolerance);
    }
  }
}

TEST(MergeTest, IsTheLogOfTheSumOfExponentials) {
  CheckMerge<float>();
  CheckMerge<double>();
}

TEST(MergeTest, EmptyPartials) {
  constexpr float kEmpty = -std::numeric_limits<float>::infinity();
  const MergeWeights<float> both = Merge(kEmpty, kEmpty);
  EXPECT_EQ(both.lse, kEmpty);
  EXPECT_EQ(both.a, 0);
  EXPECT_EQ(both.b, 0);
  const MergeWeights<float> one = Merge(kEmpty, 90.f);
  EXPECT_EQ(one.lse, 90.f);
  EXPECT_EQ(one.a, 0);
  EXPECT_EQ(one.b, 1);
}

}  // namespace
}  // namespace burst
