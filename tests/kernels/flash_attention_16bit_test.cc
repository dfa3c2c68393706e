// Compares bfloat16 and float16 attention on the GPU with naive attention in double precision on
// the same rounded inputs (no_worse.h).

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <sstream>
#include <string>
#include <tuple>

#include "burst/kernels/flash_attention.h"
#include "burst/kernels/gpu/flash_attention_gpu.h"
#include "burst/tensor/tensor.h"
#include "tests/kernels/attention_problem.h"
#include "tests/kernels/no_worse.h"
#include "tests/testing/attention_reference.h"

namespace burst {
namespace {

constexpr DeviceType kCuda = DeviceType::kCuda;
constexpr DType kBf16 = DType::kBFloat16, kFp16 = DType::kFloat16, kFloat = DType::kFloat32;

// The tested kernels and dtype: the device's choice, the kernels for any tensor cores, and the
// kernels for few queries, which have no backward.
struct Kernels {
  const char* name;
  const AttentionKernels& (*get)();
  bool forward_only = false;
  DType dtype = kBf16;
  Kernels In(DType other) const { return {name, get, forward_only, other}; }
  std::string Name() const { return std::string(name) + (dtype == kFp16 ? "Fp16" : ""); }
  void forward(const FlashForwardParams& params) const { get().Forward(params); }
  void backward(const FlashBackwardParams& params) const {
    (forward_only ? KernelsOf(kCuda) : get()).Backward(params);
  }
};
constexpr Kernels kChosen = {"Chosen",
                             []() -> const AttentionKernels& { return KernelsOf(kCuda); }};
constexpr Kernels kSm80 = {"Sm80", []() -> const AttentionKernels& {
                             return *cuda::GpuKernels(cuda::KernelFamily::kSm80);
                           }};
constexpr Kernels kDecode = {
    "Decode",
    []() -> const AttentionKernels& { return *cuda::GpuKernels(cuda::KernelFamily::kDecode); },
    /*forward_only=*/true};

Problem MakeProblem(DType dtype, int64_t batch, int64_t q_len, int64_t k_len, int64_t heads,
                    int64_t kv_heads, int64_t d, MaskKind kind) {
  return Problem(batch, q_len, k_len, heads, kv_heads, d, kind, dtype, /*magnitude=*/1.5);
}

Tensor PoisonedSum(const Tensor& like) {
  const Tensor tensor = Tensor::Empty(like.shape(), kFloat, kCuda);
  tensor.Fill(kNaN);
  return tensor;
}

Tensor Delta(const Problem& problem, const Tensor& out) {
  return DeltaOf(problem, out, KernelsOf(kCuda));
}

// Runs a single block of keys, which assigns everything in the inputs' dtype.
AttentionResults RunOnce(const Kernels& kernels, const Problem& problem, bool deterministic) {
  const AttentionResults result = UnfilledResults(problem);
  kernels.forward(ForwardParams(problem, result));
  const Tensor delta = Delta(problem, result.out);
  FlashBackwardParams params = BackwardParams(problem, result, delta);
  SetOrder(deterministic, &params);
  kernels.backward(params);
  return result;
}

void ExpectNoWorse(const AttentionResults& result, const Problem& problem) {
  ExpectNoWorse(result, problem.Reference(problem.q.dtype()), problem.Reference());
}

using Case = std::tuple<Kernels, Heads, int64_t /*head_dim*/, Lengths, MaskKind>;
class SweepTest : public testing::TestWithParam<Case> {};

TEST_P(SweepTest, NoWorseThanNaive) {
  const auto [kernels, heads, d, lengths, kind] = GetParam();
  if (kind == MaskKind::kBlocks && !kernels.get().TakesBlocks(kernels.dtype, d)) {
    GTEST_SKIP() << "Hopper's take lists of blocks";
  }
  const int64_t batch = lengths.q_len < 100 ? 2 : 1;
  const Problem problem = MakeProblem(kernels.dtype, batch, lengths.q_len, lengths.k_len,
                                      heads.heads, heads.kv_heads, d, kind);
  const AttentionResults result = RunOnce(kernels, problem, /*deterministic=*/true);
  ExpectNoWorse(result, problem);
  ExpectBitwiseEqual(RunOnce(kernels, problem, true), result);
  ExpectNoWorse(RunOnce(kernels, problem, false), problem);
}

std::string SweepName(const testing::TestParamInfo<Case>& info) {
  const auto [kernels, heads, d, lengths, kind] = info.param;
  std::ostringstream name;
  name << kernels.Name() << "_" << kind << "_heads" << heads.heads << "on" << heads.kv_heads << "_d"
       << d << "_" << lengths.q_len << "x" << lengths.k_len;
  return name.str();
}

INSTANTIATE_TEST_SUITE_P(Short, SweepTest,
                         testing::Combine(testing::Values(kChosen, kSm80, kDecode),
                                          testing::Values(Heads{2, 2}, Heads{3, 1}),
                                          testing::Values(8, 64, 80, 128),
                                          testing::Values(Lengths{0, 5}, Lengths{5, 0},
                                                          Lengths{1, 1}, Lengths{1, 129},
                                                          Lengths{70, 33}),
                                          kIntervalMasks),
                         SweepName);
INSTANTIATE_TEST_SUITE_P(
    Wide, SweepTest,
    testing::Combine(testing::Values(kChosen, kDecode), testing::Values(Heads{4, 2}),
                     testing::Values(136, 192, 248),
                     testing::Values(Lengths{1, 1}, Lengths{70, 33}, Lengths{131, 260}),
                     kIntervalMasks),
    SweepName);
INSTANTIATE_TEST_SUITE_P(Long, SweepTest,
                         testing::Combine(testing::Values(kChosen, kSm80, kDecode),
                                          testing::Values(Heads{4, 2}),
                                          testing::Values(64, 96, 128, 192, 256),
                                          testing::Values(Lengths{300, 300}, Lengths{131, 517}),
                                          kIntervalMasks),
                         SweepName);

// These lengths take Hopper's variants for more keys.
INSTANTIATE_TEST_SUITE_P(
    ManyKeys, SweepTest,
    testing::Combine(testing::Values(kChosen, kChosen.In(kFp16)), testing::Values(Heads{2, 1}),
                     testing::Values(64, 96, 128, 192),
                     testing::Values(Lengths{131, 1800}, Lengths{130, 4500}, Lengths{130, 8300}),
                     testing::Values(MaskKind::kFull, MaskKind::kCausal, MaskKind::kRandom)),
    SweepName);

// Lists of blocks have query and key blocks that are whole or not. Some lists are empty.
INSTANTIATE_TEST_SUITE_P(
    Lists, SweepTest,
    testing::Combine(testing::Values(kChosen, kChosen.In(kFp16)),
                     testing::Values(Heads{2, 2}, Heads{4, 2}, Heads{3, 1}),
                     testing::Values(40, 64, 72, 96, 128, 192, 200, 256),
                     testing::Values(Lengths{0, 5}, Lengths{5, 0}, Lengths{1, 129}, Lengths{70, 33},
                                     Lengths{128, 128}, Lengths{131, 517}, Lengths{900, 1150}),
                     testing::Values(MaskKind::kBlocks)),
    SweepName);

// With few queries and many keys, the keys of a KV head come in several parts.
INSTANTIATE_TEST_SUITE_P(FewQueries, SweepTest,
                         testing::Combine(testing::Values(kDecode), testing::Values(Heads{16, 2}),
                                          testing::Values(64, 80, 128, 256),
                                          testing::Values(Lengths{1, 1500}, Lengths{3, 2049},
                                                          Lengths{16, 777}),
                                          kIntervalMasks),
                         SweepName);

// float16 takes the same kernels with another type of operands.
INSTANTIATE_TEST_SUITE_P(ShortFp16, SweepTest,
                         testing::Combine(testing::Values(kChosen.In(kFp16), kSm80.In(kFp16),
                                                          kDecode.In(kFp16)),
                                          testing::Values(Heads{3, 1}), testing::Values(8, 64, 80),
                                          testing::Values(Lengths{0, 5}, Lengths{5, 0},
                                                          Lengths{1, 129}, Lengths{70, 33}),
                                          testing::Values(MaskKind::kFull, MaskKind::kCausal)),
                         SweepName);
INSTANTIATE_TEST_SUITE_P(
    LongFp16, SweepTest,
    testing::Combine(testing::Values(kChosen.In(kFp16), kSm80.In(kFp16), kDecode.In(kFp16)),
                     testing::Values(Heads{4, 2}), testing::Values(64, 96, 128, 192, 256),
                     testing::Values(Lengths{131, 517}), kIntervalMasks),
    SweepName);
INSTANTIATE_TEST_SUITE_P(FewQueriesFp16, SweepTest,
                         testing::Combine(testing::Values(kDecode.In(kFp16)),
                                          testing::Values(Heads{16, 2}),
                                          testing::Values(64, 128, 256),
                                          testing::Values(Lengths{1, 1500}, Lengths{3, 2049}),
                                          testing::Values(MaskKind::kFull, MaskKind::kDocuments)),
                         SweepName);

class KernelsTest : public testing::TestWithParam<Kernels> {};
INSTANTIATE_TEST_SUITE_P(All, KernelsTest,
                         testing::Values(kChosen, kSm80, kDecode, kChosen.In(kFp16),
                                         kSm80.In(kFp16), kDecode.In(kFp16)),
                         [](const auto& info) { return info.param.Name(); });

TEST_P(KernelsTest, EveryLength) {
  for (int64_t d : {64, 128, 256}) {
    for (int64_t length = 1; length <= 290; length += d == 128 && length < 140 ? 1 : 7) {
      SCOPED_TRACE(testing::Message() << d << " " << length);
      const Problem problem =
          MakeProblem(GetParam().dtype, 1, length, length, 1, 1, d, MaskKind::kCausal);
      ExpectNoWorse(RunOnce(GetParam(), problem, true), problem);
    }
  }
}

// Blocks of keys in any order, merged in float32, are the attention over all keys. The last block
// leaves the sum, or also the result in the inputs' dtype.
TEST_P(KernelsTest, BlocksOfKeysMerge) {
  for (MaskKind kind : {MaskKind::kFull, MaskKind::kCausal, MaskKind::kRandom}) {
    for (int64_t d : {64, 128, 200}) {
      const bool in_place = d == 64 || kind == MaskKind::kCausal;
      SCOPED_TRACE(testing::Message() << kind << " " << d << (in_place ? " in place" : ""));
      const Problem problem =
          MakeProblem(GetParam().dtype, 2, kBlockedKeys, kBlockedKeys, 4, 2, d, kind);
      const auto zeros = [](const Tensor& like) {
        return Tensor::Zeros(like.shape(), kFloat, kCuda);
      };
      AttentionResults result = {PoisonedSum(problem.q), Poisoned(problem.dlse), zeros(problem.q),
                                 zeros(problem.k), zeros(problem.v)};
      const Tensor sum = result.out;
      for (size_t i = 0; i < kKeyBlocks.size(); ++i) {
        const KeyBlock block(problem, kKeyBlocks[i][0], kKeyBlocks[i][1]);
        const bool converts = i + 1 == kKeyBlocks.size() && !in_place;
        if (converts) result.out = Poisoned(problem.q);
        FlashForwardParams params = {block.shape(),       Operand(problem.q),
                                     block.Of(problem.k), block.Of(problem.v),
                                     Operand(result.out), result.lse.raw_data(),
                                     /*merge=*/i > 0,     result.out.dtype()};
        if (converts) params.sum = Operand(sum);
        params.non_persistent = i % 2 == 1;
        GetParam().forward(params);
      }
      const Tensor delta = Delta(problem, result.out.To(problem.q.dtype()));
      BackwardOverKeys(problem, result, delta,
                       [&](const FlashBackwardParams& params) { GetParam().backward(params); });
      ExpectNoWorse(result, problem);
    }
  }
}

// Heads' gradients begin and end in different calls. They are in float32, and dK and dV end in the
// inputs' dtype.
TEST_P(KernelsTest, HeadsBeginAndEndInDifferentCalls) {
  for (int64_t d : {40, 64, 96, 128, 192, 256}) {
    for (bool deterministic : {false, true}) {
      SCOPED_TRACE(testing::Message() << d << (deterministic ? " deterministic" : ""));
      Problem problem = MakeProblem(GetParam().dtype, 1, 400, 300, 4, 2, d, MaskKind::kFull);
      const BackwardInParts parts(&problem);
      const AttentionResults once = RunOnce(GetParam(), problem, true);
      const Tensor delta = Delta(problem, once.out);
      const auto run = [&](bool converts) {
        const Tensor dk = converts ? Poisoned(problem.k) : Tensor();
        const Tensor dv = converts ? Poisoned(problem.v) : Tensor();
        const AttentionResults sums = {once.out, once.lse, PoisonedSum(problem.q),
                                       PoisonedSum(problem.k), PoisonedSum(problem.v)};
        parts.Run(sums, once.lse, delta, dk, dv, deterministic,
                  [&](const FlashBackwardParams& params) { GetParam().backward(params); });
        return AttentionResults{sums.out, sums.lse, sums.dq, converts ? dk : sums.dk,
                                converts ? dv : sums.dv};
      };
      const AttentionResults sums = run(false), results = run(true);
      ExpectNoWorse(results, problem);
      // These are the sums, rounded once.
      ExpectBitwiseEqual({once.out, once.lse, once.dq, sums.dk.To(problem.k.dtype()),
                          sums.dv.To(problem.v.dtype())},
                         {once.out, once.lse, once.dq, results.dk, results.dv});
    }
  }
}

// Lists of blocks take several calls, some of them without a block. Ranges give the rest of the
// mask. All merge as blocks of keys do.
TEST(ListsTest, CallsAddUp) {
  constexpr int64_t kBatch = 2, kQueries = 500, kKeys = 1100, kCalls = 4;
  for (int64_t d : {64, 96, 128, 192, 256}) {
    for (DType dtype : {kBf16, kFp16}) {
      if (!kChosen.get().TakesBlocks(dtype, d)) GTEST_SKIP() << "Hopper's take lists of blocks";
      for (bool in_place : {false, true}) {
        SCOPED_TRACE(testing::Message() << d << " " << Name(dtype) << " " << in_place);
        Problem problem = MakeProblem(dtype, kBatch, kQueries, kKeys, 4, 2, d, MaskKind::kBlocks);
        // In addition to the lists, the last call shows the first 30 keys, where the lists do not.
        const auto listed = problem.mask.visible;
        const auto in_lists = [=](int64_t b, int64_t i, int64_t j) {
          return j >= kListBlock && listed(b, i, j);
        };
        problem.mask.visible = [=](int64_t b, int64_t i, int64_t j) {
          return j < 30 || in_lists(b, i, j);
        };
        std::vector<TestMask> masks(kCalls + 1);
        std::vector<FlashAttentionShape> shapes(kCalls + 1, problem.shape());
        for (int64_t call = 0; call < kCalls; ++call) {
          masks[call].SetBlocks(kBatch, kQueries, kKeys, [=](int64_t b, int64_t i, int64_t j) {
            return j % (kCalls - 1) == call && in_lists(b, i * kListBlock, j * kListBlock);
          });
          shapes[call].blocks = masks[call].blocks();
        }
        masks[kCalls].begin.assign(kQueries, 0);
        masks[kCalls].end.assign(kQueries, 30);
        shapes[kCalls].blocks = {};
        shapes[kCalls].visible = masks[kCalls].ranges();
        // The ranges come in the middle, so that the last call has lists.
        std::swap(shapes[1], shapes[kCalls]);

        const auto zeros = [](const Tensor& like) {
          return Tensor::Zeros(like.shape(), kFloat, kCuda);
        };
        AttentionResults result = {PoisonedSum(problem.q), Poisoned(problem.dlse), zeros(problem.q),
                                   zeros(problem.k), zeros(problem.v)};
        const Tensor sum = result.out;
        for (size_t i = 0; i < shapes.size(); ++i) {
          const bool converts = i + 1 == shapes.size() && !in_place;
          if (converts) result.out = Poisoned(problem.q);
          FlashForwardParams params = {shapes[i],           Operand(problem.q),
                                       Operand(problem.k),  Operand(problem.v),
                                       Operand(result.out), result.lse.raw_data(),
                                       /*merge=*/i > 0,     result.out.dtype()};
          if (converts) params.sum = Operand(sum);
          params.non_persistent = i % 2 == 1;
          kChosen.forward(params);
        }
        const Tensor delta = Delta(problem, result.out.To(dtype));
        for (const FlashAttentionShape& shape : shapes) {
          FlashBackwardParams params = BackwardParams(problem, result, delta);
          params.shape = shape;
          kChosen.backward(params);
        }
        ExpectNoWorse(result, problem);
      }
    }
  }
}

// Memory after the keys that a query sees, as in a cache that is not full, changes nothing.
TEST(FewQueriesTest, ReadsNoKeyThatNobodySees) {
  constexpr int64_t kBegin = 37, kEnd = 1431, kKeys = 2000;
  for (int64_t d : {64, 128, 256}) {
    for (int64_t q_len : {1, 5}) {
      SCOPED_TRACE(testing::Message() << d << " " << q_len);
      Problem problem = MakeProblem(kBf16, 2, q_len, kKeys, 8, 2, d, MaskKind::kFull);
      problem.mask.begin.assign(q_len, kBegin);
      problem.mask.end.assign(q_len, kEnd);
      problem.mask.visible = [](int64_t, int64_t, int64_t j) { return kBegin <= j && j < kEnd; };
      const auto run = [&] {
        const Tensor out = Poisoned(problem.q), lse = Poisoned(problem.dlse);
        KernelsOf(kCuda).Forward({problem.shape(), Operand(problem.q), Operand(problem.k),
                                  Operand(problem.v), Operand(out), lse.raw_data(),
                                  /*merge=*/false, kBf16});
        return std::array<Tensor, 2>{out, lse};
      };
      const auto [out, lse] = run();
      const AttentionResults expected = problem.Reference();
      EXPECT_LE(RelativeError(lse, expected.lse), 1e-5);
      ExpectNoWorse("out", out, problem.Reference(kBf16).out, expected.out);
      for (Tensor* keys : {&problem.k, &problem.v}) {
        const Tensor poisoned = Poisoned(*keys);
        poisoned.Slice(1, kBegin, kEnd - kBegin).CopyFrom(keys->Slice(1, kBegin, kEnd - kBegin));
        *keys = poisoned;
      }
      const auto [out_again, lse_again] = run();
      EXPECT_EQ(out_again.ToVector<double>(), out.ToVector<double>());
      EXPECT_EQ(lse_again.ToVector<double>(), lse.ToVector<double>());
    }
  }
}

TEST(FewQueriesDeathTest, HasNoBackward) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  FlashBackwardParams params;
  params.shape.dtype = kBf16;
  params.shape.head_dim = params.shape.value_dim = 64;
  EXPECT_DEATH(cuda::GpuKernels(cuda::KernelFamily::kDecode)->Backward(params),
               "the kernel for few queries has no backward");
}

// Slices of packed tensors in and out give the same bits, and nothing else is written.
TEST_P(KernelsTest, StridedOperands) {
  constexpr int64_t kBatch = 2, kSeqlen = 150, kHeads = 4, kKvHeads = 2;
  constexpr int64_t kPacked = kHeads + 2 * kKvHeads;
  for (int64_t d : {24, 128, 256}) {
    const DType dtype = GetParam().dtype;
    Problem problem =
        MakeProblem(dtype, kBatch, kSeqlen, kSeqlen, kHeads, kKvHeads, d, MaskKind::kCausal);
    const AttentionResults expected = RunOnce(GetParam(), problem, true);
    const auto frame = [&](int64_t heads) {
      const Tensor tensor = Tensor::Empty({kBatch, kSeqlen, heads, d}, dtype, kCuda);
      tensor.Fill(42);
      return tensor;
    };
    const auto part = [](const Tensor& packed, int i) {
      return packed.Slice(2, i == 0 ? 0 : kHeads + (i - 1) * kKvHeads, i == 0 ? kHeads : kKvHeads);
    };
    const Tensor qkv = frame(kPacked), dqkv = frame(kPacked), out = frame(kHeads + 2);
    part(qkv, 0).CopyFrom(problem.q);
    part(qkv, 1).CopyFrom(problem.k);
    part(qkv, 2).CopyFrom(problem.v);
    problem.q = part(qkv, 0);
    problem.k = part(qkv, 1);
    problem.v = part(qkv, 2);
    const AttentionResults result = {out.Slice(2, 1, kHeads), Poisoned(problem.dlse), part(dqkv, 0),
                                     part(dqkv, 1), part(dqkv, 2)};
    GetParam().forward({problem.shape(), Operand(problem.q), Operand(problem.k), Operand(problem.v),
                        Operand(result.out), result.lse.raw_data(), false, dtype});
    const Tensor delta = Delta(problem, result.out);
    FlashBackwardParams params = BackwardParams(problem, result, delta);
    GetParam().backward(params);
    ExpectBitwiseEqual(result, expected);
    for (int64_t head : {int64_t{0}, kHeads + 1}) {
      for (double x : out.Slice(2, head, 1).ToVector<double>()) ASSERT_EQ(x, 42);
    }
  }
}

class FourMillionTokensTest : public testing::TestWithParam<Kernels> {};
INSTANTIATE_TEST_SUITE_P(All, FourMillionTokensTest, testing::Values(kChosen, kSm80, kDecode),
                         [](const auto& info) { return info.param.Name(); });

// One call has tensors of 2^31 elements. The test compares a few rows with the reference on the
// slice of keys that they see.
TEST_P(FourMillionTokensTest, NoWorseThanNaive) {
  constexpr int64_t kLength = 1 << 22, kHeads = 8, kDim = 64, kWindow = 300, kDrawn = 1 << 20;
  const auto random = [](int64_t heads, uint64_t stream) {  // a million numbers, repeated
    const Tensor drawn = RandomNormal({kDrawn}, kFloat, 1, stream).To(kCuda).To(kBf16);
    const Tensor tensor = Tensor::Empty({1, kLength, heads, kDim}, kBf16, kCuda);
    const Tensor flat = tensor.View({-1});
    for (int64_t i = 0; i < flat.numel(); i += kDrawn) flat.Slice(0, i, kDrawn).CopyFrom(drawn);
    return tensor;
  };
  const Tensor q = random(kHeads, 0), k = random(1, 1), v = random(1, 2), dout = random(kHeads, 3);
  const Tensor out = Tensor::EmptyLike(q), dq = Tensor::EmptyLike(q);
  const Tensor dk = Tensor::EmptyLike(k), dv = Tensor::EmptyLike(k);
  const Tensor lse = Tensor::Empty({1, kHeads, kLength}, kFloat, kCuda), delta = lse.Clone();
  std::vector<int32_t> ranges(2 * kLength);
  for (int64_t i = 0; i < kLength; ++i) {
    ranges[i] = static_cast<int32_t>(std::max<int64_t>(0, i + 1 - kWindow));
    ranges[kLength + i] = static_cast<int32_t>(i + 1);
  }
  const Tensor on_device = Tensor::FromVector(ranges, {2, kLength}, kCuda);
  const auto* begin = static_cast<const int32_t*>(on_device.raw_data());
  const FlashAttentionShape shape = {1,    kLength, kLength, kHeads, 1,
                                     kDim, kDim,    0.125,   kBf16,  {begin, begin + kLength, 0}};
  GetParam().forward(
      {shape, Operand(q), Operand(k), Operand(v), Operand(out), lse.raw_data(), false, kBf16});
  KernelsOf(kCuda).Delta({shape, Operand(out), Operand(dout), nullptr, delta.raw_data()});
  GetParam().backward({shape, Operand(q), Operand(k), Operand(v), Operand(dout), lse.raw_data(),
                       delta.raw_data(), Assigns(Operand(dq)), Assigns(Operand(dk)),
                       Assigns(Operand(dv))});
  for (int64_t first : {int64_t{0}, kLength / 2 - 5, kLength - 600}) {
    constexpr int64_t kRows = 600, kChecked = 600 - kWindow;
    const auto rows = [&](const Tensor& x) {
      return x.Slice(1, first, kRows).To(DeviceType::kCpu);
    };
    const Tensor dlse = Tensor::Zeros({1, kHeads, kRows}, kFloat);
    const auto reference = [&](DType dtype) {
      return NaiveAttention(
          rows(q), rows(k), rows(v), rows(dout), dlse, 0.125,
          [](int64_t, int64_t i, int64_t j) { return j <= i && i - j < kWindow; }, dtype);
    };
    const AttentionResults expected = reference(DType::kFloat64), naive = reference(kBf16);
    // The slice has all keys of its last rows, and all rows of its first keys.
    const auto check = [&](const char* name, const Tensor& actual, const Tensor& bound,
                           const Tensor& truth, int64_t from) {
      ExpectNoWorse(name, rows(actual).Slice(1, from, kChecked).Clone(),
                    bound.Slice(1, from, kChecked).Clone(), truth.Slice(1, from, kChecked).Clone());
    };
    check("out", out, naive.out, expected.out, kWindow);
    check("dq", dq, naive.dq, expected.dq, kWindow);
    if (first == 0) {
      check("dk", dk, naive.dk, expected.dk, 0);
      check("dv", dv, naive.dv, expected.dv, 0);
    }
  }
}

TEST(CheckTest, SaysWhatIsNotServed) {
  EXPECT_TRUE(KernelsOf(kCuda).Check(kCuda, kBf16, 128).ok());
  EXPECT_TRUE(KernelsOf(kCuda).Check(kCuda, kFp16, 128).ok());
  EXPECT_FALSE(KernelsOf(kCuda).Check(kCuda, kFp16, 20).ok());
  EXPECT_TRUE(KernelsOf(kCuda).Check(kCuda, DType::kFloat64, 7).ok());
  EXPECT_FALSE(KernelsOf(kCuda).Check(kCuda, kBf16, 20).ok());
  EXPECT_FALSE(KernelsOf(kCuda).Check(kCuda, kBf16, 264).ok());
  EXPECT_FALSE(KernelsOf(kCuda).Check(kCuda, kFloat, 257).ok());
}

}  // namespace
}  // namespace burst
