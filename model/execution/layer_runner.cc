#include "model/execution/layer_runner.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "burst/base/check.h"
#include "burst/base/progress.h"
#include "model/ops/ops.h"

namespace burst {
namespace {

// Returns residual + ffn(norm(x)), computed in chunks of tokens. residual is x, or undefined.
Variable FeedForwardInChunks(const Block& block, int64_t chunk, const ForwardPass& pass,
                             const Variable& x, const Variable& residual) {
  const bool adds = residual.defined();
  return RecomputeInChunks(
      pass.tape, x, chunk,
      [&block, pass, adds](Tape& tape, const Variable& x) {
        return block.FeedForwardBranch(pass.On(tape), x, adds ? x : Variable(), tape.result_use());
      },
      adds ? pass.tape.result_use() : ResultUse::kRead);
}

// Returns h plus the feed-forward branch.
Variable AddFeedForward(const Block& block, const LayerMemory& parts, const ForwardPass& pass,
                        const Variable& h) {
  ReachOp(static_cast<int>(block.layer()), "feed-forward");
  return block.AddFeedForward(pass, h, [&](const Variable& residual) {
    if (parts.ffn_chunk > 0) {
      BURST_CHECK(pass->parallel->ranks() == 1) << "a tensor-parallel layer in chunks";
      return FeedForwardInChunks(block, parts.ffn_chunk, pass, h, residual);
    }
    return block.FeedForwardBranch(pass, h, residual,
                                   residual.defined() ? pass.tape.result_use() : ResultUse::kRead);
  });
}

Variable Project(const ForwardPass& pass, Tape& tape, const Variable& x,
                 const LinearParameters& linear) {
  return Linear(tape, x, linear.weight, linear.bias, /*residual=*/{}, /*dx_done=*/nullptr,
                ResultUse::kRead, pass->linear_precision);
}

// Computes attention of one group of heads. With ffn_chunk > 0, x is the layer's input, and the
// chunks of tokens normalize it. Otherwise x is the normalized input.
Variable AttendGroup(const Block& block, int64_t ffn_chunk, const ForwardPass& pass,
                     const Variable& x, const HeadGroup& group) {
  const SelfAttention& attention = block.attention();
  const LinearParameters linear = attention.GroupProjection(pass.tape, group);
  if (ffn_chunk == 0) {
    return attention.AttendGroup(pass, Project(pass, pass.tape, x, linear), group);
  }
  const auto project = [&block, pass, linear](Tape& tape, const Variable& x) {
    return Project(pass, tape, block.AttentionInput(pass.On(tape), x), linear);
  };
  const Variable projected = RecomputeInChunks(pass.tape, x, ffn_chunk, project, ResultUse::kRead,
                                               linear.weight.shape()[0]);
  return attention.AttendGroup(pass, projected, group);
}

// Returns attention's result of all heads, [batch, length, heads, head_dim], one group of heads at
// a time. Every group normalizes its chunks again. So the only tensors of all tokens and the whole
// width are x and its gradient.
Variable AttendInGroups(const Block& block, const LayerMemory& parts, const ForwardPass& pass,
                        const Variable& x) {
  const SelfAttention& attention = block.attention();
  BURST_CHECK(pass->parallel->ranks() == 1 && attention.kv_heads() % parts.head_chunk == 0);
  const int64_t count = attention.kv_heads() / parts.head_chunk;
  std::shared_ptr<KeptAttention> kept = pass.kept_attention;
  if (kept == nullptr && pass.tape.recording()) kept = std::make_shared<KeptAttention>();
  std::vector<TapeFunction> groups;
  for (int64_t i = 0; i < count; ++i) {
    groups.push_back([&block, ffn_chunk = parts.ffn_chunk, pass, kept, group = HeadGroup{i, count}](
                         Tape& tape, const Variable& x) {
      return AttendGroup(block, ffn_chunk, pass.On(tape, kept), x, group);
    });
  }
  const Variable input = parts.ffn_chunk > 0 ? x : block.AttentionInput(pass, x);
  const Variable out =
      RecomputeInParts(pass.tape, input, std::move(groups), /*axis=*/2,
                       {x.shape()[0], x.shape()[1], attention.heads(), attention.head_dim()},
                       kept == nullptr ? Tensor() : kept->out);
  if (kept != nullptr) kept->out = out.value();
  return out;
}

// Runs the layer of an exact pass. The steps before attention and after it go chunk by chunk.
Variable RunInTokenChunks(const Block& block, const LayerMemory& parts, const ForwardPass& pass,
                          const Variable& x) {
  const SelfAttention& attention = block.attention();
  const DType dtype = x.value().dtype();
  const DeviceType device = x.value().device();
  ReachOp(static_cast<int>(block.layer()), "projections", /*on_device=*/true);
  const Shape heads = {attention.heads() + 2 * attention.kv_heads(), attention.head_dim()};
  const Variable qkv =
      pass.InChunks({x}, heads, dtype, device,
                    [&](const ForwardPass& of_chunk, const std::vector<Variable>& inputs) {
                      return attention.Project(of_chunk, block.AttentionInput(of_chunk, inputs[0]));
                    });
  const Variable out = attention.Attend(pass, qkv);
  return pass.InChunks(
      {x, out}, {x.shape().back()}, dtype, device,
      [&](const ForwardPass& of_chunk, const std::vector<Variable>& inputs) {
        const Variable h = block.AddAttention(of_chunk, inputs[0], [&](const Variable& residual) {
          return attention.ProjectOut(of_chunk, inputs[1], residual);
        });
        return AddFeedForward(block, parts, of_chunk, h);
      },
      pass.tape.result_use());
}

// Returns the residual stream after a layer that runs in parts, so that less memory is needed at
// once. The parts are the layer's own steps (block.h), and the results equal Block::Forward's up to
// rounding. x and result: [batch, length, width]. An exact pass (PassContext::chunks) takes
// everything but attention chunk by chunk.
Variable RunBlock(const Block& block, const LayerMemory& parts, const ForwardPass& pass,
                  const Variable& x) {
  if (pass->chunks != nullptr) return RunInTokenChunks(block, parts, pass, x);
  const SelfAttention& attention = block.attention();
  const bool in_groups = parts.HeadsAtATime(attention.kv_heads()) < attention.kv_heads();
  if (!in_groups && parts.ffn_chunk == 0) return block.Forward(pass, x);
  ReachOp(static_cast<int>(block.layer()), "projections", /*on_device=*/true);
  const Variable h = block.AddAttention(pass, x, [&](const Variable& residual) {
    if (!in_groups) {
      return attention.Forward(pass, block.AttentionInput(pass, x, pass->linear_precision),
                               residual);
    }
    return attention.ProjectOut(pass, AttendInGroups(block, parts, pass, x), residual);
  });
  return AddFeedForward(block, parts, pass, h);
}

}  // namespace

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
                          const LayerSchedules& schedules, bool fills_cache,
                          const GradientsReady& ready) const {
  Context context;
  context.parts = plan_;
  if (fills_cache) context.parts.head_chunk = 0;
  context.ready = ready;
  if (plan_.recompute == Recompute::kSequence && pass.tape.recording()) {
    context.recomputed = RecomputedPrefix(schedules);
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

LayerSchedules LayerRunner::RecomputedPrefix(const LayerSchedules& schedules) const {
  if (prefix_of_.windowed == schedules.windowed && prefix_of_.full == schedules.full) {
    return prefix_;
  }
  const auto half = [](const AttentionSchedule& whole) {
    return std::make_shared<const AttentionSchedule>(whole.Prefix(whole.shard().seqlen() / 2));
  };
  prefix_ = half(*schedules.windowed);
  if (schedules.full != schedules.windowed) prefix_.full = half(*schedules.full);
  prefix_of_ = schedules;
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
    x = RunLayer(InPrecisionOf(block, pass), context, block, x, kept);
    if (plan_.recompute_segment > 1) pass.tape.OnBackward([x] { x.ForgetValue(); });
    const bool is_last = layer + 1 == static_cast<int64_t>(blocks_.size()) && part_.chunks == 1;
    // Before a segment's first layer the backward runs the segment before it, from its first layer
    // on.
    const int64_t before = layer - (layer == first ? plan_.recompute_segment : 1);
    uses_.EndLayer(pass.tape, layer, before, ends || (pass.tape.recording() && is_last));
  }
  return x;
}

ForwardPass LayerRunner::InPrecisionOf(const Block& block, const ForwardPass& pass) const {
  const LayerRange& rounded = plan_.rounded_layers;
  if (block.layer() >= rounded.begin && block.layer() < rounded.end) return pass;
  const auto context = std::make_shared<PassContext>(*pass.context);
  context->linear_precision = LinearPrecision::kTensors;
  return {pass.tape, context, pass.kept_attention};
}

Variable LayerRunner::RunLayer(const ForwardPass& pass, const Context& context, const Block& block,
                               const Variable& x, std::shared_ptr<KeptAttention>* kept) const {
  if (plan_.recompute == Recompute::kNone || !pass.tape.recording()) {
    return RunBlock(block, context.parts, pass, x);
  }
  if (plan_.KeepsAttention()) {
    *kept = std::make_shared<KeptAttention>();
    if (context.recomputed.windowed != nullptr) {
      (*kept)->again = context.recomputed.Of(block.is_full());
    }
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
