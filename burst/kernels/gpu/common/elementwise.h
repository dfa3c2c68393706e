// The memory-bound steps around the backward, for every dtype and head_dim. Queued on the thread's
// stream.
#pragma once

#include "burst/kernels/flash_attention.h"

namespace burst {
namespace cuda {

// FlashDeltaParams: operands of any floating-point dtype and strides.
void Delta(const FlashDeltaParams& params);

// to = from + addend [batch, seqlen, num_heads, head_dim]; float32 to `dtype`, bfloat16 or float16,
// both of any strides. addend: null, or of float32 or `dtype`, of any strides too.
void Convert(const Tensor& from, const Tensor& addend, const AttentionOperand& to, DType dtype);

// FlashMerge.
void MergeParts(const Tensor& parts, const Tensor& out, const Tensor& sinks);

// FlashSinkGrads.
void SinkGrads(const Tensor& lse, const Tensor& delta, const Tensor& sinks, const Tensor& dsinks);

}  // namespace cuda
}  // namespace burst
