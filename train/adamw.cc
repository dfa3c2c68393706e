#include "train/adamw.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "burst/base/check.h"
#include "burst/base/parallel.h"

namespace burst {
namespace {

constexpr int64_t kGrain = 1 << 14;

// Coefficients of one update, the bias corrections folded in.
template <typename T>
struct Coefficients {
  T beta1, one_minus_beta1, beta2, one_minus_beta2;
  T step_size;      // lr / (1 - beta1^t)
  T sqrt_correct2;  // 1 / sqrt(1 - beta2^t)
  T eps, grad_scale;
};

//   m <- beta1 m + (1 - beta1) g                v <- beta2 v + (1 - beta2) g^2
//   p <- (1 - lr lambda) p - lr m^ / (sqrt(v^) + eps),   m^ = m / (1 - beta1^t), v^ likewise
template <typename T>
void UpdateRange(const Coefficients<T>& c, T keep, int64_t begin, int64_t end,
                 const T* __restrict g, T* __restrict p, T* __restrict m, T* __restrict v) {
  for (int64_t i = begin; i < end; ++i) {
    const T gradient = g[i] * c.grad_scale;
    m[i] = c.beta1 * m[i] + c.one_minus_beta1 * gradient;
    v[i] = c.beta2 * v[i] + c.one_minus_beta2 * gradient * gradient;
    p[i] = keep * p[i] - c.step_size * m[i] / (std::sqrt(v[i]) * c.sqrt_correct2 + c.eps);
  }
}

}  // namespace

AdamW::AdamW(const AdamWOptions& options, int64_t numel, DType dtype, std::vector<DecayRange> decay)
    : options_(options),
      decay_(std::move(decay)),
      m_(Tensor::Zeros({numel}, dtype)),
      v_(Tensor::Zeros({numel}, dtype)) {
  int64_t last = 0;
  for (const DecayRange& range : decay_) {
    BURST_CHECK(last <= range.begin && range.begin <= range.end && range.end <= numel);
    last = range.end;
  }
}

void AdamW::Step(const Tensor& values, const Tensor& grads, double grad_scale, double lr) {
  BURST_CHECK(values.shape() == m_.shape() && grads.shape() == m_.shape());
  ++updates_;
  DispatchFloat(m_.dtype(), [&](auto zero) {
    using T = decltype(zero);
    StepTyped<T>(values.data<T>(), grads.data<T>(), grad_scale, lr);
  });
}

template <typename T>
void AdamW::StepTyped(T* p, const T* g, double grad_scale, double lr) {
  const double t = static_cast<double>(updates_);
  Coefficients<T> c;
  c.beta1 = static_cast<T>(options_.beta1);
  c.one_minus_beta1 = static_cast<T>(1 - options_.beta1);
  c.beta2 = static_cast<T>(options_.beta2);
  c.one_minus_beta2 = static_cast<T>(1 - options_.beta2);
  c.step_size = static_cast<T>(lr / (1 - std::pow(options_.beta1, t)));
  c.sqrt_correct2 = static_cast<T>(1 / std::sqrt(1 - std::pow(options_.beta2, t)));
  c.eps = static_cast<T>(options_.eps);
  c.grad_scale = static_cast<T>(grad_scale);
  const T keep = static_cast<T>(1 - lr * options_.weight_decay);

  T* m = m_.data<T>();
  T* v = v_.data<T>();
  ParallelFor(m_.numel(), kGrain, [&](int64_t begin, int64_t end) {
    int64_t at = begin;
    for (const DecayRange& range : decay_) {
      const int64_t from = std::clamp(range.begin, at, end), to = std::clamp(range.end, from, end);
      UpdateRange<T>(c, T{1}, at, from, g, p, m, v);
      UpdateRange<T>(c, keep, from, to, g, p, m, v);
      at = to;
    }
    UpdateRange<T>(c, T{1}, at, end, g, p, m, v);
  });
}

double L2Norm(const Tensor& tensor) {
  constexpr int64_t kBlock = 1 << 14;
  const int64_t n = tensor.numel();
  std::vector<double> sums((n + kBlock - 1) / kBlock);
  DispatchFloat(tensor.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const T* x = tensor.data<T>();
    ParallelFor(static_cast<int64_t>(sums.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        // Independent partial sums, so that the additions do not wait for each other.
        double partial[8] = {};
        const int64_t last = std::min(n, (block + 1) * kBlock);
        int64_t i = block * kBlock;
        for (; i + 8 <= last; i += 8) {
          for (int j = 0; j < 8; ++j) partial[j] += double{x[i + j]} * double{x[i + j]};
        }
        for (; i < last; ++i) partial[0] += double{x[i]} * double{x[i]};
        for (double value : partial) sums[block] += value;
      }
    });
  });
  double sum = 0;
  for (double value : sums) sum += value;
  return std::sqrt(sum);
}

}  // namespace burst
