#include "burst/sequence/layout.h"

#include "absl/strings/str_cat.h"
#include "burst/base/check.h"

namespace burst {
namespace {

// Appends the positions of chunk `index` of `chunks` nearly equal ones.
void AppendChunk(int64_t seqlen, int64_t index, int64_t chunks, std::vector<int32_t>* positions) {
  const int64_t begin = seqlen * index / chunks;
  const int64_t end = seqlen * (index + 1) / chunks;
  for (int64_t t = begin; t < end; ++t) positions->push_back(static_cast<int32_t>(t));
}

}  // namespace

absl::StatusOr<Layout> ParseLayout(absl::string_view name) {
  for (Layout layout : {Layout::kContiguous, Layout::kZigzag, Layout::kStriped}) {
    if (name == Name(layout)) return layout;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown layout '", name, "': use contiguous, zigzag or striped"));
}

const char* Name(Layout layout) {
  switch (layout) {
    case Layout::kContiguous:
      return "contiguous";
    case Layout::kZigzag:
      return "zigzag";
    case Layout::kStriped:
      return "striped";
  }
  return "?";
}

std::vector<int32_t> LocalPositions(Layout layout, int64_t seqlen, int rank, int world_size) {
  BURST_CHECK(world_size > 0 && rank >= 0 && rank < world_size);
  std::vector<int32_t> positions;
  positions.reserve(seqlen / world_size + 2);
  switch (layout) {
    case Layout::kContiguous:
      AppendChunk(seqlen, rank, world_size, &positions);
      break;
    case Layout::kZigzag:
      AppendChunk(seqlen, rank, 2 * world_size, &positions);
      AppendChunk(seqlen, 2 * world_size - 1 - rank, 2 * world_size, &positions);
      break;
    case Layout::kStriped:
      for (int64_t t = rank; t < seqlen; t += world_size) {
        positions.push_back(static_cast<int32_t>(t));
      }
      break;
  }
  return positions;
}

}  // namespace burst
