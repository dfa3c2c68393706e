// A small model, and the options with which its layers save memory.
#pragma once

#include <cstdint>

#include "model/transformer.h"

namespace burst {

inline ModelConfig RecomputedModel(Family family) {
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

struct Saving {
  Recompute recompute = Recompute::kNone;
  int64_t ffn_chunk = 0;
  bool offload = false;
  int64_t head_chunk = 0;
  int64_t segment = 1;
};

inline void Set(const Saving& saving, Transformer* model) {
  ExecutionPlan plan;
  plan.recompute = saving.recompute;
  plan.recompute_segment = saving.segment;
  plan.ffn_chunk = saving.ffn_chunk;
  plan.head_chunk = saving.head_chunk;
  plan.offload.activations = saving.offload;
  model->SetExecution(plan);
}

}  // namespace burst
