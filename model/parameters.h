// The one list of a model's parameters. Initialisation, the optimizer, the gradient all-reduce,
// clipping and checkpoints walk it.
//
// Values and gradients are views into flat buffers, so whole-model passes (all-reduce, norm, AdamW)
// run over one array, and a range of it can be sharded.
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

struct Parameter {
  std::string name;  // "layers.0.attention.wq"
  Shape shape;
  // Initial values: constant `init_mean` when init_std is 0, else normal.
  double init_mean = 0;
  double init_std = 0;
  bool decay = false;  // weight decay applies (matrices and embeddings, not norms and biases)
  int64_t offset = 0;  // elements from the start of the flat buffers
  Variable variable;   // value [shape], grad [shape]

  int64_t numel() const;
};

class ParameterList {
 public:
  // Declares a parameter; returns its index. Allocate sets *variable, when given. Before Allocate.
  int Add(std::string name, const Shape& shape, double init_mean, double init_std, bool decay,
          Variable* variable = nullptr);
  // Makes the flat buffers and the variables; values and gradients are zero. float32, float64, or,
  // on a GPU, bfloat16.
  void Allocate(DType dtype, DeviceType device = DeviceType::kCpu);
  // Draws initial values, a function of (seed, index of the parameter, element) only.
  void Initialize(uint64_t seed);
  void ZeroGrad();

  const Parameter& operator[](int index) const { return parameters_[index]; }
  const Variable& variable(int index) const { return parameters_[index].variable; }
  const std::vector<Parameter>& all() const { return parameters_; }
  int64_t numel() const { return numel_; }

  const Tensor& values() const { return values_; }  // [numel]
  // [numel], what the optimizer changes and a checkpoint holds: values() itself, or float32 where
  // that is bfloat16. Who writes to it calls RoundMasters.
  const Tensor& masters() const { return masters_; }
  Tensor grads() const { return grads(0, numel_); }  // [numel], dtype of masters
  // Of whole parameters: elements [begin, end) of grads().
  Tensor grads(int64_t begin, int64_t end) const;
  // values() <- masters(), rounded; nothing where they are one.
  void RoundMasters();

 private:
  std::vector<Parameter> parameters_;
  std::vector<Variable*> targets_;  // what Allocate sets, by parameter
  int64_t numel_ = 0;
  Tensor values_, masters_, grads_;
};

}  // namespace burst
