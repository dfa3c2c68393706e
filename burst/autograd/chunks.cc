#include "burst/autograd/chunks.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "burst/base/check.h"

namespace burst {
namespace {

// A run of the function on one chunk, with its own leaves and tape. It is kept for the backward.
struct ChunkRun {
  ChunkRun(const TokenChunk& of, bool recording, ResultUse use) : chunk(of), tape(recording, use) {}

  const TokenChunk chunk;
  Tape tape;
  std::vector<Variable> inputs;
  Variable result;
};

void Check(const std::vector<Variable>& inputs, const ChunkOptions& options) {
  BURST_CHECK(options.tokens >= 1 && options.length % options.tokens == 0 &&
              (options.rows == 1 || options.length == options.tokens || options.length == 0))
      << options.length << " tokens in chunks of " << options.rows << " times " << options.tokens;
  for (const Variable& x : inputs) {
    BURST_CHECK(x.value().is_contiguous() && x.value().dim(0) == options.batch &&
                x.value().dim(1) == options.length)
        << ToString(x.shape()) << " for a batch of " << options.batch << " with " << options.length
        << " tokens";
  }
}

// Calls visit(chunk) in order.
template <typename Visit>
void ForEachChunk(const ChunkOptions& options, const Visit& visit) {
  for (int64_t row = 0; row < options.batch; row += options.rows) {
    for (int64_t begin = 0; begin < options.length; begin += options.tokens) {
      visit(TokenChunk{row, std::min(options.rows, options.batch - row), begin, options.tokens});
    }
  }
}

std::unique_ptr<ChunkRun> Run(Tape& tape, const std::vector<Variable>& inputs,
                              const TokenChunk& chunk, ResultUse use,
                              const ChunkFunction& function) {
  auto run = std::make_unique<ChunkRun>(chunk, tape.recording(), use);
  run->tape.Watch(tape.watcher());
  for (const Variable& x : inputs) {
    run->inputs.emplace_back(chunk.Of(x.value()), x.requires_grad());
  }
  run->result = function(run->tape, run->inputs, chunk);
  if (!run->tape.status().ok()) tape.Fail(run->tape.status());
  return run;
}

// The gradients of the inputs, which the backwards of the chunks fill.
class InputGradients {
 public:
  // If an input already has a gradient, the chunks get it, and their ops add to it.
  explicit InputGradients(const std::vector<Variable>& inputs) : inputs_(inputs) {
    for (const Variable& x : inputs) {
      before_.push_back(x.requires_grad() && !x.grad().null() ? x.grad().Contiguous() : Tensor());
      sums_.push_back(x.requires_grad() ? Tensor::EmptyLike(x.value()) : Tensor());
    }
  }

  // Runs the backward of a run, whose result has the gradient `grad`.
  absl::Status Add(ChunkRun& run, const Tensor& grad) const {
    for (size_t i = 0; i < inputs_.size(); ++i) {
      if (!before_[i].null()) run.inputs[i].AddGrad(run.chunk.Of(before_[i]));
    }
    const absl::Status status = run.tape.BackwardAndForget(std::move(run.result), grad);
    if (!status.ok()) return status;
    for (size_t i = 0; i < inputs_.size(); ++i) {
      if (sums_[i].null()) continue;
      const Tensor part = run.chunk.Of(sums_[i]), &own = run.inputs[i].grad();
      own.null() ? part.Fill(0) : part.CopyFrom(own);
    }
    return status;
  }

  // Gives the gradients to the inputs, once all have been added.
  void Set() const {
    for (size_t i = 0; i < inputs_.size(); ++i) {
      if (!sums_[i].null()) inputs_[i].SetGrad(sums_[i]);
    }
  }

 private:
  const std::vector<Variable> inputs_;
  std::vector<Tensor> before_, sums_;
};

}  // namespace

Tensor TokenChunk::Of(const Tensor& all) const {
  Shape shape = all.shape();
  shape[0] = rows;
  shape[1] = length;
  return all.Slice(0, row, rows).Slice(1, begin, length).View(shape);
}

Variable InChunks(Tape& tape, const std::vector<Variable>& inputs, const ChunkOptions& options,
                  const Shape& trailing, DType dtype, DeviceType device,
                  const ChunkFunction& function, ResultUse use) {
  Check(inputs, options);
  Shape shape = {options.batch, options.length};
  shape.insert(shape.end(), trailing.begin(), trailing.end());
  const bool read = use == ResultUse::kRead;
  const Tensor value =
      read ? Tensor::Empty(shape, dtype, device) : Tensor::Null(shape, dtype, device);
  const auto runs = std::make_shared<std::vector<std::unique_ptr<ChunkRun>>>();
  ForEachChunk(options, [&](const TokenChunk& chunk) {
    auto run = Run(tape, inputs, chunk, use, function);
    if (read) {
      const Tensor part = chunk.Of(value);
      part.CopyFrom(run->result.value().View(part.shape()));
      run->result.ForgetValue();
    }
    if (tape.recording()) runs->push_back(std::move(run));
  });
  // A rank without tokens also takes part in the backward, because the others wait for it.
  const bool requires_grad =
      tape.recording() && (runs->empty() || std::any_of(runs->begin(), runs->end(), [](auto& run) {
                             return run->result.requires_grad();
                           }));
  const Variable y(value, requires_grad);
  if (!requires_grad) return y;

  tape.Record("chunks", {y}, [&tape, inputs, options, y, runs] {
    const Tensor dy = y.grad().Contiguous();
    const InputGradients gradients(inputs);
    for (; !runs->empty(); runs->pop_back()) {  // each run is freed after its backward
      ChunkRun& run = *runs->back();
      const absl::Status status = gradients.Add(run, run.chunk.Of(dy).View(run.result.shape()));
      if (!status.ok()) return tape.Fail(status);
      if (options.chunk_done != nullptr) options.chunk_done();
    }
    gradients.Set();
  });
  return y;
}

Variable SumOfChunks(Tape& tape, const std::vector<Variable>& inputs, const ChunkOptions& options,
                     DeviceType device, const ExactGrid& grid, const ChunkFunction& function) {
  Check(inputs, options);
  const Tensor sum = Tensor::Zeros({}, DType::kFloat64, device);
  const auto gradients =
      tape.recording() ? std::make_shared<const InputGradients>(inputs) : nullptr;
  ForEachChunk(options, [&](const TokenChunk& chunk) {
    const auto run = Run(tape, inputs, chunk, ResultUse::kRead, function);
    const Tensor loss = run->result.value();
    AddExactly(loss, grid, sum);
    if (gradients == nullptr || !run->result.requires_grad() || !tape.status().ok()) return;
    const Tensor one = Tensor::EmptyLike(loss);
    one.Fill(1);
    const absl::Status status = gradients->Add(*run, one);
    if (!status.ok()) return tape.Fail(status);
    if (options.chunk_done != nullptr) options.chunk_done();
  });
  const Variable y(sum, tape.recording());
  if (!tape.recording()) return y;

  tape.Record("sum_of_chunks", {y}, [y, gradients] {
    BURST_CHECK(y.grad().device() != DeviceType::kCpu || y.grad().data<double>()[0] == 1);
    gradients->Set();
  });
  return y;
}

}  // namespace burst
