// Compares attention without tiles with the double-precision reference of the tiled kernels. It
// covers every mask, grouped heads, and blocks of keys that are merged one after the other.
#include <gtest/gtest.h>

#include <utility>

#include "benchmarks/study/study.h"
#include "burst/kernels/flash_attention.h"
#include "tests/kernels/attention_problem.h"
#include "tests/testing/attention_reference.h"

namespace burst {
namespace {

// Runs the forward over the keys in two merged blocks, then delta and a backward that assigns.
AttentionResults RunNaive(const Problem& problem) {
  const FlashAttentionShape shape = problem.shape();
  AttentionResults result = {Poisoned(problem.q), Poisoned(problem.dlse), Poisoned(problem.q),
                             Poisoned(problem.k), Poisoned(problem.v)};
  const int64_t middle = shape.k_len / 3;
  const int64_t cuts[] = {0, middle, shape.k_len};
  for (int block = 0; block < 2; ++block) {
    const KeyBlock keys(problem, cuts[block], cuts[block + 1]);
    FlashForwardParams forward = ForwardParams(problem, result);
    forward.shape = keys.shape();
    forward.k = keys.Of(problem.k);
    forward.v = keys.Of(problem.v);
    forward.merge = block > 0;
    NaiveKernels().Forward(forward);
  }
  const Tensor delta = DeltaOf(problem, result.out, NaiveKernels());
  FlashBackwardParams backward = BackwardParams(problem, result, delta);
  backward.dq = Assigns(Operand(result.dq));
  backward.dk = Assigns(Operand(result.dk));
  backward.dv = Assigns(Operand(result.dv));
  NaiveKernels().Backward(backward);
  return result;
}

class NaiveAttention : public testing::TestWithParam<MaskKind> {};

TEST_P(NaiveAttention, IsAttention) {
  // Sums have up to 130 rounded terms of order one. So the tolerance is 130 epsilon, with room for
  // the exponential.
  for (const auto& [dtype, tolerance] :
       {std::pair(DType::kFloat64, 1e-12), std::pair(DType::kFloat32, 1e-5)}) {
    for (const int64_t q_len : {1, 130}) {
      const Problem problem(/*batch=*/2, q_len, /*k_len=*/130, /*heads=*/4, /*kv_heads=*/2,
                            /*d=*/20, GetParam(), dtype);
      ExpectClose(RunNaive(problem), problem.Reference(), tolerance);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Masks, NaiveAttention, kIntervalMasks, NameOf);

TEST(NaiveAttentionCheck, RefusesGpus) {
  EXPECT_TRUE(NaiveKernels().Check(DeviceType::kCpu, DType::kFloat32, 64).ok());
  EXPECT_EQ(NaiveKernels().Check(DeviceType::kCpu, DType::kBFloat16, 64),
            absl::InvalidArgumentError(
                "attention without tiles computes in float32 or float64, not bfloat16"));
  EXPECT_EQ(NaiveKernels().Check(DeviceType::kCuda, DType::kFloat32, 64),
            absl::InvalidArgumentError("attention without tiles is there on the CPU only"));
}

}  // namespace
}  // namespace burst
