// Gradients over ranks: summed where each has a part of them, and their norm.
//
// Without tensor parallelism every rank has a part of every gradient. With it, a parameter may be
// spread over the ranks of a group: what a rank has of it is summed over the groups (data parallel)
// only, and over those neighbours that hold the same (ParameterSharding).
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

class GradientSum {
 public:
  // Collective in `world`, whose ranks are data parallel x tensor parallel (Mesh), `group` being
  // this rank's of the latter; null without tensor parallelism. All must outlive the object.
  static absl::StatusOr<std::unique_ptr<GradientSum>> Create(const ParameterList& parameters,
                                                             Communicator* world,
                                                             Communicator* group);

  // The gradients of the parameters [first, last) are complete, and may not be touched until Finish
  // returns. They are summed with those of their neighbours in one message, which starts when it is
  // long enough: every sum disturbs the work beside it.
  absl::Status Post(int first, int last);
  // Completes the sums. norm, [1] float64 on the gradients' device, becomes that of the whole
  // model's gradient, the same bits on every rank.
  absl::Status Finish(const Tensor& norm);

 private:
  GradientSum(const ParameterList& parameters, Communicator* world, Communicator* group)
      : parameters_(parameters), world_(world), group_(group) {}

  absl::Status Start();  // the sum of the parameters that wait
  absl::Status Wait();
  absl::Status NormBesideLastMessage(const Tensor& norm);
  absl::Status NormOfParts(const Tensor& norm) const;

  const ParameterList& parameters_;
  int first_ = 0, last_ = 0;  // wait for neighbours
  int64_t last_message_ = 0;  // the last message of a step is of the first so many elements
  Communicator* const world_;
  Communicator* const group_;
  // By ShardRange::reduce_ranks: so many neighbours of this rank, and those in their place in the
  // other groups.
  std::map<int, Communicator*> among_;
  std::vector<std::unique_ptr<Communicator>> owned_;
};

}  // namespace burst
