// Runs the layers of a model by an ExecutionPlan. It says which layers the backward runs again, in
// which segments and parts, and which tensors wait in the host's memory.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "burst/attention/sequence_parallel_attention.h"
#include "burst/autograd/tape.h"
#include "burst/tensor/host_copies.h"
#include "model/block.h"
#include "model/config.h"
#include "model/execution/offloaded_layer.h"
#include "model/execution/parameter_use.h"
#include "model/execution/plan.h"
#include "model/layers.h"
#include "model/pipeline_part.h"

namespace burst {

// Called during a backward when the gradients of the parameters [first, last) of the list are
// complete on this rank. They can then be summed over ranks while the backward continues. Every
// parameter is reported once.
using GradientsReady = std::function<void(int first, int last)>;

class LayerRunner {
 public:
  // What all arguments refer to must outlive the object. first_parameter: of each block, then of
  // what follows the blocks.
  LayerRunner(const std::vector<Block>& blocks, const std::vector<int>& first_parameter,
              const UnitUses& uses, const PipelinePart& part)
      : blocks_(blocks), first_parameter_(first_parameter), uses_(uses), part_(part) {}

  const ExecutionPlan& plan() const { return plan_; }
  // x_bytes, out_bytes: of the residual stream and of attention's result on this rank, for a token.
  void SetPlan(const ExecutionPlan& plan, DeviceType device, int64_t x_bytes, int64_t out_bytes);
  // Memory of the host that offloaded activations have taken.
  int64_t offload_bytes() const { return copies_ == nullptr ? 0 : copies_->host_bytes(); }

  // Runs layers [layers.begin, layers.end) on the residual stream x, [batch, length, width], and
  // returns the stream after them. `schedules` may have none if nothing is recorded. With
  // `fills_cache` attention takes all heads at once. `ready` may be null.
  Variable Run(const ForwardPass& pass, const LayerRange& layers, Variable x,
               const LayerSchedules& schedules, bool fills_cache,
               const GradientsReady& ready) const;

 private:
  // What the layers of one Run share.
  struct Context {
    LayerMemory parts;
    GradientsReady ready;
    // The tokens whose attention a recomputation computes again; null: none.
    LayerSchedules recomputed;
  };
  // The offloaded activations of a pass, by segment; null: the backward finds them on the device.
  using Offloaded = std::vector<std::unique_ptr<OffloadedLayer>>;

  // Layers [first, end). kept: becomes what a recomputed layer keeps of attention, null if nothing.
  Variable RunSegment(const ForwardPass& pass, const Context& context, int64_t first, int64_t end,
                      const Variable& x, std::shared_ptr<KeptAttention>* kept) const;
  // again: this is the second run, whose backward follows at once.
  Variable RunLayers(const ForwardPass& pass, const Context& context, int64_t first, int64_t end,
                     bool again, Variable x, std::shared_ptr<KeptAttention>* kept) const;
  // Returns the pass with the precision of a layer (ExecutionPlan::rounded_layers).
  ForwardPass InPrecisionOf(const Block& block, const ForwardPass& pass) const;
  Variable RunLayer(const ForwardPass& pass, const Context& context, const Block& block,
                    const Variable& x, std::shared_ptr<KeptAttention>* kept) const;
  bool Offloads(int64_t segment) const;
  void Offload(Tape& tape, int64_t segment, const Variable& input,
               const std::shared_ptr<KeptAttention>& kept,
               const std::shared_ptr<Offloaded>& segments) const;
  LayerSchedules RecomputedPrefix(const LayerSchedules& schedules) const;

  const std::vector<Block>& blocks_;
  const std::vector<int>& first_parameter_;
  const UnitUses& uses_;
  const PipelinePart& part_;
  ExecutionPlan plan_;
  std::unique_ptr<HostCopies> copies_;  // with plan_.offload, else null
  // With kSequence: the schedules of the last pass, and the schedules of its earlier half.
  mutable LayerSchedules prefix_, prefix_of_;
};

}  // namespace burst
