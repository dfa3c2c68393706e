// The one list of a model's parameters. Initialization, the optimizer, the gradient all-reduce,
// clipping and checkpoints walk it.
//
// Values and gradients are views into flat buffers, so operations on the whole model (all-reduce,
// norm, AdamW) run over one array, and a range of it can be sharded.
//
// Tensor parallelism: a parameter is sharded over the ranks of a group, or replicated on them. The
// list has this rank's shards; names, initial values and checkpoints are those of the full
// parameters.
//
// Mixed precision: with bfloat16 values, the optimizer updates float32 master weights. The values
// are their rounded copies, which the model computes with; gradients are accumulated in float32.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "burst/autograd/tape.h"
#include "burst/tensor/tensor.h"

namespace burst {

// [begin, begin + length) of a parameter along an axis. `replicas` neighboring ranks have the same
// slice: those with equal rank / replicas.
struct ShardSlice {
  int64_t begin = 0;
  int64_t length = 0;
  int replicas = 1;
};

// Which part of a parameter each rank of a group has. By default: one rank, all of it.
struct ParameterSharding {
  int ranks = 1;
  int rank = 0;  // this one
  // shards[r]: rank r's slices along `axis`, one behind the other; every rank has as many, of the
  // same lengths. Empty: the parameter is replicated, every rank has all of it.
  int axis = 0;
  std::vector<std::vector<ShardSlice>> shards;
  // Of a replicated parameter: true when every rank computes its complete gradient. Otherwise, as
  // for replicas of a slice, each rank computes a part of the gradient, and the parts must be
  // all-reduced.
  bool replicated_gradient = false;
};

struct Parameter {
  std::string name;  // "layers.0.attention.qkv.weight"
  Shape shape;       // of this rank's shard
  Shape full_shape;  // the same unless sharded
  // Initial values: constant `init_mean` when init_std is 0, else normal.
  double init_mean = 0;
  double init_std = 0;
  bool decay =
      false;  // weight decay applies (matrices and embeddings; not normalization and biases)
  int64_t offset = 0;  // elements from the start of the flat buffers
  Variable variable;   // value [shape], grad [shape]
  ParameterSharding sharding;

  int64_t numel() const;
  // Copies between the full parameter and a rank's shard of it, of any dtype and device.
  void TakeShard(int rank, const Tensor& full, const Tensor& shard) const;
  void PutShard(int rank, const Tensor& shard, const Tensor& full) const;
  Shape ShardShape(int rank) const;
};

// A range of the flat buffers that is sharded in one way.
struct ShardRange {
  int64_t begin = 0;
  int64_t end = 0;
  int replicas = 1;      // neighboring ranks that have this range
  int reduce_ranks = 1;  // neighboring ranks over which its gradient is all-reduced: replicas or 1
};

class ParameterList {
 public:
  // Declares a parameter; returns its index. Allocate sets *variable, when given. Before Allocate.
  int Add(std::string name, const Shape& full_shape, double init_mean, double init_std, bool decay,
          Variable* variable = nullptr, const ParameterSharding& sharding = {});
  // Makes the flat buffers and the variables; values and gradients are zero. float32, float64, or,
  // on a GPU, bfloat16. In the buffers parameters follow each other as they were added, but sharded
  // ones precede replicated ones, so that there are few ranges.
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
  std::vector<ShardRange> Ranges(int first, int last) const;

  const Tensor& values() const { return values_; }  // [numel]
  // [numel], what the optimizer updates and a checkpoint stores: values() itself, or float32 where
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
