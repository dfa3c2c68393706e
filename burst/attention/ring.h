// One pass around the ring: blocks of tensors visit every rank that needs them, their gradients
// follow and come home. Knows the schedule and the communicator, nothing of attention.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "burst/attention/schedule.h"
#include "burst/comm/communicator.h"
#include "burst/tensor/tensor.h"

namespace burst {

// What one rank sent: a hop is a block, or its gradient, handed to the next rank.
struct RingTraffic {
  int64_t block_hops = 0;
  int64_t block_bytes = 0;
  int64_t gradient_hops = 0;
  int64_t gradient_bytes = 0;
  int64_t rounds_computed = 0;
  int64_t rounds_skipped = 0;  // fully masked
};

class Ring {
 public:
  using Tensors = absl::InlinedVector<Tensor, 4>;

  // A tensor of this rank's block; the same tensor of another rank has that rank's length along
  // length_axis.
  struct Member {
    Tensor tensor;
    int length_axis;
  };
  using Block = absl::InlinedVector<Member, 4>;

  // Works on the block of rank `source` where `visible` says, adding to `gradients`.
  using Compute = std::function<void(int source, const VisibleKeys& visible, const Tensors& block,
                                     const Tensors& gradients)>;

  // `comm` null: a single rank.
  explicit Ring(Communicator* comm) : comm_(comm) {}

  // Calls compute for every round in which the pass has work, this rank's own block first, while
  // the next block travels. `visible(source)` gives the mask of a round. `gradients`, those of
  // `block`, are added to: by this rank's rounds on its own block, and by what the other ranks
  // computed, once it is home. Without gradients the rounds are those of a forward.
  absl::Status Run(const RingSchedule& schedule, const RingPass& pass, const Block& block,
                   const Block& gradients,
                   const std::function<const VisibleKeys&(int source)>& visible,
                   const Compute& compute, RingTraffic* traffic);

 private:
  // A reusable place for the tensors of any rank's block.
  using Buffer = absl::InlinedVector<Tensor, 4>;

  static void Reserve(const Block& block, int64_t max_length, Buffer* buffer);
  static Tensors ViewFor(const Block& block, const Buffer& buffer, int64_t length);
  // Sends `out` to the next rank and receives `in` from the previous one; either may be empty.
  absl::Status Exchange(Channel channel, const Tensors& out, const Tensors& in, int64_t* hops,
                        int64_t* bytes);

  Communicator* const comm_;
  Buffer visiting_[2];                  // double buffering: one at work, one arriving
  Buffer local_, outgoing_, arriving_;  // gradients
};

}  // namespace burst
