// Attention kernels that only tests and benchmarks use, on the CPU: what tiles are compared with.
#pragma once

#include <cstdint>

#include "burst/kernels/flash_attention.h"

namespace burst {

// Whole matmuls and a softmax in between, as it was before FlashAttention. Memory: one
// [batch, num_heads, q_len, k_len] forward, two backward.
const AttentionKernels& NaiveKernels();

// The CPU's kernels with tiles of `tile_keys` keys, at least 1. Their scratch memory grows by about
// 5 head_dim + 256 elements a key.
const AttentionKernels& TiledKernels(int64_t tile_keys);

}  // namespace burst
