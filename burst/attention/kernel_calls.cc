#include "burst/attention/kernel_calls.h"

#include <cmath>

#include "absl/container/inlined_vector.h"

namespace burst {

FlashAttentionShape KernelShape(double softmax_scale, const Tensor& q, const Tensor& k,
                                const Tensor& v) {
  FlashAttentionShape shape;
  shape.batch = q.dim(0);
  shape.q_len = q.dim(1);
  shape.k_len = k.dim(1);
  shape.num_heads = q.dim(2);
  shape.num_kv_heads = k.dim(2);
  shape.head_dim = q.dim(3);
  shape.value_dim = v.dim(3);
  shape.softmax_scale =
      softmax_scale != 0 ? softmax_scale : 1 / std::sqrt(static_cast<double>(q.dim(3)));
  shape.dtype = q.dtype();
  return shape;
}

void SetMask(const MaskPart& part, const KernelMask& mask, DeviceType device,
             FlashAttentionShape* shape) {
  const KernelKeys* const keys = part.IntervalsOf(mask);
  shape->visible = keys != nullptr ? keys->ranges(device) : KeyRanges();
  shape->blocks = keys != nullptr ? KeyBlocks() : mask.blocks.lists(device);
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

Ring::Block BlockForSending(Ring::Block block, const std::vector<BlockRows>* rows) {
  absl::InlinedVector<TensorCopy, 4> copies;
  for (Ring::BlockTensor& own : block) {
    if (rows != nullptr) {
      own.tensor = TakeRows(own.tensor, own.length_axis, *rows);
    } else if (!own.tensor.is_contiguous()) {
      copies.push_back({own.tensor, Tensor::EmptyLike(own.tensor)});
      own.tensor = copies.back().to;
    }
  }
  CopyAll(copies);
  return block;
}

}  // namespace burst
