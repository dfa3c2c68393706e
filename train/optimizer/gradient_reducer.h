// The reduction of gradients over ranks, and the norm of the whole model's gradient. Where the
// parameters sum their gradients exactly (ParameterList::SumGradsExactly) the sums are reduced, and
// the gradients rounded from them.
//
// Without tensor parallelism every rank has a part of every gradient. With it, a parameter may be
// spread over the ranks of a group: a rank's gradient of it is reduced over the groups (data
// parallel) only, and over those neighbors that own the same parameter (ParameterSharding).
//
// Of a pipeline a rank has the parameters of its stage. What two stages have both (Parameter::copy)
// has a part of its gradient on each: the sums over the ranks of each stage are added up.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/comm/communicator.h"
#include "burst/tensor/tensor.h"
#include "model/parameters.h"

namespace burst {

// norm, [1] float64: of a stage's gradient, which every rank of the stage has; becomes that of all
// stages. stages: this rank's place in all of them. Collective.
absl::Status NormOfStages(Communicator* stages, const Tensor& norm);

class GradientReducer {
 public:
  // Collective in `world`, whose ranks are data parallel x tensor parallel (Mesh), `group` being
  // this rank's of the latter; null without tensor parallelism. All must outlive the object.
  static absl::StatusOr<std::unique_ptr<GradientReducer>> Create(const ParameterList& parameters,
                                                                 Communicator* world,
                                                                 Communicator* group);
  // In a pipeline, whose stage `world` is. stages: this rank's place in all stages. tied: in those
  // that have a parameter in common with another one; else null. Before Post.
  void set_stages(Communicator* stages, Communicator* tied) {
    stages_ = stages;
    tied_ = tied;
  }

  // The gradients of the parameters [first, last) are complete, and may not be touched until Finish
  // returns. They are reduced with those of neighboring parameters in one message, which starts
  // when it is long enough: every all-reduce slows the work beside it down.
  absl::Status Post(int first, int last);
  // Completes the reductions. norm, [1] float64 on the gradients' device, becomes that of the whole
  // model's gradient, the same bits on every rank.
  absl::Status Finish(const Tensor& norm);

 private:
  GradientReducer(const ParameterList& parameters, Communicator* world, Communicator* group)
      : parameters_(parameters), world_(world), group_(group) {}

  absl::Status Start();  // the reduction of the parameters that wait
  absl::Status Wait();
  absl::Status NormBesideLastMessage(const Tensor& norm);
  absl::Status NormOfParts(const Tensor& norm) const;
  absl::Status AddTied();  // gradients of what another stage has, too
  // The ranges of all gradients that count for the norm.
  std::vector<ShardRange> CountedRanges() const;

  const ParameterList& parameters_;
  int first_ = 0, last_ = 0;  // wait for neighbors
  int64_t last_message_ = 0;  // the last message of a step is of the first so many elements
  Communicator* const world_;
  Communicator* const group_;
  Communicator* stages_ = nullptr;
  Communicator* tied_ = nullptr;
  // By ShardRange::reduce_ranks: so many neighbors of this rank, and those in their place in the
  // other groups.
  std::map<int, Communicator*> among_;
  std::vector<std::unique_ptr<Communicator>> owned_;
};

}  // namespace burst
