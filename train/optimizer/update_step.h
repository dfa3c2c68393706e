// A step of an optimizer's update, which a state in the host's memory takes piece by piece.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "burst/tensor/tensor.h"

namespace burst {

struct UpdateStep {
  // What the step changes of a state that may be in the host's memory: moments, and masters that
  // are not the values. [n] each, of one dtype.
  std::vector<Tensor> state;
  // Changes the same tensors in the memory of the device.
  std::function<absl::Status(absl::Span<const Tensor> here)> run;
};

// Calls body(begin, end) for pieces of [begin, end) of `piece` elements, the last one shorter.
template <typename Body>
void ForPieces(int64_t begin, int64_t end, int64_t piece, const Body& body) {
  for (; begin < end; begin += piece) body(begin, std::min(end, begin + piece));
}

}  // namespace burst
