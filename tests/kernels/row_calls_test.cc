// Tests RowCalls: of several calls of a forward, the last one that reaches a row finishes it. The
// results are compared with naive attention in double precision.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "benchmarks/study/study.h"
#include "burst/kernels/flash_attention.h"
#include "burst/tensor/tensor.h"
#include "tests/kernels/attention_problem.h"
#include "tests/kernels/no_worse.h"
#include "tests/testing/attention_reference.h"
#include "tests/testing/test_device.h"
#ifdef BURST_TEST_CUDA
#include "burst/kernels/gpu/flash_attention_gpu.h"
#endif

namespace burst {
namespace {

const AttentionKernels& Kernels() { return KernelsOf(kTestDevice); }

// Returns the device's kernels, and on a GPU the ones that older GPUs have.
std::vector<const AttentionKernels*> AllForwards() {
#ifdef BURST_TEST_CUDA
  return {&Kernels(), cuda::GpuKernels(cuda::KernelFamily::kSm80)};
#else
  return {&Kernels()};
#endif
}

Tensor PoisonedSum(const Tensor& like) {
  const Tensor tensor = Tensor::Empty(like.shape(), DType::kFloat32, kTestDevice);
  tensor.Fill(kNaN);
  return tensor;
}

// The calls of a problem with kBlockedKeys keys, one for each of kKeyBlocks.
class Calls {
 public:
  explicit Calls(const Problem& problem)
      : problem_(problem),
        q_len_(problem.q.dim(1)),
        groups_((q_len_ + kRowGroup - 1) / kRowGroup),
        stride_(problem.mask.batch_stride == 0 ? 0 : groups_),
        last_((stride_ == 0 ? 1 : problem.q.dim(0)) * groups_) {
    for (size_t call = 0; call < kKeyBlocks.size(); ++call) {
      blocks_.emplace_back(problem, kKeyBlocks[call][0], kKeyBlocks[call][1]);
      rows_.push_back({nullptr, stride_, static_cast<int32_t>(call), 0, 0});
      for (int64_t b = 0; b < static_cast<int64_t>(last_.size()) / groups_; ++b) {
        for (int64_t i = 0; i < q_len_; ++i) FindRow(b, i, static_cast<int32_t>(call));
      }
    }
    on_device_ = Tensor::FromVector(last_, {static_cast<int64_t>(last_.size())}, kTestDevice);
    for (RowCalls& rows : rows_) rows.last = static_cast<const int32_t*>(on_device_.raw_data());
  }

  // documents: KeyRanges::documents of all calls.
  void Run(const AttentionKernels& kernels, const AttentionResults& result, const Tensor& sum,
           bool documents = false) const {
    for (size_t call = 0; call < blocks_.size(); ++call) {
      FlashForwardParams params = ForwardParams(problem_, result);
      params.shape = blocks_[call].shape();
      params.shape.visible.documents = documents;
      params.k = blocks_[call].Of(problem_.k);
      params.v = blocks_[call].Of(problem_.v);
      params.merge = call > 0;
      params.sum = Operand(sum);
      params.rows = rows_[call];
      params.non_persistent = call % 2 == 1;
      kernels.Forward(params);
    }
  }

  // Returns the last call that reaches a row's group.
  int32_t LastOf(int64_t b, int64_t row) const { return last_[b * stride_ + row / kRowGroup]; }

 private:
  void FindRow(int64_t b, int64_t i, int32_t call) {
    const auto& [first, end] = kKeyBlocks[call];
    bool sees = false;
    for (int64_t j = first; j < end; ++j) sees |= problem_.mask.visible(b, i, j);
    if (!sees) return;
    last_[b * groups_ + i / kRowGroup] = call;
    RowCalls& rows = rows_[call];
    rows.begin = rows.end == 0 ? i : std::min(rows.begin, i);
    rows.end = std::max(rows.end, i + 1);
  }

  const Problem& problem_;
  const int64_t q_len_, groups_, stride_;
  std::vector<int32_t> last_;
  Tensor on_device_;
  std::vector<KeyBlock> blocks_;
  std::vector<RowCalls> rows_;
};

using Case = std::tuple<DType, HeadWidths, int64_t, MaskKind>;
class RowCallsTest : public testing::TestWithParam<Case> {};

TEST_P(RowCallsTest, TheLastCallThatReachesARowFinishesIt) {
  const auto [dtype, widths, q_len, kind] = GetParam();
  const absl::Status served = Kernels().Check(kTestDevice, dtype, widths);
  if (!served.ok()) GTEST_SKIP() << served;
  const Problem problem(2, q_len, kBlockedKeys, 4, 2, widths, kind, dtype, 1.5);
  const Calls calls(problem);
  for (const AttentionKernels* const forward : AllForwards()) {
    if (!forward->Check(kTestDevice, dtype, widths).ok()) continue;
    const AttentionResults result = UnfilledResults(problem);
    const Tensor sum = PoisonedSum(problem.dout);
    calls.Run(*forward, result, sum);
    const Tensor delta = DeltaOf(problem, result.out, Kernels());
    Kernels().Backward(BackwardParams(problem, result, delta));
    ExpectNoWorse(result, problem.Reference(dtype), problem.Reference());

    // Groups that the first call finishes never have a sum.
    const std::vector<double> sums = sum.ToVector<double>();
    const int64_t row_size = problem.dout.dim(2) * problem.dout.dim(3);
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t i = 0; i < q_len; ++i) {
        const bool has_sum = !std::isnan(sums[(b * q_len + i) * row_size]);
        ASSERT_EQ(has_sum, calls.LastOf(b, i) > 0) << "row " << i << " of " << b;
      }
    }
  }
}

std::string NameOfCase(const testing::TestParamInfo<Case>& info) {
  const auto [dtype, widths, q_len, kind] = info.param;
  std::ostringstream name;
  name << Name(dtype) << "_" << kind << "_d" << widths.head_dim << "_v" << widths.value_dim << "_"
       << q_len;
  return name.str();
}

INSTANTIATE_TEST_SUITE_P(All, RowCallsTest,
                         testing::Combine(testing::Values(DType::kBFloat16, DType::kFloat16),
                                          testing::Values(HeadWidths(40, 40), HeadWidths(64, 64),
                                                          HeadWidths(96, 96), HeadWidths(128, 128),
                                                          HeadWidths(192, 128),
                                                          HeadWidths(256, 256)),
                                          testing::Values(3, 400), kIntervalMasks),
                         NameOfCase);

// A key that is NaN reaches the rows that see it, whichever call finishes them, and no other row.
TEST(RowCallsTest, NaNStaysInItsDocument) {
  constexpr int64_t kRows = 310, kHeads = 2, kNaNKey = 205;  // of the first block of keys
  for (const int64_t d : {40, 64, 128, 256}) {
    Problem problem(1, kRows, kBlockedKeys, kHeads, kHeads, d, MaskKind::kDocuments,
                    DType::kBFloat16);
    problem.v.Slice(1, kNaNKey, 1).Fill(kNaN);
    for (const AttentionKernels* const forward : AllForwards()) {
      const AttentionResults result = UnfilledResults(problem);
      Calls(problem).Run(*forward, result, PoisonedSum(problem.dout), /*documents=*/true);
      const std::vector<double> out = result.out.ToVector<double>();
      for (int64_t i = 0; i < kRows; ++i) {
        for (int64_t at = i * kHeads * d; at < (i + 1) * kHeads * d; ++at) {
          ASSERT_EQ(std::isnan(out[at]), problem.mask.visible(0, i, kNaNKey)) << "row " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace burst
