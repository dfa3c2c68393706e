// The order of the additions to dQ, as tests ask for it.
#pragma once

#include <cstdint>

#include "burst/kernels/flash_attention.h"

namespace burst {

// Asks for a fixed order of the additions, or lifts it. Short rows under a mask would keep it all
// the same, so a lifted order says that many queries may see a key. That is an upper bound.
inline void SetOrder(bool deterministic, FlashBackwardParams* params) {
  params->deterministic = deterministic;
  if (!deterministic) params->shape.visible.most_queries = int64_t{1} << 20;
}

}  // namespace burst
