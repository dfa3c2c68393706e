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

// Heads [first, first + count) of every token: `rows` rows, which are normalized with one weight.
struct Group {
  int64_t first = 0, count = 0;
  Variable weight;    // [channels of a row]
  double offset = 0;  // added to the weight
  Tensor rstd;        // [tokens * rows]

  int64_t channels() const { return weight.value().numel(); }
  int64_t rows(int64_t head_dim) const { return count * head_dim / channels(); }
};

// Calls visit(row's number, where it begins) for the group's rows of tokens [begin, end). x:
// [tokens, heads, head_dim].
template <typename Visit>
void ForEachRow(const Group& group, int64_t begin, int64_t end, int64_t heads, int64_t head_dim,
                Visit visit) {
  const int64_t rows = group.rows(head_dim);
  for (int64_t t = begin; t < end; ++t) {
    const int64_t first = (t * heads + group.first) * head_dim;
    for (int64_t r = 0; r < rows; ++r) visit(t * rows + r, first + r * group.channels());
  }
}

// rstd = 1 / sqrt(mean(x^2) + eps), y = x rstd (offset + weight). x, y: [tokens, heads, head_dim]
template <typename T>
void Forward(const Group& group, int64_t tokens, int64_t heads, int64_t head_dim, const T* x,
             double eps, T* y) {
  const int64_t channels = group.channels();
  const auto weight = ReadAs<T>(group.weight.value());
  const auto w = AsArray<T>(weight, channels) + T(group.offset);
  T* const rstd = group.rstd.template data<T>();
  ParallelFor(tokens, 16, [&](int64_t begin, int64_t end) {
    ForEachRow(group, begin, end, heads, head_dim, [&](int64_t number, int64_t at) {
      const auto row = AsArray(x + at, channels);
      T& scale = rstd[number];
      scale = 1 / std::sqrt(row.square().sum() / T(channels) + T(eps));
      AsArray(y + at, channels) = row * w * scale;
    });
  });
}

// The gradient is RmsNorm's, with xhat = x rstd and g = dy (offset + weight): dx = rstd (g - xhat
// mean(g xhat)), dweight += sum over tokens and rows of dy xhat
template <typename T>
void Backward(const Group& group, int64_t tokens, int64_t heads, int64_t head_dim, const T* x,
              const T* dy, T* dx) {
  const int64_t channels = group.channels();
  const auto weight = ReadAs<T>(group.weight.value());
  const auto w = AsArray<T>(weight, channels) + T(group.offset);
  const T* const rstd = group.rstd.template data<T>();
  SumOverRowBlocks<T>(
      tokens, channels, UpdateAs<T>(GradBuffer(group.weight)),
      [&](int64_t begin, int64_t end, T* partial) {
        ForEachRow(group, begin, end, heads, head_dim, [&](int64_t number, int64_t at) {
          const auto row = AsArray(x + at, channels), grad = AsArray(dy + at, channels);
          const T scale = rstd[number];
          const T mean = (grad * w * row).sum() * scale / T(channels);
          AsArray(dx + at, channels) = scale * (grad * w - row * (scale * mean));
          AsArray(partial, channels) += grad * row * scale;
        });
      });
}

}  // namespace

Variable RmsNormHeads(Tape& tape, const Variable& x, const NormalizedHeads& queries,
                      const NormalizedHeads& keys, double eps, double offset) {
  BURST_CHECK(x.value().ndim() == 4 && x.value().is_contiguous());
  const int64_t tokens = x.value().dim(0) * x.value().dim(1), heads = x.value().dim(2);
  const int64_t head_dim = x.value().dim(3);
  std::vector<Group> groups;
  int64_t first = 0;
  for (const NormalizedHeads& some : {queries, keys}) {
    BURST_CHECK(some.weight.shape() == Shape({head_dim}) ||
                some.weight.shape() == Shape({some.count * head_dim}));
    groups.push_back({first, some.count, some.weight, offset, {}});
    groups.back().rstd = Tensor::Empty({tokens * groups.back().rows(head_dim)},
                                       SumDType(x.value().dtype()), x.value().device());
    first += some.count;
  }
  BURST_CHECK_LE(first, heads);
  const auto of = [](const Tensor& all, const Group& group) {
    return all.Slice(2, group.first, group.count);
  };
  const Group rest = {first, heads - first, {}, 0, {}};
  const bool on_gpu = x.value().device() == DeviceType::kCuda;

  const Tensor result = Tensor::EmptyLike(x.value());
  if (on_gpu) {
    for (const Group& group : groups) {  // the kernel takes rows behind each other
      const Tensor from = of(x.value(), group).Contiguous(), to = Tensor::EmptyLike(from);
      BURST_GPU_KERNEL(RmsNormForward, from, group.weight.value(), offset, eps, to, Tensor(),
                       group.rstd);
      of(result, group).CopyFrom(to);
    }
  } else {
    DispatchComputed(result.dtype(), [&](auto zero) {
      using T = decltype(zero);
      const auto from = ReadAs<T>(x.value()), to = WriteAs<T>(result);
      for (const Group& group : groups) Forward<T>(group, tokens, heads, head_dim, from, eps, to);
    });
  }
  if (rest.count > 0) of(result, rest).CopyFrom(of(x.value(), rest));

  const Variable y = tape.Output(result, {x, queries.weight, keys.weight});
  if (!tape.NeedsGrad({x, queries.weight, keys.weight})) return y;
  tape.Record("rmsnorm_heads", {y}, [=] {
    const Tensor dy = y.grad().Contiguous(), dx = Tensor::EmptyLike(dy);
    if (on_gpu) {
      for (const Group& group : groups) {
        const Tensor from = of(x.value(), group).Contiguous();
        const Tensor dfrom = Tensor::EmptyLike(from);
        BURST_GPU_KERNEL(RmsNormBackward, from, group.weight.value(), offset, group.rstd,
                         of(dy, group).Contiguous(), /*before=*/Tensor(), dfrom,
                         /*dx_amax=*/Tensor(), WantedGrad(group.weight));
        of(dx, group).CopyFrom(dfrom);
      }
    } else {
      DispatchComputed(dy.dtype(), [&](auto zero) {
        using T = decltype(zero);
        const auto from = ReadAs<T>(x.value()), from_grad = ReadAs<T>(dy), to = WriteAs<T>(dx);
        for (const Group& group : groups) {
          Backward<T>(group, tokens, heads, head_dim, from, from_grad, to);
        }
      });
    }
    if (rest.count > 0) of(dx, rest).CopyFrom(of(dy, rest));
    x.AddGrad(dx);
  });
  return y;
}

}  // namespace burst
