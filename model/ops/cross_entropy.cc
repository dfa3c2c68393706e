#include <algorithm>
#include <cmath>
#include <vector>

#include "burst/base/parallel.h"
#include "model/ops/arrays.h"
#include "model/ops/cuda/kernels.h"
#include "model/ops/matmul.h"
#include "model/ops/ops.h"

namespace burst {
namespace {

// Computes the loss of one row of logits l with a target (LossTerms). With `gradient`, the row
// becomes d loss / d logits times the scale. With a softcap `capped` has memory for the row.
template <typename T>
double LossOfRow(Eigen::Map<Eigen::Array<T, Eigen::Dynamic, 1>> row, int32_t target,
                 const LossTerms& terms, bool gradient, T* capped) {
  const T cap = static_cast<T>(terms.softcap);
  auto kept = AsArray(capped, cap > 0 ? row.size() : 0);
  if (cap > 0) row = kept = cap * (row / cap).tanh();
  const T max = row.maxCoeff(), picked = row[target];
  T sum;
  if (gradient) {
    row = (row - max).exp();
    sum = row.sum();
  } else {
    sum = (row - max).exp().sum();
  }
  const double lse = std::log(static_cast<double>(sum)) + max;
  if (gradient) {  // softmax (1 + 2 z lse) - onehot, and the softcap's slope
    row *= static_cast<T>(terms.scale * (1 + 2 * terms.z * lse)) / sum;
    row[target] -= static_cast<T>(terms.scale);
    if (cap > 0) row *= 1 - (kept / cap).square();
  }
  return lse - picked + terms.z * lse * lse;
}

// Computes the losses of rows, 0 without a target. With `gradient`, logits become their gradient.
// logits: [rows, vocab], targets: [rows], losses: [rows]
template <typename T>
void SoftmaxCrossEntropy(const MatrixView<T>& logits, const int32_t* targets,
                         const LossTerms& terms, bool gradient, double* losses) {
  ParallelFor(logits.rows, 1, [&](int64_t begin, int64_t end) {
    std::vector<T> capped(terms.softcap > 0 ? logits.cols : 0);
    for (int64_t i = begin; i < end; ++i) {
      auto row = AsArray(logits.data + i * logits.stride, logits.cols);
      if (targets[i] >= 0) {
        losses[i] = LossOfRow<T>(row, targets[i], terms, gradient, capped.data());
        continue;
      }
      losses[i] = 0;
      if (gradient) row.setZero();
    }
  });
}

// Returns scale * the sum of the losses. dx: [tokens, width] and dweight: [vocab, width] are
// assigned, unless they are null.
template <typename T>
double ForwardAndGradient(const MatrixView<T>& x, const MatrixView<T>& weight,
                          const int32_t* targets, const LossTerms& terms, int64_t chunk, T* dx,
                          T* dweight) {
  constexpr int64_t kAlign = 64 / sizeof(T);  // rows of logits start on a cache line
  const int64_t tokens = x.rows, width = x.cols, vocab = weight.rows;
  const int64_t stride = (vocab + kAlign - 1) / kAlign * kAlign;
  if (chunk == 0) {  // equal chunks: each reads and writes all of dweight
    const int64_t most = std::max<int64_t>(32, kLogitBytes / (stride * sizeof(T)));
    const int64_t chunks = (tokens + most - 1) / most;
    chunk = chunks == 0 ? 1 : (tokens + chunks - 1) / chunks;
  }
  chunk = std::min(chunk, std::max<int64_t>(1, tokens));
  const Tensor buffer = Tensor::Empty({chunk, stride}, DTypeOf<T>::value);
  const Tensor losses = Tensor::Empty({chunk}, DType::kFloat64);
  double total = 0;
  for (int64_t begin = 0; begin < tokens; begin += chunk) {
    const int64_t end = std::min(tokens, begin + chunk);
    const auto rows = x.Rows(begin, end);  // [chunk, width]
    const MatrixView<T> logits{buffer.data<T>(), end - begin, vocab, stride};
    MatMul(rows, weight.Transposed(), logits, Into::kAssign);
    SoftmaxCrossEntropy(logits, targets + begin, terms, dx != nullptr || dweight != nullptr,
                        losses.data<double>());
    for (int64_t i = 0; i < end - begin; ++i) total += losses.data<double>()[i];
    if (dx != nullptr) {
      const MatrixView<T> dx_rows{dx + begin * width, end - begin, width, width};
      MatMul(logits, weight, dx_rows, Into::kAssign);
    }
    if (dweight != nullptr) {
      const MatrixView<T> dweight_view{dweight, vocab, width, width};
      MatMul(logits.Transposed(), rows, dweight_view,
             begin == 0 ? Into::kAssign : Into::kAccumulate);
    }
  }
  if (dweight != nullptr && tokens == 0) std::fill_n(dweight, vocab * width, T(0));
  return terms.scale * total;
}

}  // namespace

Variable LinearCrossEntropy(Tape& tape, const Variable& x, const Variable& weight,
                            const Tensor& targets, const LossTerms& terms, int64_t chunk) {
  const int64_t vocab = weight.value().dim(0), width = weight.value().dim(1);
  const DType dtype = x.value().dtype();
  BURST_CHECK(x.value().dim(-1) == width && targets.numel() * width == x.value().numel() &&
              targets.is_contiguous());
  if (x.value().device() == DeviceType::kCuda) {
    return cuda::LinearCrossEntropy(tape, x, weight, targets, terms, chunk);
  }
  for (int64_t i = 0; i < targets.numel(); ++i) {
    const int32_t target = targets.data<int32_t>()[i];
    BURST_CHECK(target >= -1 && target < vocab) << "target " << target << " of " << vocab;
  }
  const bool needs_grad = tape.NeedsGrad({x, weight});
  const Tensor dx = needs_grad && x.requires_grad() ? Tensor::EmptyLike(x.value()) : Tensor();
  const Tensor dweight = needs_grad && weight.requires_grad()
                             ? Tensor::Empty(weight.shape(), SumDType(dtype))
                             : Tensor();
  const Variable loss = tape.Output(Tensor::Empty({}, SumDType(dtype)), {x, weight});
  DispatchComputed(dtype, [&](auto zero) {
    using T = decltype(zero);
    loss.value().Fill(ForwardAndGradient<T>(AsMatrix<T>(ReadAs<T>(x.value()).tensor(), width),
                                            AsMatrix<T>(ReadAs<T>(weight.value()).tensor(), width),
                                            targets.data<int32_t>(), terms, chunk, WriteAs<T>(dx),
                                            WriteAs<T>(dweight)));
  });
  if (!needs_grad) return loss;

  tape.Record("cross_entropy", {loss}, [=] {
    const double upstream = loss.grad().ToVector<double>()[0];
    for (const Tensor& gradient : {dx, dweight}) {
      if (!gradient.null() && upstream != 1) gradient.Scale(upstream);
    }
    if (!dx.null()) x.AddGrad(dx);
    if (!dweight.null()) weight.MutableGrad().Add(dweight);
  });
  return loss;
}

}  // namespace burst
