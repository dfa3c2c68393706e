// The ring: blocks of tensors visit every rank that needs them, and their gradients follow and
// return to the owner. Knows routes (route.h) and communicators, nothing of attention.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "burst/attention/ring/route.h"
#include "burst/comm/communicator.h"
#include "burst/tensor/tensor.h"

namespace burst {

// Statistics of one rank: the bytes it sent and the work it computed.
struct RingTraffic {
  struct Sent {
    int64_t transfers = 0, bytes = 0;  // a transfer: one block, or its gradient, to one rank
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

// Aborts for an exception of this rank; null: nothing. Needs no memory, though it then says less.
void AbortFor(const std::exception& error, Communicator* comm);

class Ring {
 public:
  using Tensors = absl::InlinedVector<Tensor, 4>;

  // A tensor of this rank's block. On another rank it differs only in its length along length_axis:
  // route.lengths[rank] tokens.
  struct BlockTensor {
    Tensor tensor;
    int length_axis;
  };
  using Block = absl::InlinedVector<BlockTensor, 4>;

  // The gradients of a block's tensors.
  struct BlockGradients {
    // The gradients of this rank's block, to be accumulated into. Zeros, where
    // OwnGradientReturnsEarly(route).
    Block own;
    DType in_transit;  // dtype while sent: own's, or bfloat16 where `own` is float32.
                       // Every rank accumulates in the dtype of `own`
    // Assigned by Run: the part of the gradients that arrived last and is not in `own` yet. It has
    // dtype in_transit and is valid until the next Run; empty if there is no such part. The caller
    // adds it to `own`, for instance while it converts them.
    Tensors last;
  };

  // The part of a block's work that is done in one call. With gradients, the rank's own block is
  // computed in two calls: kFirst while the first transfers run, kSecond while the last gradients
  // return. The callee decides what belongs to which call.
  enum class Part { kWhole, kFirst, kSecond };

  // The gradients of the block that is here; none in a forward.
  struct Sums {
    Tensors tensors;
    bool first = false;  // for another rank's block: the gradients are empty and must be assigned
  };

  // Computes the round in which the block of rank `source` is here, and adds to its gradients.
  using Compute =
      std::function<void(int source, Part part, const Tensors& block, const Sums& gradients)>;

  // Two communicators of the same ranks: `comm` within nodes, `between_nodes` between them, so that
  // neither waits for the other. Both must outlive the object. Null: a single rank, or a single
  // node.
  explicit Ring(Communicator* comm, Communicator* between_nodes = nullptr);

  // Collective. Calls compute for every round of `route` that has work, this rank's own block
  // first, while the transfers of the next round run. `gradients` may be null: a forward. Adds to
  // *traffic. A failed transfer is returned. An exception of compute goes on to the caller. The
  // communicators are aborted before, so that no transfer uses memory that the caller then frees.
  absl::Status Run(const RingRoute& route, const Block& block, BlockGradients* gradients,
                   const Compute& compute, RingTraffic* traffic);

 private:
  // Reusable memory for the tensors of any rank's block; empty: none.
  using Buffer = absl::InlinedVector<Tensor, 4>;
  class GradientTransfers;
  // Blocks of the previous round, of this one and of the next one, and of the next node's first.
  struct Visiting {
    Tensors previous, current, next, next_node;
  };

  // Starts the transfers of blocks of round t: those of later rounds arrive while it is computed.
  absl::Status PostBlocks(const RingRoute& route, const Block& block, int t, Visiting* blocks,
                          RingTraffic* traffic);
  absl::Status RunRounds(const RingRoute& route, const Block& block, BlockGradients* gradients,
                         GradientTransfers* transfers, const Compute& compute,
                         RingTraffic* traffic);
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
  Buffer within_[3];  // blocks: one is computed, one is sent, one is received
  Buffer across_[2];  // blocks that cross between nodes: one is used in its node, one is received
  std::vector<Buffer> free_;       // for gradients in transit
  std::vector<Buffer> free_sums_;  // to accumulate in, where that dtype is another
  Buffer last_;                    // holds BlockGradients::last
};

// Returns these rows of a block, in contiguous memory.
Tensor TakeRows(const Tensor& block, int axis, const std::vector<BlockRows>& rows);

// Returns a block as the ring sends it: contiguous, all of it (null) or these rows.
Ring::Block BlockForSending(Ring::Block block, const std::vector<BlockRows>* rows);

}  // namespace burst
