// Tells whoever keeps a model's values or gradients elsewhere when a pass uses them, unit by unit
// (ParameterList::units): an optimizer's shards (ZeRO), for example.
#pragma once

#include <cstddef>
#include <cstdint>

#include "burst/autograd/tape.h"
#include "model/pipeline_part.h"

namespace burst {

// Is told of every use. A unit's values may be used several times in a pass. Errors go to the tape;
// even after one there is memory to compute with.
class ParameterUse {
 public:
  virtual ~ParameterUse() = default;

  // A forward follows. The values may have changed since the last one.
  virtual void BeginPass(Tape& tape) = 0;

  // The pass computes with the values of `unit` from here to EndValues(unit). The values of `next`
  // come later and may be fetched meanwhile; -1: nothing to fetch.
  virtual void BeginValues(Tape& tape, int unit, int next) = 0;
  virtual void EndValues(int unit) = 0;
  // The backward adds to the unit's gradients from here to EndGrads(unit).
  virtual void BeginGrads(int unit) = 0;
  virtual void EndGrads(Tape& tape, int unit) = 0;
};

// Reports the uses of one model's passes, in the order of the forward. Unit 0 holds the embeddings,
// unit 1 + l layer l, and the last unit what follows the layers.
//
// In a pass with a backward, the values of the last layer and of the last unit stay until their
// backward, which comes next. A pipeline stage with several chunks runs another pass first.
class UnitUses {
 public:
  UnitUses(int64_t layers, bool tied_embeddings, const PipelinePart& part)
      : layers_(layers), tied_(tied_embeddings), part_(part) {}

  // use: must outlive the passes. Null: nobody is told.
  void set_use(ParameterUse* use) { use_ = use; }
  bool reports() const { return use_ != nullptr; }

  void BeginPass(Tape& tape) const;
  void BeginEmbedding(Tape& tape) const;
  void EndEmbedding(Tape& tape) const;
  void BeginLayer(Tape& tape, int64_t layer, bool prefetches) const;
  // before: the layer whose values the backward needs next, -1: none on this stage.
  // backward_follows: the layer's backward comes next, so its values stay.
  void EndLayer(Tape& tape, int64_t layer, int64_t before, bool backward_follows) const;
  void BeginHead(Tape& tape) const;
  void EndHead(Tape& tape) const;

 private:
  int head_unit() const { return 1 + static_cast<int>(layers_); }

  const int64_t layers_;
  const bool tied_;
  const PipelinePart part_;
  ParameterUse* use_ = nullptr;
};

}  // namespace burst
