#include "burst/autograd/chunks.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "burst/base/check.h"

namespace burst {
namespace {

// The function's run on one chunk: its own leaves and tape, kept for the backward.
struct ChunkRun {
  ChunkRun(bool recording, ResultUse use) : tape(recording, use) {}

  TokenChunk chunk;
  Tape tape;
  std::vector<Variable> inputs;
  Variable result;
};
using ChunkRuns = std::vector<std::unique_ptr<ChunkRun>>;

// Runs the function on every chunk in order. visit(run) takes the result's value.
template <typename Visit>
std::shared_ptr<ChunkRuns> RunChunks(Tape& tape, const std::vector<Variable>& inputs,
                                     const ChunkOptions& options, ResultUse use,
                                     const ChunkFunction& function, const Visit& visit) {
  BURST_CHECK(options.chunk >= 1 && options.length % options.chunk == 0)
      << options.length << " tokens in chunks of " << options.chunk;
  for (const Variable& x : inputs) {
    BURST_CHECK(x.value().is_contiguous() && x.value().dim(0) == options.batch &&
                x.value().dim(1) == options.length)
        << ToString(x.shape()) << " for a batch of " << options.batch << " with " << options.length
        << " tokens";
  }
  auto runs = std::make_shared<ChunkRuns>();
  for (int64_t row = 0; row < options.batch; ++row) {
    for (int64_t begin = 0; begin < options.length; begin += options.chunk) {
      auto run = std::make_unique<ChunkRun>(tape.recording(), use);
      run->chunk = {row, begin, options.chunk};
      run->tape.Watch(tape.watcher());
      for (const Variable& x : inputs) {
        run->inputs.emplace_back(run->chunk.Of(x.value()), x.requires_grad());
      }
      run->result = function(run->tape, run->inputs, run->chunk);
      if (!run->tape.status().ok()) tape.Fail(run->tape.status());
      visit(*run);
      if (tape.recording()) runs->push_back(std::move(run));
    }
  }
  return runs;
}

// Their backwards, the last one first; grad_of(run): the gradient of its result. Each run is gone
// after its backward.
template <typename GradOf>
void BackwardChunks(Tape& tape, const std::vector<Variable>& inputs, const ChunkOptions& options,
                    ChunkRuns* runs, const GradOf& grad_of) {
  // The gradient that an input has already goes through the chunks, whose ops add to it.
  std::vector<Tensor> before, gradients;
  for (const Variable& x : inputs) {
    before.push_back(x.requires_grad() && !x.grad().null() ? x.grad().Contiguous() : Tensor());
    gradients.push_back(x.requires_grad() ? Tensor::EmptyLike(x.value()) : Tensor());
  }
  for (; !runs->empty(); runs->pop_back()) {
    ChunkRun& run = *runs->back();
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!before[i].null()) run.inputs[i].AddGrad(run.chunk.Of(before[i]));
    }
    const Tensor grad = grad_of(run);
    const absl::Status status = run.tape.BackwardAndForget(std::move(run.result), grad);
    if (!status.ok()) return tape.Fail(status);
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (gradients[i].null()) continue;
      const Tensor part = run.chunk.Of(gradients[i]), &own = run.inputs[i].grad();
      own.null() ? part.Fill(0) : part.CopyFrom(own);
    }
    if (options.chunk_done != nullptr) options.chunk_done();
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!gradients[i].null()) inputs[i].SetGrad(gradients[i]);
  }
}

// A rank without tokens takes part in the backward, too, for the sake of the others.
bool RequiresGrad(const Tape& tape, const ChunkRuns& runs) {
  return tape.recording() && (runs.empty() || std::any_of(runs.begin(), runs.end(), [](auto& run) {
                                return run->result.requires_grad();
                              }));
}

}  // namespace

Tensor TokenChunk::Of(const Tensor& all) const {
  Shape shape = all.shape();
  shape[0] = 1;
  shape[1] = length;
  return all.Slice(0, row, 1).Slice(1, begin, length).View(shape);
}

Variable InChunks(Tape& tape, const std::vector<Variable>& inputs, const ChunkOptions& options,
                  const Shape& trailing, DType dtype, DeviceType device,
                  const ChunkFunction& function, ResultUse use) {
  Shape shape = {options.batch, options.length};
  shape.insert(shape.end(), trailing.begin(), trailing.end());
  const bool read = use == ResultUse::kRead;
  const Tensor value =
      read ? Tensor::Empty(shape, dtype, device) : Tensor::Null(shape, dtype, device);
  const auto runs = RunChunks(tape, inputs, options, use, function, [&](ChunkRun& run) {
    if (!read) return;
    const Tensor part = run.chunk.Of(value);
    part.CopyFrom(run.result.value().View(part.shape()));
    run.result.ForgetValue();
  });
  const Variable y(value, RequiresGrad(tape, *runs));
  if (!y.requires_grad()) return y;

  tape.Record("chunks", {y}, [&tape, inputs, options, y, runs] {
    const Tensor dy = y.grad().Contiguous();
    BackwardChunks(tape, inputs, options, runs.get(),
                   [&](const ChunkRun& run) { return run.chunk.Of(dy).View(run.result.shape()); });
  });
  return y;
}

Variable SumOfChunks(Tape& tape, const std::vector<Variable>& inputs, const ChunkOptions& options,
                     DeviceType device, const ExactGrid& grid, const ChunkFunction& function) {
  const Tensor sum = Tensor::Zeros({}, DType::kFloat64, device);
  const auto runs = RunChunks(tape, inputs, options, ResultUse::kRead, function,
                              [&](ChunkRun& run) { AddExactly(run.result.value(), grid, sum); });
  const Variable y(sum, RequiresGrad(tape, *runs));
  if (!y.requires_grad()) return y;

  tape.Record("sum_of_chunks", {y}, [&tape, inputs, options, y, runs] {
    BackwardChunks(tape, inputs, options, runs.get(),
                   [&](const ChunkRun& run) { return y.grad().To(run.result.value().dtype()); });
  });
  return y;
}

}  // namespace burst
