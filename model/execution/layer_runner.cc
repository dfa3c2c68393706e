#include "model/execution/layer_runner.h"

#include <algorithm>
#include <utility>

#include "burst/base/check.h"

namespace burst {

void LayerRunner::SetPlan(const ExecutionPlan& plan, DeviceType device, int64_t x_bytes,
                          int64_t out_bytes) {
  BURST_CHECK(plan.recompute_segment >= 1 &&
              (plan.recompute_segment == 1 || plan.recompute != Recompute::kNone));
  plan_ = plan;
  copies_ = nullptr;
  const ExecutionPlan::Offload& offload = plan.offload;
  if (!offload.activations) return;
  copies_ = std::make_unique<HostCopies>(device);
  if (offload.tokens == 0) return;
  int64_t segments = 0;
  for (int64_t i = 0; i * plan.recompute_segment < static_cast<int64_t>(blocks_.size()); ++i) {
    segments += Offloads(i);
  }
  copies_->Reserve(segments, offload.tokens * x_bytes);
  if (!plan.KeepsAttention() || plan.recompute_segment > 1) return;
  const int64_t bytes = offload.attended * out_bytes;
  copies_->Reserve(segments, bytes);
  if (offload.results == 1) return;
  const int64_t kv_heads = blocks_[0].attention().kv_heads();
  const int64_t groups = kv_heads / plan.HeadsAtATime(kv_heads);
  copies_->Reserve((offload.results - 1) * segments * groups, bytes / groups);
}

Variable LayerRunner::Run(const ForwardPass& pass, const LayerRange& layers, Variable x,
                          const std::shared_ptr<const AttentionSchedule>& schedule,
                          bool fills_cache, const GradientsReady& ready) const {
  Context context;
  context.parts = plan_;
  if (fills_cache) context.parts.head_chunk = 0;
  context.ready = ready;
  if (plan_.recompute == Recompute::kSequence && pass.tape.recording()) {
    context.recomputed = RecomputedPrefix(schedule);
  }
  const auto offloaded = std::make_shared<Offloaded>(blocks_.size());
  for (int64_t first = layers.begin; first < layers.end; first += plan_.recompute_segment) {
    const Variable input = x;
    std::shared_ptr<KeptAttention> kept;
    x = RunSegment(pass, context, first, std::min(first + plan_.recompute_segment, layers.end),
                   input, &kept);
    if (copies_ != nullptr && pass.tape.recording()) {
      Offload(pass.tape, first / plan_.recompute_segment, input, kept, offloaded);
    }
    // When the backward comes to the segment, all readers of the segment's result have ended.
    pass.tape.OnBackward([x] { x.ForgetValue(); });
  }
  return x;
}

std::shared_ptr<const AttentionSchedule> LayerRunner::RecomputedPrefix(
    const std::shared_ptr<const AttentionSchedule>& schedule) const {
  if (prefix_of_ != schedule) {
    prefix_ =
        std::make_shared<const AttentionSchedule>(schedule->Prefix(schedule->shard().seqlen() / 2));
    prefix_of_ = schedule;
  }
  return prefix_;
}

Variable LayerRunner::RunSegment(const ForwardPass& pass, const Context& context, int64_t first,
                                 int64_t end, const Variable& x,
                                 std::shared_ptr<KeptAttention>* kept) const {
  if (plan_.recompute_segment == 1 || !pass.tape.recording()) {
    return RunLayers(pass, context, first, end, /*again=*/false, x, kept);
  }
  const auto runs = std::make_shared<int>(0);
  return RecomputeInBackward(
      pass.tape, x, [this, pass, context, first, end, runs](Tape& tape, const Variable& x) {
        std::shared_ptr<KeptAttention> kept;  // kept by the layer alone, until its own backward
        const bool again = ++*runs > 1;
        return RunLayers(pass.On(tape), context, first, end, again, x, &kept);
      });
}

Variable LayerRunner::RunLayers(const ForwardPass& pass, const Context& context, int64_t first,
                                int64_t end, bool again, Variable x,
                                std::shared_ptr<KeptAttention>* kept) const {
  for (int64_t layer = first; layer < end; ++layer) {
    const Block& block = blocks_[static_cast<size_t>(layer)];
    if (context.ready != nullptr) {
      const auto begin_of = first_parameter_.begin() + layer;
      pass.tape.OnBackward(
          [ready = context.ready, begin = begin_of[0], last = begin_of[1]] { ready(begin, last); });
    }
    const bool ends = again && layer + 1 == end;
    uses_.BeginLayer(pass.tape, layer, /*prefetches=*/!ends);
    x = RunLayer(pass, context, block, x, kept);
    if (plan_.recompute_segment > 1) pass.tape.OnBackward([x] { x.ForgetValue(); });
    const bool is_last = layer + 1 == static_cast<int64_t>(blocks_.size()) && part_.chunks == 1;
    // Before a segment's first layer the backward runs the segment before it, from its first layer
    // on.
    const int64_t before = layer - (layer == first ? plan_.recompute_segment : 1);
    uses_.EndLayer(pass.tape, layer, before, ends || (pass.tape.recording() && is_last));
  }
  return x;
}

Variable LayerRunner::RunLayer(const ForwardPass& pass, const Context& context, const Block& block,
                               const Variable& x, std::shared_ptr<KeptAttention>* kept) const {
  if (plan_.recompute == Recompute::kNone || !pass.tape.recording()) {
    return RunBlock(block, context.parts, pass, x);
  }
  if (plan_.KeepsAttention()) {
    *kept = std::make_shared<KeptAttention>();
    (*kept)->again = context.recomputed;
  }
  return RecomputeInBackward(
      pass.tape, x,
      [&block, parts = context.parts, pass, kept = *kept](Tape& tape, const Variable& x) {
        return RunBlock(block, parts, pass.On(tape, kept), x);
      });
}

// The backward of the last segment comes first, so it keeps its activations on the device.
bool LayerRunner::Offloads(int64_t segment) const {
  return plan_.recompute != Recompute::kNone &&
         (segment + 1) * plan_.recompute_segment < static_cast<int64_t>(blocks_.size());
}

// Runs after the segment's forward is queued. By then the segment before it has copied its
// activations, and its memory is free from here on.
void LayerRunner::Offload(Tape& tape, int64_t segment, const Variable& input,
                          const std::shared_ptr<KeptAttention>& kept,
                          const std::shared_ptr<Offloaded>& segments) const {
  const auto index = static_cast<size_t>(segment);
  if (Offloads(segment) && input.value().is_contiguous()) {
    (*segments)[index] = std::make_unique<OffloadedLayer>(*copies_, input, kept);
  }
  if (index > 0 && (*segments)[index - 1] != nullptr) (*segments)[index - 1]->Release();
  tape.OnBackward([segments, index] {
    // The list gives the entry away. Otherwise the input and its gradient would stay until the tape
    // ends.
    if (const auto own = std::move((*segments)[index]); own != nullptr) own->Restore();
    if (index > 0 && (*segments)[index - 1] != nullptr) (*segments)[index - 1]->Fetch();
  });
}

}  // namespace burst
