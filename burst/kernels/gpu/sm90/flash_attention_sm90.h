// Attention on Hopper (wgmma, TMA): bfloat16 or float16 operands, float32 statistics and
// accumulation. It serves any lengths, and the widths of HopperKernelsServe (limits.h). Full speed:
// a head_dim of 64, 128, 192, 256, and 96 in the forward; 192 with a value_dim of 128.
//
// See burst/kernels/flash_attention.h for the semantics. gpu/flash_attention_gpu.cc checks every
// call. Calls are queued on the thread's stream.
#pragma once

#include <cstdint>

#include "burst/kernels/flash_attention.h"
#include "burst/kernels/gpu/sm90/head_splits.h"

namespace burst {
namespace sm90 {

inline constexpr int64_t kSharedBytes = 227 << 10;  // most bytes of a thread block

// Returns the number of int32 counters that a call needs, set to zero.
int64_t ForwardCounters(const FlashForwardParams& params);

void Forward(const FlashForwardParams& params, int32_t* counters);

// Computes the forward of params.fp8. scratch: Fp8Scratch(params) bytes, aligned to 256.
int64_t Fp8Scratch(const FlashForwardParams& params);
void Fp8Forward(const FlashForwardParams& params, int32_t* counters, uint8_t* scratch);

// Returns whether the kernels can assign dQ: a fixed order has a first addition to a tile.
// Otherwise params.dq.first must be empty.
bool AssignsDq(const FlashBackwardParams& params);

// Returns the sizes of BackwardScratch.
int64_t BackwardCounters(const FlashBackwardParams& params);
int64_t BackwardQueryTiles(const FlashBackwardParams& params);

// Computes the backward, with a sum of dQ also where dK and dV are assigned.
void Backward(const FlashBackwardParams& params, const BackwardScratch& scratch);

}  // namespace sm90
}  // namespace burst
