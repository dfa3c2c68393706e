// Runs one layer in parts, so that less memory is needed at once. The parts are the layer's own
// steps (block.h), and the results equal Block::Forward's up to rounding.
#pragma once

#include "burst/autograd/tape.h"
#include "model/block.h"
#include "model/execution/plan.h"

namespace burst {

// Returns the residual stream after the layer. x and result: [batch, length, width]. `parts` says
// ffn_chunk and head_chunk. An exact pass (PassContext::chunks) takes everything but attention
// chunk by chunk.
Variable RunBlock(const Block& block, const LayerMemory& parts, const ForwardPass& pass,
                  const Variable& x);

}  // namespace burst
