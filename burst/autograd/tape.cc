#include "burst/autograd/tape.h"

#include <algorithm>
#include <utility>

#include "burst/base/check.h"
#include "burst/base/progress.h"

namespace burst {

Variable::Variable(Tensor value, bool requires_grad) : node_(std::make_shared<Node>()) {
  node_->value = std::move(value);
  node_->requires_grad = requires_grad;
}

Variable::Variable(Tensor value, Tensor grad) : Variable(std::move(value), true) {
  const bool widened = Is16Bit(node_->value.dtype()) && grad.dtype() == DType::kFloat32;
  BURST_CHECK(node_->value.shape() == grad.shape() &&
              (node_->value.dtype() == grad.dtype() || widened));
  node_->grad = std::move(grad);
  node_->owned_grad = true;
}

Variable Variable::InFloat8(Tensor value, Tensor scale, bool requires_grad) {
  BURST_CHECK(Is8Bit(value.dtype()) && scale.dtype() == DType::kFloat32 && scale.numel() == 1);
  Variable result(std::move(value), requires_grad);
  result.node_->scale = std::move(scale);
  return result;
}

DType Variable::grad_dtype() const {
  return Is8Bit(node_->value.dtype()) ? DType::kBFloat16 : node_->value.dtype();
}

void Variable::AddGrad(const Tensor& contribution, const Tensor& amax) const {
  if (!node_->requires_grad) return;
  BURST_CHECK(contribution.shape() == node_->value.shape() && contribution.dtype() == grad_dtype())
      << "gradient " << ToString(contribution.shape()) << " " << Name(contribution.dtype())
      << " for a value " << ToString(node_->value.shape()) << " " << Name(node_->value.dtype());
  if (node_->grad.null() && !node_->owned_grad) {
    node_->grad = contribution;
    node_->grad_amax = amax;
    node_->grad_is_shared = true;
    return;
  }
  MutableGrad().Add(contribution.Contiguous());
}

void Variable::SetGrad(Tensor sum, const Tensor& amax) const {
  BURST_CHECK(node_->requires_grad && !node_->owned_grad);
  BURST_CHECK(sum.shape() == node_->value.shape() && sum.dtype() == grad_dtype());
  node_->grad = std::move(sum);
  node_->grad_amax = amax;
  node_->grad_is_shared = false;
}

Tensor Variable::TakeGrad() const {
  BURST_CHECK(!node_->owned_grad);
  node_->grad_amax = Tensor();
  return std::exchange(node_->grad, Tensor());
}

void Variable::ZeroGrad() const {
  BURST_CHECK(node_->owned_grad);
  node_->grad_is_zero = true;
}

void Variable::ClearGrad() const {
  node_->grad.Fill(0);
  node_->grad_is_zero = false;
}

void Variable::LendGrad(Tensor grad) const {
  BURST_CHECK(node_->owned_grad && node_->grad.null() && grad.shape() == node_->grad.shape() &&
              grad.dtype() == node_->grad.dtype());
  node_->grad = std::move(grad);
  node_->grad_is_zero = true;
}

void Variable::ForgetGrad() const {
  BURST_CHECK(node_->owned_grad);
  node_->grad = node_->grad.WithoutMemory();
  node_->grad_is_zero = false;
}

const Tensor& Variable::GradToWrite(bool* add) const {
  *add = !node_->grad_is_zero;
  node_->grad_is_zero = false;
  return MutableGrad();
}

void Variable::ForgetValue() const { node_->value = node_->value.WithoutMemory(); }

void Variable::SetValue(Tensor value) const {
  BURST_CHECK(node_->value.null() && value.shape() == node_->value.shape() &&
              value.dtype() == node_->value.dtype() && value.device() == node_->value.device());
  node_->value = std::move(value);
}

void Variable::SetFloat8Value(Tensor value, Tensor scale) const {
  BURST_CHECK(node_->value.null() && value.shape() == node_->value.shape() &&
              grad_dtype() == DType::kBFloat16 && Is8Bit(value.dtype()) && node_->owned_grad);
  node_->value = std::move(value);
  node_->scale = std::move(scale);
}

const Tensor& Variable::MutableGrad() const {
  BURST_CHECK(node_->requires_grad);
  node_->grad_amax = Tensor();  // the caller changes the gradient
  if (node_->grad_is_zero) ClearGrad();
  if (node_->grad.null()) {
    BURST_CHECK(!node_->owned_grad) << "a gradient that was not lent memory";
    node_->grad = Tensor::Zeros(node_->value.shape(), grad_dtype(), node_->value.device());
  } else if (node_->grad_is_shared) {
    node_->grad = node_->grad.Clone();
  }
  node_->grad_is_shared = false;
  return node_->grad;
}

bool Tape::NeedsGrad(std::initializer_list<Variable> inputs) const {
  if (!recording_) return false;
  return std::any_of(inputs.begin(), inputs.end(), [](const Variable& input) {
    return input.defined() && input.requires_grad();
  });
}

Variable Tape::Output(Tensor value, std::initializer_list<Variable> inputs, Tensor scale) const {
  if (scale.null()) return Variable(std::move(value), NeedsGrad(inputs));
  return Variable::InFloat8(std::move(value), std::move(scale), NeedsGrad(inputs));
}

void Tape::Record(const char* name, std::vector<Variable> outputs, std::function<void()> backward) {
  BURST_CHECK(recording_) << "Record on a tape that does not record";
  if (watcher_ != nullptr) {
    for (const Variable& output : outputs) watcher_(name, output.value());
  }
  nodes_.push_back({name, CurrentLayer(), std::move(outputs), std::move(backward)});
}

void Tape::OnBackward(std::function<void()> function) {
  if (recording_) nodes_.push_back({"on_backward", CurrentLayer(), {}, std::move(function)});
}

void Tape::Fail(const absl::Status& status) {
  if (status_.ok()) status_ = status;
}

absl::Status Tape::Backward(const Variable& loss) {
  BURST_CHECK_EQ(loss.value().numel(), 1) << "Backward starts from a scalar";
  Tensor one = Tensor::Empty(loss.shape(), loss.value().dtype(), loss.value().device());
  one.Fill(1);
  return Backward(std::vector<Variable>{loss}, {one});
}

absl::Status Tape::Backward(const std::vector<Variable>& outputs,
                            const std::vector<Tensor>& grads) {
  BURST_CHECK_EQ(outputs.size(), grads.size());
  for (size_t i = 0; i < outputs.size(); ++i) outputs[i].AddGrad(grads[i]);
  RunBackward();
  return status_;
}

absl::Status Tape::BackwardAndForget(Variable output, Tensor grad) {
  output.AddGrad(grad);
  grad = Tensor();
  output = Variable();
  RunBackward();
  return status_;
}

void Tape::RunBackward() {
  while (!nodes_.empty() && status_.ok()) {
    Node node = std::move(nodes_.back());
    nodes_.pop_back();
    const bool reached = node.outputs.empty() ||
                         std::any_of(node.outputs.begin(), node.outputs.end(),
                                     [](const Variable& output) { return !output.grad().null(); });
    if (watcher_ != nullptr) {
      for (const Variable& output : node.outputs) {
        if (!output.grad().null()) watcher_(node.name, output.grad());
      }
    }
    if (!reached) continue;
    ReachOp(node.layer, node.name, /*on_device=*/node.layer != CurrentLayer());
    node.backward();
  }
  nodes_.clear();
}

namespace {

// Returns the value of the function and whether it has a gradient. If the tape records, the
// function's own tape records, too, and ends here. An op that saves something for its backward may
// use another kernel, with other roundings.
Variable FirstRun(Tape& tape, const TapeFunction& function, const Variable& x) {
  Tape first(tape.recording());
  first.Watch(tape.watcher());
  const Variable result = function(first, x);
  if (!first.status().ok()) tape.Fail(first.status());
  return Variable(result.value(), result.requires_grad());
}

// Makes the second run and its backward. They add to the gradients of `input` and the parameters.
absl::Status GradientsAgain(Tape& tape, const TapeFunction& function, const Variable& input,
                            Tensor output_grad) {
  const bool watched = tape.watcher() != nullptr;
  Tape second(/*recording=*/true, watched ? ResultUse::kRead : ResultUse::kUnread);
  second.Watch(tape.watcher());
  Variable result = function(second, input);
  return second.BackwardAndForget(std::move(result), std::move(output_grad));
}

}  // namespace

Variable RecomputeInBackward(Tape& tape, const Variable& x, TapeFunction function) {
  if (!tape.recording()) return function(tape, x);
  const Variable y = FirstRun(tape, function, x);
  if (!y.requires_grad()) return y;

  tape.Record("recompute", {y}, [&tape, x, y, function = std::move(function)] {
    // The gradient of `input` is this node's contribution to the gradient of x.
    const Variable input(x.value(), x.requires_grad());
    const absl::Status status = GradientsAgain(tape, function, input, y.TakeGrad());
    if (!status.ok()) return tape.Fail(status);
    if (input.requires_grad() && !input.grad().null()) x.AddGrad(input.grad());
  });
  return y;
}

Variable RecomputeInChunks(Tape& tape, const Variable& x, int64_t chunk, TapeFunction function,
                           ResultUse use, int64_t result_width) {
  const int64_t width = x.value().dim(-1);
  BURST_CHECK(chunk >= 1 && x.value().is_contiguous() && width > 0)
      << "chunks of " << chunk << " rows of " << ToString(x.shape());
  if (result_width == -1) result_width = width;
  const int64_t rows = x.value().numel() / width;
  // Calls visit(part) for every chunk. part(tensor) returns the chunk's rows of a tensor like x or
  // y.
  const auto for_each_chunk = [=](const auto& visit) {
    for (int64_t begin = 0; begin < rows; begin += chunk) {
      visit([=, size = std::min(chunk, rows - begin)](const Tensor& all) {
        return all.View({1, rows, all.dim(-1)}).Slice(1, begin, size);
      });
    }
  };
  Shape shape = x.shape();
  shape.back() = result_width;
  Tensor value = Tensor::Null(shape, x.value().dtype(), x.value().device());
  bool requires_grad = tape.recording();
  if (use == ResultUse::kRead) {
    value = Tensor::EmptyLike(value);
    for_each_chunk([&](const auto& part) {
      const Variable y = FirstRun(tape, function, Variable(part(x.value()), x.requires_grad()));
      part(value).CopyFrom(y.value());
      requires_grad &= y.requires_grad();
    });
  }
  const Variable y(value, requires_grad);
  if (!requires_grad) return y;

  tape.Record("recompute_chunks", {y}, [&tape, x, y, for_each_chunk, function] {
    const Tensor dy = y.grad().Contiguous();
    // The gradient is assigned, unless x already has one.
    const bool adds = x.requires_grad() && !x.grad().null();
    const Tensor dx = !x.requires_grad() ? Tensor()
                      : adds             ? x.MutableGrad()
                                         : Tensor::EmptyLike(x.value());
    absl::Status status;
    for_each_chunk([&](const auto& part) {
      if (!status.ok()) return;
      const Variable input(part(x.value()), x.requires_grad());
      status = GradientsAgain(tape, function, input, part(dy));
      if (dx.null()) return;
      if (adds) {
        if (!input.grad().null()) part(dx).Add(input.grad().Contiguous());
      } else {
        input.grad().null() ? part(dx).Fill(0) : part(dx).CopyFrom(input.grad());
      }
    });
    if (!status.ok()) return tape.Fail(status);
    if (!dx.null() && !adds) x.SetGrad(dx);
  });
  return y;
}

Variable RecomputeInParts(Tape& tape, const Variable& x, std::vector<TapeFunction> parts,
                          int64_t axis, const Shape& shape, Tensor known) {
  const auto count = static_cast<int64_t>(parts.size());
  BURST_CHECK(count >= 1 && shape[axis] % count == 0)
      << count << " parts of " << ToString(shape) << " along axis " << axis;
  const auto part_of = [axis, size = shape[axis] / count](const Tensor& all, int64_t i) {
    return all.Slice(axis, i * size, size);
  };
  bool requires_grad = tape.recording();
  Tensor value = std::move(known);
  if (value.null()) {
    value = Tensor::Empty(shape, x.value().dtype(), x.value().device());
    for (int64_t i = 0; i < count; ++i) {
      const Variable y = FirstRun(tape, parts[i], x);
      part_of(value, i).CopyFrom(y.value());
      requires_grad &= y.requires_grad();
    }
  }
  BURST_CHECK(value.shape() == shape);
  const Variable y(value, requires_grad);
  if (!requires_grad) return y;

  tape.Record("recompute_parts", {y}, [&tape, x, y, part_of, parts = std::move(parts)] {
    for (size_t i = 0; i < parts.size(); ++i) {
      const absl::Status status = GradientsAgain(
          tape, parts[i], x, part_of(y.grad(), static_cast<int64_t>(i)).Contiguous());
      if (!status.ok()) return tape.Fail(status);
    }
  });
  return y;
}

}  // namespace burst
