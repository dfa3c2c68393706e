// A call of the GPU's attention kernels: the choice of the kernels, the checks, the scratch memory.
// Without absl::Status, so that benchmarks can have these in a shared library (Debian's static
// libraries of it cannot be part of one).
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "burst/kernels/gpu/flash_attention_gpu.h"

namespace burst {
namespace cuda {

using MaybeFamily = std::optional<KernelFamily>;

// The best kernels for the calling thread's GPU, or those of `only`; null when they do not serve
// such tensors, for which NotServed gives the reason.
MaybeFamily FamilyFor(MaybeFamily only, DType dtype, int64_t head_dim);
std::string NotServed(DType dtype, int64_t head_dim);
// Whether the kernels that serve them take FlashAttentionShape::blocks.
bool TakesBlocks(MaybeFamily only, DType dtype, int64_t head_dim);
// Whether they take FlashForwardParams::fp8.
bool TakesFp8(MaybeFamily only, DType dtype, int64_t head_dim);
// Whether they take FlashAttentionShape::scores and FlashForwardParams::max_logits, but not with
// lists of blocks or fp8.
bool ChangesScores(MaybeFamily only);

void Forward(MaybeFamily only, const FlashForwardParams& params);
void Backward(MaybeFamily only, const FlashBackwardParams& params);

}  // namespace cuda
}  // namespace burst
