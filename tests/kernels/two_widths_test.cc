// Tests heads whose v has another width than q and k (multi-head latent attention) against naive
// attention in double precision: masks, dtypes, calls that merge, strided operands.

#include <gtest/gtest.h>

#include <cstdint>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "benchmarks/study/study.h"
#include "burst/base/parallel.h"
#include "burst/kernels/flash_attention.h"
#include "burst/tensor/tensor.h"
#include "tests/kernels/attention_problem.h"
#include "tests/kernels/no_worse.h"
#include "tests/testing/attention_reference.h"
#include "tests/testing/test_device.h"

namespace burst {
namespace {

constexpr bool kOnGpu = kTestDevice == DeviceType::kCuda;

const AttentionKernels& Kernels() { return KernelsOf(kTestDevice); }

// Fails the test, or skips it where the kernels of this GPU serve one width only.
#define SKIP_UNLESS_SERVED(dtype, widths)                                    \
  do {                                                                       \
    const absl::Status served = Kernels().Check(kTestDevice, dtype, widths); \
    if (!served.ok() && kOnGpu) GTEST_SKIP() << served;                      \
    ASSERT_TRUE(served.ok()) << served;                                      \
  } while (false)

// Compares all results with the truth. In 16 bits they may be off as a naive computation is.
void ExpectRight(const AttentionResults& results, const Problem& problem) {
  const DType dtype = problem.q.dtype();
  if (!Is16Bit(dtype)) return ExpectClose(results, problem.Reference(), Tolerance(dtype));
  ExpectNoWorse(results, problem.Reference(dtype), problem.Reference());
}

Tensor PoisonedSum(const Tensor& like) {
  const Tensor tensor = Tensor::Empty(like.shape(), SumDType(like.dtype()), kTestDevice);
  tensor.Fill(kNaN);
  return tensor;
}

// ---- The sweep.

using Case = std::tuple<DType, Heads, HeadWidths, Lengths, MaskKind>;
class TwoWidthsTest : public testing::TestWithParam<Case> {};

TEST_P(TwoWidthsTest, NoWorseThanNaiveAndTheSameInTwoRuns) {
  const auto [dtype, heads, widths, lengths, kind] = GetParam();
  SKIP_UNLESS_SERVED(dtype, widths);
  if (kind == MaskKind::kBlocks && !Kernels().TakesBlocks(dtype, widths)) {
    GTEST_SKIP() << "Hopper's kernels of 16 bits take lists of blocks";
  }
  const int64_t batch = lengths.q_len < 100 ? 2 : 1;
  const Problem problem(batch, lengths.q_len, lengths.k_len, heads.heads, heads.kv_heads, widths,
                        kind, dtype, Is16Bit(dtype) ? 1.5 : 1);
  const AttentionResults results = RunAttention(problem);
  ExpectRight(results, problem);
  const ScopedThreadPool pool(3);
  ExpectBitwiseEqual(RunAttention(problem), results);
  if (!kOnGpu || !Is16Bit(dtype)) return;
  AttentionResults any_order = UnfilledResults(problem);
  any_order.out = results.out;
  any_order.lse = results.lse;
  const Tensor delta = DeltaOf(problem, results.out, Kernels());
  FlashBackwardParams params = BackwardParams(problem, any_order, delta);
  SetOrder(/*deterministic=*/false, &params);
  Kernels().Backward(params);
  ExpectRight(any_order, problem);
}

std::string NameOfCase(const testing::TestParamInfo<Case>& info) {
  const auto [dtype, heads, widths, lengths, kind] = info.param;
  std::ostringstream name;
  name << Name(dtype) << "_" << kind << "_heads" << heads.heads << "on" << heads.kv_heads << "_d"
       << widths.head_dim << "_v" << widths.value_dim << "_" << lengths.q_len << "x"
       << lengths.k_len;
  return name.str();
}

const auto kFloats = testing::Values(DType::kFloat32, DType::kFloat64);
const auto kHalves = testing::Values(DType::kBFloat16, DType::kFloat16);

INSTANTIATE_TEST_SUITE_P(
    Floats, TwoWidthsTest,
    testing::Combine(kFloats, testing::Values(Heads{2, 2}, Heads{3, 1}),
                     testing::Values(HeadWidths(24, 16), HeadWidths(7, 20), HeadWidths(72, 1)),
                     testing::Values(Lengths{0, 5}, Lengths{5, 0}, Lengths{1, 129}, Lengths{70, 33},
                                     Lengths{131, 300}),
                     kAllMasks),
    NameOfCase);
INSTANTIATE_TEST_SUITE_P(Halves, TwoWidthsTest,
                         testing::Combine(kHalves, testing::Values(Heads{4, 2}),
                                          testing::Values(HeadWidths(192, 128), HeadWidths(72, 64),
                                                          HeadWidths(40, 128), HeadWidths(160, 8)),
                                          testing::Values(Lengths{0, 5}, Lengths{5, 0},
                                                          Lengths{1, 129}, Lengths{70, 33}),
                                          kAllMasks),
                         NameOfCase);
// These lengths have several tiles. On a GPU, many query heads on one KV head are split.
INSTANTIATE_TEST_SUITE_P(
    Long, TwoWidthsTest,
    testing::Combine(testing::Values(DType::kFloat32, DType::kFloat64, DType::kBFloat16),
                     testing::Values(Heads{1, 1}, Heads{8, 1}),
                     testing::Values(HeadWidths(192, 128)),
                     testing::Values(Lengths{300, 300}, Lengths{131, 517}), kAllMasks),
    NameOfCase);

// ---- Several calls.

struct Kind {
  DType dtype;
  HeadWidths widths;
};
constexpr Kind kKinds[] = {{DType::kFloat32, {24, 16}},
                           {DType::kFloat64, {16, 40}},
                           {DType::kBFloat16, {192, 128}},
                           {DType::kFloat16, {64, 128}}};
class TwoWidthsCallsTest : public testing::TestWithParam<Kind> {};
INSTANTIATE_TEST_SUITE_P(All, TwoWidthsCallsTest, testing::ValuesIn(kKinds),
                         [](const auto& info) { return std::string(Name(info.param.dtype)); });

// Blocks of keys in any order, merged, are the attention over all keys. In 16 bits the last block
// converts the sum.
TEST_P(TwoWidthsCallsTest, BlocksOfKeysMerge) {
  const auto [dtype, widths] = GetParam();
  SKIP_UNLESS_SERVED(dtype, widths);
  for (const MaskKind kind : {MaskKind::kFull, MaskKind::kCausal, MaskKind::kRandom}) {
    SCOPED_TRACE(testing::Message() << kind);
    const Problem problem(2, kBlockedKeys, kBlockedKeys, 4, 2, widths, kind, dtype);
    const auto zeros = [](const Tensor& like) {
      return Tensor::Zeros(like.shape(), SumDType(like.dtype()), kTestDevice);
    };
    const Tensor sum = PoisonedSum(problem.dout);
    AttentionResults result = {sum, Poisoned(problem.dlse), zeros(problem.q), zeros(problem.k),
                               zeros(problem.v)};
    for (size_t i = 0; i < kKeyBlocks.size(); ++i) {
      const KeyBlock block(problem, kKeyBlocks[i][0], kKeyBlocks[i][1]);
      const bool converts = Is16Bit(dtype) && i + 1 == kKeyBlocks.size();
      if (converts) result.out = Poisoned(problem.dout);
      FlashForwardParams params = ForwardParams(problem, result);
      params.shape = block.shape();
      params.k = block.Of(problem.k);
      params.v = block.Of(problem.v);
      params.merge = i > 0;
      if (converts) params.sum = Operand(sum);
      Kernels().Forward(params);
    }
    BackwardOverKeys(problem, result, DeltaOf(problem, result.out, Kernels()),
                     [](const FlashBackwardParams& params) { Kernels().Backward(params); });
    ExpectRight(result, problem);
  }
}

// Heads' gradients begin and end in different calls.
TEST_P(TwoWidthsCallsTest, HeadsBeginAndEndInDifferentCalls) {
  const auto [dtype, widths] = GetParam();
  SKIP_UNLESS_SERVED(dtype, widths);
  for (const int64_t heads : {4, 16}) {
    SCOPED_TRACE(heads);
    Problem problem(1, 400, 300, heads, 2, widths, MaskKind::kFull, dtype);
    const BackwardInParts parts(&problem);
    const AttentionResults once = RunAttention(problem);
    const Tensor delta = DeltaOf(problem, once.out, Kernels());
    const bool converts = Is16Bit(dtype);
    const Tensor dk = converts ? Poisoned(problem.k) : Tensor();
    const Tensor dv = converts ? Poisoned(problem.v) : Tensor();
    const AttentionResults sums = {once.out, once.lse, PoisonedSum(problem.q),
                                   PoisonedSum(problem.k), PoisonedSum(problem.v)};
    parts.Run(sums, once.lse, delta, dk, dv, /*deterministic=*/true,
              [](const FlashBackwardParams& params) { Kernels().Backward(params); });
    ExpectRight({once.out, once.lse, sums.dq, converts ? dk : sums.dk, converts ? dv : sums.dv},
                problem);
  }
}

// Operands are slices of larger tensors. These are full of NaN around the inputs, also right after
// v's columns. Nothing is written around the results, whose bits equal the ones of whole tensors.
TEST_P(TwoWidthsCallsTest, StridedOperandsAmongNaN) {
  const auto [dtype, widths] = GetParam();
  SKIP_UNLESS_SERVED(dtype, widths);
  const Problem problem(2, 150, 131, 4, 2, widths, MaskKind::kCausal, dtype);
  const AttentionResults expected = RunAttention(problem);
  constexpr int64_t kAround = 8;  // elements: rows still begin at multiples of 16 bytes
  std::vector<Tensor> frames;
  const auto framed = [&](const Tensor& like, double around) {
    const Shape& shape = like.shape();
    frames.push_back(Tensor::Empty({shape[0], shape[1] + 2, shape[2] + 1, shape[3] + 2 * kAround},
                                   dtype, kTestDevice));
    frames.back().Fill(around);
    return frames.back().Slice(1, 1, shape[1]).Slice(2, 1, shape[2]).Slice(3, kAround, shape[3]);
  };
  Problem strided = problem;
  for (Tensor* tensor : {&strided.q, &strided.k, &strided.v, &strided.dout}) {
    const Tensor slice = framed(*tensor, kNaN);
    slice.CopyFrom(*tensor);
    *tensor = slice;
  }
  frames.clear();
  constexpr double kBefore = 42;
  AttentionResults results = {framed(expected.out, kBefore), Poisoned(expected.lse),
                              framed(expected.dq, kBefore), framed(expected.dk, kBefore),
                              framed(expected.dv, kBefore)};
  Kernels().Forward(ForwardParams(strided, results));
  const Tensor delta = DeltaOf(strided, results.out, Kernels());
  FlashBackwardParams params = BackwardParams(strided, results, delta);
  params.dq = Assigns(Operand(results.dq));
  params.dk = Assigns(Operand(results.dk));
  params.dv = Assigns(Operand(results.dv));
  Kernels().Backward(params);
  ExpectBitwiseEqual(results, expected);
  int64_t inside = 0, all = 0;
  double sum = 0;
  for (const Tensor& slice : {results.out, results.dq, results.dk, results.dv}) {
    slice.CopyFrom(Tensor::Zeros(slice.shape(), dtype, kTestDevice));
    inside += slice.numel();
  }
  for (const Tensor& frame : frames) {
    for (double x : frame.ToVector<double>()) sum += x;
    all += frame.numel();
  }
  EXPECT_EQ(sum, kBefore * static_cast<double>(all - inside));
}

// ---- What else computes the same, and what is refused.

TEST(TwoWidthsOfOthersTest, NaiveAndTiledKernels) {
  if (kOnGpu) GTEST_SKIP() << "they are the CPU's";
  for (const MaskKind kind : {MaskKind::kFull, MaskKind::kCausal, MaskKind::kRandom}) {
    const Problem problem(2, 70, 90, 4, 2, HeadWidths(24, 16), kind, DType::kFloat64);
    const AttentionResults truth = problem.Reference();
    ExpectClose(RunAttention(problem, NaiveKernels()), truth, Tolerance(DType::kFloat64));
    ExpectClose(RunAttention(problem, TiledKernels(33)), truth, Tolerance(DType::kFloat64));
  }
}

TEST(TwoWidthsChecksTest, NameBothWidths) {
  const auto error = [](DType dtype, const HeadWidths& widths) {
    return std::string(Kernels().Check(kTestDevice, dtype, widths).message());
  };
  const auto names_both = [](const std::string& text, const HeadWidths& widths) {
    return text.find(ToString(widths)) != std::string::npos;
  };
  EXPECT_EQ(ToString(HeadWidths(192, 128)), "head_dim 192 and value_dim 128");
  EXPECT_EQ(ToString(64), "head_dim 64");
  EXPECT_EQ(error(DType::kFloat32, {192, 128}), "");
  EXPECT_TRUE(names_both(error(DType::kFloat32, {64, 0}), {64, 0}));
  EXPECT_TRUE(names_both(error(DType::kFloat32, {0, 64}), {0, 64}));
  if (!kOnGpu) return;
  for (const HeadWidths& widths :
       {HeadWidths(256, 128), HeadWidths(192, 136), HeadWidths(64, 20)}) {
    EXPECT_TRUE(names_both(error(DType::kBFloat16, widths), widths)) << widths.value_dim;
  }
  EXPECT_TRUE(names_both(error(DType::kFloat32, {64, 257}), {64, 257}));
  EXPECT_FALSE(Kernels().CheckFp8(kTestDevice, DType::kBFloat16, {128, 64}).ok());
  EXPECT_FALSE(Kernels().ChangesScores(DType::kBFloat16, {192, 128}));
  EXPECT_TRUE(Kernels().ChangesScores(DType::kFloat32, {192, 128}));
}

}  // namespace
}  // namespace burst
