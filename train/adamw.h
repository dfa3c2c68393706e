// AdamW (Loshchilov and Hutter, arXiv 1711.05101) over a flat buffer of parameters.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
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
  // For a buffer of `numel` elements; `decay` is increasing and disjoint. State starts at 0.
  AdamW(const AdamWOptions& options, int64_t numel, DType dtype, std::vector<DecayRange> decay);

  // One update of values [numel] from grads [numel] times grad_scale (the clipping factor).
  void Step(const Tensor& values, const Tensor& grads, double grad_scale, double lr);

  // The state: what a checkpoint holds.
  const Tensor& first_moment() const { return m_; }   // [numel]
  const Tensor& second_moment() const { return v_; }  // [numel]
  int64_t updates() const { return updates_; }
  void set_updates(int64_t updates) { updates_ = updates; }

 private:
  template <typename T>
  void StepTyped(T* p, const T* g, double grad_scale, double lr);

  const AdamWOptions options_;
  const std::vector<DecayRange> decay_;
  Tensor m_, v_;
  int64_t updates_ = 0;
};

// The Euclidean norm, summed in double over fixed blocks: the same bits for any number of threads.
double L2Norm(const Tensor& tensor);

}  // namespace burst
