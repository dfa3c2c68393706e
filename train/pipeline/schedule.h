// Gives the order in which a stage of a pipeline computes its parts of a step: a pure function.
//
// A model's layers are cut into stages x chunks runs of layers, one after another; run k belongs to
// stage k % stages, as its chunk k / stages (PipelinePart). A micro-batch passes all runs forward
// and then all of them backward. With one chunk the order is 1F1B (Narayanan et al., PipeDream,
// 2019). A stage first makes as many forward passes as there are stages after it, then one forward
// and one backward in turns. With several chunks it is the interleaved schedule (Narayanan et al.,
// arXiv 2104.04473, section 2.2). It takes micro-batches in groups of as many as there are stages.
#pragma once

#include <vector>

namespace burst {

struct PipelineShape {
  int stages = 1;
  int chunks = 1;         // the chunks of each stage
  int micro_batches = 1;  // with several chunks: below `stages`, or a multiple of it
};

// The forward or the backward pass of a micro-batch through a chunk.
struct PipelineAction {
  bool forward = true;
  int micro_batch = 0;
  int chunk = 0;

  bool operator==(const PipelineAction& other) const {
    return forward == other.forward && micro_batch == other.micro_batch && chunk == other.chunk;
  }
};

// Returns all actions of a stage, in order.
std::vector<PipelineAction> PipelineActions(const PipelineShape& shape, int stage);

// Returns a stage's idle time divided by its computing time, (p - 1) / (v m), if all runs of layers
// take equally long and messages take no time.
double PipelineBubble(const PipelineShape& shape);

}  // namespace burst
