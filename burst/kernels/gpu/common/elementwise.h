// The memory-bound steps around the backward, for every dtype and width of heads. They are queued
// on the thread's stream.
#pragma once

#include "burst/kernels/flash_attention.h"

namespace burst {
namespace cuda {

// Computes delta of FlashDeltaParams: operands of any floating-point dtype and strides.
void Delta(const FlashDeltaParams& params);

// Computes to = from + addend, all [batch, seqlen, num_heads, columns] of any strides. Tensor
// `from` is float32, `to` is `dtype`: bfloat16 or float16. addend: null, float32 or `dtype`.
// addend_rows: of FlashConvert; null: the addend has all rows.
void Convert(const Tensor& from, const Tensor& addend, const int32_t* addend_rows,
             const AttentionOperand& to, DType dtype);

// Merges partial results, as FlashMerge says.
void MergeParts(const Tensor& parts, const Tensor& out, const Tensor& sinks);

// Computes the gradients of sinks, as FlashSinkGrads says.
void SinkGrads(const Tensor& lse, const Tensor& delta, const Tensor& sinks, const Tensor& dsinks);

}  // namespace cuda
}  // namespace burst
