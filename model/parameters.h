// The one list of a model's parameters. Initialisation, the optimizer, the gradient all-reduce,
// clipping and checkpoints walk it.
//
// Values and gradients are views into two flat buffers, so whole-model passes (all-reduce, norm,
// AdamW) run over one array, and a range of it can be sharded.
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
  // Makes the flat buffers and the variables; values and gradients are zero.
  void Allocate(DType dtype);
  // Draws initial values, a function of (seed, index of the parameter, element) only.
  void Initialize(uint64_t seed);
  void ZeroGrad();

  const Parameter& operator[](int index) const { return parameters_[index]; }
  const Variable& variable(int index) const { return parameters_[index].variable; }
  const std::vector<Parameter>& all() const { return parameters_; }
  int64_t numel() const { return numel_; }

  const Tensor& values() const { return values_; }  // [numel]
  const Tensor& grads() const { return grads_; }    // [numel]

 private:
  std::vector<Parameter> parameters_;
  std::vector<Variable*> targets_;  // what Allocate sets, by parameter
  int64_t numel_ = 0;
  Tensor values_, grads_;
};

}  // namespace burst
