// The two sides of BurstAttention's backward. One travels around the ring, its gradients follow it;
// the other stays.
//
//   queries  q, dO, lse, delta | dQ
//   keys     K, V              | dK, dV
#pragma once

#include <cstdint>
#include <initializer_list>
#include <vector>

#include "burst/attention/ring/ring.h"
#include "burst/attention/ring/schedule.h"
#include "burst/tensor/tensor.h"

namespace burst {

// The sum of one gradient over the calls of a backward on this rank, and its result.
class GradientSum {
 public:
  // The sum is in `result` itself, if its dtype and strides allow it or if one call makes it.
  GradientSum(const Tensor& result, bool one_call);

  const Tensor& sum() const { return sum_; }
  const Tensor& result() const { return result_; }
  // Whether the kernels' last call can convert the sum into the result.
  bool KernelsConvert() const;
  // Makes the result of the sum and of what arrived after the last call (null: nothing).
  void Finish(const Tensor& arrived) const;

 private:
  Tensor result_, sum_;
};

// What the calls of a step read and write of one side: of this rank's block or of one that visits.
struct SideOfStep {
  int source;  // the rank whose block it is
  Ring::Tensors inputs;
  // Null sums: one call assigns the results. Null results: the last call converts nothing.
  Ring::Tensors sums, results;
  // The first call for some heads assigns their sums. False: the sums hold something already.
  bool begins = true;
};

// This rank's block of queries or of keys, and the sums of its gradients.
class BackwardSide {
 public:
  // results: of the gradients. one_call, clears: as the plan says.
  BackwardSide(int rank, const Ring::Block& block, std::initializer_list<Tensor> results,
               bool one_call, bool clears);

  const Ring::Block& block() const { return block_; }
  const std::vector<GradientSum>& gradients() const { return gradients_; }
  // The kernels' last call makes the results of the sums, if it can. Finish then does nothing.
  void LetKernelsConvert();
  SideOfStep OfStep() const;
  // Makes the results. `arrived`: what came from other ranks after the last call; empty: nothing.
  void Finish(const Ring::Tensors& arrived) const;

 private:
  const int rank_;
  const Ring::Block block_;
  const bool one_call_;
  std::vector<GradientSum> gradients_;
  bool kernels_convert_ = false;
};

// The side that travels: what the ring sends of its block, and the gradients that come back.
class TravelingSide {
 public:
  // rows: those that this rank sends; null: all. Both pointers must outlive the object.
  TravelingSide(const BackwardSide* own, const RingRoute& route, const std::vector<BlockRows>* rows,
                DType in_transit);

  const Ring::Block& sent() const { return sent_; }
  Ring::BlockGradients* gradients() { return &gradients_; }
  // What a step reads and writes where the block of `source` is.
  SideOfStep OfStep(int source, const Ring::Tensors& visiting, const Ring::Sums& sums) const;
  // Adds what has come back, and makes the results.
  void Finish();

 private:
  const BackwardSide& own_;
  const int rank_;
  const std::vector<BlockRows>* const rows_;
  Ring::Block sent_;
  Ring::BlockGradients gradients_;
};

}  // namespace burst
