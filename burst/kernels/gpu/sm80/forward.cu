// The forward on Ampere's tensor cores. A block owns kBlockM queries of a head, a warp 16 kM of
// them. It reads keys and values in blocks of kBlockN. While it computes with K it copies V, and
// the other way round:
//
//   S = Q K^T;  m' = max(m, rowmax S);  P = 2^(c S - c m'), c = softmax_scale log2 e
//   l = l 2^(c m - c m') + rowsum P;  O = O 2^(c m - c m') + P V
//
// Traits::kChanged: S is changed and includes softmax_scale (burst/kernels/scores.h). Weights are
// dropped from P after l was summed, and O is multiplied by 1 / (1 - dropout) at the end.
//
// Compiled once for every variant in variants.h.
#include <cmath>

#include "burst/kernels/gpu/common/isolation.cuh"
#include "burst/kernels/gpu/common/shared_memory.h"
#include "burst/kernels/gpu/sm80/softmax.cuh"
#include "burst/kernels/gpu/sm80/tile.cuh"
#include "burst/kernels/gpu/sm80/variants.h"
#include "burst/kernels/merge.h"

namespace burst {
namespace sm80 {
namespace {

// The tile of a block. Last tiles come first, because they are the longest under a causal mask.
struct TileIndex {
  __device__ __forceinline__ TileIndex(const FlashAttentionShape& shape, int tiles, int rows) {
    const int index = BlockIndex(), num_heads = static_cast<int>(shape.num_heads);
    first = (tiles - 1 - index % tiles) * rows;
    h = index / tiles % num_heads;
    b = index / tiles / num_heads;
  }
  int first, h, b;
};

// Returns whether 16 rows of a warp, from `row` on, are left to the repair of common/isolation.h: O
// is not finite. Keys and values that are not finite reach all rows, so a thread looks at its
// first.
template <int kTiles>
__device__ __forceinline__ bool LeaveToRepair(const FlashAttentionShape& shape,
                                              const TileIndex& index, int row, int32_t* marks,
                                              const float (&o)[kTiles][4]) {
  if (marks == nullptr) return false;
  float sum = 0;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) sum += o[n][0] + o[n][1];
  if (__all_sync(0xffffffff, cuda::IsFinite(sum))) return false;
  if (threadIdx.x % 32 == 0 && row < shape.q_len) {
    const int64_t head = index.b * shape.num_heads + index.h;
    cuda::Mark(marks, head * cuda::MarkGroups(shape.q_len) + row / cuda::kMarkRows, 0xFFFF);
  }
  return true;
}

// Computes O = O / l and lse = softmax_scale m + log l, merged with earlier results.
template <class Traits>
__device__ __forceinline__ void Finish(const FlashForwardParams& params, int tiles, int32_t* marks,
                                       const Softmax<Traits::kM>& softmax,
                                       float (&o)[Traits::kM][Traits::kHeadDim / 8][4]) {
  constexpr int kM = Traits::kM, kHeadDim = Traits::kHeadDim;
  const FlashAttentionShape& shape = params.shape;
  const int q_len = static_cast<int>(shape.q_len), head_dim = static_cast<int>(shape.head_dim);
  const TileIndex index(shape, tiles, Traits::kBlockM);
  const int warp_row = threadIdx.x / 32 * (16 * kM), lane = threadIdx.x % 32;
  float* const lse =
      static_cast<float*>(params.lse) + (index.b * shape.num_heads + index.h) * shape.q_len;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    const int first_row = index.first + warp_row + 16 * m;
    if (first_row >= q_len) continue;
    const int64_t calls_left = params.rows.Left(index.b, first_row);
    if (calls_left < 0) continue;
    if (LeaveToRepair(shape, index, first_row, marks, o[m])) continue;
    const int row = first_row + lane / 4;
    float factor[2], keep[2];
    bool valid[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = row + 8 * half;
      valid[half] = i < q_len;
      float max = softmax.max[m][half], sum = RowSum(softmax.sum[m][half]), scale = 1;
      if constexpr (Traits::kChanged) {
        scale = ChangedScores<float>(shape, index.b, index.h).kept();
      } else {
        max *= static_cast<float>(shape.softmax_scale);
      }
      if (params.sinks != nullptr) {
        scale *= AddSink(static_cast<const float*>(params.sinks)[index.h], &max, &sum);
      }
      float row_lse = sum != 0 ? max + logf(sum) : -INFINITY;
      factor[half] = sum != 0 ? scale / sum : 0;
      keep[half] = 0;
      if (params.merge && valid[half]) {
        const MergeWeights<float> weights = Merge(lse[i], row_lse);
        row_lse = weights.lse;
        factor[half] *= weights.b;
        keep[half] = weights.a;
      }
      __syncwarp();  // the four lanes have read lse
      if (valid[half] && lane % 4 == 0) lse[i] = row_lse;
    }
    const RowPair rows{index.b, index.h, row, valid, head_dim};
    const AttentionOperand& so_far = params.sum.data == nullptr ? params.out : params.sum;
    if (params.merge) {
      MergeRows<kHeadDim>(so_far, rows, factor, keep, o[m]);
      factor[0] = factor[1] = 1;
    }
    const bool is_float = calls_left > 0 || params.out_dtype == DType::kFloat32;
    StoreRows<typename Traits::Element, kHeadDim>(is_float, o[m], factor,
                                                  calls_left > 0 ? so_far : params.out, rows);
  }
}

// Raises *largest to the warp's; rows that see nothing, and rows from q_len on, have -inf.
template <int kM>
__device__ __forceinline__ void RaiseToLargest(const Softmax<kM>& softmax, float* largest) {
  float max = -INFINITY;
#pragma unroll
  for (int m = 0; m < kM; ++m) max = fmaxf(max, fmaxf(softmax.max[m][0], softmax.max[m][1]));
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) {  // the four lanes of a row have the same
    max = fmaxf(max, __shfl_xor_sync(0xffffffff, max, lanes));
  }
  if (threadIdx.x % 32 == 0 && max != -INFINITY) cuda::RaiseTo(max, largest);
}

// Updates the softmax with a block of changed S: replaces S by P, without dropped weights, and
// rescales O. rows: the warp's queries; key: the block's first key.
template <class Traits>
__device__ __forceinline__ void UpdateChanged(const FlashAttentionShape& shape,
                                              const ChangedScores<float>& changed,
                                              const ChangedRows<Traits::kM>& rows, int key,
                                              float (&s)[Traits::kM][Traits::kBlockN / 8][4],
                                              Softmax<Traits::kM>& softmax,
                                              float (&o)[Traits::kM][Traits::kHeadDim / 8][4]) {
  constexpr int kColumns = Traits::kBlockN / 8;
  const int k_len = static_cast<int>(shape.k_len);
  const float scale = static_cast<float>(shape.softmax_scale);
  rows.template ForEach<kColumns>(
      changed, key, k_len, [&](int m, int n, int e, bool sees, bool, auto change) {
        float slope;
        s[m][n][e] = sees ? change(scale * s[m][n][e], &slope) : -INFINITY;
      });
  Update(kLog2E, s, softmax, o);
  if (!changed.drops()) return;
  rows.template ForEach<kColumns>(changed, key, k_len,
                                  [&](int m, int n, int e, bool, bool kept, auto) {
                                    if (!kept) s[m][n][e] = 0;
                                  });
}

template <class Traits>
__global__ __launch_bounds__(Traits::kThreads) void ForwardKernel(
    const __grid_constant__ FlashForwardParams params, int tiles, int32_t* marks) {
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN, kM = Traits::kM;
  using Element = typename Traits::Element;
  constexpr int kHeadDim = Traits::kHeadDim, kThreads = Traits::kThreads;
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t q_tile = SharedAddress(shared);
  const uint32_t k_tile = q_tile + kBlockM * kHeadDim * 2;
  const uint32_t v_tile = k_tile + kBlockN * kHeadDim * 2;

  const FlashAttentionShape& shape = params.shape;
  const int q_len = static_cast<int>(shape.q_len), k_len = static_cast<int>(shape.k_len);
  const int head_dim = static_cast<int>(shape.head_dim);
  const TileIndex index(shape, tiles, kBlockM);
  const int first = index.first, b = index.b;
  const int kv_head =
      index.h / static_cast<int>(shape.num_heads / static_cast<int>(shape.num_kv_heads));
  const Visible visible(shape, b);
  const int first_key = visible.begin(first),
            last_key = visible.end(min(first + kBlockM, q_len) - 1);
  const int warp_row = threadIdx.x / 32 * (16 * kM);
  const KeySpan all_see(visible, first + warp_row, 16 * kM, q_len);
  const float c = static_cast<float>(shape.softmax_scale) * kLog2E;

  float o[kM][kHeadDim / 8][4];
  Clear<kM, kHeadDim / 8>(o);
  Softmax<kM> softmax;
  softmax.Reset();

  using KeyLoader = TileLoader<kBlockN, kHeadDim, kThreads>;
  KeyLoader k(params.k, b, kv_head, first_key), v(params.v, b, kv_head, first_key);
  if (first_key < last_key) {
    const TileLoader<kBlockM, kHeadDim, kThreads> q(params.q, b, index.h, first);
    q.Load(params.q.seq_stride, q_len - first, head_dim, q_tile);
    k.Load(params.k.seq_stride, k_len - first_key, head_dim, k_tile);
    CommitCopies();
  }
  for (int key = first_key; key < last_key; key += kBlockN) {
    WaitCopies<0>();
    __syncthreads();  // K is here, and no warp reads the last V any more
    v.Load(params.v.seq_stride, k_len - key, head_dim, v_tile);
    v.Advance(params.v.seq_stride);
    CommitCopies();
    float s[kM][kBlockN / 8][4];
    Clear<kM, kBlockN / 8>(s);
    Multiply<Element, kHeadDim>(A<kHeadDim>(q_tile, warp_row), B<kHeadDim>(k_tile, 0), s);
    WaitCopies<0>();
    __syncthreads();  // V is here, and no warp reads K any more
    k.Advance(params.k.seq_stride);
    if (key + kBlockN < last_key) {
      k.Load(params.k.seq_stride, k_len - key - kBlockN, head_dim, k_tile);
    }
    CommitCopies();
    if constexpr (Traits::kChanged) {
      const ChangedScores<float> changed(shape, b, index.h);
      const ChangedRows<kM> rows(changed, visible, first + warp_row, q_len);
      UpdateChanged<Traits>(shape, changed, rows, key, s, softmax, o);
    } else {
      if (!all_see.Contains(key, kBlockN)) {
        const TileIndex again(shape, tiles, kBlockM);
        MaskScores(Visible(shape, again.b), again.first + warp_row, q_len, key, s);
      }
      Update(c, s, softmax, o);
    }
    MultiplyAccumulators<Element>(s, BT<kHeadDim>(v_tile, 0), o);
  }

  if constexpr (Traits::kChanged) {
    if (params.max_logits != nullptr) {
      RaiseToLargest(softmax, params.max_logits + b * shape.num_heads + index.h);
    }
  }
  Finish<Traits>(params, tiles, marks, softmax, o);
}

}  // namespace

template <class Traits>
void LaunchForward(const FlashForwardParams& params, int32_t* marks) {
  const FlashAttentionShape& shape = params.shape;
  const int tiles = static_cast<int>((shape.q_len + Traits::kBlockM - 1) / Traits::kBlockM);
  const int64_t blocks = tiles * shape.num_heads * shape.batch;
  if (blocks == 0) return;
  const auto kernel = ForwardKernel<Traits>;
  cuda::AllowSharedMemory(reinterpret_cast<const void*>(kernel), Traits::kSharedBytes);
  kernel<<<static_cast<unsigned>(blocks), Traits::kThreads, Traits::kSharedBytes,
           cuda::CurrentStream()>>>(params, tiles, marks);
  BURST_CUDA_CHECK_LAUNCH("attention forward");
}

template void LaunchForward<Variants<BFloat16>::BURST_VARIANT>(const FlashForwardParams&, int32_t*);
template void LaunchForward<Variants<Float16>::BURST_VARIANT>(const FlashForwardParams&, int32_t*);

}  // namespace sm80
}  // namespace burst
