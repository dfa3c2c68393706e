// Attention on Hopper (wgmma, TMA): bfloat16 or float16 operands, float32 statistics and
// accumulation. Serves any lengths and any head_dim that is a multiple of 8 up to 256 (64, 96
// forward, 128, 192 and 256 at full speed).
//
// Semantics as in burst/kernels/flash_attention.h; what a call must satisfy is checked by
// gpu/calls.cc. Queued on the thread's stream.
#pragma once

#include <cstdint>

#include "burst/kernels/flash_attention.h"
#include "burst/kernels/gpu/sm90/head_splits.h"

namespace burst {
namespace sm90 {

inline constexpr int64_t kSharedBytes = 227 << 10;  // of a thread block, at most

// The number of int32 counters that a call needs; zeros.
int64_t ForwardCounters(const FlashForwardParams& params);

void Forward(const FlashForwardParams& params, int32_t* counters);

// Computes the forward of params.fp8. scratch: Fp8Scratch(params) bytes, aligned to 256.
int64_t Fp8Scratch(const FlashForwardParams& params);
void Fp8Forward(const FlashForwardParams& params, int32_t* counters, uint8_t* scratch);

// Whether the kernels can assign dQ: in a fixed order somebody is the first to add to a tile. Else
// params.first_dq must be empty.
bool AssignsDq(const FlashBackwardParams& params);

// For BackwardScratch.
int64_t BackwardCounters(const FlashBackwardParams& params);
int64_t BackwardQueryTiles(const FlashBackwardParams& params);

// dQ is float32; params.assign is of dK and dV.
void Backward(const FlashBackwardParams& params, const BackwardScratch& scratch);

}  // namespace sm90
}  // namespace burst
