// Host side: descriptions of tensors for the TMA, and what a call's arguments must satisfy.
#pragma once

#include <cuda.h>

#include "burst/kernels/gpu/sm90/flash_attention_sm90.h"

namespace burst {
namespace sm90 {

// `tensor`: [batch, seqlen, num_heads, head_dim] of bf16 or fp32. A copy moves box_rows rows of 128
// bytes of one head to a block of shared memory in the 128-byte swizzle (wgmma.cuh). Reads beyond
// the tensor give zeros; writes beyond it are dropped.
cudaError_t MakeTensorMap(const Operand& tensor, bool is_float, int64_t batch, int64_t seqlen,
                          int64_t num_heads, int64_t head_dim, int box_rows, CUtensorMap* map);

// Sizes and the mask; not the operands, which MakeTensorMap checks.
bool IsServed(const Shape& shape);

int MultiprocessorCount();

}  // namespace sm90
}  // namespace burst
