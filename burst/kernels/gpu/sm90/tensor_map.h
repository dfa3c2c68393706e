// Makes the TMA's descriptions of tensors, on the host.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "burst/kernels/flash_attention.h"

namespace burst {
namespace sm90 {

// The sizes of a tensor [batch, rows, heads, columns].
struct Extents {
  int64_t batch, rows, heads, columns;
};

// Makes the map of a tensor of bfloat16, float16 or float32. A copy moves box_rows rows of 128
// bytes of one head to a block of shared memory in the 128-byte swizzle (wgmma.cuh). Reads beyond
// the tensor give zeros; writes beyond it are dropped.
CUtensorMap MakeTensorMap(const AttentionOperand& tensor, DType dtype, const Extents& extents,
                          int box_rows);

// Makes the map of a tensor of 1-byte elements: [batch, num_heads, rows, columns], contiguous,
// columns a multiple of 16.
CUtensorMap MakeByteTensorMap(void* data, int64_t columns, int64_t rows, int64_t num_heads,
                              int64_t batch, int box_rows);

}  // namespace sm90
}  // namespace burst
