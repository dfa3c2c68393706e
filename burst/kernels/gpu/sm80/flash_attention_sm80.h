// Attention on Ampere and later (mma.sync): bfloat16 or float16 operands, float32 statistics and
// accumulation. Serves any head_dim that is a multiple of 8 up to 256 (64, 128 and 256 at full
// speed), any lengths.
//
// Semantics as in burst/kernels/flash_attention.h; what a call must satisfy is checked by
// gpu/calls.cc. Queued on the thread's stream.
#pragma once

#include <cstdint>

#include "burst/kernels/flash_attention.h"

namespace burst {
namespace sm80 {

// The number of int32 counters that a call needs; zeros.
int64_t ForwardCounters(const FlashForwardParams& params);
int64_t BackwardCounters(const FlashBackwardParams& params);

void Forward(const FlashForwardParams& params, int32_t* counters);

// Forward for few queries and many keys: the keys of a KV head are shared out to `parts` blocks for
// every 16 or 32 rows (queries times the heads of a group). Any call is served, most of them slower
// than by Forward.
int DecodeParts(const FlashAttentionShape& shape);
// Returns the floats of memory that `parts` parts need; 0 for one part.
int64_t DecodeScratch(const FlashAttentionShape& shape, int parts);
void Decode(const FlashForwardParams& params, int parts, float* scratch, int32_t* counters);

// dQ is float32 and added to; params.first_dq is not read.
void Backward(const FlashBackwardParams& params, int32_t* counters);

}  // namespace sm80
}  // namespace burst
