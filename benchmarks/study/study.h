// Attention kernels on the CPU for tests and benchmarks only: tiles are compared with them.
#pragma once

#include <cstdint>

#include "burst/kernels/flash_attention.h"

namespace burst {

// Returns kernels with whole matmuls and a softmax in between, as before FlashAttention. They hold
// one [batch, num_heads, q_len, k_len] forward, and two backward.
const AttentionKernels& NaiveKernels();

// Returns the CPU's kernels with tiles of `tile_keys` keys, at least 1. Their scratch memory grows
// by about 5 head_dim + 256 elements a key.
const AttentionKernels& TiledKernels(int64_t tile_keys);

}  // namespace burst
