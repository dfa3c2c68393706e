// The kernels of RMSNorm and LayerNorm, which differ by the mean (kCenter) and the bias.
//
//   xhat = (x - mean) rstd,   rstd = 1 / sqrt(mean of (x - mean)^2 + eps),   y = xhat weight + bias
//
// with mean = 0 and bias = 0 for RMSNorm, whose weight is `offset` + the stored one. A team keeps a
// row in registers, so that memory is read once. It is a warp, or a whole block for rows that do
// not fit a warp's registers. The Strided kernels read a row again if it does not fit vectors or is
// too wide.
#pragma once

#include <array>

#include "model/ops/cuda/float8.cuh"
#include "model/ops/cuda/kernels.h"
#include "model/ops/cuda/vectorized.cuh"

namespace burst {
namespace cuda {

// The arguments of the kernels; bias and mean are for LayerNorm only.
template <typename T>
struct NormArgs {
  using A = Accumulator<T>;
  int64_t rows = 0;
  int width = 0;
  A eps = 0;
  A offset = 0;               // added to the weight, for RMSNorm
  const T* x = nullptr;       // [rows, width]
  const T* weight = nullptr;  // [width]
  const T* bias = nullptr;    // [width]
  A* mean = nullptr;          // [rows]
  A* rstd = nullptr;          // [rows]
  T* y = nullptr;             // [rows, width]
  // The result instead of y: y / scale in e4m3, for T = bf16.
  uint8_t* y_float8 = nullptr;  // [rows, width]
  float* scale = nullptr;       // one number
  // backward
  const T* dy = nullptr;        // [rows, width]
  const T* before = nullptr;    // [rows, width] or null: added to dx
  T* dx = nullptr;              // [rows, width]
  uint32_t* dx_amax = nullptr;  // one number, or null; for T = bf16
  A* partials = nullptr;        // [blocks, 1 or 2, width]: of dweight and then of dbias

  // The factor of a stored weight.
  template <bool kCenter>
  __device__ A Weight(A stored) const {
    if constexpr (kCenter) return stored;
    return offset + stored;
  }
};

// A block is [teams][threads of a team]: threadIdx.y is the team, of a warp (kWarpTeams of them) or
// of all threads.
inline constexpr int kWarpTeams = 8, kMaxNormThreads = 512;

// Sums over a team: every thread gets the same bits. A call of a block's team has one barrier,
// because calls alternate between two buffers.
template <typename A, bool kBlockTeam>
class TeamSum {
 public:
  // Replaces values[i] by its sum over the team, i < kValues <= 2.
  template <int kValues>
  __device__ void operator()(A (&values)[kValues]) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) {
        values[i] += __shfl_xor_sync(~0u, values[i], offset);
      }
    }
    if constexpr (kBlockTeam) {
      __shared__ A shared[2][kMaxNormThreads / 32][kValues];
      if (threadIdx.x % 32 == 0) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) shared[buffer_][threadIdx.x / 32][i] = values[i];
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kValues; ++i) values[i] = 0;
#pragma unroll 4
      for (int warp = 0; warp < blockDim.x / 32; ++warp) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) values[i] += shared[buffer_][warp][i];
      }
      buffer_ ^= 1;
    }
  }

 private:
  int buffer_ = 0;
};

constexpr int NormThreads(bool block_team) {
  return block_team ? kMaxNormThreads : 32 * kWarpTeams;
}

// Returns the resident blocks of warps to compile for. It limits registers, so that enough rows are
// on their way from memory.
constexpr int NormBlocks(bool block_team, bool forward, int vecs) {
  if (block_team) return 1;
  if (forward) return vecs <= 3 ? 3 : 2;
  return vecs <= 3 ? 2 : 1;
}

// This thread's part of a row of `vecs` vectors. Thread t has vectors t, t + blockDim.x and so on.
template <typename T, int N, int kVecs>
__device__ inline void LoadRow(const T* row, int vecs, Words<T, N> (&out)[kVecs]) {
#pragma unroll
  for (int p = 0; p < kVecs; ++p) {
    const int at = threadIdx.x + p * blockDim.x;
    if (at < vecs) out[p] = Load<N>(row + at * N);
  }
}

// Hides from the compiler that it has unpacked these numbers before. It would keep them unpacked,
// which takes the registers of half the warps.
template <typename T, int N>
__device__ inline void Forget(Words<T, N>& vec) {
#pragma unroll
  for (uint32_t& word : vec.words) asm volatile("" : "+r"(word));
}

template <typename T, bool kCenter, bool kBlockTeam, int kVecs>
__global__ void __launch_bounds__(NormThreads(kBlockTeam), NormBlocks(kBlockTeam, true, kVecs))
    NormForwardKernel(NormArgs<T> args) {
  using A = Accumulator<T>;
  constexpr int N = kVecSize<T>;
  const int vecs = args.width / N;
  const A inverse_width = A(1) / A(args.width);
  const int64_t step = int64_t{gridDim.x} * blockDim.y;
  int64_t row = blockIdx.x * int64_t{blockDim.y} + threadIdx.y;
  TeamSum<A, kBlockTeam> team_sum;

  Words<T, N> weight[kVecs], next[kVecs];
  LoadRow(args.weight, vecs, weight);
  if (row < args.rows) LoadRow(args.x + row * args.width, vecs, next);
  for (; row < args.rows; row += step) {
    A x[kVecs][N];
#pragma unroll
    for (int p = 0; p < kVecs; ++p) {
#pragma unroll
      for (int j = 0; j < N; ++j) x[p][j] = next[p][j];
    }
    if (row + step < args.rows) LoadRow(args.x + (row + step) * args.width, vecs, next);

    A mean[1] = {0}, square[1] = {0};
    if constexpr (kCenter) {
#pragma unroll
      for (int p = 0; p < kVecs; ++p) {
        if (threadIdx.x + p * blockDim.x >= vecs) continue;
#pragma unroll
        for (int j = 0; j < N; ++j) mean[0] += x[p][j];
      }
      team_sum(mean);
      mean[0] *= inverse_width;
    }
#pragma unroll
    for (int p = 0; p < kVecs; ++p) {
      if (threadIdx.x + p * blockDim.x >= vecs) continue;
#pragma unroll
      for (int j = 0; j < N; ++j) square[0] += (x[p][j] - mean[0]) * (x[p][j] - mean[0]);
    }
    team_sum(square);
    const A rstd = rsqrt(square[0] * inverse_width + args.eps);
    if (threadIdx.x == 0) {
      args.rstd[row] = rstd;
      if constexpr (kCenter) args.mean[row] = mean[0];
    }
#pragma unroll
    for (int p = 0; p < kVecs; ++p) {
      const int at = threadIdx.x + p * blockDim.x;
      if (at >= vecs) continue;
      Forget(weight[p]);
      Words<T, N> bias;  // loaded from the L1 cache, to save registers
      if (kCenter) bias = Load<N>(args.bias + at * N);
      A y[N];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        y[j] = (x[p][j] - mean[0]) * rstd * args.template Weight<kCenter>(weight[p][j]);
        if constexpr (kCenter) y[j] += bias[j];
      }
      const int64_t to = row * args.width + at * N;
      if constexpr (std::is_same_v<T, bf16>) {
        if (args.y_float8 != nullptr) {
          *reinterpret_cast<uint2*>(args.y_float8 + to) = RoundEight<__NV_E4M3>(y, 1 / *args.scale);
          continue;
        }
      }
      StoreRounded<T, N>(y, args.y + to);
    }
  }
}

// The numbers of a row that the backward reads.
template <typename T, int kVecs>
struct NormBackwardRow {
  using A = Accumulator<T>;
  static constexpr int N = kVecSize<T>;
  Words<T, N> x[kVecs], dy[kVecs], before[kVecs];
  A mean = 0, rstd = 0;

  __device__ void Load(const NormArgs<T>& args, int64_t row) {
    LoadRow(args.x + row * args.width, args.width / N, x);
    LoadRow(args.dy + row * args.width, args.width / N, dy);
    if (args.before != nullptr) {
      LoadRow(args.before + row * args.width, args.width / N, before);
    }
    rstd = args.rstd[row];
    if (args.mean != nullptr) mean = args.mean[row];
  }
};

// Sets partials [kSums, width] to the sums of all teams of the block, through shared memory.
template <typename A, int N, int kSums, int kVecs>
__device__ inline void CombineTeams(const A (&sums)[kSums][kVecs][N], int width, A* partials) {
  extern __shared__ __align__(16) unsigned char memory[];
  A* shared = reinterpret_cast<A*>(memory);  // [teams, width]
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    __syncthreads();
#pragma unroll
    for (int p = 0; p < kVecs; ++p) {
      const int at = threadIdx.x + p * blockDim.x;
      if (at >= width / N) continue;
#pragma unroll
      for (int j = 0; j < N; ++j) shared[threadIdx.y * width + at * N + j] = sums[i][p][j];
    }
    __syncthreads();
    for (int column = threadIdx.y * blockDim.x + threadIdx.x; column < width;
         column += blockDim.x * blockDim.y) {
      A sum = 0;
      for (int team = 0; team < blockDim.y; ++team) sum += shared[team * width + column];
      partials[i * width + column] = sum;
    }
  }
}

// Sets the block's partials [kSums, width]. A block of one team has no others to add.
template <bool kBlockTeam, typename T, typename A, int N, int kSums, int kVecs>
__device__ inline void StorePartials(const NormArgs<T>& args, const A (&sums)[kSums][kVecs][N]) {
  A* partials = args.partials + blockIdx.x * int64_t{kSums} * args.width;
  if constexpr (kBlockTeam) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
#pragma unroll
      for (int p = 0; p < kVecs; ++p) {
        const int at = threadIdx.x + p * blockDim.x;
        if (at < args.width / N) StoreNumbers<N>(sums[i][p], partials + i * args.width + at * N);
      }
    }
  } else {
    CombineTeams<A, N, kSums, kVecs>(sums, args.width, partials);
  }
}

// With g = dy weight:
//   dx = before + rstd (g - mean(g) - xhat mean(g xhat)),   dweight = sum over rows of dy xhat,
//   dbias = sum over rows of dy
// The sums over a team's rows stay in registers, too. Blocks leave their sums in `partials`.
template <typename T, bool kCenter, bool kBlockTeam, int kVecs>
__global__ void __launch_bounds__(NormThreads(kBlockTeam), NormBlocks(kBlockTeam, false, kVecs))
    NormBackwardKernel(NormArgs<T> args) {
  using A = Accumulator<T>;
  constexpr int N = kVecSize<T>;
  constexpr int kSums = kCenter ? 2 : 1;
  const int vecs = args.width / N;
  const A inverse_width = A(1) / A(args.width);
  const int64_t step = int64_t{gridDim.x} * blockDim.y;
  int64_t row = blockIdx.x * int64_t{blockDim.y} + threadIdx.y;
  TeamSum<A, kBlockTeam> team_sum;

  // Reads the weight from the L1 cache where the sums leave no registers for it.
  Words<T, N> kept_weight[kCenter ? 1 : kVecs];
  if constexpr (!kCenter) LoadRow(args.weight, vecs, kept_weight);
  const auto weight_of = [&](int p) {
    if (kCenter) return Load<N>(args.weight + (threadIdx.x + p * blockDim.x) * N);
    Forget(kept_weight[kCenter ? 0 : p]);
    return kept_weight[kCenter ? 0 : p];
  };
  A sums[kSums][kVecs][N] = {};  // sums of dy xhat and of dy
  uint32_t most = 0;             // largest magnitude of dx
  NormBackwardRow<T, kVecs> next;
  // Where registers are short, other warps keep memory busy.
  constexpr bool kPrefetch = kBlockTeam && kVecs == 2 && !kCenter;
  if (kPrefetch && row < args.rows) next.Load(args, row);
  for (; row < args.rows; row += step) {
    if (!kPrefetch) next.Load(args, row);
    NormBackwardRow<T, kVecs> in = next;
    if (kPrefetch && row + step < args.rows) next.Load(args, row + step);
    A means[kSums] = {};  // means of g xhat and of g
#pragma unroll
    for (int p = 0; p < kVecs; ++p) {
      if (threadIdx.x + p * blockDim.x >= vecs) continue;
      const Words<T, N> weight = weight_of(p);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const A dy = in.dy[p][j], g = dy * args.template Weight<kCenter>(weight[j]);
        const A xhat = (in.x[p][j] - in.mean) * in.rstd;
        means[0] += g * xhat;
        sums[0][p][j] += dy * xhat;
        if constexpr (kCenter) {
          means[1] += g;
          sums[1][p][j] += dy;
        }
      }
    }
    if (args.dx == nullptr) continue;
    team_sum(means);
#pragma unroll
    for (int i = 0; i < kSums; ++i) means[i] *= inverse_width;
#pragma unroll
    for (int p = 0; p < kVecs; ++p) {
      const int at = threadIdx.x + p * blockDim.x;
      if (at >= vecs) continue;
      const Words<T, N> weight = weight_of(p);
      Forget(in.x[p]);
      Forget(in.dy[p]);
      A dx[N];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const A g = in.dy[p][j] * args.template Weight<kCenter>(weight[j]);
        const A xhat = (in.x[p][j] - in.mean) * in.rstd;
        dx[j] = in.rstd * (g - xhat * means[0] - (kCenter ? means[kSums - 1] : A(0)));
        if (args.before != nullptr) dx[j] += in.before[p][j];
      }
      const Words<T, N> rounded = ToWords<T, N>(dx);
      if constexpr (std::is_same_v<T, bf16>) {
        if (args.dx_amax != nullptr) most = max(most, MagnitudeBits(rounded));
      }
      Store(rounded, args.dx + row * args.width + at * N);
    }
  }
  if (args.dx_amax != nullptr) RaiseAmax(most, args.dx_amax);
  StorePartials<kBlockTeam>(args, sums);
}

// --- rows of any width: a block per row, read two or three times

inline constexpr int kStridedThreads = 256;

template <typename T, bool kCenter>
__global__ void __launch_bounds__(kStridedThreads) NormForwardStridedKernel(NormArgs<T> args) {
  using A = Accumulator<T>;
  TeamSum<A, true> team_sum;
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    const T* x = args.x + row * args.width;
    A mean[1] = {0}, square[1] = {0};
    if constexpr (kCenter) {
      for (int j = threadIdx.x; j < args.width; j += kStridedThreads) mean[0] += ConvertTo<A>(x[j]);
      team_sum(mean);
      mean[0] /= args.width;
    }
    for (int j = threadIdx.x; j < args.width; j += kStridedThreads) {
      const A centered = ConvertTo<A>(x[j]) - mean[0];
      square[0] += centered * centered;
    }
    team_sum(square);
    const A rstd = rsqrt(square[0] / args.width + args.eps);
    if (threadIdx.x == 0) {
      args.rstd[row] = rstd;
      if constexpr (kCenter) args.mean[row] = mean[0];
    }
    for (int j = threadIdx.x; j < args.width; j += kStridedThreads) {
      A y = (ConvertTo<A>(x[j]) - mean[0]) * rstd *
            args.template Weight<kCenter>(ConvertTo<A>(args.weight[j]));
      if constexpr (kCenter) y += ConvertTo<A>(args.bias[j]);
      if (args.y_float8 != nullptr) {
        const float scaled = static_cast<float>(y) / *args.scale;
        args.y_float8[row * args.width + j] = RoundTwo<__NV_E4M3>(scaled, 0) & 0xff;
      } else {
        args.y[row * args.width + j] = ConvertTo<T>(y);
      }
    }
  }
}

template <typename T, bool kCenter>
__global__ void __launch_bounds__(kStridedThreads) NormBackwardStridedKernel(NormArgs<T> args) {
  using A = Accumulator<T>;
  constexpr int kSums = kCenter ? 2 : 1;
  uint32_t most = 0;  // largest magnitude of dx
  TeamSum<A, true> team_sum;
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    const T* x = args.x + row * args.width;
    const T* dy = args.dy + row * args.width;
    const A rstd = args.rstd[row];
    A mean = 0;
    if constexpr (kCenter) mean = args.mean[row];
    A means[kSums] = {};
    for (int j = threadIdx.x; j < args.width; j += kStridedThreads) {
      const A g = ConvertTo<A>(dy[j]) * args.template Weight<kCenter>(ConvertTo<A>(args.weight[j]));
      means[0] += g * ((ConvertTo<A>(x[j]) - mean) * rstd);
      if constexpr (kCenter) means[1] += g;
    }
    team_sum(means);
    for (int j = threadIdx.x; j < args.width; j += kStridedThreads) {
      const A xhat = (ConvertTo<A>(x[j]) - mean) * rstd;
      const A g = ConvertTo<A>(dy[j]) * args.template Weight<kCenter>(ConvertTo<A>(args.weight[j]));
      A inner = g - xhat * (means[0] / args.width);
      if constexpr (kCenter) inner -= means[1] / args.width;
      A dx = rstd * inner;
      if (args.before != nullptr) dx += ConvertTo<A>(args.before[row * args.width + j]);
      const T rounded = ConvertTo<T>(dx);
      args.dx[row * args.width + j] = rounded;
      if (args.dx_amax != nullptr) most = max(most, MagnitudeBits(ConvertTo<float>(rounded)));
    }
  }
  if (args.dx_amax != nullptr) RaiseAmax(most, args.dx_amax);
}

// A thread takes a column; block (_, b) sums the rows b, b + gridDim.y and so on.
template <typename T, bool kCenter>
__global__ void __launch_bounds__(kStridedThreads) NormParametersStridedKernel(NormArgs<T> args) {
  using A = Accumulator<T>;
  constexpr int kSums = kCenter ? 2 : 1;
  const int column = blockIdx.x * kStridedThreads + threadIdx.x;
  if (column >= args.width) return;
  A sums[kSums] = {};
  for (int64_t row = blockIdx.y; row < args.rows; row += gridDim.y) {
    const A grad = ConvertTo<A>(args.dy[row * args.width + column]);
    A x = ConvertTo<A>(args.x[row * args.width + column]);
    if constexpr (kCenter) x -= args.mean[row];
    sums[0] += grad * (x * args.rstd[row]);
    if constexpr (kCenter) sums[1] += grad;
  }
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    args.partials[(blockIdx.y * int64_t{kSums} + i) * args.width + column] = sums[i];
  }
}

// --- the sum of the blocks' partials

// 64 threads sum 8 columns, 32 bytes of float: many blocks even for few columns.
inline constexpr int kSumColumns = 8, kSumThreads = 64;

template <typename T, int kSums>
struct NormSums {
  void* sums[kSums] = {};             // [width]; null: not wanted
  bool accumulator_type[kSums] = {};  // else T
  bool add[kSums] = {};               // accumulate into the sums; else overwrite them
};

// Sets or adds sums[s][c] = sum over i of partials[i, s, c], s = blockIdx.y. The thread with
// threadIdx.y = j takes the rows j, j + 64 and so on; the 64 sums meet in a tree.
template <typename T, int kSums>
__global__ void NormSumKernel(int rows, int width, const Accumulator<T>* __restrict__ partials,
                              NormSums<T, kSums> out) {
  using A = Accumulator<T>;
  __shared__ A shared[kSumThreads][kSumColumns];
  void* const sum = out.sums[blockIdx.y];
  const int column = blockIdx.x * kSumColumns + threadIdx.x;
  A total = 0;
  if (column < width && sum != nullptr) {
#pragma unroll 8
    for (int i = threadIdx.y; i < rows; i += kSumThreads) {
      total += partials[(i * int64_t{kSums} + blockIdx.y) * width + column];
    }
  }
  shared[threadIdx.y][threadIdx.x] = total;
  for (int half = kSumThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half) {
      shared[threadIdx.y][threadIdx.x] += shared[threadIdx.y + half][threadIdx.x];
    }
  }
  if (threadIdx.y != 0 || column >= width || sum == nullptr) return;
  total = shared[0][threadIdx.x];
  if (out.accumulator_type[blockIdx.y]) {
    A& element = static_cast<A*>(sum)[column];
    element = out.add[blockIdx.y] ? element + total : total;
  } else {
    T& element = static_cast<T*>(sum)[column];
    if (out.add[blockIdx.y]) total += ConvertTo<A>(element);
    element = ConvertTo<T>(total);
  }
}

// Sets or adds the sums over blocks of partials, [blocks, kSums, width], to the gradients.
template <typename T, int kSums>
void SumPartials(int blocks, int width, const Accumulator<T>* partials,
                 const std::array<ParameterGrad, kSums>& gradients) {
  NormSums<T, kSums> out;
  for (int i = 0; i < kSums; ++i) {
    const Tensor& sum = gradients[i].sum;
    out.sums[i] = Data<void>(sum);
    out.accumulator_type[i] = sum.dtype() == SumDType(sum.dtype());
    out.add[i] = gradients[i].add;
  }
  const dim3 grid(BlocksFor(width, kSumColumns), kSums), threads(kSumColumns, kSumThreads);
  NormSumKernel<T, kSums><<<grid, threads, 0, CurrentStream()>>>(blocks, width, partials, out);
  BURST_CUDA_CHECK_LAUNCH("NormSum");
}

}  // namespace cuda
}  // namespace burst
