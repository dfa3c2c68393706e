// Launches RMSNorm and LayerNorm on a GPU, with the kernel of normalization.cuh for the width.
#include <algorithm>
#include <array>

#include "burst/base/check.h"
#include "model/ops/cuda/kernels.h"
#include "model/ops/cuda/normalization.cuh"

namespace burst {
namespace cuda {
namespace {

// How the threads of a block divide rows of some width.
struct NormBlock {
  bool block_team = false;
  int vecs_per_thread = 0;
  dim3 threads;
};

// float64, which only tests use, has at most four vectors a thread.
template <typename T>
bool MakeNormBlock(int64_t vecs, NormBlock* block) {
  constexpr bool kFew = sizeof(T) == 8;
  constexpr int kWarpVecs = 4;
  block->block_team = vecs > 32 * kWarpVecs;
  if (!block->block_team) {
    block->vecs_per_thread = kFew ? 4 : std::max(2, static_cast<int>((vecs + 31) / 32));
    block->threads = dim3(32, kWarpTeams);
    return true;
  }
  block->vecs_per_thread = kFew || vecs > 2 * kMaxNormThreads ? 4 : 2;
  const int64_t threads = (vecs + block->vecs_per_thread - 1) / block->vecs_per_thread;
  block->threads = dim3(static_cast<unsigned>((threads + 31) / 32 * 32));
  return block->threads.x <= kMaxNormThreads;
}

// Returns the kernel for a block, of Forward or Backward: Kernels::Get<kBlockTeam, kVecs>().
template <typename T, typename Kernels>
auto NormKernelFor(const NormBlock& block) {
  if constexpr (sizeof(T) < 8) {
    if (block.vecs_per_thread == 2) {
      return block.block_team ? Kernels::template Get<true, 2>()
                              : Kernels::template Get<false, 2>();
    }
    if (block.vecs_per_thread == 3) return Kernels::template Get<false, 3>();
  }
  return block.block_team ? Kernels::template Get<true, 4>() : Kernels::template Get<false, 4>();
}
template <typename T, bool kCenter>
struct ForwardKernels {
  template <bool kBlockTeam, int kVecs>
  static auto Get() {
    return NormForwardKernel<T, kCenter, kBlockTeam, kVecs>;
  }
};
template <typename T, bool kCenter>
struct BackwardKernels {
  template <bool kBlockTeam, int kVecs>
  static auto Get() {
    return NormBackwardKernel<T, kCenter, kBlockTeam, kVecs>;
  }
};

// Returns the blocks that are resident on the GPU at once, or fewer if there are fewer rows.
template <typename Kernel>
int ResidentBlocks(Kernel kernel, const NormBlock& block, size_t shared_bytes, int64_t rows) {
  int per_multiprocessor = 0;
  BURST_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      &per_multiprocessor, kernel, block.threads.x * block.threads.y, shared_bytes));
  const int64_t resident = int64_t{per_multiprocessor} * CurrentContext().multiprocessors;
  const int64_t enough = (rows + block.threads.y - 1) / block.threads.y;
  return static_cast<int>(std::max<int64_t>(1, std::min(resident, enough)));
}

// Sets *scale to the scale that fits sqrt(width) max |offset + weight| + max |bias|. No |y| exceeds
// it, because |xhat| <= sqrt(width). One block computes it; NaN counts as larger than every number.
__global__ void NormScaleKernel(NormArgs<bf16> args) {
  const auto largest = [&](const bf16* x, float offset) {
    uint32_t most = 0;
    for (int j = threadIdx.x; x != nullptr && j < args.width; j += kStridedThreads) {
      most = max(most, __float_as_uint(offset + ConvertTo<float>(x[j])) & 0x7fffffff);
    }
    __shared__ uint32_t of_block;
    if (threadIdx.x == 0) of_block = 0;
    __syncthreads();
    atomicMax(&of_block, most);
    __syncthreads();
    const float result = __uint_as_float(of_block);
    __syncthreads();  // before the next call changes it
    return result;
  };
  const float bound = sqrtf(static_cast<float>(args.width)) * largest(args.weight, args.offset);
  const float most_bias = largest(args.bias, 0);
  if (threadIdx.x == 0) *args.scale = ScaleFor(bound + most_bias, kLargestE4M3);
}

// Returns the arguments that all passes read. rstd: [rows], of which a forward writes the elements.
template <typename T>
NormArgs<T> ArgsOf(const Tensor& x, const Tensor& weight, const Tensor& rstd) {
  NormArgs<T> args;
  args.rows = rstd.numel();
  args.width = static_cast<int>(weight.numel());
  args.x = Data<T>(x);
  args.weight = Data<T>(weight);
  args.rstd = Data<Accumulator<T>>(rstd);
  return args;
}

// Sets where the forward stores its result, and the scale of a result in float8.
template <typename T>
void SetNormResult(const Tensor& y, const Tensor& scale, NormArgs<T>* args) {
  if (!Is8Bit(y.dtype())) {
    args->y = Data<T>(y);
    return;
  }
  BURST_CHECK(y.dtype() == DType::kFloat8E4M3);
  if constexpr (std::is_same_v<T, bf16>) {
    args->y_float8 = static_cast<uint8_t*>(y.raw_data());
    args->scale = Data<float>(scale);
    NormScaleKernel<<<1, kStridedThreads, 0, CurrentStream()>>>(*args);
    BURST_CUDA_CHECK_LAUNCH("NormScale");
  } else {
    BURST_CHECK(false) << "a normalization in float8 must be of bfloat16";
  }
}

template <typename T, bool kCenter>
void LaunchNormForward(const NormArgs<T>& args, bool vectorized) {
  if (args.rows == 0 || args.width == 0) return;
  NormBlock block;
  if (vectorized && MakeNormBlock<T>(args.width / kVecSize<T>, &block)) {
    const auto kernel = NormKernelFor<T, ForwardKernels<T, kCenter>>(block);
    const int blocks = ResidentBlocks(kernel, block, 0, args.rows);
    kernel<<<blocks, block.threads, 0, CurrentStream()>>>(args);
  } else {
    NormForwardStridedKernel<T, kCenter>
        <<<GridSize(args.rows, 1), kStridedThreads, 0, CurrentStream()>>>(args);
  }
  BURST_CUDA_CHECK_LAUNCH("NormForward");
}

// Sets the tensors of the backward. dx_amax gets the largest magnitude of dx; null: none does.
template <typename T>
void SetGradients(const Tensor& dy, const Tensor& before, const Tensor& dx, const Tensor& dx_amax,
                  NormArgs<T>* args) {
  args->dy = Data<T>(dy);
  args->before = Data<T>(before);
  args->dx = Data<T>(dx);
  if (dx_amax.null()) return;
  BURST_CHECK((std::is_same_v<T, bf16>));
  dx_amax.Fill(0);
  args->dx_amax = static_cast<uint32_t*>(dx_amax.raw_data());
}

// dparameters: dweight and, for LayerNorm, dbias.
template <typename T, bool kCenter>
void LaunchNormBackward(NormArgs<T> args, bool vectorized,
                        const std::array<ParameterGrad, kCenter ? 2 : 1>& dparameters) {
  using A = Accumulator<T>;
  constexpr int kSums = kCenter ? 2 : 1;
  if (args.width == 0) return;
  if (args.rows == 0) {
    for (const ParameterGrad& grad : dparameters) {
      if (!grad.sum.null() && !grad.add) grad.sum.Fill(0);
    }
    return;
  }
  int blocks = 0;  // blocks that leave partial sums
  Tensor partials;
  const auto allocate = [&](int count) {
    blocks = count;
    const int64_t rows = count, width = args.width;
    partials = Tensor::Empty({rows, kSums, width}, DTypeOf<A>::value, DeviceType::kCuda);
    args.partials = Data<A>(partials);
  };
  NormBlock block;
  if (vectorized && MakeNormBlock<T>(args.width / kVecSize<T>, &block)) {
    const auto kernel = NormKernelFor<T, BackwardKernels<T, kCenter>>(block);
    const size_t shared_bytes = block.block_team ? 0 : kWarpTeams * args.width * sizeof(A);
    allocate(ResidentBlocks(kernel, block, shared_bytes, args.rows));
    kernel<<<blocks, block.threads, shared_bytes, CurrentStream()>>>(args);
  } else {
    if (args.dx != nullptr) {
      NormBackwardStridedKernel<T, kCenter>
          <<<GridSize(args.rows, 1), kStridedThreads, 0, CurrentStream()>>>(args);
    }
    allocate(static_cast<int>(std::min<int64_t>(args.rows, 256)));
    const dim3 grid(BlocksFor(args.width, kStridedThreads), blocks);
    NormParametersStridedKernel<T, kCenter><<<grid, kStridedThreads, 0, CurrentStream()>>>(args);
  }
  BURST_CUDA_CHECK_LAUNCH("NormBackward");

  SumPartials<T, kSums>(blocks, args.width, args.partials, dparameters);
}

}  // namespace

// ---- RMSNorm.

void RmsNormForward(const Tensor& x, const Tensor& weight, double offset, double eps,
                    const Tensor& y, const Tensor& scale, const Tensor& rstd) {
  const int64_t width = weight.numel();
  DispatchDtype(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    NormArgs<T> args = ArgsOf<T>(x, weight, rstd);
    args.eps = static_cast<Accumulator<T>>(eps);
    args.offset = static_cast<Accumulator<T>>(offset);
    SetNormResult(y, scale, &args);
    LaunchNormForward<T, /*kCenter=*/false>(args, FitsVectors(width, {x, weight, y}));
  });
}

void RmsNormBackward(const Tensor& x, const Tensor& weight, double offset, const Tensor& rstd,
                     const Tensor& dy, const Tensor& before, const Tensor& dx,
                     const Tensor& dx_amax, const ParameterGrad& dweight) {
  const int64_t width = weight.numel();
  DispatchDtype(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    NormArgs<T> args = ArgsOf<T>(x, weight, rstd);
    args.offset = static_cast<Accumulator<T>>(offset);
    SetGradients(dy, before, dx, dx_amax, &args);
    LaunchNormBackward<T, /*kCenter=*/false>(args, FitsVectors(width, {x, weight, dy, before, dx}),
                                             {dweight});
  });
}

// ---- LayerNorm.

void LayerNormForward(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
                      const Tensor& y, const Tensor& scale, const Tensor& mean,
                      const Tensor& rstd) {
  const int64_t width = weight.numel();
  DispatchDtype(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    NormArgs<T> args = ArgsOf<T>(x, weight, rstd);
    args.eps = static_cast<Accumulator<T>>(eps);
    args.bias = Data<T>(bias);
    args.mean = Data<Accumulator<T>>(mean);
    SetNormResult(y, scale, &args);
    LaunchNormForward<T, /*kCenter=*/true>(args, FitsVectors(width, {x, weight, bias, y}));
  });
}

void LayerNormBackward(const Tensor& x, const Tensor& weight, const Tensor& mean,
                       const Tensor& rstd, const Tensor& dy, const Tensor& before, const Tensor& dx,
                       const Tensor& dx_amax, const ParameterGrad& dweight,
                       const ParameterGrad& dbias) {
  const int64_t width = weight.numel();
  DispatchDtype(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    NormArgs<T> args = ArgsOf<T>(x, weight, rstd);
    args.mean = Data<Accumulator<T>>(mean);
    SetGradients(dy, before, dx, dx_amax, &args);
    LaunchNormBackward<T, /*kCenter=*/true>(args, FitsVectors(width, {x, weight, dy, before, dx}),
                                            {dweight, dbias});
  });
}

}  // namespace cuda
}  // namespace burst
