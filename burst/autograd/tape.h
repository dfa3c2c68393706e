// Reverse-mode automatic differentiation on a tape.
//
// An op computes its value, then records one node: a function, written by hand beside the forward,
// that reads the gradient of the op's outputs and adds to the gradients of its inputs. Backward
// runs the nodes in reverse order and frees each as it goes, saved tensors included.
//
//   Variable y = RmsNorm(tape, x, weight, eps);      // in the op:
//     tape.Record("rmsnorm", {y}, [=] {              // y.grad() -> x, weight
//       Tensor dx = ...;
//       x.AddGrad(dx);
//     });
//
// A tape belongs to one rank's thread.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "burst/tensor/tensor.h"

namespace burst {

// A value on the tape and the gradient of the loss with respect to it. A handle: copies share both.
class Variable {
 public:
  Variable() = default;
  // A leaf. With requires_grad, backward functions add to its gradient.
  explicit Variable(Tensor value, bool requires_grad = false);
  // A parameter: its gradient is accumulated into `grad`, which lives as long as the caller likes
  // (over many tapes), until its owner calls ZeroGrad. The gradient of a bfloat16 value may be
  // float32.
  Variable(Tensor value, Tensor grad);

  bool defined() const { return node_ != nullptr; }
  const Tensor& value() const { return node_->value; }
  const Shape& shape() const { return node_->value.shape(); }
  bool requires_grad() const { return node_->requires_grad; }

  // d loss / d value, the shape of value; null() before the first contribution.
  const Tensor& grad() const {
    if (node_->grad_is_zero) ClearGrad();
    return node_->grad;
  }

  // Adds a contribution; the first one is kept without a copy, so the caller must not change it
  // afterwards. Does nothing when !requires_grad().
  void AddGrad(const Tensor& contribution) const;

  // The buffer to add a contribution into, for backwards that can accumulate (a matrix product with
  // beta = 1): zeroed at the first call. Only when requires_grad().
  const Tensor& MutableGrad() const;

  // For backwards that can add to the buffer or overwrite it: *add is false for the first
  // contribution to a parameter since ZeroGrad, whose buffer holds nothing of use.
  const Tensor& GradToWrite(bool* add) const;

  // Sets a parameter's gradient to zero. Its memory is written by the first contribution, or by the
  // first call of grad().
  void ZeroGrad() const;

  // Replaces the gradient, for backwards whose kernel reads grad() (which may be null) and writes
  // its sum with the contribution to another tensor. Not for parameters, whose buffer belongs to
  // their owner.
  void SetGrad(Tensor sum) const;
  bool is_parameter() const { return node_->owned_grad; }

  // Frees the memory of a value that no backward reads, or that is computed again before one does;
  // its shape stays. SetValue puts the value back.
  void ForgetValue() const;
  void SetValue(Tensor value) const;

 private:
  struct Node {
    Tensor value;
    Tensor grad;
    bool requires_grad = false;
    bool owned_grad = false;      // a parameter's, given by its owner
    bool grad_is_shared = false;  // the first contribution, perhaps held by its maker too
    bool grad_is_zero = false;    // though its memory may hold anything
  };
  void ClearGrad() const;

  std::shared_ptr<Node> node_;
};

class Tape {
 public:
  // A tape that does not record runs forwards only: nothing is saved (evaluation, generation).
  explicit Tape(bool recording = true) : recording_(recording) {}
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;

  bool recording() const { return recording_; }

  // Whether an op over these inputs must record a node and save what its backward needs.
  bool NeedsGrad(std::initializer_list<Variable> inputs) const;

  // The op's output: requires a gradient when some input does.
  Variable Output(Tensor value, std::initializer_list<Variable> inputs) const;

  // Records a node. `backward` runs once, unless no output received a gradient. `outputs` are the
  // op's results; hold what the backward needs in the closure.
  void Record(const char* name, std::vector<Variable> outputs, std::function<void()> backward);

  // Records `function`, to be called when the backward reaches this point: the gradients of
  // variables that only later ops use are complete then. Does nothing on a tape that does not
  // record.
  void OnBackward(std::function<void()> function);

  // Fills the gradients of everything that `loss`, a tensor of one element, depends on, with
  // d loss / d loss = 1. Consumes the tape. Returns status(): what an op reported, forward or
  // backward; the gradients mean nothing then.
  [[nodiscard]] absl::Status Backward(const Variable& loss);
  // The same for outputs with given gradients: d outputs[i] = grads[i].
  [[nodiscard]] absl::Status Backward(const std::vector<Variable>& outputs,
                                      const std::vector<Tensor>& grads);

  // To look at what ops compute (for a NaN, say), or to change it: `watcher` is called with every
  // output that is recorded, then, during the backward, with its gradient once that is complete.
  using Watcher = std::function<void(const char* op, const Tensor& value_or_grad)>;
  void Watch(Watcher watcher) { watcher_ = std::move(watcher); }
  const Watcher& watcher() const { return watcher_; }  // null: none

  // For ops that talk to the outside world (the ring): the first failure is kept, later nodes do
  // not run, and Backward returns it.
  void Fail(const absl::Status& status);
  const absl::Status& status() const { return status_; }

  int64_t num_nodes() const { return static_cast<int64_t>(nodes_.size()); }

 private:
  struct Node {
    const char* name;
    std::vector<Variable> outputs;  // none: of OnBackward
    std::function<void()> backward;
  };
  void RunBackward();

  const bool recording_;
  std::vector<Node> nodes_;
  Watcher watcher_;
  absl::Status status_;
};

}  // namespace burst
