// Hints about a mask with which the Hopper kernels use their cache well. Computed on the host, from
// a mask in the host's memory.
#pragma once

#include <cstdint>
#include <vector>

#include "burst/kernels/flash_attention.h"

namespace burst {
namespace sm90 {

// KeyRanges::most_queries. `ranges` describe `rows` batch rows of `q_len` queries each.
int64_t MostQueries(const KeyRanges& ranges, int64_t rows, int64_t q_len);

// The order in which the backward walks lists of `rows` batch rows on a grid of query blocks by key
// blocks: positions in query_list and place_list.
std::vector<int32_t> WalkOrder(const KeyBlocks& blocks, int64_t rows, int64_t query_blocks,
                               int64_t key_blocks);

}  // namespace sm90
}  // namespace burst
