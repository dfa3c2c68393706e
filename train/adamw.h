// AdamW (Loshchilov and Hutter, arXiv 1711.05101) over a flat buffer of parameters, on a CPU or,
// queued on the calling thread's stream and never waited for, on a GPU.
#pragma once

#include <cstdint>
#include <vector>

#include "burst/tensor/tensor.h"

namespace burst {

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
};

// A range of the flat buffer that weight decay applies to.
struct DecayRange {
  int64_t begin = 0;
  int64_t end = 0;
};

class AdamW {
 public:
  // For a buffer of `numel` elements of float32 or float64; `decay` is increasing and disjoint.
  // State starts at 0.
  AdamW(const AdamWOptions& options, int64_t numel, DType dtype, std::vector<DecayRange> decay,
        DeviceType device = DeviceType::kCpu);

  // One update, number updates() + 1, of `masters` [numel] from `grads` [numel] times min(1, clip /
  // norm) (clip 0: times 1); `compute` [numel] bfloat16, unless null, becomes the masters, rounded.
  // loss_and_norm: [2] float64, on the same device: unless both are finite, nothing changes.
  void Step(const Tensor& masters, const Tensor& compute, const Tensor& grads,
            const Tensor& loss_and_norm, double clip, double lr);
  // Confirms that the last Step made its update, for whoever knows by then that its loss and norm
  // were finite.
  void CountUpdate() { ++updates_; }

  // The state: what a checkpoint holds.
  const Tensor& first_moment() const { return m_; }   // [numel]
  const Tensor& second_moment() const { return v_; }  // [numel]
  int64_t updates() const { return updates_; }
  void set_updates(int64_t updates) { updates_ = updates; }

 private:
  const AdamWOptions options_;
  const std::vector<DecayRange> decay_;
  Tensor m_, v_;
  Tensor decay_bounds_;  // of a GPU: begin, end, begin, end... as float64, exact to 2^53
  int64_t updates_ = 0;
};

// The Euclidean norm of a tensor, [1] float64 on its device: summed in double and in a fixed order,
// the same bits for any number of threads and in every run. On a GPU queued, not waited for.
Tensor L2Norm(const Tensor& tensor);

}  // namespace burst
