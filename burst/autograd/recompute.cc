#include "burst/autograd/recompute.h"

#include <utility>

namespace burst {

Variable RecomputeInBackward(Tape& tape, const Variable& x, TapeFunction function) {
  if (!tape.recording()) return function(tape, x);
  // This one records, too: an op that saves something for its backward may do so with another
  // kernel, with other roundings. It lasts no longer than its nodes will in the backward.
  Variable y;
  {
    Tape first;
    first.Watch(tape.watcher());
    const Variable result = function(first, x);
    if (!first.status().ok()) tape.Fail(first.status());
    y = Variable(result.value(), result.requires_grad());
  }
  if (!y.requires_grad()) return y;

  tape.Record("recompute", {y}, [&tape, x, y, function = std::move(function)] {
    Tape second;
    second.Watch(tape.watcher());
    const Variable input(x.value(),
                         x.requires_grad());  // whose gradient is this node's part of x's
    const Variable result = function(second, input);
    const absl::Status status = second.Backward({result}, {y.grad()});
    if (!status.ok()) return tape.Fail(status);
    if (input.requires_grad() && !input.grad().null()) x.AddGrad(input.grad());
  });
  return y;
}

}  // namespace burst
