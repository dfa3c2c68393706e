#include "model/execution/run_block.h"

#include <memory>
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

// Returns h + dropout(ffn(norm(h))).
Variable AddFeedForward(const Block& block, const LayerMemory& parts, const ForwardPass& pass,
                        const Variable& h) {
  ReachOp(static_cast<int>(block.layer()), "feed-forward");
  return Residual(pass, h, FeedForwardSite(block.layer()), [&](const Variable& residual) {
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
    return Project(pass, tape, block.attention_norm().Forward(pass.On(tape), x), linear);
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
  const Variable input = parts.ffn_chunk > 0 ? x : block.attention_norm().Forward(pass, x);
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
  const Variable qkv = pass.InChunks(
      {x}, heads, dtype, device,
      [&](const ForwardPass& of_chunk, const std::vector<Variable>& inputs) {
        return attention.Project(of_chunk, block.attention_norm().Forward(of_chunk, inputs[0]));
      });
  const Variable out = attention.Attend(pass, qkv);
  return pass.InChunks(
      {x, out}, {x.shape().back()}, dtype, device,
      [&](const ForwardPass& of_chunk, const std::vector<Variable>& inputs) {
        const Variable h = Residual(of_chunk, inputs[0], AttentionSite(block.layer()),
                                    [&](const Variable& residual) {
                                      return attention.ProjectOut(of_chunk, inputs[1], residual);
                                    });
        return AddFeedForward(block, parts, of_chunk, h);
      },
      pass.tape.result_use());
}

}  // namespace

Variable RunBlock(const Block& block, const LayerMemory& parts, const ForwardPass& pass,
                  const Variable& x) {
  if (pass->chunks != nullptr) return RunInTokenChunks(block, parts, pass, x);
  const SelfAttention& attention = block.attention();
  const bool in_groups = parts.HeadsAtATime(attention.kv_heads()) < attention.kv_heads();
  if (!in_groups && parts.ffn_chunk == 0) return block.Forward(pass, x);
  ReachOp(static_cast<int>(block.layer()), "projections", /*on_device=*/true);
  const Variable h = Residual(pass, x, AttentionSite(block.layer()), [&](const Variable& residual) {
    if (!in_groups) {
      const Variable normalized = block.attention_norm().Forward(pass, x, pass->linear_precision);
      return attention.Forward(pass, normalized, residual);
    }
    return attention.ProjectOut(pass, AttendInGroups(block, parts, pass, x), residual);
  });
  return AddFeedForward(block, parts, pass, h);
}

}  // namespace burst
