// Says how a step runs a model: which values it recomputes, splits and keeps in the host's memory.
// A plan never changes what is computed, up to rounding.
#pragma once

#include <cstdint>
#include <limits>

#include "model/config.h"
#include "model/ops/ops.h"
#include "model/pipeline_part.h"

namespace burst {

// How a layer saves memory. The options of //train have the names and defaults of these fields.
struct LayerMemory {
  // Selects the values that layers save for the backward.
  Recompute recompute = Recompute::kNone;
  // Layers of a segment. With more than one, only the input of a segment's first layer is saved.
  // The backward runs the segment once more, and then each of its layers as `recompute` says. 1 if
  // nothing is recomputed.
  int64_t recompute_segment = 1;

  // Tokens that a feed-forward, with its normalization, takes at a time. It saves nothing: the
  // backward runs it again (RecomputeInChunks). 0: all at once. Not with tensor parallelism.
  int64_t ffn_chunk = 0;
  // KV heads that attention takes at a time, with their query heads, from their projection on. It
  // saves the result of a group alone (RecomputeInParts). Divides the KV heads. 0: all at once. Not
  // with tensor parallelism, nor in passes that fill a cache.
  int64_t head_chunk = 0;

  bool KeepsAttention() const {
    return recompute == Recompute::kSelective || recompute == Recompute::kSequence;
  }
  // Returns how many of `kv_heads` attention takes at a time.
  int64_t HeadsAtATime(int64_t kv_heads) const { return head_chunk > 0 ? head_chunk : kv_heads; }
};

struct ExecutionPlan : LayerMemory {
  // The precision to which the projections of `rounded_layers` round their factors. The other
  // layers and the head keep the model's dtype.
  LinearPrecision linear_precision = LinearPrecision::kTensors;
  LayerRange rounded_layers = {0, std::numeric_limits<int64_t>::max()};

  // Activations of recomputing layers wait for the backward in the host's memory, except the last
  // segment's. `tokens`: the most of a pass on this rank, `attended`: those for which attention's
  // result is saved, `results`: how often it is. They size the memory that is reserved at the
  // start; 0 tokens: nothing is reserved.
  struct Offload {
    bool activations = false;
    int64_t tokens = 0, attended = 0;
    int results = 1;
  };
  Offload offload = {};

  // An exact pass takes all but attention in chunks of `chunk` tokens of a sequence, or as many
  // whole sequences, and adds over tokens exactly. Losses and gradients then have the same bits on
  // any number of ranks whose tokens are whole chunks, if attention is exact too (ExactAttention).
  // `tokens`: of a step, on all ranks. Gradients are complete in parameters().exact_sums(). Not
  // with tensor parallelism, nor with head_chunk.
  struct Exact {
    int64_t chunk = 0;  // 0: not exact
    int64_t tokens = 0;
  };
  Exact exact = {};
};

}  // namespace burst
