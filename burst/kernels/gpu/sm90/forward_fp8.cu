// The forward on Q, K and V of 8 bits (e4m3), rounded by quantize_fp8.h. It follows the plan of
// forward.cu, with these differences:
//
//   scales   S_j is the product of 8 bits times the scales of the query block and of key block j.
//            O is kept in units of the last key block's scale of V: the factor that a new maximum
//            takes anyway changes the units as well.
//   P        lies between 0 and 256, not 1: more of its small values are above e4m3's smallest.
//            Its sum is of the values before rounding.
//   P V      of a block is a matmul of its own, added to O in fp32: the tensor cores' sums of
//            8-bit products have too few bits for thousands of keys (Liu et al., DeepSeek-V3,
//            arXiv 2412.19437, section 3.3.2).
//   turns    Warpgroups do not take turns at issuing matmuls, which take half as long as the rest.
//
// Compiled once for every variant in variants.h.
#include <type_traits>

#include "burst/kernels/gpu/sm90/forward.cuh"
#include "burst/kernels/gpu/sm90/online_softmax.cuh"
#include "burst/kernels/gpu/sm90/tensor_map.h"
#include "burst/kernels/gpu/sm90/wgmma_fp8.cuh"

namespace burst {
namespace sm90 {
namespace {

constexpr float kLargestP = 256;
constexpr float kLog2LargestP = 8;

struct Fp8ForwardArgs : ForwardArgs {
  const float *q_scales, *k_scales, *v_scales;
  int q_blocks, k_blocks;
};

// Computes like OnlineSoftmax, for blocks of S with different scales. Its maxima are maxima of
// scale S.
struct ScaledSoftmax {
  float max[2];         // maximum of scale S, in powers of two
  float sum[2];         // sum of P, up to kLargestP, over this thread's columns
  float correction[2];  // factor of O so far
  float origin[2];      // max - log2(kLargestP); of 0 where there is no maximum yet

  __device__ __forceinline__ void Reset() {
    max[0] = max[1] = -INFINITY;
    sum[0] = sum[1] = 0;
  }

  template <bool kMasked, int kCount>
  __device__ __forceinline__ void UpdateMax(int r, const float (&s)[kCount], float scale) {
    float partial[2] = {s[2 * r], s[2 * r + 1]};  // short chains, so that their latencies overlap
#pragma unroll
    for (int i = 2; i < kCount / 2; ++i) {
      partial[i % 2] = fmaxf(partial[i % 2], s[OnlineSoftmax::Index(r, i)]);
    }
    float top = fmaxf(partial[0], partial[1]);
    top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
    top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
    top = fmaxf(max[r], top * scale);
    const float finite = kMasked && top == -INFINITY ? 0.f : top;
    correction[r] = Exp2(max[r] - finite);
    max[r] = top;
    origin[r] = finite - kLog2LargestP;
  }

  // Replaces S of row r by P, and adds P to the sum.
  template <int kCount>
  __device__ __forceinline__ void Exponentiate(int r, float (&s)[kCount], float scale) {
    float total[2] = {sum[r] * correction[r], 0};
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      float& x = s[OnlineSoftmax::Index(r, i)];
      x = Exp2(fmaf(x, scale, -origin[r]));
      total[i % 2] += x;
    }
    sum[r] = total[0] + total[1];
  }
};

// Loads the result of the earlier calls for the thread's rows, in units of a scale of V of 1.
__device__ __forceinline__ void Fp8ForwardResume(const Fp8ForwardArgs& args, const TileInfo& tile,
                                                 int first_row, ScaledSoftmax& softmax,
                                                 float (&o)[64]) {
  const float* lse_row = LseRow(args, tile, first_row);
  const float* row =
      static_cast<const float*>(args.sum.data) + Offset(args.sum, tile.batch, tile.head, first_row);
  const bool valid[2] = {first_row < args.q_len, first_row + 8 < args.q_len};
  LoadRowFloat<0, 128>(row, valid[0], args.value_dim, o);
  LoadRowFloat<1, 128>(row + 8 * args.sum.seq_stride, valid[1], args.value_dim, o);
#pragma unroll
  for (float& x : o) x *= kLargestP;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float lse = valid[r] ? __ldcg(lse_row + 8 * r) : -INFINITY;
    softmax.max[r] = lse * kLog2E;
    softmax.sum[r] = threadIdx.x % 4 == 0 && lse != -INFINITY ? kLargestP : 0.f;
  }
}

// Stores O / sum and lse of the thread's rows. v_scale: the units of O.
template <class Traits>
__device__ __forceinline__ void Fp8ForwardFinish(const Fp8ForwardArgs& args, const TileInfo& tile,
                                                 int first_row, ScaledSoftmax& softmax,
                                                 const float (&o)[64], float v_scale) {
  if (LeaveToRepair<Traits>(args, tile, first_row, o)) return;
  float* lse_row = LseRow(args, tile, first_row);
  bool valid[2];
  float factor[2];
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      softmax.sum[r] += __shfl_xor_sync(0xffffffff, softmax.sum[r], distance);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float max = (softmax.max[r] - kLog2LargestP) * kLn2, sum = softmax.sum[r];
    const float keep = AddSinkOf(args, tile, &max, &sum);
    valid[r] = first_row + 8 * r < args.q_len;
    factor[r] = sum != 0 ? __fdividef(keep * v_scale, sum) : 0.f;
    const float lse = sum != 0 ? max + __logf(sum) : -INFINITY;
    if (threadIdx.x % 4 == 0 && valid[r]) lse_row[8 * r] = lse;
  }
  StoreRows<typename Traits::Element, 128>(args.out_is_float, o, factor, args.out,
                                           Offset(args.out, tile.batch, tile.head, first_row),
                                           valid, args.value_dim);
}

// Returns the thread's first row, computed again wherever it is needed, to save a register.
__device__ __forceinline__ int RowInTile(int consumer) {
  const int thread = ThreadIndexAgain() % kWarpgroupSize;
  return consumer * kWgmmaM + thread / kWarpSize * 16 + thread % kWarpSize / 4;
}

template <class Traits>
__device__ __forceinline__ void Fp8ForwardConsume(const Fp8ForwardArgs& args,
                                                  ForwardShared<Traits>& shared, int consumer) {
  constexpr int kBlockN = Traits::kBlockN;
  // Counts the tiles of Q and the blocks of K so far; V is one block behind. These counts give the
  // next slot of each ring, and the parity of its use.
  unsigned tiles = 0, blocks = 0;
  static_assert(Traits::kQStages == 2 && Traits::kStages == 4, "");
  const auto q_stage = [&] { return tiles % 2; };
  const auto stage = [](unsigned index) { return index % 4; };
  const auto parity = [](unsigned index) { return index / 4 % 2; };

  float s[64];     // [64, kBlockN]
  float pv[64];    // [64, head_dim], of a block
  float o[64];     // [64, head_dim]
  uint32_t p[16];  // [64, kBlockN] of e4m3
  ScaledSoftmax softmax;

  const auto issue_s = [&] {  // S = Q K^T
    WgmmaFence();
    Fp8MatmulSharedShared(s, shared.q[q_stage()].At(consumer * kWgmmaM),
                          shared.k[stage(blocks)].At(0));
    WgmmaCommit();
  };
  const auto issue_pv = [&] {
    PinRegisters(p);
    WgmmaFence();
    Fp8MatmulRegisterShared(pv, p, shared.v[stage(blocks - 1)].At(0));
    WgmmaCommit();
  };

  for (;; ++tiles) {
    Wait(&shared.q_full[q_stage()], tiles / 2 % 2);
    const TileInfo& tile = shared.tile[tiles % 4];
    if (tile.batch < 0) break;
    const int block_begin = tile.block_begin;
    // The rows' visible ranges are read again for every masked block, to save registers.
    const auto mask = [&](int block) {
      if (Traits::kRanges) {
        const int64_t first = tile.batch * args.visible.batch_stride;
        const auto limits = [&](const int32_t* of_rows, int(&limit)[2]) {
          const int row = tile.row + RowInTile(consumer);
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            limit[r] = __ldg(of_rows + first + min(row + 8 * r, args.q_len - 1));
          }
        };
        int limit[2];
        if (block >= tile.whole_end) {
          limits(args.visible.end, limit);
          limit[0] = min(limit[0], args.k_len);
          limit[1] = min(limit[1], args.k_len);
          MaskRows<false>(s, block * kBlockN, limit);
        }
        if (block < tile.whole_begin) {
          limits(args.visible.begin, limit);
          MaskRows<true>(s, block * kBlockN, limit);
        }
      } else if (block >= tile.whole_end) {
        const int keys = args.k_len % kBlockN, limit[2] = {keys, keys};
        MaskRows<false>(s, 0, limit);
      }
    };

    const int batch_head = tile.batch * args.num_heads + tile.head;
    const float q_scale = args.scale * kLog2E *
                          __ldg(args.q_scales + batch_head * args.q_blocks + tile.row / kBlockN);
    const int first_scale = batch_head / args.heads_per_kv * args.k_blocks;
    const auto key_block = [&](int block) -> int {
      if (Traits::kLists) block = __ldg(args.blocks.key_list + block);
      return first_scale + block;
    };
    float v_scale = 1, next_k_scale = 0, next_v_scale = 1;
    const auto load_scales = [&](int block) {
      if (block < block_begin) return;
      const int index = key_block(block);
      next_k_scale = __ldg(args.k_scales + index);
      next_v_scale = __ldg(args.v_scales + index);
    };
    if (args.merge) {
      Fp8ForwardResume(args, tile, tile.row + RowInTile(consumer), softmax, o);
    } else {
      softmax.Reset();
#pragma unroll
      for (float& x : o) x = 0;
    }

    int block = tile.block_end - 1;
    if (block >= block_begin) {
      load_scales(block);
      float units[2];  // factor of O before the next PV is added
      const auto change_units = [&] {
        const float ratio = __fdividef(v_scale, next_v_scale);
#pragma unroll
        for (int r = 0; r < 2; ++r) units[r] = softmax.correction[r] * ratio;
        v_scale = next_v_scale;
      };
      const auto add_pv = [&] {
#pragma unroll
        for (int i = 0; i < 64; ++i) o[i] = fmaf(o[i], units[i / 2 % 2], pv[i]);
      };

      Wait(&shared.k_full[stage(blocks)], parity(blocks));
      issue_s();
      float scale = q_scale * next_k_scale;
      WgmmaWait<0>();
      PinRegisters(s);
      ArriveWarp(&shared.k_empty[stage(blocks)]);
      ++blocks;
      mask(block);
      softmax.UpdateMax<true>(0, s, scale);
      softmax.UpdateMax<true>(1, s, scale);
      softmax.Exponentiate(0, s, scale);
      softmax.Exponentiate(1, s, scale);
      change_units();
      load_scales(block - 1);
      PackFp8Operand(s, p);
      const auto step = [&](auto masked) {
        constexpr bool kMasked = decltype(masked)::value;
        Wait(&shared.k_full[stage(blocks)], parity(blocks));
        issue_s();
        Wait(&shared.v_full[stage(blocks - 1)], parity(blocks - 1));
        issue_pv();
        scale = q_scale * next_k_scale;
        WgmmaWait<1>();
        PinRegisters(s);
        if (kMasked) mask(block);
        softmax.UpdateMax<kMasked>(0, s, scale);
        softmax.UpdateMax<kMasked>(1, s, scale);
        // Arrives after both maxima, which ptxas would otherwise move behind the wait for P V. The
        // exponentials come after that wait and run in parallel with the additions to O.
        ArriveWarpAfter(&shared.k_empty[stage(blocks)],
                        softmax.correction[0] + softmax.correction[1]);
        WgmmaWait<0>();
        PinRegisters(pv);
        ArriveWarp(&shared.v_empty[stage(blocks - 1)]);
        ++blocks;
        softmax.Exponentiate(0, s, scale);
        add_pv();
        softmax.Exponentiate(1, s, scale);
        change_units();
        load_scales(block - 1);
        PackFp8Operand(s, p);
      };
      for (--block; block >= max(block_begin, tile.whole_end); --block) step(std::true_type());
      const int whole_begin = max(block_begin, tile.whole_begin);
#pragma unroll 1
      for (; block >= whole_begin; --block) step(std::false_type());
#pragma unroll 1
      for (; block >= block_begin; --block) step(std::true_type());
      Arrive(&shared.q_empty[q_stage()]);
      Wait(&shared.v_full[stage(blocks - 1)], parity(blocks - 1));
      issue_pv();
      WgmmaWait<0>();
      PinRegisters(pv);
      ArriveWarp(&shared.v_empty[stage(blocks - 1)]);
      add_pv();
    } else {
      Arrive(&shared.q_empty[q_stage()]);
    }
    Fp8ForwardFinish<Traits>(args, tile, tile.row + RowInTile(consumer), softmax, o, v_scale);
  }
}

template <class Traits>
__global__ __launch_bounds__(Traits::kThreads,
                             1) void Fp8ForwardKernel(const __grid_constant__ Fp8ForwardArgs args) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<ForwardShared<Traits>*>(shared_bytes);
  if (threadIdx.x == 0) {
    PrefetchTensorMap(args.q);
    PrefetchTensorMap(args.k);
    PrefetchTensorMap(args.v);
    InitForwardBarriers(shared);
  }
  __syncthreads();
  const int warpgroup = WarpUniform(threadIdx.x / kWarpgroupSize);
  if (warpgroup == 0) {
    DecreaseRegisters<Traits::kProducerRegisters>();
    if (threadIdx.x == 0) ForwardProducer<Traits>(args, shared).Run();
  } else {
    IncreaseRegisters<Traits::kConsumerRegisters>();
    Fp8ForwardConsume<Traits>(args, shared, warpgroup - 1);
  }
}

}  // namespace

template <class Traits>
void LaunchFp8Forward(const FlashForwardParams& params, const Fp8Operands& operands,
                      int32_t* counters) {
  const FlashAttentionShape& shape = params.shape;
  Fp8ForwardArgs args;
  SetForwardArgs<Traits>(params, counters, 2 * kFp8HeadDim, &args);
  args.q = MakeByteTensorMap(operands.q, kFp8HeadDim, shape.q_len, shape.num_heads, shape.batch,
                             Traits::kBlockM);
  args.k = args.v = args.q;  // not read without keys
  args.q_blocks = static_cast<int>((shape.q_len + kFp8Block - 1) / kFp8Block);
  args.k_blocks = static_cast<int>((shape.k_len + kFp8Block - 1) / kFp8Block);
  if (shape.k_len > 0) {
    args.k = MakeByteTensorMap(operands.k, kFp8HeadDim, shape.k_len, shape.num_kv_heads,
                               shape.batch, Traits::kBlockN);
    args.v = MakeByteTensorMap(operands.v, args.k_blocks * kFp8Block, kFp8HeadDim,
                               shape.num_kv_heads, shape.batch, kFp8HeadDim);
  }
  args.q_scales = operands.q_scales;
  args.k_scales = operands.k_scales;
  args.v_scales = operands.v_scales;
  StartForward<Traits>(Fp8ForwardKernel<Traits>, args, params.non_persistent);
}

template void LaunchFp8Forward<Variants<BFloat16>::BURST_VARIANT>(const FlashForwardParams&,
                                                                  const Fp8Operands&, int32_t*);
template void LaunchFp8Forward<Variants<Float16>::BURST_VARIANT>(const FlashForwardParams&,
                                                                 const Fp8Operands&, int32_t*);

}  // namespace sm90
}  // namespace burst
