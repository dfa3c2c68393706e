// Which tokens of a rank's block a ring sends. Under a window or with packed documents, other ranks
// need few of them. A document on one rank never leaves it, and only the edge of a window does.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "burst/attention/ring/route.h"
#include "burst/mask/mask.h"

namespace burst {

enum class BlockOf { kKeys, kQueries };

// The tokens of a rank that others need, of the rank's `positions`, increasing: keys that queries
// of others see, or queries that see keys of others. Null: send all of them, because most are
// needed, they are in many pieces, or the mask is one of slices. O(positions) for each row.
std::optional<std::vector<int32_t>> NeededElsewhere(BlockOf block, const Mask& mask, int64_t seqlen,
                                                    const std::vector<int32_t>& positions);

// Where the positions `some` are among `all`; both increase.
std::vector<BlockRows> FindRows(const std::vector<int32_t>& some, const std::vector<int32_t>& all);

}  // namespace burst
