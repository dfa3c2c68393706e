// Computes AdamW and the norm of a gradient on a GPU: the kernels for train/optimizer/adamw.h.
#pragma once

#include <cstdint>

#include "burst/tensor/gpu_kernel.h"
#include "burst/tensor/tensor.h"

namespace burst {
namespace cuda {

// The arguments of an update; see train/optimizer/adamw.cc for the formulas.
struct AdamWUpdate {
  double beta1 = 0, beta2 = 0, eps = 0, lr = 0, weight_decay = 0;
  double clip = 0;  // the largest norm; 0: no clipping
};

// Everything is [n]. grads, masters, m, v and average are all float32 or all float64; compute is
// bfloat16. compute and average may be null. Muon's elements have no v.
struct AdamWPart {
  int64_t offset = 0;  // number of its first element among all updated ones
  Tensor grads, masters, m, v, compute;
  Tensor average = {};
};
// Returns the work: the masters and both moments are read and written.
inline KernelWork WorkOf(const AdamWPart& part) {
  KernelWork work;
  for (const Tensor& twice : {part.masters, part.m, part.v}) {
    work.bytes += 2 * burst::WorkOf(twice).bytes;
  }
  work.bytes += burst::WorkOf(part.grads).bytes + burst::WorkOf(part.compute).bytes;
  return work;
}

// Begins an update. Counts it in updates, [1] float64, and computes the coefficients that all parts
// need: [kAdamWCoefficients] of the masters' dtype. loss_and_norm: [2] float64. Unless both are
// finite, this and AdamWStep do nothing.
constexpr int64_t kAdamWCoefficients = 9;
constexpr int64_t kGradScale = 8;  // the coefficient by which clipping multiplies gradients
void BeginAdamWStep(const AdamWUpdate& update, const Tensor& loss_and_norm, const Tensor& updates,
                    const Tensor& coefficients);

// Updates one part. decay_bounds: float64, increasing, counted over all parts; may be empty.
// Weights decay from its elements 0, 2... up to its elements 1, 3....
void AdamWStep(const Tensor& coefficients, const Tensor& decay_bounds, const Tensor& loss_and_norm,
               const AdamWPart& part);

// Moves the average of weights by an update that BeginAdamWStep counted in updates: decay average +
// (1 - decay) weights, and weights after update 1. Unless loss and norm are finite, it does
// nothing.
void UpdateAverage(double decay, const Tensor& loss_and_norm, const Tensor& updates,
                   const Tensor& weights, const Tensor& average);

// Sets norm, [1] float64, to the Euclidean norm of x: contiguous, any floating-point type. It is
// summed in double, in an order that depends on the number of elements and their type alone.
void L2Norm(const Tensor& x, const Tensor& norm);

}  // namespace cuda
}  // namespace burst
