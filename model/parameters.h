// The one list of a model's parameters. Initialisation, the optimizer, the gradient all-reduce,
// clipping and checkpoints walk it.
//
// Values and gradients are views into flat buffers, so whole-model passes (all-reduce, norm, AdamW)
// run over one array, and a range of it can be sharded.
//
// Tensor parallelism: the ranks of a group may hold a parameter between them. What is here is this
// rank's part; names, initial values and checkpoints are those of the whole.
//
// Mixed precision: with bfloat16 values, the optimizer updates float32 masters, of which the values
// are the rounded copy that the model computes with, and gradients are summed in float32.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "burst/autograd/tape.h"
#include "burst/tensor/tensor.h"

namespace burst {

// [begin, begin + length) of a parameter along an axis, held by `copies` neighbouring ranks: those
// with the same rank / copies.
struct ParameterSlice {
  int64_t begin = 0;
  int64_t length = 0;
  int copies = 1;
};

// How a group of ranks holds a parameter. By default: one rank, all of it.
struct ParameterSharing {
  int ranks = 1;
  int rank = 0;  // this one
  // parts[r]: rank r's slices along `axis`, one behind the other, in number and lengths the same
  // for every rank. Empty: every rank holds the whole.
  int axis = 0;
  std::vector<std::vector<ParameterSlice>> parts;
  // For a parameter that every rank holds whole: every rank computes its whole gradient, too.
  // Otherwise, where several ranks hold an element, each computes a part of its gradient, and the
  // parts are to be summed.
  bool whole_gradient = false;
};

struct Parameter {
  std::string name;   // "layers.0.attention.wq"
  Shape shape;        // of this rank's part
  Shape whole_shape;  // the same unless shared
  // Initial values: constant `init_mean` when init_std is 0, else normal.
  double init_mean = 0;
  double init_std = 0;
  bool decay = false;  // weight decay applies (matrices and embeddings, not norms and biases)
  int64_t offset = 0;  // elements from the start of the flat buffers
  Variable variable;   // value [shape], grad [shape]
  ParameterSharing sharing;

  int64_t numel() const;
  // Copies between the whole parameter and a rank's part of it, of any dtype and device.
  void TakePart(int rank, const Tensor& whole, const Tensor& part) const;
  void PutPart(int rank, const Tensor& part, const Tensor& whole) const;
  Shape PartShape(int rank) const;
};

// A range of the flat buffers that is shared in one way.
struct SharedRange {
  int64_t begin = 0;
  int64_t end = 0;
  int copies = 1;  // neighbouring ranks that hold it
  int summed = 1;  // neighbouring ranks over which its gradient is to be summed: copies, or 1
};

class ParameterList {
 public:
  // Declares a parameter; returns its index. Allocate sets *variable, when given. Before Allocate.
  int Add(std::string name, const Shape& whole_shape, double init_mean, double init_std, bool decay,
          Variable* variable = nullptr, const ParameterSharing& sharing = {});
  // Makes the flat buffers and the variables; values and gradients are zero. float32, float64, or,
  // on a GPU, bfloat16. In the buffers parameters follow each other as they were added; where some
  // are shared, those that are come first, so that few ranges are left.
  void Allocate(DType dtype, DeviceType device = DeviceType::kCpu);
  // Draws initial values, a function of (seed, index of the parameter, element) only.
  void Initialize(uint64_t seed);
  void ZeroGrad();

  const Parameter& operator[](int index) const { return parameters_[index]; }
  const Variable& variable(int index) const { return parameters_[index].variable; }
  const std::vector<Parameter>& all() const { return parameters_; }
  int size() const { return static_cast<int>(parameters_.size()); }
  int64_t numel() const { return numel_; }
  // The parameters [first, last) as ranges of the flat buffers, increasing and as few as possible.
  std::vector<SharedRange> Ranges(int first, int last) const;

  const Tensor& values() const { return values_; }  // [numel]
  // [numel], what the optimizer changes and a checkpoint holds: values() itself, or float32 where
  // that is bfloat16. Call RoundMasters after writing to it.
  const Tensor& masters() const { return masters_; }
  Tensor grads() const { return grads(0, numel_); }  // [numel], dtype of masters
  // Elements [begin, end) of grads().
  Tensor grads(int64_t begin, int64_t end) const;
  // Rounds masters() into values(); does nothing where they are the same tensor.
  void RoundMasters();

 private:
  std::vector<Parameter> parameters_;
  std::vector<Variable*> targets_;  // what Allocate sets, by parameter
  int64_t numel_ = 0;
  Tensor values_, masters_, grads_;
};

}  // namespace burst
