#include "burst/base/check.h"
#include "model/ops/cuda/float8.cuh"
#include "model/ops/cuda/kernels.h"
#include "model/ops/cuda/vectorized.cuh"

namespace burst {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxHalf = 256;

struct Angles {
  double frequencies[kMaxHalf];
  double amplitude;
};

template <typename A>
__global__ void RopeCosSinKernel(int64_t n, int half, const int32_t* __restrict__ positions,
                                 const __grid_constant__ Angles angles, A* __restrict__ cosines,
                                 A* __restrict__ sines) {
  for (int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * kThreads) {
    double sine, cosine;
    sincos(positions[i / half] * angles.frequencies[i % half], &sine, &cosine);
    cosines[i] = static_cast<A>(angles.amplitude * cosine);
    sines[i] = static_cast<A>(angles.amplitude * sine);
  }
}

// A thread takes the same N pairs of channels of kHeads heads of a token, so that it reads their
// angles once. The pairs behind `half` do not turn; they are two halves of the channels behind
// 2 half.
constexpr int kHeads = 2;

template <typename T>
struct RotateArgs {
  using A = Accumulator<T>;
  int64_t tokens;
  int heads, rotated;
  int half, pairs;  // pairs of channels that turn, and all pairs of a head
  A sign;
  const T* x;
  const A *cosines, *sines;
  T* y;
  uint32_t* y_amax;  // null: not computed; for T = bf16
};

// Computes y1 = x1 cos - sign x2 sin and y2 = x2 cos + sign x1 sin; x1, x2 are the halves of the
// channels that turn. Returns the magnitude bits of the largest result, or 0 if it is not needed.
template <typename T, int N>
__device__ inline uint32_t Rotate(const RotateArgs<T>& args) {
  using A = Accumulator<T>;
  const int heads = args.heads, half = args.half, pairs = args.pairs;
  const uint32_t vecs = pairs / N, per_token = vecs * ((heads + kHeads - 1) / kHeads);
  const uint32_t index = blockIdx.x * kThreads + threadIdx.x, token = index / per_token;
  if (token >= args.tokens) return 0;
  const uint32_t rest = index - token * per_token;
  const int pair = rest % vecs * N, first_head = rest / vecs * kHeads;
  const bool turns = pair < half;
  const int rotated = turns ? args.rotated : 0;  // of this thread's channels

  const int channel = turns ? pair : pair + half, apart = turns ? half : pairs - half;
  const int64_t at = (token * int64_t{heads} + first_head) * 2 * pairs + channel;
  Words<T, N> x1[kHeads], x2[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (first_head + h >= heads) break;
    x1[h] = Load<N>(args.x + at + h * 2 * pairs);
    x2[h] = Load<N>(args.x + at + h * 2 * pairs + apart);
  }
  uint32_t most = 0;
  A cosine[N], sine[N];
  if (first_head < rotated) {
    LoadNumbers<N>(args.cosines + token * int64_t{half} + pair, cosine);
    LoadNumbers<N>(args.sines + token * int64_t{half} + pair, sine);
#pragma unroll
    for (int j = 0; j < N; ++j) sine[j] *= args.sign;
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    if (first_head + h >= heads) break;
    if (first_head + h < rotated) {
      A y1[N], y2[N];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const A a = x1[h][j], b = x2[h][j];
        y1[j] = a * cosine[j] - b * sine[j];
        y2[j] = b * cosine[j] + a * sine[j];
      }
      x1[h] = ToWords<T, N>(y1);
      x2[h] = ToWords<T, N>(y2);
    }
    if constexpr (std::is_same_v<T, bf16>) {
      if (args.y_amax != nullptr) most = max(most, max(MagnitudeBits(x1[h]), MagnitudeBits(x2[h])));
    }
    Store(x1[h], args.y + at + h * 2 * pairs);
    Store(x2[h], args.y + at + h * 2 * pairs + apart);
  }
  return most;
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads) RopeRotateKernel(RotateArgs<T> args) {
  const uint32_t most = Rotate<T, N>(args);
  if (args.y_amax != nullptr) RaiseAmax(most, args.y_amax);
}

}  // namespace

void RopeCosSin(const Tensor& positions, const std::vector<double>& frequencies, double amplitude,
                const Tensor& cos, const Tensor& sin) {
  const int64_t n = cos.numel();
  const int half = static_cast<int>(frequencies.size());
  BURST_CHECK_LE(half, kMaxHalf) << "rope for at most 512 channels of a head";
  if (n == 0) return;
  Angles arg = {};
  std::copy(frequencies.begin(), frequencies.end(), arg.frequencies);
  arg.amplitude = amplitude;
  const auto launch = [&](auto zero) {
    using A = decltype(zero);
    RopeCosSinKernel<A><<<GridSize(n, kThreads), kThreads, 0, CurrentStream()>>>(
        n, half, Data<int32_t>(positions), arg, Data<A>(cos), Data<A>(sin));
  };
  DispatchFloat(cos.dtype(), launch);
  BURST_CUDA_CHECK_LAUNCH("RopeCosSin");
}

void RopeRotate(const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t rotated, double sign,
                const Tensor& y, const Tensor& y_amax) {
  const int64_t tokens = cos.dim(0), half = cos.dim(1), heads = x.dim(-2), pairs = x.dim(-1) / 2;
  if (!y_amax.null()) {
    BURST_CHECK(y.dtype() == DType::kBFloat16);
    y_amax.Fill(0);
  }
  if (x.numel() == 0) return;
  const bool vectorized = FitsVectors(half, {x, y}) && FitsVectors(pairs, {x, y});
  DispatchVectors(x.dtype(), vectorized, [&](auto zero, auto vec_size) {
    using T = decltype(zero);
    using A = Accumulator<T>;
    constexpr int N = decltype(vec_size)::value;
    const int64_t threads = tokens * (pairs / N) * ((heads + kHeads - 1) / kHeads);
    const RotateArgs<T> args = {
        tokens,
        static_cast<int>(heads),
        static_cast<int>(rotated),
        static_cast<int>(half),
        static_cast<int>(pairs),
        static_cast<A>(sign),
        Data<T>(x),
        Data<A>(cos),
        Data<A>(sin),
        Data<T>(y),
        y_amax.null() ? nullptr : static_cast<uint32_t*>(y_amax.raw_data())};
    RopeRotateKernel<T, N><<<BlocksFor(threads, kThreads), kThreads, 0, CurrentStream()>>>(args);
  });
  BURST_CUDA_CHECK_LAUNCH("RopeRotate");
}

}  // namespace cuda
}  // namespace burst
