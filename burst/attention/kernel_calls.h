// How a block of a ring is given to the kernels: what burst_attention.cc (the forward) and
// burst_attention_backward.cc share.
#pragma once

#include <cstdint>
#include <vector>

#include "burst/attention/kernel_mask.h"
#include "burst/attention/ring/call_plan.h"
#include "burst/attention/ring/ring.h"
#include "burst/attention/ring/schedule.h"
#include "burst/kernels/flash_attention.h"
#include "burst/tensor/tensor.h"

namespace burst {

inline constexpr int kSeqAxis = 1, kHeadAxis = 2;        // axes of [batch, seqlen, heads, columns]
inline constexpr int kLseSeqAxis = 2, kLseHeadAxis = 1;  // axes of [batch, heads, seqlen]

// The shape of a call with q, k and v, without a mask. softmax_scale 0: 1 / sqrt(head_dim).
FlashAttentionShape KernelShape(double softmax_scale, const Tensor& q, const Tensor& k,
                                const Tensor& v);

// Sets the mask of a call to a part of `mask`.
void SetMask(const MaskPart& part, const KernelMask& mask, DeviceType device,
             FlashAttentionShape* shape);

// The rows of a block that a ring sends, in contiguous memory.
Tensor TakeRows(const Tensor& block, int axis, const std::vector<BlockRows>& rows);

// A block as the ring sends it: contiguous, all of it or those rows.
Ring::Block BlockForSending(Ring::Block block, const std::vector<BlockRows>* rows);

}  // namespace burst
