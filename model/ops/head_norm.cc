#include <cmath>
#include <vector>

#include "burst/base/parallel.h"
#include "burst/tensor/gpu_kernel.h"
#include "model/ops/arrays.h"
#include "model/ops/cuda/kernels.h"
#include "model/ops/gradients.h"
#include "model/ops/ops.h"

namespace burst {
namespace {

// Heads [first, first + count) of every token, which are normalized with one weight.
struct Group {
  int64_t first = 0, count = 0;
  Variable weight;  // [channels]
  Tensor rstd;      // [tokens * count]
};

// rstd = 1 / sqrt(mean(x^2) + eps), y = x rstd weight. x, y: [tokens, heads, channels]
template <typename T>
void Forward(const Group& group, int64_t tokens, int64_t heads, int64_t channels, const T* x,
             double eps, T* y) {
  const auto w = AsArray(group.weight.value().template data<T>(), channels);
  T* const rstd = group.rstd.template data<T>();
  ParallelFor(tokens, 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t h = 0; h < group.count; ++h) {
        const int64_t at = (t * heads + group.first + h) * channels;
        const auto row = AsArray(x + at, channels);
        T& scale = rstd[t * group.count + h];
        scale = 1 / std::sqrt(row.square().sum() / T(channels) + T(eps));
        AsArray(y + at, channels) = row * w * scale;
      }
    }
  });
}

// The gradient is RmsNorm's, with xhat = x rstd and g = dy weight: dx = rstd (g - xhat mean(g
// xhat)), dweight += sum over tokens and heads of dy xhat
template <typename T>
void Backward(const Group& group, int64_t tokens, int64_t heads, int64_t channels, const T* x,
              const T* dy, T* dx) {
  const auto w = AsArray(group.weight.value().template data<T>(), channels);
  const T* const rstd = group.rstd.template data<T>();
  const Tensor dweight = GradBuffer(group.weight);
  SumOverRowBlocks(
      tokens, channels, dweight.data<T>(), [&](int64_t begin, int64_t end, T* partial) {
        for (int64_t t = begin; t < end; ++t) {
          for (int64_t h = 0; h < group.count; ++h) {
            const int64_t at = (t * heads + group.first + h) * channels;
            const auto row = AsArray(x + at, channels), grad = AsArray(dy + at, channels);
            const T scale = rstd[t * group.count + h];
            const T mean = (grad * w * row).sum() * scale / T(channels);
            AsArray(dx + at, channels) = scale * (grad * w - row * (scale * mean));
            AsArray(partial, channels) += grad * row * scale;
          }
        }
      });
}

}  // namespace

Variable RmsNormHeads(Tape& tape, const Variable& x, const NormalizedHeads& queries,
                      const NormalizedHeads& keys, double eps) {
  BURST_CHECK(x.value().ndim() == 4 && x.value().is_contiguous());
  const int64_t tokens = x.value().dim(0) * x.value().dim(1), heads = x.value().dim(2);
  const int64_t channels = x.value().dim(3);
  std::vector<Group> groups;
  int64_t first = 0;
  for (const NormalizedHeads& some : {queries, keys}) {
    BURST_CHECK(some.weight.shape() == Shape({channels}));
    const Tensor rstd = Tensor::Empty(
        {tokens * some.count}, cuda::AccumulatorDType(x.value().dtype()), x.value().device());
    groups.push_back({first, some.count, some.weight, rstd});
    first += some.count;
  }
  BURST_CHECK_LE(first, heads);
  const auto of = [](const Tensor& all, const Group& group) {
    return all.Slice(2, group.first, group.count);
  };
  const Group rest = {first, heads - first, {}, {}};
  const bool on_gpu = x.value().device() == DeviceType::kCuda;

  const Tensor result = Tensor::EmptyLike(x.value());
  for (const Group& group : groups) {
    if (on_gpu) {  // the kernel takes rows behind each other
      const Tensor from = of(x.value(), group).Contiguous(), to = Tensor::EmptyLike(from);
      BURST_GPU_KERNEL(RmsNormForward, from, group.weight.value(), eps, to, Tensor(), group.rstd);
      of(result, group).CopyFrom(to);
      continue;
    }
    DispatchFloat(result.dtype(), [&](auto zero) {
      using T = decltype(zero);
      Forward<T>(group, tokens, heads, channels, x.value().data<T>(), eps, result.data<T>());
    });
  }
  if (rest.count > 0) of(result, rest).CopyFrom(of(x.value(), rest));

  const Variable y = tape.Output(result, {x, queries.weight, keys.weight});
  if (!tape.NeedsGrad({x, queries.weight, keys.weight})) return y;
  tape.Record("rmsnorm_heads", {y}, [=] {
    const Tensor dy = y.grad().Contiguous(), dx = Tensor::EmptyLike(dy);
    for (const Group& group : groups) {
      if (on_gpu) {
        const Tensor from = of(x.value(), group).Contiguous();
        const Tensor dfrom = Tensor::EmptyLike(from);
        BURST_GPU_KERNEL(RmsNormBackward, from, group.weight.value(), group.rstd,
                         of(dy, group).Contiguous(), /*before=*/Tensor(), dfrom,
                         /*dx_amax=*/Tensor(), WantedGrad(group.weight));
        of(dx, group).CopyFrom(dfrom);
        continue;
      }
      DispatchFloat(dy.dtype(), [&](auto zero) {
        using T = decltype(zero);
        Backward<T>(group, tokens, heads, channels, x.value().data<T>(), dy.data<T>(),
                    dx.data<T>());
      });
    }
    if (rest.count > 0) of(dx, rest).CopyFrom(of(dy, rest));
    x.AddGrad(dx);
  });
  return y;
}

}  // namespace burst
