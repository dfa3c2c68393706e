// Trains on a task that only attention over long distances can solve: a random sequence, repeated
// once. Every token of the second half is known from 64 positions before. These are on another
// rank, because each has 32 tokens.

#include <gtest/gtest.h>

#include <cmath>
#include <memory>

#include "burst/attention/burst_attention.h"
#include "burst/base/philox.h"
#include "burst/base/status.h"
#include "burst/comm/thread/thread_communicator.h"
#include "model/transformer.h"
#include "tests/testing/sanitizers.h"
#include "train/data/batch.h"
#include "train/optimizer/adamw.h"

namespace burst {
namespace {

constexpr int kRanks = 4;
constexpr int64_t kHalf = 64, kSeqlen = 2 * kHalf, kVocab = 16, kBatch = 8;

// Targets are in the second half only, because the first half cannot be predicted.
GlobalBatch Repetitions(uint64_t step) {
  GlobalBatch batch;
  batch.batch = kBatch;
  batch.seqlen = kSeqlen;
  for (int64_t b = 0; b < kBatch; ++b) {
    const auto token = [&](int64_t t) {
      return static_cast<int32_t>(Philox(step, b, t % kHalf)[0] % kVocab);
    };
    for (int64_t t = 0; t < kSeqlen; ++t) {
      batch.tokens.push_back(token(t));
      batch.positions.push_back(static_cast<int32_t>(t));
      const bool known = t + 1 >= kHalf && t + 1 < kSeqlen;
      batch.targets.push_back(known ? token(t + 1) : -1);
      batch.num_targets += known;
    }
  }
  return batch;
}

// Trains two layers for `steps`. Returns the mean loss of the second half on new sequences.
absl::StatusOr<double> LossAfterTraining(Layout layout, int64_t window, int steps) {
  ModelConfig config;
  config.family = Family::kLlama;
  config.layers = 2;
  config.width = 64;
  config.heads = 4;
  config.kv_heads = 2;
  config.vocab = kVocab;
  double result = 0;
  const absl::Status status = RunRanks(kRanks, [&](Communicator& comm) -> absl::Status {
    BurstAttentionOptions options;
    options.layout = layout;
    BURST_ASSIGN_OR_RETURN(const auto attention, BurstAttention::Create(options, &comm));
    BURST_ASSIGN_OR_RETURN(AttentionSchedule ring,
                           attention->Schedule(kSeqlen, Mask::SlidingWindow(window)));
    const auto schedule = std::make_shared<const AttentionSchedule>(std::move(ring));
    BURST_ASSIGN_OR_RETURN(const auto model, Transformer::Create(config, DType::kFloat32, 1));
    ParameterList& parameters = model->parameters();
    AdamW optimizer(AdamWOptions{0.9, 0.99, 1e-8, 0}, parameters.numel(), DType::kFloat32, {});
    for (int step = 0; step <= steps; ++step) {
      const GlobalBatch batch = Repetitions(step);
      parameters.ZeroGrad();
      Tape tape;
      const Variable loss = model->Loss(tape, *attention, SliceForRank(batch, schedule),
                                        1.0 / batch.num_targets, DropoutKey());
      const Tensor sum = loss.value().To(DType::kFloat64).View({1});
      BURST_RETURN_IF_ERROR(comm.AllReduceSum(sum));
      if (comm.rank() == 0) result = sum.data<double>()[0];
      if (step == steps) return absl::OkStatus();
      BURST_RETURN_IF_ERROR(tape.Backward(loss));
      BURST_RETURN_IF_ERROR(comm.AllReduceSum(parameters.grads()));
      BURST_RETURN_IF_ERROR(optimizer.Step(parameters.values(), /*compute=*/Tensor(),
                                           parameters.grads(), Tensor::Zeros({2}, DType::kFloat64),
                                           /*clip=*/0, 3e-3 * std::min(1.0, step / 20.0)));
    }
    return absl::OkStatus();
  });
  if (!status.ok()) return status;
  return result;
}

// Learning takes minutes under a sanitizer, and the same code runs for a few steps in train_parity.
constexpr bool kSanitized = kThreadSanitizer || kAddressSanitizer;

class CopyTask : public testing::TestWithParam<Layout> {};

TEST_P(CopyTask, IsSolvedOverFourRanks) {
  if (kSanitized) GTEST_SKIP() << "not under sanitizers";
  const auto loss = LossAfterTraining(GetParam(), /*window=*/0, 400);
  ASSERT_TRUE(loss.ok()) << loss.status();
  EXPECT_LT(*loss, 0.05);
}

INSTANTIATE_TEST_SUITE_P(Layouts, CopyTask,
                         testing::Values(Layout::kZigzag, Layout::kContiguous, Layout::kStriped),
                         [](const auto& info) { return std::string(Name(info.param)); });

// The control has a window too short to see the first half, so nothing can be learned.
TEST(CopyTaskControl, IsNotSolvedWithoutLongRangeAttention) {
  if (kSanitized) GTEST_SKIP() << "not under sanitizers";
  const auto loss = LossAfterTraining(Layout::kContiguous, /*window=*/32, 100);
  ASSERT_TRUE(loss.ok()) << loss.status();
  EXPECT_GT(*loss, 0.9 * std::log(kVocab));
}

}  // namespace
}  // namespace burst
