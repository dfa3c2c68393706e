// The reduction of gradients over ranks, and the norm of the whole model's gradient. Where the
// parameters sum their gradients exactly (ParameterList::SumGradsExactly) the sums are reduced, and
// the gradients rounded from them.
//
// Without tensor parallelism every rank has a part of every gradient. With it, a parameter may be
// spread over the ranks of a group. A rank's gradient of such a parameter is reduced over the
// groups (data parallel), and over the neighbors that own the same parameter (ParameterSharding).
//
// In a pipeline, a rank holds the parameters of its stage. A parameter shared by two stages
// (Parameter::copy, tied embeddings) has a partial gradient on each. The two stages' reduced
// gradients are added.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "burst/comm/communicator.h"
#include "burst/tensor/tensor.h"
#include "model/parameters.h"
#include "train/optimizer/state_exchange.h"

namespace burst {

// norm, [1] float64: of a stage's gradient, which every rank of the stage has; becomes that of all
// stages. stages: this rank's place in all of them. Collective.
absl::Status NormOfStages(Communicator* stages, const Tensor& norm);

class GradientReducer : public StateExchange {
 public:
  // Collective in `world`, whose ranks are data parallel x tensor parallel (Mesh), `group` being
  // this rank's of the latter; null without tensor parallelism. All must outlive the object.
  static absl::StatusOr<std::unique_ptr<GradientReducer>> Create(ParameterList& parameters,
                                                                 Communicator* world,
                                                                 Communicator* group);
  // In a pipeline, whose stage `world` is. stages: this rank's place in all stages. tied: in those
  // that have a parameter in common with another one; else null. Before Post.
  void set_stages(Communicator* stages, Communicator* tied) {
    stages_ = stages;
    tied_ = tied;
  }

  void BeginStep() override { parameters_.ZeroGrad(); }
  // Gradients are reduced with those of neighboring parameters in one message. It starts when it is
  // long enough, since every all-reduce slows down the work that runs with it.
  absl::Status Post(int first, int last) override;
  absl::Status Finish(const Tensor& norm) override;
  // Every rank updates all values.
  absl::Status GatherValues() override { return absl::OkStatus(); }

 private:
  GradientReducer(ParameterList& parameters, Communicator* world, Communicator* group)
      : parameters_(parameters), world_(world), group_(group) {}

  absl::Status Start();  // the reduction of the parameters that wait
  absl::Status Wait();
  absl::Status NormBesideLastMessage(const Tensor& norm);
  absl::Status NormOfParts(const Tensor& norm) const;
  absl::Status AddTied();  // gradients of what another stage has, too
  // The ranges of all gradients that count for the norm.
  std::vector<ShardRange> CountedRanges() const;

  ParameterList& parameters_;
  int first_ = 0, last_ = 0;  // wait for neighbors
  int64_t last_message_ = 0;  // elements of a step's last message, the first ones
  Communicator* const world_;
  Communicator* const group_;
  Communicator* stages_ = nullptr;
  Communicator* tied_ = nullptr;
  // By number of ranks (ShardRange::reduce_ranks): that many neighbors of this rank, and the ranks
  // in their place in the other groups.
  std::map<int, Communicator*> among_;
  std::vector<std::unique_ptr<Communicator>> owned_;
};

}  // namespace burst
