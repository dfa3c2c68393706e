// Reverse-mode automatic differentiation on a tape.
//
// An op computes its value, then records one node: a function, written by hand next to the forward.
// The node reads the gradient of the op's outputs and adds to the gradients of its inputs. Backward
// runs the nodes in reverse order and frees each one, with the tensors it saved, after it has run.
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
  // A parameter: its gradient is accumulated into `grad`, over many tapes, until its owner calls
  // ZeroGrad. grad: the shape of value and its dtype; float32, too, for a value of 16 bits.
  Variable(Tensor value, Tensor grad);
  // An op's result in float8: the numbers of `value` times `scale`, a float32 on value's device.
  // Its gradient is in bfloat16.
  static Variable InFloat8(Tensor value, Tensor scale, bool requires_grad);

  bool defined() const { return node_ != nullptr; }
  const Tensor& value() const { return node_->value; }
  const Shape& shape() const { return node_->value.shape(); }
  bool requires_grad() const { return node_->requires_grad; }
  const Tensor& scale() const { return node_->scale; }  // null, but for float8
  DType grad_dtype() const;                             // of the contributions to the gradient

  // d loss / d value, the shape of value; null() before the first contribution.
  const Tensor& grad() const {
    if (node_->grad_is_zero) ClearGrad();
    return node_->grad;
  }

  // Adds a contribution, of the shape of value and grad_dtype(). The first one is kept without a
  // copy, so the caller must not change it afterward. Does nothing when !requires_grad(). `amax`,
  // unless null, is the contribution's largest magnitude, [1] float32.
  void AddGrad(const Tensor& contribution, const Tensor& amax = {}) const;
  // The gradient's largest magnitude, if the kernel that made the gradient found it; else null.
  const Tensor& grad_amax() const { return node_->grad_amax; }

  // The buffer to add a contribution to, for backwards that can accumulate (a GEMM with beta = 1);
  // zeroed at the first call. Only when requires_grad().
  const Tensor& MutableGrad() const;

  // Returns the buffer of MutableGrad, for backwards that can also overwrite it. If *add is false,
  // this is a parameter's first contribution since ZeroGrad, and the buffer's values are undefined.
  const Tensor& GradToWrite(bool* add) const;

  // Sets a parameter's gradient to zero. The memory is written later, by the first contribution or
  // the first call of grad().
  void ZeroGrad() const;

  // Whether nothing was added to a parameter's gradient since ZeroGrad.
  bool grad_is_zero() const { return node_->grad_is_zero; }

  // For a parameter whose gradient has memory only while a backward adds to it. From LendGrad until
  // ForgetGrad the gradient is accumulated in `grad`, whose old values count as zero.
  void LendGrad(Tensor grad) const;
  void ForgetGrad() const;

  // Replaces the gradient by `sum`, a tensor that nobody else uses. For backwards whose kernel
  // reads grad() (which may be null) and writes its sum with the contribution elsewhere. Not for
  // parameters, because their owner has the buffer. `amax` as for AddGrad, of the sum.
  void SetGrad(Tensor sum, const Tensor& amax = {}) const;
  // Returns whether there is a gradient whose memory nobody else uses, so that it may be written in
  // place.
  bool owns_grad() const { return !node_->grad.null() && !node_->grad_is_shared; }
  // Returns the gradient and removes it from the variable. Not for parameters.
  Tensor TakeGrad() const;
  bool is_parameter() const { return node_->owned_grad; }

  // Frees the memory of the value, but keeps its shape. For values that no backward reads, or that
  // are recomputed before one does. SetValue puts the value back.
  void ForgetValue() const;
  void SetValue(Tensor value) const;
  // Puts a bfloat16 parameter's value back in float8, with its scale (InFloat8).
  void SetFloat8Value(Tensor value, Tensor scale) const;

 private:
  struct Node {
    Tensor value;
    Tensor scale;
    Tensor grad;
    Tensor grad_amax;
    bool requires_grad = false;
    bool owned_grad = false;      // a parameter's owner gave the gradient's memory
    bool grad_is_shared = false;  // the first contribution, which its maker may still use
    bool grad_is_zero = false;    // whatever its memory says
  };
  void ClearGrad() const;

  std::shared_ptr<Node> node_;
};

class Tape;
// A function y = f(tape, x). It records its ops on the tape that it is given, and may read
// parameters as well as x.
using TapeFunction = std::function<Variable(Tape& tape, const Variable& x)>;

// Says whether the value of a result is read. An unread result needs only a gradient, so its value
// is null (Tensor::Null).
enum class ResultUse { kRead, kUnread };

class Tape {
 public:
  // A tape that does not record runs forwards only: nothing is saved (evaluation, generation).
  // `result_use` says whether the result of the recorded function is read.
  explicit Tape(bool recording = true, ResultUse result_use = ResultUse::kRead)
      : recording_(recording), result_use_(result_use) {}
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;

  bool recording() const { return recording_; }
  // kUnread in the second run of a recomputation (below).
  ResultUse result_use() const { return result_use_; }

  // Whether an op over these inputs must record a node and save what its backward needs.
  bool NeedsGrad(std::initializer_list<Variable> inputs) const;

  // The op's output: requires a gradient when some input does. `scale`, unless null, says that the
  // value is in float8.
  Variable Output(Tensor value, std::initializer_list<Variable> inputs, Tensor scale = {}) const;

  // Records a node. `backward` runs once, unless no output received a gradient. `outputs` are the
  // op's results; the closure keeps what the backward needs.
  void Record(const char* name, std::vector<Variable> outputs, std::function<void()> backward);

  // Records `function`, to be called when the backward reaches this point: the gradients of
  // variables that only later ops use are complete then. Does nothing on a tape that does not
  // record.
  void OnBackward(std::function<void()> function);

  // Fills the gradients of everything that `loss`, a tensor of one element, depends on, with
  // d loss / d loss = 1. Consumes the tape. Returns status(): the first error that an op reported,
  // forward or backward; the gradients mean nothing then.
  [[nodiscard]] absl::Status Backward(const Variable& loss);
  // Runs the backward of several outputs with given gradients: d outputs[i] = grads[i].
  [[nodiscard]] absl::Status Backward(const std::vector<Variable>& outputs,
                                      const std::vector<Tensor>& grads);
  // Runs the backward of one output; the output and its gradient are freed as soon as the ops allow
  // it.
  [[nodiscard]] absl::Status BackwardAndForget(Variable output, Tensor grad);

  // A watcher inspects or changes the values of ops, for example to find a NaN. It is called with
  // every recorded output and then, during the backward, with the output's complete gradient.
  using Watcher = std::function<void(const char* op, const Tensor& value_or_grad)>;
  void Watch(Watcher watcher) { watcher_ = std::move(watcher); }
  const Watcher& watcher() const { return watcher_; }  // null: none

  // Reports the failure of an op, such as a transfer between ranks. The first error is kept, later
  // nodes do not run, and Backward returns it.
  void Fail(const absl::Status& status);
  const absl::Status& status() const { return status_; }

  int64_t num_nodes() const { return static_cast<int64_t>(nodes_.size()); }

 private:
  struct Node {
    const char* name;
    int layer;                      // the op's layer; -1: none
    std::vector<Variable> outputs;  // empty: from OnBackward
    std::function<void()> backward;
  };
  void RunBackward();

  const bool recording_;
  const ResultUse result_use_;
  std::vector<Node> nodes_;
  Watcher watcher_;
  absl::Status status_;
};

// ---- Recomputation in the backward, or gradient checkpointing (Chen et al., "Training Deep Nets
// with Sublinear Memory Cost", arXiv 1604.06174). A part of a model keeps only its input. Its ops
// are computed once more when the backward reaches it.

// Records function(tape, x) as one node, which keeps only x and the tensors that the function
// itself keeps. The function runs twice: now, on a tape that is thrown away, and in the backward,
// on a second tape, for its gradients. Both runs must compute the same values. So random numbers
// must be functions of a key, and messages to other ranks are sent twice. On a tape that does not
// record, the function runs once, directly on that tape.
//
// Values and gradients have the same bits as without recomputation, if the ops themselves are
// reproducible. A watcher of the tape sees the function's values in both runs, so it may change
// them. An error that the function reports with Tape::Fail is reported to the tape.
//
// In the second run, unless there is a watcher, the tape's result_use() is kUnread: the op that
// makes the function's result may leave out its value.
Variable RecomputeInBackward(Tape& tape, const Variable& x, TapeFunction function);

// Recomputes a function that treats every row independently, `chunk` rows at a time. In both runs
// the function gets [1, chunk, width] of x (the last chunk may be shorter) and returns [1, chunk,
// result_width] (-1: width). So its memory does not grow with x. A tape that does not record takes
// chunks, too.
//
// x: [..., width], contiguous, any number of rows. y: [..., result_width]. Gradients of parameters
// are sums over chunks, equal up to rounding to a run without chunks. `use` says whether y is read.
Variable RecomputeInChunks(Tape& tape, const Variable& x, int64_t chunk, TapeFunction function,
                           ResultUse use = ResultUse::kRead, int64_t result_width = -1);

// Recomputes several functions of the same x, one after another in both runs. y is their results
// side by side along `axis`, all of equal size there. Memory that one function allocates is free
// again for the next. The gradient of x is summed over the functions in order, in its dtype and in
// place. `known`, unless null, is y, so the first runs need not compute it.
Variable RecomputeInParts(Tape& tape, const Variable& x, std::vector<TapeFunction> parts,
                          int64_t axis, const Shape& shape, Tensor known = {});

}  // namespace burst
