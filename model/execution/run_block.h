// Runs one layer in parts, so that less memory is needed at once. The parts are the layer's own
// steps (block.h), and the results equal Block::Forward's up to rounding.
#pragma once

#include <cstdint>

#include "burst/autograd/tape.h"
#include "model/block.h"

namespace burst {

// Sizes of the parts; 0: all at once. ExecutionPlan explains them.
struct BlockParts {
  int64_t ffn_chunk = 0;
  int64_t head_chunk = 0;
};

// Returns the residual stream after the layer. x and result: [batch, length, width]. An exact pass
// (PassContext::chunks) takes everything but attention chunk by chunk.
Variable RunBlock(const Block& block, const BlockParts& parts, const ForwardPass& pass,
                  const Variable& x);

}  // namespace burst
