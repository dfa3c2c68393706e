// The forward kernel, by FlashAttention-3's plan (Shah et al., arXiv 2407.08608).
//
//   producer   one thread; TMA loads Q of a tile, then its K and V blocks, last block first
//   consumers  a warpgroup for every 64 query rows:
//                S_j = Q K_j^T                     issued together with
//                O  += P_(j+1) V_(j+1)             so that the tensor cores work during
//                P_j = exp2(c S_j - c max)         the softmax of S_j
//              The warpgroups take turns at issuing matmuls (ping-pong): one's softmax runs during
//              the other's matmuls.
//   finish     O / sum, log-sum-exp
//
// When it merges, a tile begins with the result (O, lse) of the earlier calls: O, max = lse, sum =
// 1, as if their keys had come first. It is loaded while the first S is computed.
//
// Blocks are persistent and draw tiles from a counter, longest first: under a causal mask the tiles
// of the last rows see the most keys. Producer and consumers walk exactly the key blocks of
// TileInfo. With lists these are places in the list of a tile's rows, and the producer looks up the
// keys. The consumers only need the place of the last, partial block of keys.
//
// Compiled once for every variant in variants.h.
#include <type_traits>

#include "burst/kernels/gpu/sm90/forward.cuh"
#include "burst/kernels/gpu/sm90/online_softmax.cuh"
#include "burst/kernels/gpu/sm90/tensor_map.h"

namespace burst {
namespace sm90 {
namespace {

// Loads the result of the earlier calls for the thread's rows.
template <class Traits>
__device__ __forceinline__ void ForwardResume(const ForwardArgs& args, const TileInfo& tile,
                                              int first_row, OnlineSoftmax& softmax,
                                              float (&o)[Traits::kValueDim / 2]) {
  const float* lse_row = LseRow(args, tile, first_row);
  const float* row =
      static_cast<const float*>(args.sum.data) + Offset(args.sum, tile.batch, tile.head, first_row);
  const bool valid[2] = {first_row < args.q_len, first_row + 8 < args.q_len};
  LoadRowFloat<0, Traits::kValueDim>(row, valid[0], args.value_dim, o);
  LoadRowFloat<1, Traits::kValueDim>(row + 8 * args.sum.seq_stride, valid[1], args.value_dim, o);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float lse = valid[r] ? __ldcg(lse_row + 8 * r) : -INFINITY;
    softmax.max[r] = lse * args.inverse_scale;
    softmax.sum[r] = threadIdx.x % 4 == 0 && lse != -INFINITY ? 1.f : 0.f;
  }
}

// Stores O / sum and lse of the thread's rows. staging: the warp's place for StoreWarpRows.
template <class Traits>
__device__ __forceinline__ void ForwardFinish(const ForwardArgs& args, const TileInfo& tile,
                                              RowsGo rows_go, int first_row, OnlineSoftmax& softmax,
                                              const float (&o)[Traits::kValueDim / 2],
                                              uint32_t staging) {
  constexpr int kValueDim = Traits::kValueDim;
  using Element = typename Traits::Element;
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
    float max = softmax.max[r] * args.scale, sum = softmax.sum[r];
    const float keep = AddSinkOf(args, tile, &max, &sum);
    valid[r] = first_row + 8 * r < args.q_len;
    factor[r] = sum != 0 ? __fdividef(keep, sum) : 0.f;
    const float lse = sum != 0 ? max + __logf(sum) : -INFINITY;
    if (threadIdx.x % 4 == 0 && valid[r]) lse_row[8 * r] = lse;
  }
  if (Traits::kStoreByTma && !args.out_is_float && rows_go == RowsGo::kToOut) {
    StoreWarpRows<Element, kValueDim>(args.out_map, staging, ForwardTiles<Traits>::Q::kBlockBytes,
                                      o, factor, threadIdx.x % kWarpSize, first_row, tile.head,
                                      tile.batch);
    return;
  }
  StoreRows<Element, kValueDim>(
      args.out_is_float || rows_go == RowsGo::kToSum, o, factor, TargetOf(args, rows_go),
      Offset(args.out, tile.batch, tile.head, first_row), valid, args.value_dim);
}

// Masks blocks of S: the keys that a thread's two rows of a tile see.
template <class Traits>
struct TileMask {
  // Masks S of a block.
  __device__ __forceinline__ void Apply(int block, float (&s)[Traits::kBlockN / 2]) const {
    constexpr int kBlockN = Traits::kBlockN;
    if (Traits::kLists) {
      const int keys = args.k_len % kBlockN, limit[2] = {keys, keys};
      if (block >= whole_end) MaskRows<false>(s, 0, limit);
      return;
    }
    if (block >= whole_end) {
      const int limit[2] = {min(end[0], args.k_len), min(end[1], args.k_len)};
      MaskRows<false>(s, block * kBlockN, limit);
    }
    if (Traits::kRanges && block < whole_begin) MaskRows<true>(s, block * kBlockN, begin);
  }

  const ForwardArgs& args;
  const int whole_begin, whole_end;  // blocks of which all rows see every key
  const int (&begin)[2], (&end)[2];  // keys that each row sees
};

// A thread of a consumer warpgroup: its places in the rings, and the steps of the equations.
template <class Traits>
struct ForwardConsumer {
  using Element = typename Traits::Element;
  static constexpr int kBlockN = Traits::kBlockN;
  static constexpr int kHeadDim = Traits::kHeadDim, kValueDim = Traits::kValueDim;
  static constexpr int kTurnThreads = 2 * kWarpgroupSize;
  using QTile = typename ForwardTiles<Traits>::Q;
  using KTile = typename ForwardTiles<Traits>::K;
  using VTile = typename ForwardTiles<Traits>::V;
  using Scores = float[kBlockN / 2];           // S or P: [64, kBlockN]
  using ScoreOperand = uint32_t[kBlockN / 4];  // P, of Element
  using Output = float[kValueDim / 2];         // O: [64, kValueDim]

  const ForwardArgs& args;
  ForwardShared<Traits>& shared;
  const int consumer, my_turn, next_turn;
  const float scale_log2;
  RingSlot<Traits::kQStages> q_slot;
  RingSlot<Traits::kStages> k_slot, v_slot;
  // With kStoreByTma: the barrier of the Q whose place O of the last tile is leaving from.
  Barrier* leaving = nullptr;

  __device__ __forceinline__ ForwardConsumer(const ForwardArgs& args_,
                                             ForwardShared<Traits>& shared_, int consumer_)
      : args(args_),
        shared(shared_),
        consumer(consumer_),
        my_turn(1 + consumer_),
        next_turn(1 + (consumer_ + 1) % Traits::kConsumers),
        scale_log2(args_.scale * kLog2E) {}

  // Begins S = Q K^T.
  __device__ __forceinline__ void MultiplyScores(Scores& s) const {
    WgmmaFence();
    MatmulSharedShared<Element, kBlockN, kHeadDim>(s, shared.q[q_slot.stage].At(consumer * kWgmmaM),
                                                   QTile::kBlockBytes, shared.k[k_slot.stage].At(0),
                                                   KTile::kBlockBytes, false);
    WgmmaCommit();
  }

  // Begins O += P V.
  __device__ __forceinline__ void AddValues(ScoreOperand& p, Output& o) const {
    PinRegisters(p);
    WgmmaFence();
    MatmulRegisterShared<Element, kValueDim, kBlockN, Major::kMN>(
        o, p, shared.v[v_slot.stage].At(0), VTile::kBlockBytes, true);
    WgmmaCommit();
  }

  // Frees a Q, and with it the description of the tile before. Every reader of Q calls it.
  __device__ __forceinline__ static void FreeQ(Barrier* barrier) {
    Traits::kOneLaneReads ? ArriveWarp(barrier) : Arrive(barrier);
  }

  // Frees the Q whose place O of the last tile has left.
  __device__ __forceinline__ void FreeLeftQ() {
    if (leaving == nullptr) return;
    if (threadIdx.x % kWarpSize == 0) BulkWaitRead();
    FreeQ(leaving);
    leaving = nullptr;
  }

  // Computes P of a tile's first block, whose matmul runs alone.
  __device__ __forceinline__ void FirstBlock(const TileMask<Traits>& mask, int block,
                                             OnlineSoftmax& softmax, Scores& s, ScoreOperand& p,
                                             Output& o) {
    Wait(&shared.k_full[k_slot.stage], k_slot.parity);
    NamedBarrierSync(my_turn, kTurnThreads);
    MultiplyScores(s);
    NamedBarrierArrive(next_turn, kTurnThreads);
    FreeLeftQ();
    WgmmaWait<0>();
    PinRegisters(s);
    ArriveWarp(&shared.k_empty[k_slot.stage]);
    k_slot.Advance();
    mask.Apply(block, s);
    softmax.UpdateMax<true>(0, s, scale_log2);
    softmax.UpdateMax<true>(1, s, scale_log2);
    softmax.Exponentiate(0, s, scale_log2);
    softmax.Exponentiate(1, s, scale_log2);
    if (args.merge) softmax.Rescale(o);
    PackOperand<Element>(s, p);
  }

  // Computes P of a block, and adds P V of the block before to O. The exponentials of row 0 run in
  // parallel with the matmul with V, row 1's come after it.
  template <bool kMasked>
  __device__ __forceinline__ void NextBlock(const TileMask<Traits>& mask, int block,
                                            OnlineSoftmax& softmax, Scores& s, ScoreOperand& p,
                                            Output& o) {
    Wait(&shared.k_full[k_slot.stage], k_slot.parity);
    NamedBarrierSync(my_turn, kTurnThreads);
    MultiplyScores(s);
    Wait(&shared.v_full[v_slot.stage], v_slot.parity);
    AddValues(p, o);
    NamedBarrierArrive(next_turn, kTurnThreads);
    WgmmaWait<1>();
    PinRegisters(s);
    if (kMasked) mask.Apply(block, s);
    softmax.UpdateMax<kMasked>(0, s, scale_log2);
    softmax.OrderRows();
    softmax.UpdateMax<kMasked>(1, s, scale_log2);
    softmax.Exponentiate(0, s, scale_log2);
    ArriveWarpAfter(&shared.k_empty[k_slot.stage], s[OnlineSoftmax::Index(0, kBlockN / 4 - 1)]);
    k_slot.Advance();
    WgmmaWait<0>();
    PinRegisters(o);
    ArriveWarp(&shared.v_empty[v_slot.stage]);
    v_slot.Advance();
    softmax.Exponentiate(1, s, scale_log2);
    softmax.Rescale(o);
    PackOperand<Element>(s, p);
  }

  // Adds P V of a tile's last block to O.
  __device__ __forceinline__ void LastValues(ScoreOperand& p, Output& o) {
    Wait(&shared.v_full[v_slot.stage], v_slot.parity);
    AddValues(p, o);
    WgmmaWait<0>();
    PinRegisters(o);
    ArriveWarp(&shared.v_empty[v_slot.stage]);
    v_slot.Advance();
  }

  __device__ __forceinline__ void Run();
};

template <class Traits>
__device__ __forceinline__ void ForwardConsumer<Traits>::Run() {
  const int thread = threadIdx.x % kWarpgroupSize;
  if (consumer == Traits::kConsumers - 1) NamedBarrierArrive(next_turn, kTurnThreads);
  Scores s;
  Output o;
  ScoreOperand p;
  OnlineSoftmax softmax;
  for (;; q_slot.Advance()) {
    Wait(&shared.q_full[q_slot.stage], q_slot.parity);
    using Tile = TileInfoOf<Traits>;
    const Tile& place = shared.tile[q_slot.stage + Traits::kQStages * q_slot.parity];
    Tile own;
    const Tile& tile = Traits::kOneLaneReads ? own : place;
    if constexpr (Traits::kOneLaneReads) own.batch = ReadByOneLane(place.batch);
    if (tile.batch < 0) break;
    if constexpr (Traits::kOneLaneReads) {
      own.row = ReadByOneLane(place.row);
      own.head = ReadByOneLane(place.head);
      own.block_begin = ReadByOneLane(place.block_begin);
      own.block_end = ReadByOneLane(place.block_end);
      own.whole_begin = ReadByOneLane(place.whole_begin);
      own.whole_end = ReadByOneLane(place.whole_end);
    }
    const int row_in_tile = consumer * kWgmmaM + thread / kWarpSize * 16 + thread % kWarpSize / 4;
    const int block_begin = tile.block_begin;
    const int whole_begin = tile.whole_begin, whole_end = tile.whole_end;
    int begin[2] = {0, 0}, end[2] = {args.k_len, args.k_len};
    if (Traits::kRanges) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int64_t row = tile.batch * args.visible.batch_stride +
                            min(tile.row + row_in_tile + 8 * r, args.q_len - 1);
        begin[r] = args.visible.begin[row];
        end[r] = args.visible.end[row];
      }
    }
    const TileMask<Traits> mask = {args, whole_begin, whole_end, begin, end};
    if (args.merge) {
      ForwardResume<Traits>(args, tile, tile.row + row_in_tile, softmax, o);
    } else {
      softmax.Reset();
#pragma unroll
      for (int i = 0; i < kValueDim / 2; ++i) o[i] = 0;
    }

    int block = tile.block_end - 1;
    if (block >= block_begin) {
      FirstBlock(mask, block, softmax, s, p, o);
      for (--block; block >= max(block_begin, whole_end); --block) {
        NextBlock<true>(mask, block, softmax, s, p, o);
      }
#pragma unroll 1
      for (; block >= max(block_begin, whole_begin); --block) {
        NextBlock<false>(mask, block, softmax, s, p, o);
      }
#pragma unroll 1
      for (; block >= block_begin; --block) NextBlock<true>(mask, block, softmax, s, p, o);
      if (!Traits::kStoreByTma) FreeQ(&shared.q_empty[q_slot.stage]);
      LastValues(p, o);
    } else {
      if (!Traits::kStoreByTma) FreeQ(&shared.q_empty[q_slot.stage]);
      FreeLeftQ();
    }
    if constexpr (Traits::kOneLaneReads) {  // computed again, to save registers
      own.batch = ReadByOneLane(place.batch);
      own.row = ReadByOneLane(place.row);
      own.head = ReadByOneLane(place.head);
      if constexpr (Traits::kRowCalls) own.rows_go = ReadByOneLane(place.rows_go);
    }
    ForwardFinish<Traits>(args, tile, WhereRowsGo(tile, consumer), tile.row + row_in_tile, softmax,
                          o,
                          SharedAddress(shared.q[q_slot.stage].At(consumer * kWgmmaM +
                                                                  thread / kWarpSize * kWarpRows)));
    if (Traits::kStoreByTma) leaving = &shared.q_empty[q_slot.stage];
  }
  FreeLeftQ();
}

template <class Traits>
__global__ __launch_bounds__(Traits::kThreads,
                             1) void ForwardKernel(const __grid_constant__ ForwardArgs args) {
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
    ForwardConsumer<Traits>(args, shared, warpgroup - 1).Run();
  }
}

}  // namespace

template <class Traits>
void LaunchForward(const FlashForwardParams& params, int32_t* counters) {
  const FlashAttentionShape& shape = params.shape;
  const auto map = [&](const AttentionOperand& tensor, int64_t seqlen, int64_t heads,
                       int64_t columns, int box_rows) {
    return MakeTensorMap(tensor, shape.dtype, {shape.batch, seqlen, heads, columns}, box_rows);
  };
  const int64_t head_dim = shape.head_dim, value_dim = shape.value_dim;
  ForwardArgs args;
  SetForwardArgs<Traits>(params, counters, (Traits::kHeadDim + Traits::kValueDim) * 2, &args);
  args.q = map(params.q, shape.q_len, shape.num_heads, head_dim, Traits::kBlockM);
  args.k = args.v = args.q;  // not read without keys
  if (shape.k_len > 0) {
    args.k = map(params.k, shape.k_len, shape.num_kv_heads, head_dim, Traits::kBlockN);
    args.v = map(params.v, shape.k_len, shape.num_kv_heads, value_dim, Traits::kBlockN);
  }
  if (Traits::kStoreByTma && !args.out_is_float) {
    args.out_map = map(params.out, shape.q_len, shape.num_heads, value_dim, kWarpRows);
  }
  if (params.rows.last == nullptr) {
    return StartForward<Traits>(ForwardKernel<Traits>, args, params.non_persistent);
  }
  using RowTraits = WithRowCalls<Traits>;
  StartForward<RowTraits>(ForwardKernel<RowTraits>, args, params.non_persistent);
}

template void LaunchForward<Variants<BFloat16>::BURST_VARIANT>(const FlashForwardParams&, int32_t*);
template void LaunchForward<Variants<Float16>::BURST_VARIANT>(const FlashForwardParams&, int32_t*);

}  // namespace sm90
}  // namespace burst
