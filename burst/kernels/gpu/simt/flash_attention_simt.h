// Attention on any GPU, without tensor cores: float32 and float64, any head_dim up to 256. For
// training in float32 and for tests; what they compute in is the dtype itself. No atomics: dQ, and
// dK with dV, are kernels of their own, so every result is bitwise the same in every run.
//
// Semantics as in burst/kernels/flash_attention.h. Queued on the thread's stream.
#pragma once

#include "burst/kernels/flash_attention.h"

namespace burst {
namespace simt {

// Whether the calling thread's GPU has the shared memory for it: float64 with a head_dim above 128
// needs 131 KB a thread block, all else at most 99 KB.
bool Fits(DType dtype, int64_t head_dim);

void Forward(const FlashForwardParams& params);
void Backward(const FlashBackwardParams& params);

}  // namespace simt
}  // namespace burst
