// Models whose layers are computed again in the backward: the losses and gradients are, to the bit,
// those of models that keep everything, whatever the strategy; memory and messages are what the
// shapes say. (The op on the tape by itself is in tape_test, whole runs are in trainer_test.)
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "burst/attention/strategy.h"
#include "burst/autograd/tape.h"
#include "burst/base/status.h"
#include "burst/device/memory.h"
#include "model/transformer.h"
#include "tests/attention/sequence_problem.h"
#include "tests/model/small_models.h"

namespace burst {
namespace {

using Values = std::vector<double>;

ModelConfig Model(Family family) {
  ModelConfig config;
  config.family = family;
  config.layers = 3;
  config.width = 32;
  config.heads = 4;
  config.kv_heads = family == Family::kLlama ? 2 : 4;
  config.ffn = 64;
  config.vocab = 13;
  config.context = 24;
  config.dropout = 0.25;
  return config;
}

struct Step {
  Values loss, gradients;
  std::vector<int> ready;  // how often each parameter's gradient was said to be complete
  int64_t forward_bytes = 0, backward_bytes = 0;  // sent for attention
};

absl::StatusOr<Step> TakeStep(Recompute recompute, SequenceParallelAttention& attention,
                              const SequenceBatch& batch, Transformer& model) {
  model.set_recompute(recompute);
  model.parameters().ZeroGrad();
  attention.ResetStats();
  DropoutKey dropout;
  dropout.seed = 5;
  dropout.enabled = true;
  Step step;
  step.ready.resize(model.parameters().size());
  Tape tape;
  const Variable loss = model.Loss(tape, attention, batch, 0.1, dropout, [&](int first, int last) {
    for (int i = first; i < last; ++i) ++step.ready[i];
  });
  BURST_RETURN_IF_ERROR(tape.Backward(loss));
  step.loss = loss.value().To(DType::kFloat64).ToVector<double>();
  step.gradients = model.parameters().grads().To(DType::kFloat64).ToVector<double>();
  step.forward_bytes = attention.bytes_sent().forward;
  step.backward_bytes = attention.bytes_sent().backward;
  return step;
}

struct Ranks {
  Strategy strategy;
  int ranks;
  int group = 1;     // of burst+ulysses
  int per_node = 0;  // a double ring
  int64_t length = 24;
};

absl::Status ExpectSameBits(const Ranks& ranks, Family family, DType dtype, Communicator& comm) {
  BurstAttentionOptions options;
  options.ranks_per_node = ranks.per_node;
  BURST_ASSIGN_OR_RETURN(const auto attention,
                         CreateAttention(ranks.strategy, options, ranks.group, &comm));
  TensorParallel parallel;
  if (IsTensorParallel(ranks.strategy)) {
    parallel = TensorParallel(&comm, ranks.strategy == Strategy::kTpSp);
  }
  BURST_ASSIGN_OR_RETURN(const auto model, Transformer::Create(Model(family), dtype, /*seed=*/3,
                                                               kTestDevice, parallel));
  const Text text = RandomText(/*vocab=*/13, /*packed=*/ranks.length > 5, ranks.length);
  BURST_ASSIGN_OR_RETURN(RingSchedule schedule, attention->Schedule(text.length, text.documents));
  const SequenceBatch batch = Cut(text, std::make_shared<RingSchedule>(std::move(schedule)));
  BURST_ASSIGN_OR_RETURN(const Step kept, TakeStep(Recompute::kNone, *attention, batch, *model));
  for (const Recompute recompute : {Recompute::kFull, Recompute::kSelective}) {
    SCOPED_TRACE(Name(recompute));
    BURST_ASSIGN_OR_RETURN(const Step again, TakeStep(recompute, *attention, batch, *model));
    EXPECT_EQ(again.loss, kept.loss);
    EXPECT_EQ(again.gradients, kept.gradients);
    EXPECT_EQ(again.ready, std::vector<int>(again.ready.size(), 1));
    EXPECT_EQ(again.backward_bytes, kept.backward_bytes);
    if (recompute == Recompute::kFull) {
      EXPECT_EQ(again.forward_bytes, 2 * kept.forward_bytes);
    } else if (HasRing(ranks.strategy) && ranks.group == 1) {
      EXPECT_EQ(again.forward_bytes, kept.forward_bytes) << "attention's result is kept";
    } else if (ranks.strategy == Strategy::kUlysses && ranks.ranks == 2) {
      // q, k and v are gathered again; only out, as large as q, is not sent back a second time.
      const ModelConfig config = Model(family);
      const int64_t qkv = config.heads + 2 * config.kv_heads, all = qkv + config.heads;
      EXPECT_EQ(again.forward_bytes * all, kept.forward_bytes * (all + qkv));
    }
  }
  return absl::OkStatus();
}

TEST(Recompute, LossAndGradientsAreTheSameBits) {
  std::vector<DType> dtypes = {DType::kFloat32, DType::kFloat64};
  if (kTestDevice == DeviceType::kCuda) dtypes = {DType::kBFloat16, DType::kFloat32};
  const Ranks cases[] = {{Strategy::kSingle, 1},
                         {Strategy::kBurst, 2},
                         {Strategy::kRing, 2},
                         {Strategy::kBurst, 4, 1, /*per_node=*/2},
                         {Strategy::kUlysses, 2},
                         {Strategy::kBurstUlysses, 4, /*group=*/2},
                         {Strategy::kBurst, 4, 1, 0, /*length=*/3},
                         {Strategy::kUlysses, 4, 1, 0, /*length=*/3},
                         {Strategy::kTp, 2},
                         {Strategy::kTpSp, 2}};
  for (const Ranks& ranks : cases) {
    for (const Family family : {Family::kLlama, Family::kGpt2}) {
      for (const DType dtype : dtypes) {
        const absl::Status status = RunTestRanks(ranks.ranks, [&](Communicator& comm) {
          SCOPED_TRACE(testing::Message() << Name(ranks.strategy) << ", " << ranks.ranks
                                          << " ranks, " << Name(family) << ", " << Name(dtype));
          return ExpectSameBits(ranks, family, dtype, comm);
        });
        EXPECT_TRUE(status.ok()) << status;
      }
    }
  }
}

// What is in use beyond what was before: with the tape, before the backward; and at most.
struct Memory {
  int64_t kept = 0, peak = 0;
};

Memory MemoryOfStep(Recompute recompute, SequenceParallelAttention& attention,
                    const SequenceBatch& batch, Transformer& model) {
  model.set_recompute(recompute);
  const int64_t before = GetMemoryStats(kTestDevice).bytes_in_use;
  ResetPeakMemory(kTestDevice);
  Memory memory;
  Tape tape;
  const Variable loss = model.Loss(tape, attention, batch, 0.1, DropoutKey());
  memory.kept = GetMemoryStats(kTestDevice).bytes_in_use - before;
  EXPECT_TRUE(tape.Backward(loss).ok());
  memory.peak = GetMemoryStats(kTestDevice).peak_bytes - before;
  return memory;
}

TEST(Recompute, MemoryIsThatOfTheShapes) {
  // Sizes are powers of two, so that the allocator rounds nothing.
  ModelConfig config = Model(Family::kLlama);
  config.layers = 8;
  config.width = 64;
  config.ffn = 128;
  const auto model =
      *Transformer::Create(config, DType::kFloat64, /*seed=*/3, kTestDevice, TensorParallel());
  const SingleRank single(RandomText(config.vocab, /*packed=*/false, /*length=*/256));
  const auto measure = [&](Recompute recompute) {
    return MemoryOfStep(recompute, *single.attention, single.batch, *model);
  };
  measure(Recompute::kNone);  // buffers that stay
  const Memory none = measure(Recompute::kNone), full = measure(Recompute::kFull);
  const Memory selective = measure(Recompute::kSelective);

  // Of one layer's forward, for each token: both normalizations with 1 / rms, the projected heads,
  // the same after RoPE, out and lse, the residual stream after either branch, gate and up, the
  // result of SwiGLU.
  const int64_t w = config.width, qkv = w + 2 * config.kv_heads * config.WithDefaults().head_dim;
  const int64_t all = 2 * (w + 1) + 2 * qkv + (w + config.heads) + 2 * w + 3 * config.ffn;
  const int64_t stream = w, result = w + config.heads;
  const int64_t unit = 2 * 256 * 8;  // bytes of a channel: tokens, double
  EXPECT_EQ(none.kept - full.kept, config.layers * (all - stream) * unit);
  EXPECT_EQ(none.kept - selective.kept, config.layers * (all - stream - result) * unit);
  // At most one layer is there whole; and with it, for as long as its backward takes, its result's
  // two values, of the first run and the second, and their gradient.
  const int64_t others = config.layers - 1;
  EXPECT_GE(none.peak - full.peak, (others * (all - stream) - 3 * stream) * unit);
  EXPECT_GE(none.peak - selective.peak, (others * (all - stream - result) - 3 * stream) * unit);
  testing::Test::RecordProperty("peak_none", none.peak);
  testing::Test::RecordProperty("peak_selective", selective.peak);
  testing::Test::RecordProperty("peak_full", full.peak);
}

TEST(Recompute, EvaluationKeepsNothing) {
  const ModelConfig config = Model(Family::kGpt2);
  const auto model = MakeModel(config);
  const SingleRank single(RandomText(config.vocab, /*packed=*/true));
  const auto logits = [&](Recompute recompute) {
    model->set_recompute(recompute);
    Tape tape(/*recording=*/false);
    const Variable result = model->Logits(tape, *single.attention, single.batch);
    EXPECT_EQ(tape.num_nodes(), 0);
    return result.value().ToVector<double>();
  };
  EXPECT_EQ(logits(Recompute::kFull), logits(Recompute::kNone));
  EXPECT_EQ(logits(Recompute::kSelective), logits(Recompute::kNone));
}

}  // namespace
}  // namespace burst
