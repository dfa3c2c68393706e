// Tests models whose layers are recomputed in the backward pass. Losses and gradients have the same
// bits as in models that store everything, with every strategy. Messages have the sizes that follow
// from the shapes. recompute_memory_test tests memory, tape_test the op on the tape, and
// trainer_test whole runs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "burst/attention/strategy.h"
#include "burst/autograd/tape.h"
#include "burst/base/status.h"
#include "model/transformer.h"
#include "tests/attention/sequence_problem.h"
#include "tests/model/saving.h"
#include "tests/model/small_models.h"

namespace burst {
namespace {

using Values = std::vector<double>;

// Returns a model with sinks, and with changed scores if kernels support them. A llama normalizes
// after its branches.
ModelConfig ModelOfChangedScores(Family family) {
  ModelConfig config = RecomputedModel(family);
  if (family == Family::kLlama) config.norm_position = NormPosition::kAfter;
  config.attention_sinks = true;
  if (kTestDevice == DeviceType::kCpu) {
    config.attention_dropout = 0.2;
    config.attention_softcap = 1.5;
  }
  return config;
}

struct Step {
  Values loss, gradients;
  std::vector<int> ready;  // how often each parameter's gradient was said to be complete
  int64_t forward_bytes = 0, backward_bytes = 0;  // bytes that attention sends
};

absl::StatusOr<Step> TakeStep(const Saving& saving, SequenceParallelAttention& attention,
                              const SequenceBatch& batch, Transformer& model) {
  Set(saving, &model);
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

// Expects that every difference is at most `bound` times the largest value.
void ExpectNear(const Values& have, const Values& want, double bound) {
  ASSERT_EQ(have.size(), want.size());
  double largest = 0, worst = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    largest = std::max(largest, std::abs(want[i]));
    worst = std::max(worst, std::abs(have[i] - want[i]));
  }
  EXPECT_LE(worst, bound * largest);
}

struct Ranks {
  Strategy strategy;
  int ranks;
  int group = 1;     // the group size of burst+ulysses
  int per_node = 0;  // a double ring
  int64_t length = 24;
  enum { kNo, kTp, kTpSp } tensor_parallel = kNo;
  int64_t window = 0;  // of the first of three layers
};

constexpr Recompute kOfLayers[] = {Recompute::kFull, Recompute::kSelective};

void ExpectReadyOnce(const Step& step) {
  EXPECT_EQ(step.ready, std::vector<int>(step.ready.size(), 1));
}

// Compares steps that save memory with a step that stores everything, on one rank.
class Comparison {
 public:
  Comparison(const Ranks& ranks, const ModelConfig& config, DType dtype, const SequenceBatch& batch,
             SequenceParallelAttention* attention, Transformer* model, Communicator* comm)
      : ranks_(ranks),
        config_(config),
        batch_(batch),
        attention_(*attention),
        model_(*model),
        comm_(*comm),
        bound_(dtype == DType::kFloat64   ? 1e-12
               : dtype == DType::kFloat32 ? 1e-4
                                          : 0.05),
        exchanges_(ranks.strategy == Strategy::kUlysses ||
                   ranks.strategy == Strategy::kBurstUlysses),
        has_ring_(HasRing(ranks.strategy) && ranks.group == 1) {}

  absl::Status Run() {
    BURST_ASSIGN_OR_RETURN(kept_, Take({}));
    for (const Recompute recompute : kOfLayers) BURST_RETURN_IF_ERROR(OfLayers(recompute));
    BURST_RETURN_IF_ERROR(OfHalfOfTheSequence());
    BURST_RETURN_IF_ERROR(OfSegments());
    if (ranks_.tensor_parallel != Ranks::kNo) return absl::OkStatus();
    BURST_RETURN_IF_ERROR(InChunks());
    // A group of heads may be too small to be divided.
    const int divisor = ranks_.group > 1 ? ranks_.group : ranks_.ranks;
    if (exchanges_ && config_.heads / 2 % divisor != 0) return absl::OkStatus();
    return InGroupsOfHeads();
  }

 private:
  absl::StatusOr<Step> Take(const Saving& saving) const {
    return TakeStep(saving, attention_, batch_, model_);
  }

  absl::Status OfLayers(Recompute recompute) const {
    SCOPED_TRACE(Name(recompute));
    BURST_ASSIGN_OR_RETURN(const Step again, Take({recompute}));
    EXPECT_EQ(again.loss, kept_.loss);
    EXPECT_EQ(again.gradients, kept_.gradients);
    ExpectReadyOnce(again);
    EXPECT_EQ(again.backward_bytes, kept_.backward_bytes);
    if (recompute == Recompute::kFull) {
      EXPECT_EQ(again.forward_bytes, 2 * kept_.forward_bytes);
    } else if (has_ring_) {
      EXPECT_EQ(again.forward_bytes, kept_.forward_bytes) << "attention's result is kept";
    } else if (ranks_.strategy == Strategy::kUlysses && ranks_.ranks == 2) {
      // q, k and v are gathered again. Only out, which is as large as q, is not sent back a second
      // time.
      const int64_t qkv = config_.heads + 2 * config_.kv_heads, all = qkv + config_.heads;
      EXPECT_EQ(again.forward_bytes * all, kept_.forward_bytes * (all + qkv));
    }
    // The tensors that layers keep are in the host's memory meanwhile.
    for (int run = 0; run < 2; ++run) {
      BURST_ASSIGN_OR_RETURN(const Step offloaded, Take({recompute, 0, /*offload=*/true}));
      EXPECT_EQ(offloaded.loss, kept_.loss);
      EXPECT_EQ(offloaded.gradients, kept_.gradients);
      EXPECT_EQ(offloaded.ready, again.ready);
      EXPECT_EQ(offloaded.backward_bytes, kept_.backward_bytes);
    }
    return absl::OkStatus();
  }

  // Only the later half's result of attention is kept. For the other half, blocks go around again.
  absl::Status OfHalfOfTheSequence() const {
    for (const Saving& saving :
         {Saving{Recompute::kSequence}, Saving{Recompute::kSequence, 0, true},
          Saving{Recompute::kSequence, 0, false, 0, 2}}) {
      BURST_ASSIGN_OR_RETURN(const Step late, Take(saving));
      EXPECT_EQ(late.loss, kept_.loss);
      ExpectNear(late.gradients, kept_.gradients, bound_);
      ExpectReadyOnce(late);
      if (exchanges_) continue;  // out and lse are gathered again
      EXPECT_EQ(late.backward_bytes, kept_.backward_bytes);
    }
    return absl::OkStatus();
  }

  // Stores the input of the first of two layers in a row, and of the third layer by itself.
  absl::Status OfSegments() const {
    for (const Recompute recompute : kOfLayers) {
      for (const bool offload : {false, true}) {
        BURST_ASSIGN_OR_RETURN(const Step rows, Take({recompute, 0, offload, 0, 2}));
        EXPECT_EQ(rows.loss, kept_.loss);
        EXPECT_EQ(rows.gradients, kept_.gradients);
        ExpectReadyOnce(rows);
        EXPECT_EQ(rows.backward_bytes, kept_.backward_bytes);
        if (recompute == Recompute::kFull) {
          EXPECT_EQ(rows.forward_bytes, 3 * kept_.forward_bytes);
        } else if (has_ring_) {
          EXPECT_EQ(rows.forward_bytes, 2 * kept_.forward_bytes);
        }
      }
    }
    return absl::OkStatus();
  }

  // Chunks change roundings alone, and recomputation of layers changes nothing about them.
  absl::Status InChunks() const {
    BURST_ASSIGN_OR_RETURN(const Step chunked, Take({Recompute::kNone, 5}));
    ExpectNear(chunked.loss, kept_.loss, bound_);
    ExpectNear(chunked.gradients, kept_.gradients, bound_);
    ExpectReadyOnce(chunked);
    for (const Recompute recompute : kOfLayers) {
      BURST_ASSIGN_OR_RETURN(const Step again, Take({recompute, 5}));
      EXPECT_EQ(again.loss, chunked.loss);
      EXPECT_EQ(again.gradients, chunked.gradients);
    }
    return absl::OkStatus();
  }

  // Groups of heads change roundings alone, too. They are projected once more, but attended to
  // once; K and V, and their gradients, go around a ring once.
  absl::Status InGroupsOfHeads() const {
    const int64_t group = config_.kv_heads / 2;
    BURST_ASSIGN_OR_RETURN(const Step grouped, Take({Recompute::kNone, 0, false, group}));
    ExpectNearOverRanks(grouped);
    if (!exchanges_) {  // otherwise ranks may share a KV head, and send it more often
      EXPECT_EQ(grouped.forward_bytes, kept_.forward_bytes);
      EXPECT_EQ(grouped.backward_bytes, kept_.backward_bytes);
    }
    for (const Recompute recompute : kOfLayers) {
      for (const bool offload : {false, true}) {
        BURST_ASSIGN_OR_RETURN(const Step again, Take({recompute, 0, offload, group}));
        EXPECT_EQ(again.loss, grouped.loss) << Name(recompute);
        EXPECT_EQ(again.gradients, grouped.gradients) << Name(recompute);
        EXPECT_EQ(again.backward_bytes, grouped.backward_bytes);
        if (exchanges_) continue;
        EXPECT_EQ(again.forward_bytes,
                  (recompute == Recompute::kFull ? 2 : 1) * grouped.forward_bytes);
      }
    }
    // The tokens of a group also go through the projections in chunks.
    BURST_ASSIGN_OR_RETURN(const Step both, Take({Recompute::kNone, 5, false, group}));
    ExpectNearOverRanks(both);
    for (const Recompute recompute : kOfLayers) {
      BURST_ASSIGN_OR_RETURN(const Step again, Take({recompute, 5, true, group}));
      EXPECT_EQ(again.loss, both.loss);
      EXPECT_EQ(again.gradients, both.gradients);
    }
    return absl::OkStatus();
  }

  // In an all-to-all, a rank has the gradients of the sinks of the heads that it computes. Groups
  // of heads give it other heads. So this compares sums over the ranks.
  void ExpectNearOverRanks(const Step& step) const {
    const auto of_all_ranks = [this](const Values& own) {
      const Tensor sum = Tensor::FromVector(own, {static_cast<int64_t>(own.size())}, kTestDevice);
      EXPECT_TRUE(comm_.AllReduceSum(sum).ok());
      return sum.ToVector<double>();
    };
    ExpectNear(step.loss, kept_.loss, bound_);
    ExpectNear(of_all_ranks(step.gradients), of_all_ranks(kept_.gradients), bound_);
    ExpectReadyOnce(step);
  }

  const Ranks& ranks_;
  const ModelConfig& config_;
  const SequenceBatch& batch_;
  SequenceParallelAttention& attention_;
  Transformer& model_;
  Communicator& comm_;
  const double bound_;
  const bool exchanges_, has_ring_;
  Step kept_;
};

absl::Status ExpectSameBits(const Ranks& ranks, Family family, DType dtype, Communicator& comm) {
  ModelConfig config = ModelOfChangedScores(family);
  if (ranks.window > 0) config.full_layers = {1, 2};
  BurstAttentionOptions options;
  options.scores = ScoresOf(config);
  options.ranks_per_node = ranks.per_node;
  const bool tensor = ranks.tensor_parallel != Ranks::kNo;
  // The ranks exchange sums for it, which a second run of a layer sends again.
  if (tensor && family == Family::kLlama) config.qk_norm = QkNorm::kAll;
  BURST_ASSIGN_OR_RETURN(
      const auto attention,
      CreateAttention(ranks.strategy, options, ranks.group, tensor ? nullptr : &comm,
                      tensor ? RankGroup{2, comm.rank()} : RankGroup{}));
  TensorParallel parallel;
  if (tensor) parallel = TensorParallel(&comm, ranks.tensor_parallel == Ranks::kTpSp);
  BURST_ASSIGN_OR_RETURN(const auto model,
                         Transformer::Create(config, dtype, /*seed=*/3, kTestDevice, parallel));
  const Text text = RandomText(/*vocab=*/13, /*packed=*/ranks.length > 5, ranks.length);
  BURST_ASSIGN_OR_RETURN(const LayerSchedules schedules,
                         SchedulesOf(config, *attention, text, ranks.window));
  const SequenceBatch batch = Cut(text, schedules);
  return Comparison(ranks, config, dtype, batch, attention.get(), model.get(), &comm).Run();
}

TEST(Recompute, LossAndGradientsAreTheSameBits) {
  const DType dtypes[] = {DType::kFloat32, DType::kBFloat16};
  const Ranks cases[] = {{Strategy::kSingle, 1},
                         {Strategy::kBurst, 2},
                         {Strategy::kBurst, 2, 1, 0, 24, Ranks::kNo, /*window=*/7},
                         {Strategy::kRing, 2},
                         {Strategy::kBurst, 4, 1, /*per_node=*/2},
                         {Strategy::kUlysses, 2},
                         {Strategy::kBurstUlysses, 4, /*group=*/2},
                         {Strategy::kBurst, 4, 1, 0, /*length=*/3},
                         {Strategy::kUlysses, 4, 1, 0, /*length=*/3},
                         {Strategy::kSingle, 2, 1, 0, 24, Ranks::kTp},
                         {Strategy::kSingle, 2, 1, 0, 24, Ranks::kTpSp}};
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

// The earlier half's keys and values go around once more, in every layer.
TEST(Recompute, OfHalfOfTheSequenceSendsHalfAgain) {
  for (const int ranks : {2, 4}) {
    if (kTestDevice == DeviceType::kCuda && ranks > CudaDeviceCount()) continue;
    const absl::Status status = RunTestRanks(ranks, [&](Communicator& comm) -> absl::Status {
      BurstAttentionOptions options;
      options.layout = Layout::kStriped;
      BURST_ASSIGN_OR_RETURN(const auto attention,
                             CreateAttention(Strategy::kBurst, options, 1, &comm));
      const ModelConfig config = RecomputedModel(Family::kLlama);
      const auto model = MakeModel(config);
      const Text text = RandomText(config.vocab, /*packed=*/false, /*length=*/24);
      BURST_ASSIGN_OR_RETURN(const LayerSchedules schedules, SchedulesOf(config, *attention, text));
      const SequenceBatch batch = Cut(text, schedules);
      BURST_ASSIGN_OR_RETURN(const Step kept, TakeStep({}, *attention, batch, *model));
      BURST_ASSIGN_OR_RETURN(const Step late,
                             TakeStep({Recompute::kSequence}, *attention, batch, *model));
      EXPECT_GT(kept.forward_bytes, 0);
      EXPECT_EQ(2 * late.forward_bytes, 3 * kept.forward_bytes);
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(Recompute, EvaluationKeepsNothing) {
  const ModelConfig config = RecomputedModel(Family::kGpt2);
  const auto model = MakeModel(config);
  const SingleRank single(RandomText(config.vocab, /*packed=*/true));
  const auto logits = [&](Recompute recompute) {
    ExecutionPlan plan;
    plan.recompute = recompute;
    model->SetExecution(plan);
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
