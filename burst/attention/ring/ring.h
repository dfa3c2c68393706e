// One pass around the ring: blocks of tensors visit every rank that needs them, their gradients
// follow and come home. Knows the schedule and the communicators, nothing of attention; when what
// goes where is in route.h.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "burst/attention/ring/route.h"
#include "burst/attention/ring/schedule.h"
#include "burst/comm/communicator.h"
#include "burst/tensor/tensor.h"

namespace burst {

// What one rank sent: a hop is a block, or its gradient, handed to another rank.
struct RingTraffic {
  struct Sent {
    int64_t transfers = 0, bytes = 0;
    Sent operator+(const Sent& other) const {
      return {transfers + other.transfers, bytes + other.bytes};
    }
  };
  PerLink<Sent> blocks, gradients;
  int64_t rounds_computed = 0;
  int64_t rounds_skipped = 0;  // fully masked

  int64_t bytes(Link link) const { return blocks[link].bytes + gradients[link].bytes; }
  int64_t bytes() const { return blocks.total().bytes + gradients.total().bytes; }
};

class Ring {
 public:
  using Tensors = absl::InlinedVector<Tensor, 4>;

  // A tensor of this rank's block; the same tensor of another rank has that rank's length along
  // length_axis.
  struct BlockTensor {
    Tensor tensor;
    int length_axis;
  };
  using Block = absl::InlinedVector<BlockTensor, 4>;

  // In a pass with gradients the rank's own block is worked on in two calls: the first hides the
  // first transfer, the second the gradient's way home. How to divide the work is up to the caller.
  enum class Part { kWhole, kFirst, kSecond };
  // Works on the block of rank `source` where `visible` says, adding to `gradients`.
  using Compute = std::function<void(int source, Part part, const VisibleKeys& visible,
                                     const Tensors& block, const Tensors& gradients)>;

  // Two communicators of the same ranks: `comm` carries what stays in a node, `between_nodes` what
  // leaves it, so that neither waits for the other. Null: a single rank, or a single node.
  explicit Ring(Communicator* comm, Communicator* between_nodes = nullptr)
      : comm_(comm), between_nodes_(between_nodes) {}

  // Calls compute for every round in which the pass has work, this rank's own block first, while
  // the next blocks travel. visible(source) gives the mask of a round.
  //
  // `gradients` are those of `block`. This rank's rounds on its own block add to them, and so does
  // what the other ranks computed, once it is home. Only what comes home last is returned in *last
  // instead (in gradient_dtype, valid until the next Run; empty if there is none), so that the
  // caller can add it to `gradients` while it converts them. On their way gradients have
  // gradient_dtype: their own, or bfloat16 where their own is float32; every rank adds in their
  // own.
  absl::Status Run(const RingSchedule& schedule, const RingRoute& pass, const Block& block,
                   const Block& gradients, DType gradient_dtype,
                   const std::function<const VisibleKeys&(int source)>& visible,
                   const Compute& compute, RingTraffic* traffic, Tensors* last);
  // The same without gradients: a forward.
  absl::Status Run(const RingSchedule& schedule, const RingRoute& pass, const Block& block,
                   const std::function<const VisibleKeys&(int source)>& visible,
                   const Compute& compute, RingTraffic* traffic) {
    return Run(schedule, pass, block, {}, DType::kFloat32, visible, compute, traffic, nullptr);
  }

 private:
  // A reusable place for the tensors of any rank's block; empty: none.
  using Buffer = absl::InlinedVector<Tensor, 4>;
  class Gradients;

  Communicator* comm(Link link) const { return link == Link::kIntra ? comm_ : between_nodes_; }
  // Makes room for every tensor of the block at the given length, in `dtype` or in its own.
  static void Reserve(const Block& block, int64_t max_length, Buffer* buffer,
                      std::optional<DType> dtype = std::nullopt);
  static Tensors ViewFor(const Block& block, const Buffer& buffer, int64_t length);
  // Starts a transfer: `out` to transfer.to, `in` from transfer.from.
  absl::Status Post(Link link, Channel channel, const RingTransfer& transfer, const Tensors& out,
                    const Tensors& in, RingTraffic::Sent* sent);
  absl::Status Wait(Link link, Channel channel);

  Communicator* const comm_;
  Communicator* const between_nodes_;
  // A block at work, one on its way out, one on its way in; and of those that cross between nodes,
  // one that its node passes around and one on its way in.
  Buffer within_[3], across_[2];
  std::vector<Buffer> spare_;       // for gradients that travel
  std::vector<Buffer> spare_sums_;  // for sums, where their dtype is not the travelling one
  Buffer home_;                     // holds *last
};

}  // namespace burst
