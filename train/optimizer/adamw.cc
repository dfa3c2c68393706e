#include "train/optimizer/adamw.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "burst/base/check.h"
#include "burst/base/parallel.h"
#include "burst/base/status.h"
#include "burst/tensor/gpu_kernel.h"
#include "train/optimizer/adamw_cuda.h"
#include "train/optimizer/state_stream.h"

namespace burst {
namespace {

constexpr int64_t kBlock = 1 << 14;  // elements that one call of a loop updates or sums

// Returns the factor of clipping.
double GradScale(const cuda::AdamWUpdate& update, double norm) {
  return update.clip > 0 && norm > update.clip ? update.clip / norm : 1;
}

// Coefficients of one update. They include the bias corrections and the clipping.
template <typename T>
struct Coefficients {
  T beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, sqrt_correct2, eps, keep, grad_scale;

  // Computes the coefficients of update number t, counted from 1.
  Coefficients(const cuda::AdamWUpdate& update, double t, double norm)
      : beta1(static_cast<T>(update.beta1)),
        one_minus_beta1(static_cast<T>(1 - update.beta1)),
        beta2(static_cast<T>(update.beta2)),
        one_minus_beta2(static_cast<T>(1 - update.beta2)),
        step_size(static_cast<T>(update.lr / (1 - std::pow(update.beta1, t)))),
        sqrt_correct2(static_cast<T>(1 / std::sqrt(1 - std::pow(update.beta2, t)))),
        eps(static_cast<T>(update.eps)),
        keep(static_cast<T>(1 - update.lr * update.weight_decay)),
        grad_scale(static_cast<T>(GradScale(update, norm))) {}
};

//   m <- beta1 m + (1 - beta1) g                v <- beta2 v + (1 - beta2) g^2
//   p <- (1 - lr lambda) p - lr m^ / (sqrt(v^) + eps),   m^ = m / (1 - beta1^t), v^ likewise
//
// Each fma is explicit. A compiler that chose them could choose otherwise at the ends of a
// vectorized loop, and a parameter's bits would depend on how ranks divide the state.
template <typename T>
void UpdateRange(const Coefficients<T>& c, T keep, int64_t begin, int64_t end,
                 const T* __restrict g, T* __restrict p, T* __restrict m, T* __restrict v) {
  for (int64_t i = begin; i < end; ++i) {
    const T gradient = g[i] * c.grad_scale;
    m[i] = std::fma(c.beta1, m[i], c.one_minus_beta1 * gradient);
    v[i] = std::fma(c.beta2, v[i], c.one_minus_beta2 * gradient * gradient);
    p[i] = std::fma(keep, p[i],
                    -(c.step_size * m[i] / std::fma(std::sqrt(v[i]), c.sqrt_correct2, c.eps)));
  }
}

// Updates elements from `offset` of the state on. `decay` counts from the start of the state.
template <typename T>
void UpdateAll(const Coefficients<T>& c, const std::vector<DecayRange>& decay, int64_t offset,
               int64_t n, const T* g, T* p, T* m, T* v) {
  const auto update_block = [&](int64_t at, int64_t end) {
    auto range = std::partition_point(decay.begin(), decay.end(),
                                      [&](const DecayRange& r) { return r.end <= offset + at; });
    for (; range != decay.end() && range->begin < offset + end; ++range) {
      const int64_t from = std::max(range->begin - offset, at);
      const int64_t to = std::min(range->end - offset, end);
      UpdateRange<T>(c, T{1}, at, from, g, p, m, v);
      UpdateRange<T>(c, c.keep, from, to, g, p, m, v);
      at = to;
    }
    UpdateRange<T>(c, T{1}, at, end, g, p, m, v);
  };
  ParallelFor((n + kBlock - 1) / kBlock, 1, [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      update_block(block * kBlock, std::min(n, (block + 1) * kBlock));
    }
  });
}

// Calls body(begin, end) for the ranges of [begin, end) that Muon does not update.
template <typename Body>
void ForAdamW(const Muon* muon, int64_t begin, int64_t end, const Body& body) {
  if (muon != nullptr) {
    for (const MuonPiece& piece : muon->own()) {
      if (piece.at < begin || piece.at >= end) continue;
      body(begin, piece.at);
      begin = piece.at + piece.length;
      BURST_CHECK_LE(begin, end);
    }
  }
  body(begin, end);
}

// Returns the elements [begin, end) of the state's second moments, which begin with element `first`
// of the state. Muon's elements have none.
Tensor SecondMoments(const Muon* muon, const Tensor& v, int64_t first, int64_t begin, int64_t end) {
  const auto at = [&](int64_t i) { return muon == nullptr ? i : i - muon->NumelBefore(i); };
  return v.Slice(0, at(begin) - at(first), at(end) - at(begin));
}

// Returns the elements [begin, end) of a part, counted from the start of the state.
cuda::AdamWPart Cut(const Muon* muon, const cuda::AdamWPart& part, int64_t begin, int64_t end) {
  const auto cut = [&](const Tensor& tensor) {
    return tensor.null() ? Tensor() : tensor.Slice(0, begin - part.offset, end - begin);
  };
  return {begin,
          cut(part.grads),
          cut(part.masters),
          cut(part.m),
          SecondMoments(muon, part.v, part.offset, begin, end),
          cut(part.compute),
          cut(part.average)};
}

void UpdateAverage(double decay, const Tensor& weights, const Tensor& average) {
  DispatchFloat(weights.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const T keep = static_cast<T>(decay), rest = static_cast<T>(1 - decay);
    const T* const p = weights.data<T>();
    T* const a = average.data<T>();
    const int64_t n = weights.numel();
    ParallelFor((n + kBlock - 1) / kBlock, 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first * kBlock; i < std::min(n, last * kBlock); ++i) {
        a[i] = std::fma(keep, a[i], rest * p[i]);
      }
    });
  });
}

// An update in progress. It is applied to one part of the state at a time.
class BegunUpdate {
 public:
  BegunUpdate(const cuda::AdamWUpdate& update, DType dtype, const std::vector<DecayRange>& decay,
              const Muon* muon, double average_decay, const Tensor& decay_bounds,
              const Tensor& loss_and_norm, const Tensor& updates)
      : update_(update),
        decay_(decay),
        muon_(muon),
        average_decay_(average_decay),
        decay_bounds_(decay_bounds),
        loss_and_norm_(loss_and_norm),
        updates_(updates) {
    if (updates.device() == DeviceType::kCuda) {
      coefficients_ = Tensor::Empty({cuda::kAdamWCoefficients}, dtype, DeviceType::kCuda);
      BURST_GPU_KERNEL(BeginAdamWStep, update, loss_and_norm, updates, coefficients_);
      return;
    }
    const double *loss = loss_and_norm.data<double>(), *norm = loss + 1;
    if (!std::isfinite(*loss) || !std::isfinite(*norm)) return;
    number_ = ++updates.data<double>()[0];
    norm_ = *norm;
  }

  // Returns the steps of Muon for the matrices of all parts. They come before AdamW's.
  std::vector<UpdateStep> MuonSteps(absl::Span<const cuda::AdamWPart> parts, int64_t piece) const {
    const bool on_gpu = !coefficients_.null();
    if (muon_ == nullptr || (!on_gpu && number_ == 0)) return {};
    MuonUpdate update;
    update.lr = update_.lr;
    update.keep = 1 - update_.lr * update_.weight_decay;
    update.dtype = on_gpu && !parts[0].compute.null() ? DType::kBFloat16 : parts[0].m.dtype();
    update.loss_and_norm = loss_and_norm_;
    if (on_gpu) {
      update.gpu_grad_scale = coefficients_.Slice(0, cuda::kGradScale, 1);
    } else {
      update.grad_scale = GradScale(update_, norm_);
    }
    const auto part_of = [&](int64_t begin, int64_t end) {
      size_t i = 0;
      while (i + 1 < parts.size() && parts[i + 1].offset <= begin) ++i;
      return Cut(muon_, parts[i], begin, end);
    };
    return muon_->Steps(update, part_of, piece);
  }

  // Adds the steps of AdamW for what Muon leaves of a part, with at most `piece` elements each. The
  // state of a step is m, v, and masters that are rounded.
  void AddSteps(const cuda::AdamWPart& part, int64_t piece, std::vector<UpdateStep>* steps) const {
    const auto add = [&](int64_t begin, int64_t end) {
      const cuda::AdamWPart own = Cut(muon_, part, begin, end);
      UpdateStep& step = steps->emplace_back(UpdateStep{{own.m, own.v}, nullptr});
      if (!own.compute.null()) step.state.push_back(own.masters);
      step.run = [this, own](absl::Span<const Tensor> here) {
        cuda::AdamWPart on_device = own;
        on_device.m = here[0];
        on_device.v = here[1];
        if (here.size() > 2) on_device.masters = here[2];
        Apply(on_device);
        return absl::OkStatus();
      };
    };
    ForAdamW(muon_, part.offset, part.offset + part.m.numel(),
             [&](int64_t begin, int64_t end) { ForPieces(begin, end, piece, add); });
  }

  void Apply(const cuda::AdamWPart& part) const {
    const int64_t end = part.offset + part.m.numel();
    if (!coefficients_.null()) {
      ForAdamW(muon_, part.offset, end, [&](int64_t from, int64_t to) {
        BURST_GPU_KERNEL(AdamWStep, coefficients_, decay_bounds_, loss_and_norm_,
                         Cut(muon_, part, from, to));
      });
      if (part.average.null()) return;
      BURST_GPU_KERNEL(UpdateAverage, average_decay_, loss_and_norm_, updates_, part.masters,
                       part.average);
      return;
    }
    if (number_ == 0) return;
    DispatchFloat(part.m.dtype(), [&](auto zero) {
      using T = decltype(zero);
      const Coefficients<T> c(update_, number_, norm_);
      ForAdamW(muon_, part.offset, end, [&](int64_t from, int64_t to) {
        const cuda::AdamWPart cut = Cut(muon_, part, from, to);
        UpdateAll<T>(c, decay_, from, to - from, cut.grads.data<T>(), cut.masters.data<T>(),
                     cut.m.data<T>(), cut.v.data<T>());
        if (!cut.compute.null()) cut.compute.CopyFrom(cut.masters.To(DType::kBFloat16));
      });
    });
    if (part.average.null()) return;
    UpdateAverage(number_ == 1 ? 0 : average_decay_, part.masters, part.average);
  }

 private:
  const cuda::AdamWUpdate& update_;
  const std::vector<DecayRange>& decay_;
  const Muon* const muon_;
  const double average_decay_;
  const Tensor &decay_bounds_, &loss_and_norm_, &updates_;
  Tensor coefficients_;           // for a GPU
  double number_ = 0, norm_ = 0;  // for the CPU; 0 means that no update has begun
};

}  // namespace

AdamW::AdamW(const AdamWOptions& options, int64_t numel, DType dtype, std::vector<DecayRange> decay,
             DeviceType device, const StreamedState& streamed, std::unique_ptr<Muon> muon)
    : options_(options),
      decay_(std::move(decay)),
      muon_(std::move(muon)),
      device_(device),
      updates_(Tensor::Zeros({1}, DType::kFloat64, device)),
      piece_(streamed.piece) {
  BURST_CHECK(piece_ >= 0 && piece_ % 64 == 0);  // vectorized loads can begin at a piece
  const auto zeros = [&](int64_t n) {
    return piece_ > 0 ? Tensor::ZerosOnHost({n}, dtype, device) : Tensor::Zeros({n}, dtype, device);
  };
  m_ = zeros(numel);
  v_ = zeros(muon_ == nullptr ? numel : numel - muon_->NumelBefore(numel));
  if (piece_ > 0) stream_ = std::make_unique<StateStream>(device, dtype, streamed.resident);
  int64_t last = 0;
  std::vector<double> bounds;
  for (const DecayRange& range : decay_) {
    BURST_CHECK(last <= range.begin && range.begin <= range.end && range.end <= numel);
    last = range.end;
    bounds.push_back(static_cast<double>(range.begin));
    bounds.push_back(static_cast<double>(range.end));
  }
  if (device == DeviceType::kCuda) {
    decay_bounds_ = Tensor::FromVector(bounds, {static_cast<int64_t>(bounds.size())}, device);
  }
}

AdamW::~AdamW() = default;

void AdamW::WriteBack() const {
  if (stream_ != nullptr) stream_->WriteBack();
}

int64_t AdamW::resident_bytes() const { return stream_ == nullptr ? 0 : stream_->resident_bytes(); }

void AdamW::KeepAverage(double decay) {
  BURST_CHECK(stream_ == nullptr);
  average_decay_ = decay;
  average_ = Tensor::Zeros({m_.numel()}, m_.dtype(), device_);
}

std::vector<AdamW::StateTensor> AdamW::state() const {
  std::vector<StateTensor> all = {{"adam.m.", m_, nullptr}, {"adam.v.", v_, muon_.get()}};
  if (!average_.null()) all.push_back({kAveragePrefix, average_, nullptr});
  return all;
}

Tensor AdamW::StateTensor::Slice(int64_t at, int64_t length) const {
  return left_out == nullptr ? flat.Slice(0, at, length)
                             : SecondMoments(left_out, flat, 0, at, at + length);
}

void AdamW::CheckParts(absl::Span<const Part> parts) const {
  int64_t n = 0;
  for (const Part& part : parts) {
    n += part.masters.numel();
    const bool on_host = stream_ != nullptr && !part.compute.null();
    BURST_CHECK(part.masters.device() == (on_host ? DeviceType::kCpu : device_));
    BURST_CHECK(part.grads.device() == device_);
    for (const Tensor& tensor : {part.masters, part.grads}) {
      BURST_CHECK(tensor.ndim() == 1 && tensor.shape() == part.masters.shape() &&
                  tensor.dtype() == m_.dtype() && tensor.is_contiguous());
    }
    BURST_CHECK(part.compute.null() ||
                (part.compute.shape() == part.masters.shape() && part.compute.is_contiguous() &&
                 part.compute.dtype() == DType::kBFloat16 && part.compute.device() == device_));
  }
  BURST_CHECK_EQ(n, m_.numel());
}

std::vector<cuda::AdamWPart> AdamW::WithState(absl::Span<const Part> parts) const {
  std::vector<cuda::AdamWPart> with_state;
  int64_t offset = 0;
  for (const Part& part : parts) {
    const int64_t n = part.masters.numel();
    with_state.push_back({offset, part.grads, part.masters, m_.Slice(0, offset, n),
                          SecondMoments(muon_.get(), v_, 0, offset, offset + n), part.compute,
                          average_.null() ? Tensor() : average_.Slice(0, offset, n)});
    offset += n;
  }
  return with_state;
}

absl::Status AdamW::Step(absl::Span<const Part> parts, const Tensor& loss_and_norm, double clip,
                         double lr) {
  CheckParts(parts);
  BURST_CHECK(loss_and_norm.numel() == 2 && loss_and_norm.dtype() == DType::kFloat64 &&
              loss_and_norm.device() == device_);
  cuda::AdamWUpdate numbers;
  numbers.beta1 = options_.beta1;
  numbers.beta2 = options_.beta2;
  numbers.eps = options_.eps;
  numbers.lr = lr;
  numbers.weight_decay = options_.weight_decay;
  numbers.clip = clip;
  const std::vector<cuda::AdamWPart> with_state = WithState(parts);
  const BegunUpdate update(numbers, m_.dtype(), decay_, muon_.get(), average_decay_, decay_bounds_,
                           loss_and_norm, updates_);
  if (stream_ == nullptr) {
    for (const UpdateStep& step : update.MuonSteps(with_state, m_.numel())) {
      BURST_RETURN_IF_ERROR(step.run(step.state));
    }
    for (const cuda::AdamWPart& part : with_state) update.Apply(part);
    return absl::OkStatus();
  }
  std::vector<UpdateStep> steps = update.MuonSteps(with_state, piece_);
  for (const cuda::AdamWPart& part : with_state) update.AddSteps(part, piece_, &steps);
  return stream_->Run(steps);
}

absl::Status AdamW::Step(const Tensor& masters, const Tensor& compute, const Tensor& grads,
                         const Tensor& loss_and_norm, double clip, double lr) {
  const Part part = {masters, compute, grads};
  return Step({&part, 1}, loss_and_norm, clip, lr);
}

int64_t AdamW::updates() const { return static_cast<int64_t>(updates_.ToVector<double>()[0]); }

void L2Norm(const Tensor& tensor, const Tensor& norm) {
  BURST_CHECK(norm.numel() == 1 && norm.dtype() == DType::kFloat64 &&
              norm.device() == tensor.device());
  if (tensor.device() == DeviceType::kCuda) {
    BURST_GPU_KERNEL(L2Norm, tensor, norm);
    return;
  }
  const int64_t n = tensor.numel();
  std::vector<double> sums((n + kBlock - 1) / kBlock);
  DispatchFloat(tensor.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const T* x = tensor.data<T>();
    ParallelFor(static_cast<int64_t>(sums.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        // The partial sums are independent, so that the additions do not wait for each other.
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
  norm.data<double>()[0] = std::sqrt(sum);
}

}  // namespace burst
