// The part of a model that a stage of a pipeline has (train/pipeline): runs of its layers. The
// embeddings precede the first run; the final normalization and the head follow the last run.
//
// The layers are cut into stages x chunks runs, equal but for one layer, shorter ones first. Run k
// is chunk k / stages of stage k % stages (Narayanan et al., arXiv 2104.04473, section 2.2).
#pragma once

#include <cstdint>

namespace burst {

struct LayerRange {
  int64_t begin = 0, end = 0;
};

struct PipelinePart {
  int stage = 0;
  int stages = 1;
  int chunks = 1;

  int runs() const { return stages * chunks; }
  int Run(int chunk) const { return chunk * stages + stage; }
  bool IsFirst(int chunk) const { return Run(chunk) == 0; }
  bool IsLast(int chunk) const { return Run(chunk) + 1 == runs(); }
  bool HasFirst() const { return stage == 0; }
  bool HasLast() const { return stage + 1 == stages; }
  // The layers of a chunk, if the model has `layers`.
  LayerRange Layers(int64_t layers, int chunk) const {
    const int64_t run = Run(chunk);
    return {layers * run / runs(), layers * (run + 1) / runs()};
  }
  bool HasLayer(int64_t layers, int64_t layer) const {
    const LayerRange run = RunOf(layers, layer);
    return run.begin < run.end;
  }
  // Returns the stage's run that has a layer; empty if the stage does not have it.
  LayerRange RunOf(int64_t layers, int64_t layer) const {
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const LayerRange own = Layers(layers, chunk);
      if (own.begin <= layer && layer < own.end) return own;
    }
    return {};
  }
};

}  // namespace burst
