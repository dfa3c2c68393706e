// Runs calls of the GPU's attention kernels: chooses the kernels, checks the call, allocates
// scratch memory. Errors end the program without absl::Status, because benchmarks put this code
// into a shared library, which Debian's static libraries of absl cannot be part of.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "burst/kernels/gpu/flash_attention_gpu.h"

namespace burst {
namespace cuda {

using MaybeFamily = std::optional<KernelFamily>;

// Returns the best kernels for the calling thread's GPU, or `only`. Returns null when they do not
// serve such tensors; NotServed gives the reason.
MaybeFamily FamilyFor(MaybeFamily only, DType dtype, const HeadWidths& widths);
std::string NotServed(DType dtype, const HeadWidths& widths);
// Returns whether the kernels that serve such tensors take FlashAttentionShape::blocks.
bool TakesBlocks(MaybeFamily only, DType dtype, const HeadWidths& widths);
// Returns whether they take FlashForwardParams::fp8.
bool TakesFp8(MaybeFamily only, DType dtype, const HeadWidths& widths);
// Returns whether they take FlashAttentionShape::scores and FlashForwardParams::max_logits of such
// tensors, without lists of blocks and fp8.
bool ChangesScores(MaybeFamily only, DType dtype, const HeadWidths& widths);

void Forward(MaybeFamily only, const FlashForwardParams& params);
void Backward(MaybeFamily only, const FlashBackwardParams& params);

}  // namespace cuda
}  // namespace burst
