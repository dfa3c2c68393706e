// Tests models whose layers are recomputed in the backward pass. Losses and gradients have the same
// bits as in models that store everything, with every strategy. Memory and messages have the sizes
// that follow from the shapes. tape_test tests the op on the tape, and trainer_test whole runs.
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

// Returns a model with sinks, and with changed scores if kernels support them. A llama normalizes
// after its branches.
ModelConfig ModelOfChangedScores(Family family) {
  ModelConfig config = Model(family);
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

struct Saving {
  Recompute recompute = Recompute::kNone;
  int64_t ffn_chunk = 0;
  bool offload = false;
  int64_t head_chunk = 0;
  int64_t segment = 1;
};

void Set(const Saving& saving, Transformer* model) {
  ExecutionPlan plan;
  plan.recompute = saving.recompute;
  plan.recompute_segment = saving.segment;
  plan.ffn_chunk = saving.ffn_chunk;
  plan.head_chunk = saving.head_chunk;
  plan.offload.activations = saving.offload;
  model->SetExecution(plan);
}

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
  BURST_ASSIGN_OR_RETURN(const Step kept, TakeStep({}, *attention, batch, *model));
  for (const Recompute recompute : {Recompute::kFull, Recompute::kSelective}) {
    SCOPED_TRACE(Name(recompute));
    BURST_ASSIGN_OR_RETURN(const Step again, TakeStep({recompute}, *attention, batch, *model));
    EXPECT_EQ(again.loss, kept.loss);
    EXPECT_EQ(again.gradients, kept.gradients);
    EXPECT_EQ(again.ready, std::vector<int>(again.ready.size(), 1));
    EXPECT_EQ(again.backward_bytes, kept.backward_bytes);
    if (recompute == Recompute::kFull) {
      EXPECT_EQ(again.forward_bytes, 2 * kept.forward_bytes);
    } else if (HasRing(ranks.strategy) && ranks.group == 1) {
      EXPECT_EQ(again.forward_bytes, kept.forward_bytes) << "attention's result is kept";
    } else if (ranks.strategy == Strategy::kUlysses && ranks.ranks == 2) {
      // q, k and v are gathered again. Only out, which is as large as q, is not sent back a second
      // time.
      const int64_t qkv = config.heads + 2 * config.kv_heads, all = qkv + config.heads;
      EXPECT_EQ(again.forward_bytes * all, kept.forward_bytes * (all + qkv));
    }
    // The tensors that layers keep are in the host's memory meanwhile.
    for (int run = 0; run < 2; ++run) {
      BURST_ASSIGN_OR_RETURN(const Step offloaded,
                             TakeStep({recompute, 0, true}, *attention, batch, *model));
      EXPECT_EQ(offloaded.loss, kept.loss);
      EXPECT_EQ(offloaded.gradients, kept.gradients);
      EXPECT_EQ(offloaded.ready, again.ready);
      EXPECT_EQ(offloaded.backward_bytes, kept.backward_bytes);
    }
  }
  const bool exchanges =
      ranks.strategy == Strategy::kUlysses || ranks.strategy == Strategy::kBurstUlysses;
  // Only the later half's result of attention is kept. For the other half, blocks go around again.
  const double bound = dtype == DType::kFloat64 ? 1e-12 : dtype == DType::kFloat32 ? 1e-4 : 0.05;
  for (const Saving& saving : {Saving{Recompute::kSequence}, Saving{Recompute::kSequence, 0, true},
                               Saving{Recompute::kSequence, 0, false, 0, 2}}) {
    BURST_ASSIGN_OR_RETURN(const Step late, TakeStep(saving, *attention, batch, *model));
    EXPECT_EQ(late.loss, kept.loss);
    ExpectNear(late.gradients, kept.gradients, bound);
    EXPECT_EQ(late.ready, std::vector<int>(late.ready.size(), 1));
    if (exchanges) continue;  // out and lse are gathered again
    EXPECT_EQ(late.backward_bytes, kept.backward_bytes);
  }
  // Stores the input of the first of two layers in a row, and of the third layer by itself.
  for (const Recompute recompute : {Recompute::kFull, Recompute::kSelective}) {
    for (const bool offload : {false, true}) {
      BURST_ASSIGN_OR_RETURN(const Step rows,
                             TakeStep({recompute, 0, offload, 0, 2}, *attention, batch, *model));
      EXPECT_EQ(rows.loss, kept.loss);
      EXPECT_EQ(rows.gradients, kept.gradients);
      EXPECT_EQ(rows.ready, std::vector<int>(rows.ready.size(), 1));
      EXPECT_EQ(rows.backward_bytes, kept.backward_bytes);
      if (recompute == Recompute::kFull) {
        EXPECT_EQ(rows.forward_bytes, 3 * kept.forward_bytes);
      } else if (HasRing(ranks.strategy) && ranks.group == 1) {
        EXPECT_EQ(rows.forward_bytes, 2 * kept.forward_bytes);
      }
    }
  }
  if (parallel.ranks() > 1) return absl::OkStatus();
  // Chunks change roundings alone, and recomputation of layers changes nothing about them.
  BURST_ASSIGN_OR_RETURN(const Step chunked,
                         TakeStep({Recompute::kNone, 5}, *attention, batch, *model));
  ExpectNear(chunked.loss, kept.loss, bound);
  ExpectNear(chunked.gradients, kept.gradients, bound);
  EXPECT_EQ(chunked.ready, std::vector<int>(chunked.ready.size(), 1));
  for (const Recompute recompute : {Recompute::kFull, Recompute::kSelective}) {
    BURST_ASSIGN_OR_RETURN(const Step again, TakeStep({recompute, 5}, *attention, batch, *model));
    EXPECT_EQ(again.loss, chunked.loss);
    EXPECT_EQ(again.gradients, chunked.gradients);
  }
  // So do groups of heads. They are projected once more, but attended to once; K and V, and their
  // gradients, go around a ring once.
  const int64_t group = config.kv_heads / 2;
  if (exchanges && config.heads / 2 % (ranks.group > 1 ? ranks.group : ranks.ranks) != 0) {
    return absl::OkStatus();  // a group is too small to be divided
  }
  // In an all-to-all, a rank has the gradients of the sinks of the heads that it computes. Groups
  // of heads give it other heads. So the test compares sums over the ranks.
  const auto of_all_ranks = [&comm](const Values& own) {
    const Tensor sum = Tensor::FromVector(own, {static_cast<int64_t>(own.size())}, kTestDevice);
    EXPECT_TRUE(comm.AllReduceSum(sum).ok());
    return sum.ToVector<double>();
  };
  const Values gradients = of_all_ranks(kept.gradients);
  BURST_ASSIGN_OR_RETURN(const Step grouped,
                         TakeStep({Recompute::kNone, 0, false, group}, *attention, batch, *model));
  ExpectNear(grouped.loss, kept.loss, bound);
  ExpectNear(of_all_ranks(grouped.gradients), gradients, bound);
  EXPECT_EQ(grouped.ready, std::vector<int>(grouped.ready.size(), 1));
  if (!exchanges) {  // otherwise ranks may share a KV head, and send it more often
    EXPECT_EQ(grouped.forward_bytes, kept.forward_bytes);
    EXPECT_EQ(grouped.backward_bytes, kept.backward_bytes);
  }
  for (const Recompute recompute : {Recompute::kFull, Recompute::kSelective}) {
    for (const bool offload : {false, true}) {
      BURST_ASSIGN_OR_RETURN(const Step again,
                             TakeStep({recompute, 0, offload, group}, *attention, batch, *model));
      EXPECT_EQ(again.loss, grouped.loss) << Name(recompute);
      EXPECT_EQ(again.gradients, grouped.gradients) << Name(recompute);
      EXPECT_EQ(again.backward_bytes, grouped.backward_bytes);
      if (exchanges) continue;
      EXPECT_EQ(again.forward_bytes,
                (recompute == Recompute::kFull ? 2 : 1) * grouped.forward_bytes);
    }
  }
  // The tokens of a group also go through the projections in chunks.
  BURST_ASSIGN_OR_RETURN(const Step both,
                         TakeStep({Recompute::kNone, 5, false, group}, *attention, batch, *model));
  ExpectNear(both.loss, kept.loss, bound);
  ExpectNear(of_all_ranks(both.gradients), gradients, bound);
  EXPECT_EQ(both.ready, std::vector<int>(both.ready.size(), 1));
  for (const Recompute recompute : {Recompute::kFull, Recompute::kSelective}) {
    BURST_ASSIGN_OR_RETURN(const Step again,
                           TakeStep({recompute, 5, true, group}, *attention, batch, *model));
    EXPECT_EQ(again.loss, both.loss);
    EXPECT_EQ(again.gradients, both.gradients);
  }
  return absl::OkStatus();
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
      const ModelConfig config = Model(Family::kLlama);
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

// Memory in use in addition to the memory before: with the tape, before the backward, and at the
// peak.
struct Memory {
  int64_t kept = 0, peak = 0;
};

Memory MemoryOfStep(const Saving& saving, SequenceParallelAttention& attention,
                    const SequenceBatch& batch, Transformer& model) {
  Set(saving, &model);
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
  const auto measure = [&](const Saving& saving) {
    return MemoryOfStep(saving, *single.attention, single.batch, *model);
  };
  measure({});  // buffers that stay
  const Memory none = measure({}), full = measure({Recompute::kFull});
  const Memory selective = measure({Recompute::kSelective});

  // The channels that one layer's forward stores for each token: normalizations with 1 / rms,
  // projected heads before and after RoPE, out and lse. Then come the residual stream after either
  // branch, gate and up, and the result of SwiGLU.
  const int64_t w = config.width, qkv = w + 2 * config.kv_heads * config.WithDefaults().head_dim;
  const int64_t all = 2 * (w + 1) + 2 * qkv + (w + config.heads) + 2 * w + 3 * config.ffn;
  const int64_t stream = w, result = w + config.heads;
  const int64_t unit = 2 * 256 * 8;  // bytes of a channel: tokens, double
  EXPECT_EQ(none.kept - full.kept, config.layers * (all - stream) * unit);
  EXPECT_EQ(none.kept - selective.kept, config.layers * (all - stream - result) * unit);
  // kSequence stores attention's result for the later half of the tokens only.
  const Memory sequence = measure({Recompute::kSequence});
  EXPECT_EQ(none.kept - sequence.kept,
            config.layers * (all - stream) * unit - config.layers * result * unit / 2);
  // Stores only the first layer's input of every four layers.
  const Memory rows = measure({Recompute::kSelective, 0, false, 0, 4});
  EXPECT_EQ(full.kept - rows.kept, config.layers * 3 / 4 * stream * unit);
  const Memory rows_away = measure({Recompute::kSelective, 0, true, 0, 4});
  EXPECT_EQ(rows.kept - rows_away.kept, (config.layers / 4 - 1) * stream * unit);
  // The host's memory has all kept tensors but the last layer's, whose backward comes next. They do
  // not count as the device's memory, even on the CPU, because HostBuffer takes none of the pool.
  const Memory full_away = measure({Recompute::kFull, 0, true});
  EXPECT_EQ(full.kept - full_away.kept, (config.layers - 1) * stream * unit);
  EXPECT_EQ(model->offload_bytes(), (config.layers - 1) * stream * unit);
  const Memory selective_away = measure({Recompute::kSelective, 0, true});
  EXPECT_EQ(selective.kept - selective_away.kept, (config.layers - 1) * 2 * w * unit);
  EXPECT_EQ(model->offload_bytes(), (config.layers - 1) * 2 * stream * unit);
  EXPECT_LT(selective_away.peak, selective.peak);
  // Feed-forwards in chunks keep neither their normalization nor tensors with ffn channels.
  const Memory chunks = measure({Recompute::kNone, 32});
  EXPECT_EQ(none.kept - chunks.kept, config.layers * ((w + 1) + 3 * config.ffn) * unit);
  // At most one whole layer is in memory. During its backward there are also two values of its
  // result, from the first run and from the second, and their gradient.
  const int64_t others = config.layers - 1;
  EXPECT_GE(none.peak - full.peak, (others * (all - stream) - 3 * stream) * unit);
  EXPECT_GE(none.peak - selective.peak, (others * (all - stream - result) - 3 * stream) * unit);
  testing::Test::RecordProperty("peak_none", none.peak);
  testing::Test::RecordProperty("peak_selective", selective.peak);
  testing::Test::RecordProperty("peak_full", full.peak);
}

// With a feed-forward in chunks, no buffer grows with tokens * ffn in the forward, in the backward,
// or without a tape.
TEST(Recompute, ChunksBoundTheMemoryOfAFeedForward) {
  constexpr int64_t kChunk = 32, kTokens = 2 * 256;
  for (const Family family : {Family::kLlama, Family::kGpt2}) {
    for (const Recompute recompute : {Recompute::kNone, Recompute::kFull, Recompute::kSelective}) {
      SCOPED_TRACE(testing::Message() << Name(recompute) << (family == Family::kGpt2));
      const auto peak = [&](int64_t ffn, int64_t chunk, bool recording) {
        ModelConfig config = Model(family);
        config.layers = 2;
        config.context = kTokens / 2;
        config.dropout = 0;
        config.ffn = ffn;
        const auto model =
            *Transformer::Create(config, DType::kFloat64, /*seed=*/3, kTestDevice, {});
        const SingleRank single(RandomText(config.vocab, /*packed=*/false, kTokens / 2));
        for (int run = 0;; ++run) {  // the first run leaves buffers that stay
          int64_t bytes = 0;
          if (recording) {
            bytes = MemoryOfStep({recompute, chunk}, *single.attention, single.batch, *model).peak;
          } else {
            ExecutionPlan plan;
            plan.ffn_chunk = chunk;
            model->SetExecution(plan);
            const int64_t before = GetMemoryStats(kTestDevice).bytes_in_use;
            ResetPeakMemory(kTestDevice);
            Tape tape(/*recording=*/false);
            model->Logits(tape, *single.attention, single.batch);
            bytes = GetMemoryStats(kTestDevice).peak_bytes - before;
          }
          if (run == 1) return bytes;
        }
      };
      // With a tape there are up to three tensors of ffn channels, their gradients, and copies of
      // two.
      const int64_t small = 64, large = 1024, more = (large - small) * sizeof(double);
      EXPECT_LE(peak(large, kChunk, true) - peak(small, kChunk, true), 8 * kChunk * more);
      EXPECT_GE(peak(large, 0, true) - peak(small, 0, true), 2 * kTokens * more);
      if (recompute != Recompute::kNone) continue;
      EXPECT_LE(peak(large, kChunk, false) - peak(small, kChunk, false), 3 * kChunk * more);
      EXPECT_GE(peak(large, 0, false) - peak(small, 0, false), kTokens * more);
    }
  }
}

// A layer in groups of heads and chunks of tokens needs at most a fixed number of tensors of [all
// tokens, width]. They are its input and result, the branch's value between them, attention's
// result, and the gradients of the last two. Their number does not depend on the heads and the ffn.
TEST(Recompute, GroupsAndChunksLeaveAFewTensorsOfTheWidth) {
  constexpr int64_t kTokens = 2 * 1024, kHeads = 8, kChunk = 32;
  const auto peak = [&](int64_t width) {
    ModelConfig config = Model(Family::kLlama);
    config.layers = 1;
    config.heads = config.kv_heads = kHeads;
    config.width = width;
    config.ffn = 4 * width;
    config.dropout = 0;
    const auto model = *Transformer::Create(config, DType::kFloat64, /*seed=*/3, kTestDevice, {});
    const SingleRank single(RandomText(config.vocab, /*packed=*/false, kTokens / 2));
    const Saving saving = {Recompute::kFull, kChunk, false, 1};
    MemoryOfStep(saving, *single.attention, single.batch, *model);  // buffers that stay
    return MemoryOfStep(saving, *single.attention, single.batch, *model).peak;
  };
  const int64_t more = 64 * kTokens * static_cast<int64_t>(sizeof(double));
  // A group has an eighth of the width, and 14 tensors of it as above. A chunk is small.
  EXPECT_LE(peak(128) - peak(64), (6 + 14.0 / kHeads + 0.5) * static_cast<double>(more));
}

// With attention in groups of heads, only its result, the result's gradient and the projections'
// parameters grow with the number of heads.
TEST(Recompute, GroupsOfHeadsBoundTheMemoryOfAttention) {
  constexpr int64_t kTokens = 2 * 256, kHeads = 8;
  for (const Recompute recompute : {Recompute::kNone, Recompute::kFull, Recompute::kSelective}) {
    SCOPED_TRACE(Name(recompute));
    const auto peak = [&](int64_t head_dim, int64_t head_chunk) {
      ModelConfig config = Model(Family::kLlama);
      config.layers = 1;
      config.heads = config.kv_heads = kHeads;
      config.head_dim = head_dim;
      config.dropout = 0;
      const auto model = *Transformer::Create(config, DType::kFloat64, /*seed=*/3, kTestDevice, {});
      const SingleRank single(RandomText(config.vocab, /*packed=*/false, kTokens / 2));
      const Saving saving = {recompute, 0, false, head_chunk};
      MemoryOfStep(saving, *single.attention, single.batch, *model);  // buffers that stay
      return MemoryOfStep(saving, *single.attention, single.batch, *model).peak;
    };
    const int64_t small = 16, large = 64;
    const int64_t more = (large - small) * kTokens * static_cast<int64_t>(sizeof(double));
    const int64_t grouped = peak(large, 1) - peak(small, 1), all = peak(large, 0) - peak(small, 0);
    // There are the result and its gradient. A group has q, k and v, before and after rotation,
    // with their gradients, and its result with its gradient.
    EXPECT_LE(grouped, (2 * kHeads + 14) * more);
    // There are the result and its gradient, the rotated q, k and v, and their gradients.
    EXPECT_GE(all, (2 + 6) * kHeads * more);
  }
}

TEST(Recompute, EvaluationKeepsNothing) {
  const ModelConfig config = Model(Family::kGpt2);
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
