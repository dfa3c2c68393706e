#include "burst/attention/kernel_calls.h"

#include <cmath>

namespace burst {

MaskParts PartsOf(const KernelMask& mask, bool takes_blocks) {
  MaskParts parts;
  if (!mask.blocks.none() && takes_blocks) parts.push_back({nullptr, &mask.blocks});
  if (!mask.blocks.none() && !takes_blocks) {
    for (const KernelKeys& keys : mask.blocks.parts()) parts.push_back({&keys, nullptr});
  }
  for (const KernelKeys& keys : mask.parts) parts.push_back({&keys, nullptr});
  return parts;
}

FlashAttentionShape KernelShape(double softmax_scale, const Tensor& q, const Tensor& k) {
  FlashAttentionShape shape;
  shape.batch = q.dim(0);
  shape.q_len = q.dim(1);
  shape.k_len = k.dim(1);
  shape.num_heads = q.dim(2);
  shape.num_kv_heads = k.dim(2);
  shape.head_dim = q.dim(3);
  shape.softmax_scale =
      softmax_scale != 0 ? softmax_scale : 1 / std::sqrt(static_cast<double>(q.dim(3)));
  shape.dtype = q.dtype();
  return shape;
}

void SetMask(const MaskPart& part, DeviceType device, FlashAttentionShape* shape) {
  shape->visible = part.keys != nullptr ? part.keys->ranges(device) : KeyRanges();
  shape->blocks = part.blocks != nullptr ? part.blocks->lists(device) : KeyBlocks();
}

Tensor TakeRows(const Tensor& block, int axis, const std::vector<BlockRows>& rows) {
  Shape shape = block.shape();
  shape[axis] = 0;
  for (const BlockRows& range : rows) shape[axis] += range.count;
  const Tensor taken = Tensor::Empty(shape, block.dtype(), block.device());
  std::vector<TensorCopy> copies;
  int64_t at = 0;
  for (const BlockRows& range : rows) {
    copies.push_back(
        {block.Slice(axis, range.begin, range.count), taken.Slice(axis, at, range.count)});
    at += range.count;
  }
  CopyAll(copies);
  return taken;
}

}  // namespace burst
