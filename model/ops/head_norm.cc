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
  Variable weight;  // [channels of a row]
  Tensor rstd;      // [tokens * rows]; null for shared heads on a GPU

  int64_t channels() const { return weight.value().numel(); }
  int64_t rows(int64_t head_dim) const { return count * head_dim / channels(); }
  Tensor Of(const Tensor& all) const { return all.Slice(2, first, count); }
};

// One call of the op. Behind the heads of the groups, queries and keys, are those that are copied.
struct Call {
  std::vector<Group> groups;
  int64_t tokens = 0, heads = 0, head_dim = 0;
  double eps = 0;
  double offset = 0;  // added to the weights
  HeadRanks ranks;
  Tensor squares;  // for shared heads on a GPU: the means of x^2 over all ranks, as EmptySums

  bool shared() const { return ranks.count > 1; }
  void CopyOthers(const Tensor& from, const Tensor& to) const {
    const int64_t first = groups.back().first + groups.back().count;
    const Group others = {first, heads - first, {}, {}};
    if (others.count > 0) others.Of(to).CopyFrom(others.Of(from));
  }
  // Numbers that the ranks add up: [groups, tokens], in the accumulator type of x.
  Tensor EmptySums(const Tensor& x) const {
    const int64_t rows = static_cast<int64_t>(groups.size());
    return Tensor::Empty({rows, tokens}, SumDType(x.dtype()), x.device());
  }
};

// ---- One group on the CPU. x, y, dy, dx: [tokens, heads, head_dim].

template <typename T>
class Rows {
 public:
  Rows(const Call& call, const Group& group)
      : call_(call),
        group_(group),
        channels_(group.channels()),
        weight_(ReadAs<T>(group.weight.value())),
        rstd_(group.rstd.template data<T>()) {}

  // rstd = 1 / sqrt(mean(x^2) + eps), y = x rstd (offset + weight). squares: the means of x^2 over
  // all ranks, [tokens], or null.
  void Forward(const T* x, const T* squares, T* y) const {
    InParallel([&](int64_t number, int64_t at) {
      const T square = squares == nullptr ? MeanSquare(x + at) : squares[number];
      rstd_[number] = 1 / std::sqrt(square + T(call_.eps));
      Row(y + at) = Row(x + at) * Weight() * rstd_[number];
    });
  }

  // The gradient is RmsNorm's, with xhat = x rstd and g = dy (offset + weight): dx = rstd (g - xhat
  // mean(g xhat)), dweight += sum over tokens and rows of dy xhat. products: the means of g xhat
  // over all ranks, [tokens], or null.
  void Backward(const T* x, const T* dy, const T* products, T* dx) const {
    SumOverRowBlocks<T>(call_.tokens, channels_, UpdateAs<T>(GradBuffer(group_.weight)),
                        [&](int64_t begin, int64_t end, T* partial) {
                          ForEach(begin, end, [&](int64_t number, int64_t at) {
                            const T scale = rstd_[number];
                            const T mean = products == nullptr ? MeanProduct(x + at, dy + at, scale)
                                                               : products[number];
                            const auto row = Row(x + at), grad = Row(dy + at);
                            Row(dx + at) = scale * (grad * Weight() - row * (scale * mean));
                            Row(partial) += grad * row * scale;
                          });
                        });
  }

  // A rank's share of the means over all ranks: of x^2, and of g xhat.
  void ShareOfSquares(const T* x, T* squares) const {
    InParallel([&](int64_t number, int64_t at) {
      squares[number] = MeanSquare(x + at) / T(call_.ranks.count);
    });
  }
  void ShareOfProducts(const T* x, const T* dy, T* products) const {
    InParallel([&](int64_t number, int64_t at) {
      products[number] = MeanProduct(x + at, dy + at, rstd_[number]) / T(call_.ranks.count);
    });
  }

 private:
  template <typename Number>
  auto Row(Number* begin) const {
    return AsArray(begin, channels_);
  }
  auto Weight() const { return AsArray<T>(weight_, channels_) + T(call_.offset); }
  T MeanSquare(const T* x) const { return Row(x).square().sum() / T(channels_); }
  T MeanProduct(const T* x, const T* dy, T rstd) const {
    return (Row(dy) * Weight() * Row(x)).sum() * rstd / T(channels_);
  }

  // Calls visit(row's number, where it begins) for the rows of tokens [begin, end), or of all.
  template <typename Visit>
  void ForEach(int64_t begin, int64_t end, Visit visit) const {
    const int64_t rows = group_.rows(call_.head_dim);
    for (int64_t t = begin; t < end; ++t) {
      const int64_t first = (t * call_.heads + group_.first) * call_.head_dim;
      for (int64_t r = 0; r < rows; ++r) visit(t * rows + r, first + r * channels_);
    }
  }
  template <typename Visit>
  void InParallel(Visit visit) const {
    ParallelFor(call_.tokens, 16, [&](int64_t begin, int64_t end) { ForEach(begin, end, visit); });
  }

  const Call& call_;
  const Group& group_;
  const int64_t channels_;
  const Numbers<T> weight_;
  T* const rstd_;
};

// Calls run(rows, numbers) for each group, with its numbers of `sums`, [tokens], or null.
template <typename T, typename Run>
void ForEachGroup(const Call& call, const Tensor& sums, Run run) {
  for (size_t i = 0; i < call.groups.size(); ++i) {
    T* const numbers = sums.null() ? nullptr : sums.template data<T>() + i * call.tokens;
    run(Rows<T>(call, call.groups[i]), numbers);
  }
}

void ForwardOnCpu(const Call& call, const Tensor& x, const Tensor& y) {
  DispatchComputed(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const auto from = ReadAs<T>(x), to = WriteAs<T>(y);
    Tensor squares;
    if (call.shared()) {
      squares = call.EmptySums(x);
      ForEachGroup<T>(call, squares,
                      [&](const Rows<T>& rows, T* numbers) { rows.ShareOfSquares(from, numbers); });
      call.ranks.add_up(squares);
    }
    ForEachGroup<T>(call, squares, [&](const Rows<T>& rows, const T* numbers) {
      rows.Forward(from, numbers, to);
    });
  });
  call.CopyOthers(x, y);
}

void BackwardOnCpu(const Call& call, const Tensor& x, const Tensor& dy, const Tensor& dx) {
  DispatchComputed(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const auto from = ReadAs<T>(x), from_grad = ReadAs<T>(dy), to = WriteAs<T>(dx);
    Tensor products;
    if (call.shared()) {
      products = call.EmptySums(x);
      ForEachGroup<T>(call, products, [&](const Rows<T>& rows, T* numbers) {
        rows.ShareOfProducts(from, from_grad, numbers);
      });
      call.ranks.add_up(products);
    }
    ForEachGroup<T>(call, products, [&](const Rows<T>& rows, const T* numbers) {
      rows.Backward(from, from_grad, numbers, to);
    });
  });
  call.CopyOthers(dy, dx);
}

// ---- On a GPU. The kernels of shared heads copy the others, too. RmsNorm's take contiguous rows.

cuda::SharedHeads SharedHeadsOf(const Call& call, const Tensor& x) {
  const Tensor query_weight = call.groups[0].weight.value();
  const Tensor key_weight = call.groups[1].weight.value();
  return {x, query_weight, key_weight, call.offset, call.eps, call.ranks.count, call.squares};
}

void ForwardOnGpu(const Call& call, const Tensor& x, const Tensor& y) {
  if (call.shared()) {
    const cuda::SharedHeads heads = SharedHeadsOf(call, x);
    BURST_GPU_KERNEL(SharedHeadSquares, heads);
    call.ranks.add_up(heads.squares);
    BURST_GPU_KERNEL(SharedHeadForward, heads, y);
    return;
  }
  for (const Group& group : call.groups) {
    const Tensor from = group.Of(x).Contiguous(), to = Tensor::EmptyLike(from);
    BURST_GPU_KERNEL(RmsNormForward, from, group.weight.value(), call.offset, call.eps, to,
                     /*scale=*/Tensor(), group.rstd);
    group.Of(y).CopyFrom(to);
  }
  call.CopyOthers(x, y);
}

void BackwardOnGpu(const Call& call, const Tensor& x, const Tensor& dy, const Tensor& dx) {
  if (call.shared()) {
    const cuda::SharedHeads heads = SharedHeadsOf(call, x);
    const Tensor products = call.EmptySums(x);
    BURST_GPU_KERNEL(SharedHeadProducts, heads, dy, products);
    call.ranks.add_up(products);
    BURST_GPU_KERNEL(SharedHeadBackward, heads, dy, products, dx, WantedGrad(call.groups[0].weight),
                     WantedGrad(call.groups[1].weight));
    return;
  }
  for (const Group& group : call.groups) {
    const Tensor from = group.Of(x).Contiguous(), to = Tensor::EmptyLike(from);
    BURST_GPU_KERNEL(RmsNormBackward, from, group.weight.value(), call.offset, group.rstd,
                     group.Of(dy).Contiguous(), /*before=*/Tensor(), to, /*dx_amax=*/Tensor(),
                     WantedGrad(group.weight));
    group.Of(dx).CopyFrom(to);
  }
  call.CopyOthers(dy, dx);
}

Call MakeCall(const Tensor& x, const NormalizedHeads& queries, const NormalizedHeads& keys,
              double eps, double offset, const HeadRanks& ranks) {
  BURST_CHECK(x.ndim() == 4 && x.is_contiguous());
  Call call = {{}, x.dim(0) * x.dim(1), x.dim(2), x.dim(3), eps, offset, ranks, {}};
  const bool rstd = !call.shared() || x.device() == DeviceType::kCpu;
  int64_t first = 0;
  for (const NormalizedHeads& some : {queries, keys}) {
    const bool all = some.weight.shape() == Shape({some.count * call.head_dim});
    BURST_CHECK(all || (some.weight.shape() == Shape({call.head_dim}) && !call.shared()));
    Group& group = call.groups.emplace_back(Group{first, some.count, some.weight, {}});
    if (rstd) {
      const int64_t rows = call.tokens * group.rows(call.head_dim);
      group.rstd = Tensor::Empty({rows}, SumDType(x.dtype()), x.device());
    }
    first += some.count;
  }
  if (!rstd) call.squares = call.EmptySums(x);
  BURST_CHECK_LE(first, call.heads);
  return call;
}

}  // namespace

Variable RmsNormHeads(Tape& tape, const Variable& x, const NormalizedHeads& queries,
                      const NormalizedHeads& keys, double eps, double offset,
                      const HeadRanks& ranks) {
  const Call call = MakeCall(x.value(), queries, keys, eps, offset, ranks);
  const bool on_gpu = x.value().device() == DeviceType::kCuda;
  const Tensor result = Tensor::EmptyLike(x.value());
  (on_gpu ? ForwardOnGpu : ForwardOnCpu)(call, x.value(), result);

  const Variable y = tape.Output(result, {x, queries.weight, keys.weight});
  if (!tape.NeedsGrad({x, queries.weight, keys.weight})) return y;
  tape.Record("rmsnorm_heads", {y}, [=] {
    const Tensor dy = y.grad().Contiguous(), dx = Tensor::EmptyLike(dy);
    (on_gpu ? BackwardOnGpu : BackwardOnCpu)(call, x.value(), dy, dx);
    x.AddGrad(dx);
  });
  return y;
}

}  // namespace burst
