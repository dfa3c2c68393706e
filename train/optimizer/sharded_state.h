// Exchanges values and gradients between ranks that divide the state of a model (ZeRO, Rajbhandari
// et al., arXiv 1910.02054). StateSharding says which rank has which part. With tensor parallelism
// the ranks that have the same shard of the model divide it, one of each group.
//
//   stage 1   after an update every rank's piece of the values is gathered by all. Gradients are
//             those of a GradientReducer, whole on every rank.
//   stage 2   the same; and the gradients of a unit have memory from the first contribution of a
//             backward to the last. They are reduced then, each rank keeping its piece, while the
//             backward continues. So it is after every micro-batch.
//   stage 3   values have memory only while they are used. They are gathered one unit ahead of the
//             forward and of the backward. Weights that passes read in e4m3 travel in e4m3.
//
// Messages go on Channel::kCollective. If that runs in parallel with the device (NCCL), they are
// waited for when the next unit begins.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/autograd/tape.h"
#include "burst/comm/communicator.h"
#include "burst/tensor/tensor.h"
#include "model/execution/parameter_use.h"
#include "model/parameters.h"
#include "train/optimizer/gradient_reducer.h"
#include "train/optimizer/state_exchange.h"
#include "train/optimizer/weight_scales.h"

namespace burst {

class ShardedState : public StateExchange, public ParameterUse {
 public:
  // Collective in `world`, whose ranks are data parallel x tensor parallel (Mesh), `group` being
  // this rank's of the latter; null without tensor parallelism. All must outlive the object.
  static absl::StatusOr<std::unique_ptr<ShardedState>> Create(ParameterList& parameters,
                                                              Communicator* world,
                                                              Communicator* group);

  // In a pipeline, whose stage `world` is, as GradientReducer::set_stages; before the first step.
  void set_stages(Communicator* stages, Communicator* tied);

  void BeginStep() override;
  // Does nothing in stages 2 and 3, where EndGrads begins the reduction of a unit.
  absl::Status Post(int first, int last) override;
  absl::Status Finish(const Tensor& norm) override;
  absl::Status GatherValues() override;

  void BeginPass(Tape& tape) override;
  void BeginValues(Tape& tape, int unit, int next) override;
  void EndValues(int unit) override;
  void BeginGrads(int unit) override;
  void EndGrads(Tape& tape, int unit) override;

 private:
  // A unit's values while they are here.
  struct Gathered {
    Tensor values;  // [numel of the unit], of the values' dtype or e4m3; null: they are not
    Tensor others;  // with e4m3: the parameters that keep the values' dtype
    bool arrived = false;
    bool lent = false;
  };
  // A unit's gradients on their way.
  struct Reduction {
    int unit;
    Tensor all;    // [numel of the unit]
    Tensor added;  // [piece], to be added to what is there; null: it went there
  };

  ShardedState(ParameterList& parameters, Communicator* world, Communicator* group)
      : parameters_(parameters), world_(world), group_(group) {}
  absl::Status Connect();
  std::vector<int64_t> Counts(int unit) const;
  absl::Status Gather(int unit);
  absl::Status GatherInFloat8(int unit);
  absl::Status GatherOthers(int unit);
  void Lend(int unit);
  bool TravelsInFloat8(int unit, int parameter) const;
  bool HasFloat8(int unit) const;
  std::vector<int64_t> PlacesOfOthers(int unit) const;
  absl::Status Reduce(int unit, const Tensor& all);
  absl::Status ReduceOverNeighbors(int unit, const Tensor& all);
  absl::Status Wait();
  std::vector<Tensor> CountedParts() const;

  ParameterList& parameters_;
  Communicator* const world_;
  Communicator* const group_;
  std::unique_ptr<GradientReducer> whole_gradients_;  // in stage 1 alone
  Communicator* shards_ = nullptr;                    // the ranks that divide the state
  Communicator* stages_ = nullptr;
  Communicator* tied_ = nullptr;
  std::unique_ptr<WeightScales> scales_;  // null: no weight travels in e4m3
  // With tensor parallelism, by number of neighbors of this rank (ShardRange::reduce_ranks).
  std::map<int, std::unique_ptr<Communicator>> neighbors_;
  std::unique_ptr<Communicator> owned_;
  std::vector<bool> has_gradient_;     // by unit: of an earlier micro-batch of this step
  std::vector<Gathered> gathered_;     // by unit
  std::vector<Tensor> grads_;          // by unit, while a backward adds to them
  std::vector<Reduction> reductions_;  // posted, and not waited for
};

}  // namespace burst
