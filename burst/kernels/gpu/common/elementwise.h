// The memory-bound steps around the backward, for every dtype and head_dim. Queued on the thread's
// stream.
#pragma once

#include "burst/kernels/flash_attention.h"

namespace burst {
namespace cuda {

// FlashDeltaParams: float32, float64 or bfloat16 operands of any strides.
void Delta(const FlashDeltaParams& params);

// to = from + addend [batch, seqlen, num_heads, head_dim]; float32 to bfloat16, both of any
// strides. addend: null, or float32 or bfloat16, of any strides too.
void Convert(const Tensor& from, const Tensor& addend, const AttentionOperand& to);

// FlashMerge.
void MergeParts(const Tensor& parts, const Tensor& out);

}  // namespace cuda
}  // namespace burst
