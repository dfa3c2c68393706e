#include "train/pipeline/schedule.h"

#include <algorithm>

#include "burst/base/check.h"

namespace burst {
namespace {

// Returns pass number `i` of a stage, forward or backward. A group of micro-batches passes one
// chunk before the next one. The backward begins with the last chunk.
PipelineAction PassNumber(const PipelineShape& shape, bool forward, int i) {
  const int group = std::min(shape.stages, shape.micro_batches);
  const int of_chunk = shape.chunks == 1 ? shape.micro_batches : group;
  const int of_group = of_chunk * shape.chunks;
  const int chunk = i % of_group / of_chunk;
  return {forward, i / of_group * of_chunk + i % of_chunk,
          forward ? chunk : shape.chunks - 1 - chunk};
}

}  // namespace

std::vector<PipelineAction> PipelineActions(const PipelineShape& shape, int stage) {
  const int p = shape.stages, v = shape.chunks, m = shape.micro_batches;
  BURST_CHECK(v >= 1 && m >= 1 && 0 <= stage && stage < p);
  const int group = std::min(p, m);
  BURST_CHECK(v == 1 || m % group == 0) << m << " micro-batches in groups of " << group;
  const int passes = m * v, behind = p - 1 - stage;
  const int ahead = std::min(passes, v == 1 ? behind : 2 * behind + (v - 1) * group);
  std::vector<PipelineAction> actions;
  for (int i = 0; i < passes + ahead; ++i) {
    if (i < passes) actions.push_back(PassNumber(shape, /*forward=*/true, i));
    if (i >= ahead) actions.push_back(PassNumber(shape, /*forward=*/false, i - ahead));
  }
  return actions;
}

double PipelineBubble(const PipelineShape& shape) {
  return static_cast<double>(shape.stages - 1) / (shape.chunks * shape.micro_batches);
}

}  // namespace burst
