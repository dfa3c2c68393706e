// The one list of a model's parameters. Initialization, the optimizer, the gradient all-reduce,
// clipping and checkpoints walk it.
//
// Values and gradients are views into flat buffers. Operations on the whole model (all-reduce,
// norm, AdamW) run over one array, and a range of it can be sharded.
//
// Tensor parallelism: a parameter is sharded over the ranks of a group, or replicated on them. The
// list has this rank's shards. Names, initial values and checkpoints belong to the full parameters.
//
// ZeRO: ranks that have the same parameters can divide what each of them would keep
// (StateSharding). The flat order of the parameters is a row of units. Each unit is divided into as
// many equal pieces as there are ranks, with padding at its end. The r-th pieces of all units, one
// behind the other, are the shard of rank r. The place of an element therefore depends on the
// number of ranks alone.
//
// Mixed precision: with bfloat16 values, the optimizer updates float32 master weights. The values
// are their rounded copies, which the model computes with; gradients are accumulated in float32.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "burst/autograd/tape.h"
#include "burst/tensor/exact_sum.h"
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
  // True for a replicated parameter whose complete gradient every rank computes. Otherwise each
  // rank computes a part of the gradient, as for replicas of a slice, and the parts must be
  // all-reduced.
  bool replicated_gradient = false;
};

struct Parameter {
  std::string name;  // "layers.0.attention.qkv.weight"
  Shape shape;       // the shape of this rank's shard
  Shape full_shape;  // the same unless sharded
  // Initial values: constant `init_mean` when init_std is 0, else normal.
  double init_mean = 0;
  double init_std = 0;
  bool decay =
      false;  // weight decay applies (matrices and embeddings; not normalization and biases)
  int64_t number = 0;  // in the list of the whole model
  // Another stage of a pipeline has it, too, with the same gradient, and counts for both.
  bool copy = false;
  int64_t offset = 0;  // elements from the start of the flat buffers
  Variable variable;   // value [shape], grad [shape]
  ParameterSharding sharding;

  int64_t numel() const;
  // Copies between the full parameter and a rank's shard of it, of any dtype and device.
  void TakeShard(int rank, const Tensor& full, const Tensor& shard) const;
  void PutShard(int rank, const Tensor& shard, const Tensor& full) const;
  // This rank's shard of a full parameter: that itself where the parameter is not sharded.
  Tensor OwnShard(const Tensor& full) const;
  Shape ShardShape(int rank) const;
};

// A range of the flat buffers that is sharded in one way.
struct ShardRange {
  int64_t begin = 0;
  int64_t end = 0;
  int replicas = 1;      // neighboring ranks that have this range
  int reduce_ranks = 1;  // neighboring ranks over which its gradient is all-reduced: replicas or 1
};

// The parts of a model's state that ranks with the same parameters divide (ZeRO, Rajbhandari et
// al., arXiv 1910.02054), and the parts outside the device's memory.
struct StateSharding {
  // What is divided. 0: nothing. 1: the optimizer's moments and the master weights. 2: gradients
  // too. 3: values too.
  int stage = 0;
  int ranks = 1;
  int rank = 0;  // this one
  // The optimizer's state is in the host's memory: its moments, and master weights that are not the
  // values themselves.
  bool optimizer_on_host = false;
  // There are no gradients, and no master weights that are not the values: for a model that is only
  // read. In stage 0.
  bool values_alone = false;

  static StateSharding ValuesAlone() {
    StateSharding sharding;
    sharding.values_alone = true;
    return sharding;
  }
};

// A range of the flat order. If gradients or values are divided, it has parameters that are used
// together: the embeddings, a layer, or what follows the layers. Else it has all of them.
struct ParameterUnit {
  int first = 0, last = 0;  // its parameters
  int64_t begin = 0;        // in the flat order
  int64_t numel = 0;        // padding included: `piece` for each of the ranks
  int64_t piece = 0;
  int64_t shard_begin = 0;  // where the piece begins in its rank's shard
};

// The elements [begin, begin + length) of a parameter that a rank has in its shard, from element
// `at` of that on; length may be 0.
struct ParameterPiece {
  int64_t begin = 0;
  int64_t length = 0;
  int64_t at = 0;
};

class ParameterList {
 public:
  // Declares a parameter. Allocate sets *variable, when given. Before Allocate.
  void Add(std::string name, const Shape& full_shape, double init_mean, double init_std, bool decay,
           Variable* variable = nullptr, const ParameterSharding& sharding = {});
  // Whether another rank has the parameters that are added from now on, as ranks of a pipeline do:
  // these are numbered, and nothing else. Before Allocate.
  void set_elsewhere(bool elsewhere) { elsewhere_ = elsewhere; }
  // The last parameter is a copy. Before Allocate.
  void MarkCopy() { parameters_.back().copy = true; }
  // The parameters since the last call, or the first, are used together. Before Allocate; the last
  // ones, too.
  void EndUnit() { unit_ends_.push_back(size()); }
  // Makes the flat buffers and the variables; values and gradients are zero. float32, float64, or,
  // on a GPU, bfloat16. In a unit parameters follow each other as they were added, with two
  // exceptions. Sharded ones precede replicated ones, so that there are few ranges. Parameters
  // whose length is not a multiple of 8 come last, so that the others are aligned for vectorized
  // loads.
  void Allocate(DType dtype, DeviceType device = DeviceType::kCpu,
                const StateSharding& sharding = {});
  // Draws initial values, a function of (seed, number of the parameter, element) only.
  void Initialize(uint64_t seed);
  void ZeroGrad();

  // ---- Gradients whose bits do not depend on the order of their contributions, in stages 0 and 1.
  // Float64 sums take in exactly what has come together in a gradient.

  // From now on; the sums are zero. After Allocate.
  void SumGradsExactly(const ExactGrid& grid);
  bool sums_grads_exactly() const { return !exact_sums_.null(); }
  // Adds every gradient to its sum, and makes it zero.
  void AddGradsToSums() const;
  // Elements [begin, end) of the sums, of whole parameters.
  Tensor exact_sums(int64_t begin, int64_t end) const;
  // Gradients become their sums, rounded to their dtype.
  void RoundSums() const;

  const Parameter& operator[](int index) const { return parameters_[index]; }
  const Variable& variable(int index) const { return parameters_[index].variable; }
  const std::vector<Parameter>& all() const { return parameters_; }
  int size() const { return static_cast<int>(parameters_.size()); }
  int64_t numel() const { return numel_; }
  // The parameters [first, last) as ranges of the flat buffers, increasing and as few as possible.
  std::vector<ShardRange> Ranges(int first, int last) const;

  DType dtype() const { return dtype_; }  // the values' dtype
  DType master_dtype() const { return SumDType(dtype_); }
  DeviceType device() const { return device_; }

  // ---- The buffers, of ranks that divide nothing.

  Tensor values() const;  // [numel]; also in the stages 1 and 2
  // [numel], what the optimizer updates and a checkpoint stores: values() itself, or float32 where
  // that is bfloat16, in the device's memory or the host's (StateSharding::optimizer_on_host). Call
  // RoundMasters after writing to it.
  const Tensor& masters() const;
  bool has_masters() const { return sharding_.stage == 0 && !masters_.null(); }
  Tensor grads() const { return grads(0, numel_); }  // [numel], dtype of masters; also in stage 1
  // Elements [begin, end) of grads().
  Tensor grads(int64_t begin, int64_t end) const;
  // Rounds masters() into values(); does nothing where they are the same tensor.
  void RoundMasters();

  // Bytes that a rank keeps. `optimizer` has the optimizer's state, and masters that are not the
  // values. On the host: optimizer_on_host. In device memory: the others.
  struct KeptBytes {
    int64_t values = 0, gradients = 0, optimizer = 0;
    int64_t optimizer_on_host = 0;
  };
  // Returns the bytes of the list, which has masters and no other state of the optimizer.
  KeptBytes kept_bytes() const;

  // ---- The same of ranks that divide a state; any stage.

  const StateSharding& sharding() const { return sharding_; }
  const std::vector<ParameterUnit>& units() const { return units_; }
  int64_t shard_numel() const { return shard_numel_; }
  // A rank's piece of a parameter.
  ParameterPiece PieceOf(int index, int rank) const;
  // This rank's piece of a unit, [piece]: of the masters, of the gradients, and of the values. The
  // piece of the values is the masters' unless values are rounded.
  Tensor MasterPiece(int unit) const;
  Tensor GradPiece(int unit) const;
  Tensor ValuePiece(int unit) const;
  const Tensor& GradShard() const;  // all pieces of the gradients, [shard_numel]; stages 2 and 3
  // This rank's elements of a parameter's masters, [length] of its PieceOf, and of its values.
  Tensor Masters(int index) const;
  Tensor OwnValue(int index) const;
  // Sets a parameter's masters and values. value: this rank's whole [shape], as if nothing were
  // divided, of the masters' dtype; on any device.
  void Set(int index, const Tensor& value);

  // The model computes with other values until it gets the former ones, which are returned. Masters
  // are as before then, and not used in between. EmptyValues returns memory for them.
  Tensor EmptyValues() const { return Tensor::EmptyLike(values_); }
  Tensor ExchangeValues(const Tensor& values);

  // ---- Weights that passes read in e4m3, with one scale for a whole weight.

  // Sets their numbers in the list.
  void set_float8_weights(std::vector<int> weights) { float8_weights_ = std::move(weights); }
  const std::vector<int>& float8_weights() const { return float8_weights_; }
  // Returns the place of a parameter among them, or -1.
  int Float8Slot(int index) const;

  // Where a unit's values are whole, [numel of the unit]: in the stages 1 and 2.
  Tensor Values(int unit) const;
  // Stage 3: the values are in `flat`, [numel of the unit], until ForgetValues.
  void LendValues(int unit, const Tensor& flat) const;
  void ForgetValues(int unit) const;
  // Stages 2 and 3: the gradients go into `flat`, which counts as zeros, until TakeGrads. That
  // writes the zeros to which nothing was added.
  void LendGrads(int unit, const Tensor& flat) const;
  void TakeGrads(int unit, const Tensor& flat) const;

 private:
  void MakeUnits();
  Tensor PartOf(const Tensor& flat, const ParameterUnit& unit, const Parameter& parameter) const;

  DType dtype_ = DType::kFloat32;
  DeviceType device_ = DeviceType::kCpu;
  StateSharding sharding_;
  bool allocated_ = false;
  bool elsewhere_ = false;
  int64_t added_ = 0;  // parameters of the whole model so far
  std::vector<int> unit_ends_;
  std::vector<ParameterUnit> units_;
  int64_t shard_numel_ = 0;
  std::vector<Parameter> parameters_;
  std::vector<Variable*> targets_;  // what Allocate sets, by parameter
  int64_t numel_ = 0;
  // [numel with padding], or [shard_numel] where the kind is divided. masters_ is values_ if
  // nothing is rounded and both are divided alike. It is null if masters are pieces of whole
  // values, or if there are values alone.
  Tensor values_, masters_, grads_;
  Tensor exact_sums_;  // [numel] float64, or null
  // By parameter: its sum is zero, whatever its memory says. It is written by the first gradient.
  mutable std::vector<bool> sum_is_zero_;
  ExactGrid exact_grid_;
  std::vector<int> float8_weights_;
};

}  // namespace burst
