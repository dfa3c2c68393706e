// Computes hints about a mask, on the host, so that the Hopper kernels use their cache well. The
// mask is in the host's memory.
#pragma once

#include <cstdint>
#include <vector>

#include "burst/kernels/flash_attention.h"

namespace burst {
namespace sm90 {

// Returns KeyRanges::most_queries. `ranges` describe `rows` batch rows of `q_len` queries each.
int64_t MostQueries(const KeyRanges& ranges, int64_t rows, int64_t q_len);

// Returns the order in which the backward walks lists of `rows` batch rows: positions in query_list
// and place_list. The grid is query blocks by key blocks.
std::vector<int32_t> WalkOrder(const KeyBlocks& blocks, int64_t rows, int64_t query_blocks,
                               int64_t key_blocks);

}  // namespace sm90
}  // namespace burst
