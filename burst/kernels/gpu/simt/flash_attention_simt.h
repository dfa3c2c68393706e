// Attention on any GPU, without tensor cores, for training in float32 and for tests. It computes in
// the inputs' dtype, float32 or float64, for any head_dim and value_dim up to 256. dQ has one
// kernel, dK and dV another. So nothing is atomic, and results have the same bits in every run. See
// burst/kernels/flash_attention.h for the semantics. Calls are queued on the thread's stream.
#pragma once

#include "burst/kernels/flash_attention.h"

namespace burst {
namespace simt {

// Returns whether the thread's GPU has enough shared memory a thread block: 131 KB for float64 with
// a width above 128, else at most 99 KB.
bool Fits(DType dtype, const HeadWidths& widths);

void Forward(const FlashForwardParams& params);
void Backward(const FlashBackwardParams& params);

}  // namespace simt
}  // namespace burst
