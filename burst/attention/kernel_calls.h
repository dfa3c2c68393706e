// How a block of a ring is given to the kernels: what burst_attention.cc (the forward) and
// burst_attention_backward.cc share.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "burst/attention/kernel_mask.h"
#include "burst/attention/ring/schedule.h"
#include "burst/kernels/flash_attention.h"
#include "burst/tensor/tensor.h"

namespace burst {

inline constexpr int kSeqAxis = 1, kHeadAxis = 2;        // of [batch, seqlen, heads, head_dim]
inline constexpr int kLseSeqAxis = 2, kLseHeadAxis = 1;  // of [batch, heads, seqlen]

// A part of a mask, which is one call of the kernels: of intervals, or of blocks.
struct MaskPart {
  const KernelKeys* keys;
  const KernelBlocks* blocks;
};
using MaskParts = absl::InlinedVector<MaskPart, 4>;

// takes_blocks: whether the kernels do.
MaskParts PartsOf(const KernelMask& mask, bool takes_blocks);

// The shape of a call with q and k, without a mask. softmax_scale 0: 1 / sqrt(head_dim).
FlashAttentionShape KernelShape(double softmax_scale, const Tensor& q, const Tensor& k);

void SetMask(const MaskPart& part, DeviceType device, FlashAttentionShape* shape);

// The rows of a block that a ring sends, in contiguous memory.
Tensor TakeRows(const Tensor& block, int axis, const std::vector<BlockRows>& rows);

}  // namespace burst
