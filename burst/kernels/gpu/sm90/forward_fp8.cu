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
#include "burst/kernels/gpu/sm90/quantize_fp8.h"
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
                                                 RowsGo rows_go, int first_row,
                                                 ScaledSoftmax& softmax, const float (&o)[64],
                                                 float v_scale) {
  if (rows_go == RowsGo::kNowhere) return;
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
  StoreRows<typename Traits::Element, 128>(
      args.out_is_float || rows_go == RowsGo::kToSum, o, factor, TargetOf(args, rows_go),
      Offset(args.out, tile.batch, tile.head, first_row), valid, args.value_dim);
}

// Returns the thread's first row, computed again wherever it is needed, to save a register.
__device__ __forceinline__ int RowInTile(int consumer) {
  const int thread = ThreadIndexAgain() % kWarpgroupSize;
  return consumer * kWgmmaM + thread / kWarpSize * 16 + thread % kWarpSize / 4;
}

using Fp8Scores = float[64];      // S or P: [64, kBlockN]
using Fp8Output = float[64];      // O, or P V of a block: [64, head_dim]
using Fp8Operand = uint32_t[16];  // P: [64, kBlockN] of e4m3

// A tile's mask, scales and softmax, for a consumer.
template <class Traits>
struct Fp8Tile {
  __device__ __forceinline__ Fp8Tile(const Fp8ForwardArgs& args_, const TileInfo& info_,
                                     int consumer_, ScaledSoftmax& softmax_)
      : args(args_),
        info(info_),
        softmax(softmax_),
        consumer(consumer_),
        block_begin(info_.block_begin) {
    const int batch_head = info.batch * args.num_heads + info.head;
    q_scale = args.scale * kLog2E *
              __ldg(args.q_scales + batch_head * args.q_blocks + info.row / Traits::kBlockN);
    first_scale = batch_head / args.heads_per_kv * args.k_blocks;
  }

  // Masks S of a block. The rows' visible ranges are read again for each, to save registers.
  __device__ __forceinline__ void Mask(int block, Fp8Scores& s) const {
    constexpr int kBlockN = Traits::kBlockN;
    if (Traits::kRanges) {
      const int64_t first = info.batch * args.visible.batch_stride;
      const auto limits = [&](const int32_t* of_rows, int(&limit)[2]) {
        const int row = info.row + RowInTile(consumer);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          limit[r] = __ldg(of_rows + first + min(row + 8 * r, args.q_len - 1));
        }
      };
      int limit[2];
      if (block >= info.whole_end) {
        limits(args.visible.end, limit);
        limit[0] = min(limit[0], args.k_len);
        limit[1] = min(limit[1], args.k_len);
        MaskRows<false>(s, block * kBlockN, limit);
      }
      if (block < info.whole_begin) {
        limits(args.visible.begin, limit);
        MaskRows<true>(s, block * kBlockN, limit);
      }
    } else if (block >= info.whole_end) {
      const int keys = args.k_len % kBlockN, limit[2] = {keys, keys};
      MaskRows<false>(s, 0, limit);
    }
  }

  // Loads the scales of the next block.
  __device__ __forceinline__ void LoadScales(int block) {
    if (block < block_begin) return;
    if (Traits::kLists) block = __ldg(args.blocks.key_list + block);
    const int place = first_scale + block;
    next_k_scale = __ldg(args.k_scales + place);
    next_v_scale = __ldg(args.v_scales + place);
  }

  // Makes the next block's scale of V the unit of O, once the softmax has its maximum.
  __device__ __forceinline__ void ChangeUnits() {
    const float ratio = __fdividef(v_scale, next_v_scale);
#pragma unroll
    for (int r = 0; r < 2; ++r) units[r] = softmax.correction[r] * ratio;
    v_scale = next_v_scale;
  }

  __device__ __forceinline__ void AddValues(const Fp8Output& pv, Fp8Output& o) const {
#pragma unroll
    for (int i = 0; i < 64; ++i) o[i] = fmaf(o[i], units[i / 2 % 2], pv[i]);
  }

  const Fp8ForwardArgs& args;
  const TileInfo& info;
  ScaledSoftmax& softmax;
  const int consumer, block_begin;
  int first_scale;    // place of the KV head's first scale
  float q_scale;      // of Q, times softmax_scale log2 e
  float v_scale = 1;  // of the last block: the units of O
  float next_k_scale = 0, next_v_scale = 1;
  float units[2];  // factor of O before the next P V is added
};

// A thread of a consumer warpgroup: its places in the rings, and the steps of the equations.
template <class Traits>
struct Fp8ForwardConsumer {
  static_assert(Traits::kQStages == 2 && Traits::kStages == 4, "");

  const Fp8ForwardArgs& args;
  ForwardShared<Traits>& shared;
  const int consumer;
  // Counts the tiles of Q and the blocks of K so far; V is one block behind. These counts give the
  // next slot of each ring, and the parity of its use.
  unsigned tiles = 0, blocks = 0;

  __device__ __forceinline__ Fp8ForwardConsumer(const Fp8ForwardArgs& args_,
                                                ForwardShared<Traits>& shared_, int consumer_)
      : args(args_), shared(shared_), consumer(consumer_) {}

  __device__ __forceinline__ unsigned QStage() const { return tiles % 2; }
  __device__ __forceinline__ static unsigned Stage(unsigned index) { return index % 4; }
  __device__ __forceinline__ static unsigned Parity(unsigned index) { return index / 4 % 2; }

  // Begins S = Q K^T.
  __device__ __forceinline__ void MultiplyScores(Fp8Scores& s) const {
    WgmmaFence();
    Fp8MatmulSharedShared(s, shared.q[QStage()].At(consumer * kWgmmaM),
                          shared.k[Stage(blocks)].At(0));
    WgmmaCommit();
  }

  // Begins P V.
  __device__ __forceinline__ void MultiplyValues(Fp8Operand& p, Fp8Output& pv) const {
    PinRegisters(p);
    WgmmaFence();
    Fp8MatmulRegisterShared(pv, p, shared.v[Stage(blocks - 1)].At(0));
    WgmmaCommit();
  }

  // Computes P of a tile's first block, whose matmul runs alone.
  __device__ __forceinline__ void FirstBlock(int block, Fp8Tile<Traits>& tile, Fp8Scores& s,
                                             Fp8Operand& p) {
    ScaledSoftmax& softmax = tile.softmax;
    tile.LoadScales(block);
    Wait(&shared.k_full[Stage(blocks)], Parity(blocks));
    MultiplyScores(s);
    const float scale = tile.q_scale * tile.next_k_scale;
    WgmmaWait<0>();
    PinRegisters(s);
    ArriveWarp(&shared.k_empty[Stage(blocks)]);
    ++blocks;
    tile.Mask(block, s);
    softmax.UpdateMax<true>(0, s, scale);
    softmax.UpdateMax<true>(1, s, scale);
    softmax.Exponentiate(0, s, scale);
    softmax.Exponentiate(1, s, scale);
    tile.ChangeUnits();
    tile.LoadScales(block - 1);
    PackFp8Operand(s, p);
  }

  // Computes P of a block, and adds P V of the block before to O.
  template <bool kMasked>
  __device__ __forceinline__ void NextBlock(int block, Fp8Tile<Traits>& tile, Fp8Scores& s,
                                            Fp8Operand& p, Fp8Output& pv, Fp8Output& o) {
    ScaledSoftmax& softmax = tile.softmax;
    Wait(&shared.k_full[Stage(blocks)], Parity(blocks));
    MultiplyScores(s);
    Wait(&shared.v_full[Stage(blocks - 1)], Parity(blocks - 1));
    MultiplyValues(p, pv);
    const float scale = tile.q_scale * tile.next_k_scale;
    WgmmaWait<1>();
    PinRegisters(s);
    if (kMasked) tile.Mask(block, s);
    softmax.UpdateMax<kMasked>(0, s, scale);
    softmax.UpdateMax<kMasked>(1, s, scale);
    // Arrives after both maxima, which ptxas would otherwise move behind the wait for P V. The
    // exponentials come after that wait and run in parallel with the additions to O.
    ArriveWarpAfter(&shared.k_empty[Stage(blocks)], softmax.correction[0] + softmax.correction[1]);
    WgmmaWait<0>();
    PinRegisters(pv);
    ArriveWarp(&shared.v_empty[Stage(blocks - 1)]);
    ++blocks;
    softmax.Exponentiate(0, s, scale);
    tile.AddValues(pv, o);
    softmax.Exponentiate(1, s, scale);
    tile.ChangeUnits();
    tile.LoadScales(block - 1);
    PackFp8Operand(s, p);
  }

  // Adds P V of a tile's last block to O.
  __device__ __forceinline__ void LastValues(const Fp8Tile<Traits>& tile, Fp8Operand& p,
                                             Fp8Output& pv, Fp8Output& o) {
    Wait(&shared.v_full[Stage(blocks - 1)], Parity(blocks - 1));
    MultiplyValues(p, pv);
    WgmmaWait<0>();
    PinRegisters(pv);
    ArriveWarp(&shared.v_empty[Stage(blocks - 1)]);
    tile.AddValues(pv, o);
  }

  __device__ __forceinline__ void Run();
};

template <class Traits>
__device__ __forceinline__ void Fp8ForwardConsumer<Traits>::Run() {
  Fp8Scores s;
  Fp8Output pv, o;
  Fp8Operand p;
  ScaledSoftmax softmax;
  for (;; ++tiles) {
    Wait(&shared.q_full[QStage()], tiles / 2 % 2);
    const TileInfoOf<Traits>& info = shared.tile[tiles % 4];
    if (info.batch < 0) break;
    Fp8Tile<Traits> tile(args, info, consumer, softmax);
    if (args.merge) {
      Fp8ForwardResume(args, info, info.row + RowInTile(consumer), softmax, o);
    } else {
      softmax.Reset();
#pragma unroll
      for (int i = 0; i < 64; ++i) o[i] = 0;
    }
    int block = info.block_end - 1;
    if (block >= tile.block_begin) {
      FirstBlock(block, tile, s, p);
      for (--block; block >= max(tile.block_begin, info.whole_end); --block) {
        NextBlock<true>(block, tile, s, p, pv, o);
      }
      const int whole_begin = max(tile.block_begin, info.whole_begin);
#pragma unroll 1
      for (; block >= whole_begin; --block) NextBlock<false>(block, tile, s, p, pv, o);
#pragma unroll 1
      for (; block >= tile.block_begin; --block) NextBlock<true>(block, tile, s, p, pv, o);
      Arrive(&shared.q_empty[QStage()]);
      LastValues(tile, p, pv, o);
    } else {
      Arrive(&shared.q_empty[QStage()]);
    }
    Fp8ForwardFinish<Traits>(args, info, WhereRowsGo(info, consumer),
                             info.row + RowInTile(consumer), softmax, o, tile.v_scale);
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
    Fp8ForwardConsumer<Traits>(args, shared, warpgroup - 1).Run();
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
  if (params.rows.last == nullptr) {
    return StartForward<Traits>(Fp8ForwardKernel<Traits>, args, params.non_persistent);
  }
  using RowTraits = WithRowCalls<Traits>;
  StartForward<RowTraits>(Fp8ForwardKernel<RowTraits>, args, params.non_persistent);
}

template void LaunchFp8Forward<Variants<BFloat16>::BURST_VARIANT>(const FlashForwardParams&,
                                                                  const Fp8Operands&, int32_t*);
template void LaunchFp8Forward<Variants<Float16>::BURST_VARIANT>(const FlashForwardParams&,
                                                                 const Fp8Operands&, int32_t*);

}  // namespace sm90
}  // namespace burst
