// Attention on Ampere and later (mma.sync): bfloat16 or float16 operands, float32 statistics and
// accumulation. It serves any lengths, and any head_dim that is a multiple of 8 up to 256 (64, 128
// and 256 at full speed).
//
// See burst/kernels/flash_attention.h for the semantics. gpu/flash_attention_gpu.cc checks every
// call. Calls are queued on the thread's stream.
#pragma once

#include <cstdint>

#include "burst/kernels/flash_attention.h"

namespace burst {
namespace sm80 {

// Returns the number of int32 counters that a call needs, set to zero.
int64_t ForwardCounters(const FlashForwardParams& params);
int64_t BackwardCounters(const FlashBackwardParams& params);

void Forward(const FlashForwardParams& params, int32_t* counters);

// The forward for few queries and many keys. `parts` blocks share the keys of a KV head. A block
// has 16 or 32 rows: queries times the heads of a group. It serves any call, most of them slower
// than Forward.
int DecodeParts(const FlashAttentionShape& shape);
// Returns the floats of memory that `parts` parts need; 0 for one part.
int64_t DecodeScratch(const FlashAttentionShape& shape, int parts);
void Decode(const FlashForwardParams& params, int parts, float* scratch, int32_t* counters);

// Adds to the sum of dQ; its first heads are not read.
void Backward(const FlashBackwardParams& params, int32_t* counters);

}  // namespace sm80
}  // namespace burst
