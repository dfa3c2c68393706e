// Holds in the host's memory what a recomputed layer keeps between its forward and its backward:
// its input and attention's result.
#pragma once

#include <memory>
#include <vector>

#include "burst/attention/sequence_parallel_attention.h"
#include "burst/autograd/tape.h"
#include "burst/tensor/host_copies.h"

namespace burst {

class OffloadedLayer {
 public:
  // Begins the copies. x: contiguous, read by nobody but the layer; kept: null, or what its first
  // run has left.
  OffloadedLayer(HostCopies& copies, const Variable& x, std::shared_ptr<KeptAttention> kept);

  // Frees the device's memory for work that is queued from here on, after the copies.
  void Release();
  // Begins the copies back.
  void Fetch();
  // Puts everything back where it was, for work that is queued from here on.
  void Restore();

 private:
  const Variable x_;
  const std::shared_ptr<KeptAttention> kept_;
  bool released_ = false;
  // Null: not stored.
  std::unique_ptr<HostCopies::Stored> stored_x_, stored_out_;
  // exchanged.out of kept_->results
  std::vector<std::unique_ptr<HostCopies::Stored>> stored_exchanged_;
};

}  // namespace burst
