// RMSNorm of queries and keys whose heads several ranks share. Every kernel takes a token's heads
// as one row, in place.
#include <algorithm>

#include "model/ops/cuda/kernels.h"
#include "model/ops/cuda/normalization.cuh"

namespace burst {
namespace cuda {
namespace {

// The threads of a block that sums a row, and of one that changes columns.
constexpr int kShareThreads = 128, kColumnThreads = 256;

template <typename T>
struct HeadArgs {
  using A = Accumulator<T>;
  int64_t tokens = 0;
  int width = 0;             // channels of a token's heads
  int channels[2] = {};      // of its queries, and then of its keys
  const T* weights[2] = {};  // [channels]
  A offset = 0, eps = 0;
  int ranks = 1;
  const T* x = nullptr;  // [tokens, width]
  A* squares = nullptr;  // [2, tokens]
  T* y = nullptr;        // [tokens, width]
  // backward
  const T* dy = nullptr;  // [tokens, width]
  A* products = nullptr;  // [2, tokens]
  T* dx = nullptr;        // [tokens, width]
  A* partials[2] = {};    // [blocks, channels]: of the weights' gradients

  __device__ A Rstd(int group, int64_t token) const {
    return rsqrt(squares[group * tokens + token] + eps);
  }
};

// A block takes rows; blockIdx.y = 0 their queries, 1 their keys. It leaves this rank's share of
// mean(x^2), or in the backward of mean(g xhat).
template <typename T, int N, bool kBackward>
__global__ void __launch_bounds__(kShareThreads) ShareKernel(HeadArgs<T> args) {
  using A = Accumulator<T>;
  const int group = blockIdx.y, channels = args.channels[group];
  TeamSum<A, /*kBlockTeam=*/true> team_sum;
  for (int64_t token = blockIdx.x; token < args.tokens; token += gridDim.x) {
    const int64_t first = token * args.width + (group == 0 ? 0 : args.channels[0]);
    A sum[1] = {0};
    for (int at = threadIdx.x * N; at < channels; at += kShareThreads * N) {
      const Words<T, N> x = Load<N>(args.x + first + at);
      Words<T, N> dy, weight;
      if constexpr (kBackward) {
        dy = Load<N>(args.dy + first + at);
        weight = Load<N>(args.weights[group] + at);
      }
#pragma unroll
      for (int j = 0; j < N; ++j) {
        sum[0] += x[j] * (kBackward ? dy[j] * (args.offset + weight[j]) : x[j]);
      }
    }
    team_sum(sum);
    if (threadIdx.x != 0) continue;
    const A share = sum[0] / (static_cast<A>(channels) * args.ranks);
    if constexpr (kBackward) {
      args.products[group * args.tokens + token] = share * args.Rstd(group, token);
    } else {
      args.squares[group * args.tokens + token] = share;
    }
  }
}

// The N columns of a thread, which takes them in the rows blockIdx.y, blockIdx.y + gridDim.y, ...
template <typename T, int N>
struct Columns {
  using A = Accumulator<T>;
  int first;  // the first column, of all heads
  int group;  // 0 for queries, 1 for keys, 2 for others
  int at;     // the first column, of the group
  A weight[N];

  __device__ explicit Columns(const HeadArgs<T>& args) {
    first = (blockIdx.x * kColumnThreads + threadIdx.x) * N;
    group = first < args.channels[0] ? 0 : first < args.channels[0] + args.channels[1] ? 1 : 2;
    at = first - (group > 0 ? args.channels[0] : 0);
    if (group == 2) return;
    const Words<T, N> stored = Load<N>(args.weights[group] + at);
#pragma unroll
    for (int j = 0; j < N; ++j) weight[j] = args.offset + stored[j];
  }
};

template <typename T, int N>
__global__ void __launch_bounds__(kColumnThreads) SharedForwardKernel(HeadArgs<T> args) {
  using A = Accumulator<T>;
  const Columns<T, N> columns(args);
  if (columns.first >= args.width) return;
  for (int64_t token = blockIdx.y; token < args.tokens; token += gridDim.y) {
    const int64_t at = token * args.width + columns.first;
    Words<T, N> x = Load<N>(args.x + at);
    if (columns.group < 2) {
      const A rstd = args.Rstd(columns.group, token);
      A y[N];
#pragma unroll
      for (int j = 0; j < N; ++j) y[j] = x[j] * rstd * columns.weight[j];
      x = ToWords<T, N>(y);
    }
    Store(x, args.y + at);
  }
}

// dx = rstd (g - xhat mean(g xhat)); the sums of dy xhat over the block's rows go to `partials`.
template <typename T, int N>
__global__ void __launch_bounds__(kColumnThreads) SharedBackwardKernel(HeadArgs<T> args) {
  using A = Accumulator<T>;
  const Columns<T, N> columns(args);
  if (columns.first >= args.width) return;
  const int group = columns.group;
  A sums[N] = {};
  for (int64_t token = blockIdx.y; token < args.tokens; token += gridDim.y) {
    const int64_t at = token * args.width + columns.first;
    Words<T, N> dy = Load<N>(args.dy + at);
    if (group < 2) {
      const Words<T, N> x = Load<N>(args.x + at);
      const A rstd = args.Rstd(group, token), mean = args.products[group * args.tokens + token];
      A dx[N];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const A xhat = x[j] * rstd;
        dx[j] = rstd * (dy[j] * columns.weight[j] - xhat * mean);
        sums[j] += dy[j] * xhat;
      }
      dy = ToWords<T, N>(dx);
    }
    Store(dy, args.dx + at);
  }
  if (group == 2) return;
  StoreNumbers<N>(sums,
                  args.partials[group] + blockIdx.y * int64_t{args.channels[group]} + columns.at);
}

// Calls launch(args, T(), constant N) with the arguments that all kernels have, and N columns a
// vector. other: of x's shape, or null.
template <typename Launch>
void DispatchHeads(const SharedHeads& heads, const Tensor& other, Launch launch) {
  const Tensor& x = heads.x;
  const bool vectorized = FitsVectors(x.dim(3), {x, other, heads.query_weight, heads.key_weight});
  DispatchVectors(x.dtype(), vectorized, [&](auto zero, auto vec_size) {
    using T = decltype(zero);
    using A = Accumulator<T>;
    HeadArgs<T> args;
    args.tokens = x.dim(0) * x.dim(1);
    args.width = static_cast<int>(x.dim(2) * x.dim(3));
    args.channels[0] = static_cast<int>(heads.query_weight.numel());
    args.channels[1] = static_cast<int>(heads.key_weight.numel());
    args.weights[0] = Data<T>(heads.query_weight);
    args.weights[1] = Data<T>(heads.key_weight);
    args.offset = static_cast<A>(heads.offset);
    args.eps = static_cast<A>(heads.eps);
    args.ranks = heads.ranks;
    args.x = Data<T>(x);
    args.squares = Data<A>(heads.squares);
    launch(args, zero, vec_size);
  });
}

dim3 RowGrid(int64_t tokens) { return dim3(GridSize(tokens, 1), 2); }

// Returns a grid of as many blocks as keep memory busy. Each of them takes several rows, so that
// there are few partial sums.
dim3 ColumnGrid(int64_t tokens, int vecs) {
  const unsigned across = BlocksFor(vecs, kColumnThreads);
  const int64_t resident = int64_t{8} * CurrentContext().multiprocessors / across;
  const int64_t rows = std::max<int64_t>(1, std::min(resident, tokens));
  return dim3(across, static_cast<unsigned>(rows));
}

}  // namespace

void SharedHeadSquares(const SharedHeads& heads) {
  DispatchHeads(heads, {}, [](const auto& args, auto zero, auto vec_size) {
    using T = decltype(zero);
    constexpr int N = decltype(vec_size)::value;
    ShareKernel<T, N, /*kBackward=*/false>
        <<<RowGrid(args.tokens), kShareThreads, 0, CurrentStream()>>>(args);
  });
  BURST_CUDA_CHECK_LAUNCH("SharedHeadSquares");
}

void SharedHeadForward(const SharedHeads& heads, const Tensor& y) {
  DispatchHeads(heads, y, [&](auto args, auto zero, auto vec_size) {
    using T = decltype(zero);
    constexpr int N = decltype(vec_size)::value;
    args.y = Data<T>(y);
    const dim3 grid = ColumnGrid(args.tokens, args.width / N);
    SharedForwardKernel<T, N><<<grid, kColumnThreads, 0, CurrentStream()>>>(args);
  });
  BURST_CUDA_CHECK_LAUNCH("SharedHeadForward");
}

void SharedHeadProducts(const SharedHeads& heads, const Tensor& dy, const Tensor& products) {
  DispatchHeads(heads, dy, [&](auto args, auto zero, auto vec_size) {
    using T = decltype(zero);
    constexpr int N = decltype(vec_size)::value;
    args.dy = Data<T>(dy);
    args.products = Data<Accumulator<T>>(products);
    ShareKernel<T, N, /*kBackward=*/true>
        <<<RowGrid(args.tokens), kShareThreads, 0, CurrentStream()>>>(args);
  });
  BURST_CUDA_CHECK_LAUNCH("SharedHeadProducts");
}

void SharedHeadBackward(const SharedHeads& heads, const Tensor& dy, const Tensor& products,
                        const Tensor& dx, const ParameterGrad& dquery_weight,
                        const ParameterGrad& dkey_weight) {
  DispatchHeads(heads, dy, [&](auto args, auto zero, auto vec_size) {
    using T = decltype(zero);
    using A = Accumulator<T>;
    constexpr int N = decltype(vec_size)::value;
    args.dy = Data<T>(dy);
    args.products = Data<A>(products);
    args.dx = Data<T>(dx);
    const dim3 grid = ColumnGrid(args.tokens, args.width / N);
    Tensor partials[2];
    for (int group = 0; group < 2; ++group) {
      partials[group] =
          Tensor::Empty({grid.y, args.channels[group]}, DTypeOf<A>::value, DeviceType::kCuda);
      args.partials[group] = Data<A>(partials[group]);
    }
    SharedBackwardKernel<T, N><<<grid, kColumnThreads, 0, CurrentStream()>>>(args);
    BURST_CUDA_CHECK_LAUNCH("SharedHeadBackward");
    SumPartials<T, 1>(grid.y, args.channels[0], args.partials[0], {dquery_weight});
    SumPartials<T, 1>(grid.y, args.channels[1], args.partials[1], {dkey_weight});
  });
}

}  // namespace cuda
}  // namespace burst
