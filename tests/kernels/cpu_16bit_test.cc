// Tests the CPU's attention in bfloat16 and float16. Naive attention in double precision bounds its
// errors (no_worse.h). Its results have the bits of the float32 kernels' results, rounded.

#include <gtest/gtest.h>

#include <cstdint>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "burst/base/parallel.h"
#include "burst/kernels/flash_attention.h"
#include "burst/tensor/tensor.h"
#include "tests/kernels/attention_problem.h"
#include "tests/kernels/no_worse.h"
#include "tests/testing/attention_reference.h"

namespace burst {
namespace {

constexpr DType kFloat = DType::kFloat32;

const AttentionKernels& Kernels() { return KernelsOf(DeviceType::kCpu); }

AttentionResults Rounded(const AttentionResults& results, DType dtype) {
  return {results.out.To(dtype), results.lse, results.dq.To(dtype), results.dk.To(dtype),
          results.dv.To(dtype)};
}

Tensor PoisonedSum(const Tensor& like) {
  const Tensor tensor = Tensor::Empty(like.shape(), kFloat);
  tensor.Fill(kNaN);
  return tensor;
}

// Returns the same problem in float32.
Problem InFloat(Problem problem) {
  for (Tensor* x : {&problem.q, &problem.k, &problem.v, &problem.dout}) *x = x->To(kFloat);
  return problem;
}

// Returns the results of the float32 kernels on the same inputs, rounded. The backward reads
// `out`, which is rounded, too.
AttentionResults RoundedResults(const Problem& problem, const Tensor& out) {
  const Problem wide = InFloat(problem);
  const AttentionResults results = UnfilledResults(wide);
  Kernels().Forward(ForwardParams(wide, results));
  const Tensor delta = DeltaOf(wide, out.To(kFloat), Kernels());
  Kernels().Backward(BackwardParams(wide, results, delta));
  return Rounded(results, problem.q.dtype());
}

using Case = std::tuple<DType, Heads, int64_t /*head_dim*/, Lengths, MaskKind>;
class SweepTest : public testing::TestWithParam<Case> {};

TEST_P(SweepTest, IsFloat32Rounded) {
  const auto [dtype, heads, d, lengths, kind] = GetParam();
  const int64_t batch = lengths.q_len < 100 ? 2 : 1;
  const Problem problem(batch, lengths.q_len, lengths.k_len, heads.heads, heads.kv_heads, d, kind,
                        dtype, /*magnitude=*/1.5);
  const AttentionResults result = RunAttention(problem);
  ExpectNoWorse(result, problem.Reference(dtype), problem.Reference());
  ExpectBitwiseEqual(result, RoundedResults(problem, result.out));
  for (const int threads : {2, 3}) {
    const ScopedThreadPool pool(threads);
    ExpectBitwiseEqual(RunAttention(problem), result);
  }
}

std::string SweepName(const testing::TestParamInfo<Case>& info) {
  const auto [dtype, heads, d, lengths, kind] = info.param;
  std::ostringstream name;
  name << Name(dtype) << "_" << kind << "_heads" << heads.heads << "on" << heads.kv_heads << "_d"
       << d << "_" << lengths.q_len << "x" << lengths.k_len;
  return name.str();
}

const auto kDTypes = testing::Values(DType::kBFloat16, DType::kFloat16);
INSTANTIATE_TEST_SUITE_P(
    Short, SweepTest,
    testing::Combine(kDTypes, testing::Values(Heads{2, 2}, Heads{3, 1}), testing::Values(7, 64, 80),
                     testing::Values(Lengths{0, 5}, Lengths{5, 0}, Lengths{1, 1}, Lengths{70, 33}),
                     kAllMasks),
    SweepName);
INSTANTIATE_TEST_SUITE_P(Long, SweepTest,
                         testing::Combine(kDTypes, testing::Values(Heads{2, 1}),
                                          testing::Values(16, 128),
                                          testing::Values(Lengths{600, 700}), kAllMasks),
                         SweepName);

class CallsTest : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(All, CallsTest, kDTypes,
                         [](const auto& info) { return std::string(Name(info.param)); });

// Blocks of keys in any order, merged in float32, are the attention over all keys. The last block
// leaves the sum, or also the result in the inputs' dtype.
TEST_P(CallsTest, BlocksOfKeysMerge) {
  for (const MaskKind kind : {MaskKind::kFull, MaskKind::kCausal, MaskKind::kRandom}) {
    const Problem problem(2, kBlockedKeys, kBlockedKeys, 4, 2, 24, kind, GetParam(), 1.5);
    AttentionResults result = {PoisonedSum(problem.q), Poisoned(problem.dlse),
                               PoisonedSum(problem.q), PoisonedSum(problem.k),
                               PoisonedSum(problem.v)};
    const Tensor sum = result.out;
    for (size_t i = 0; i < kKeyBlocks.size(); ++i) {
      const KeyBlock block(problem, kKeyBlocks[i][0], kKeyBlocks[i][1]);
      FlashForwardParams params = ForwardParams(problem, result);
      params.shape = block.shape();
      params.k = block.Of(problem.k);
      params.v = block.Of(problem.v);
      params.merge = i > 0;
      if (i + 1 == kKeyBlocks.size() && kind != MaskKind::kCausal) {
        result.out = Poisoned(problem.q);
        params.out = Operand(result.out);
        params.out_dtype = GetParam();
        params.sum = Operand(sum);
      }
      Kernels().Forward(params);
    }
    const Tensor delta = DeltaOf(problem, result.out.To(GetParam()), Kernels());
    for (const Tensor* x : {&result.dq, &result.dk, &result.dv}) x->Fill(0);
    BackwardOverKeys(problem, result, delta,
                     [&](const FlashBackwardParams& params) { Kernels().Backward(params); });
    ExpectNoWorse(result, problem.Reference(GetParam()), problem.Reference());
  }
}

// Heads' gradients begin and end in different calls. They are in float32, and dK and dV end in the
// inputs' dtype.
TEST_P(CallsTest, HeadsBeginAndEndInDifferentCalls) {
  Problem problem(1, 400, 300, 4, 2, 40, MaskKind::kFull, GetParam(), 1.5);
  const BackwardInParts parts(&problem);
  const AttentionResults once = RunAttention(problem);
  const Tensor delta = DeltaOf(problem, once.out, Kernels());
  const auto run = [&](const Tensor& dk, const Tensor& dv) {
    const AttentionResults sums = {once.out, once.lse, PoisonedSum(problem.q),
                                   PoisonedSum(problem.k), PoisonedSum(problem.v)};
    parts.Run(sums, once.lse, delta, dk, dv, /*deterministic=*/true,
              [&](const FlashBackwardParams& params) { Kernels().Backward(params); });
    return sums;
  };
  const AttentionResults sums = run(Tensor(), Tensor());
  ExpectNoWorse(sums, problem.Reference(GetParam()), problem.Reference());
  const Tensor dk = Poisoned(problem.k), dv = Poisoned(problem.v);
  run(dk, dv);
  const AttentionResults rounded = Rounded(sums, GetParam());
  ExpectBitwiseEqual({once.out, once.lse, rounded.dq, dk, dv}, rounded);
}

// Rows begin at odd elements. The bits equal the bits of contiguous tensors, and nothing else is
// written.
TEST_P(CallsTest, StridedOperands) {
  constexpr int64_t kDim = 20;
  Problem problem(2, 150, 150, 4, 2, kDim, MaskKind::kCausal, GetParam());
  const AttentionResults expected = RunAttention(problem);
  const auto framed = [](const Tensor& like) {
    Shape shape = like.shape();
    shape[3] += 3;
    const Tensor frame = Tensor::Empty(shape, like.dtype());
    frame.Fill(42);
    return frame;
  };
  const auto inner = [](const Tensor& frame) { return frame.Slice(3, 1, kDim); };
  for (Tensor* x : {&problem.q, &problem.k, &problem.v, &problem.dout}) {
    const Tensor frame = framed(*x);
    inner(frame).CopyFrom(*x);
    *x = inner(frame);
  }
  const Tensor frames[] = {framed(problem.q), framed(problem.q), framed(problem.k),
                           framed(problem.v)};
  const AttentionResults result = {inner(frames[0]), Poisoned(problem.dlse), inner(frames[1]),
                                   inner(frames[2]), inner(frames[3])};
  Kernels().Forward(ForwardParams(problem, result));
  const Tensor delta = DeltaOf(problem, result.out, Kernels());
  Kernels().Backward(BackwardParams(problem, result, delta));
  ExpectBitwiseEqual(result, expected);
  for (const Tensor& frame : frames) {
    for (const int64_t column : {int64_t{0}, kDim + 1, kDim + 2}) {
      for (double x : frame.Slice(3, column, 1).ToVector<double>()) ASSERT_EQ(x, 42);
    }
  }
}

// All numbers of 16 bits are read as Tensor::To reads them. Floats between neighbors, infinities
// and NaN are rounded as it rounds them.
TEST_P(CallsTest, ElementsAreReadAndRoundedAsTensorsAre) {
  constexpr int64_t kNumbers = 1 << 16, kDim = 32;
  const Tensor numbers = Tensor::Empty({1, kNumbers / kDim, 1, kDim}, GetParam());
  auto* const bits = static_cast<uint16_t*>(numbers.raw_data());
  for (int64_t i = 0; i < kNumbers; ++i) bits[i] = static_cast<uint16_t>(i);
  // Each query sees one key, so out is its value.
  TestMask mask;
  for (int32_t i = 0; i < kNumbers / kDim; ++i) {
    mask.begin.push_back(i);
    mask.end.push_back(i + 1);
  }
  const Tensor q = Tensor::Zeros(numbers.shape(), GetParam());
  const Tensor lse = Tensor::Empty({1, 1, kNumbers / kDim}, kFloat);
  FlashForwardParams params;
  constexpr int64_t kRows = kNumbers / kDim;
  params.shape = {1, kRows, kRows, 1, 1, kDim, kDim, 1, GetParam(), mask.ranges()};
  params.q = params.k = Operand(q);
  params.v = Operand(numbers);
  params.lse = lse.raw_data();
  for (const DType dtype : {GetParam(), kFloat}) {
    const Tensor out = Tensor::Empty(numbers.shape(), dtype);
    params.out = Operand(out);
    params.out_dtype = dtype;
    Kernels().Forward(params);
    const Tensor expected = numbers.To(dtype);
    const std::vector<float> a = out.ToVector<float>(), b = expected.ToVector<float>();
    for (int64_t i = 0; i < kNumbers; ++i) {
      if (std::isnan(b[i])) {
        EXPECT_TRUE(std::isnan(a[i])) << i;
      } else {
        EXPECT_EQ(a[i], b[i]) << i;
      }
    }
  }
}

}  // namespace
}  // namespace burst
