// Tests that the memory of models whose layers are recomputed, chunked and offloaded follows from
// the shapes.
#include <gtest/gtest.h>

#include <cstdint>

#include "burst/autograd/tape.h"
#include "burst/device/memory.h"
#include "model/transformer.h"
#include "tests/model/saving.h"
#include "tests/model/small_models.h"

namespace burst {
namespace {

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

TEST(RecomputeMemory, IsThatOfTheShapes) {
  // Sizes are powers of two, so that the allocator rounds nothing.
  ModelConfig config = RecomputedModel(Family::kLlama);
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
TEST(RecomputeMemory, ChunksBoundTheMemoryOfAFeedForward) {
  constexpr int64_t kChunk = 32, kTokens = 2 * 256;
  for (const Family family : {Family::kLlama, Family::kGpt2}) {
    for (const Recompute recompute : {Recompute::kNone, Recompute::kFull, Recompute::kSelective}) {
      SCOPED_TRACE(testing::Message() << Name(recompute) << (family == Family::kGpt2));
      const auto peak = [&](int64_t ffn, int64_t chunk, bool recording) {
        ModelConfig config = RecomputedModel(family);
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
TEST(RecomputeMemory, GroupsAndChunksLeaveAFewTensorsOfTheWidth) {
  constexpr int64_t kTokens = 2 * 1024, kHeads = 8, kChunk = 32;
  const auto peak = [&](int64_t width) {
    ModelConfig config = RecomputedModel(Family::kLlama);
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
TEST(RecomputeMemory, GroupsOfHeadsBoundTheMemoryOfAttention) {
  constexpr int64_t kTokens = 2 * 256, kHeads = 8;
  for (const Recompute recompute : {Recompute::kNone, Recompute::kFull, Recompute::kSelective}) {
    SCOPED_TRACE(Name(recompute));
    const auto peak = [&](int64_t head_dim, int64_t head_chunk) {
      ModelConfig config = RecomputedModel(Family::kLlama);
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

}  // namespace
}  // namespace burst
