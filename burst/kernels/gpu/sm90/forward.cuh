// The forward kernel: FlashAttention-3's plan (Shah et al., arXiv 2407.08608).
//
//   producer   one thread; TMA loads Q of a tile, then its K and V blocks, last block first
//   consumers  a warpgroup for every 64 query rows:
//                S_j = Q K_j^T                     issued together with
//                O  += P_(j+1) V_(j+1)             so that the tensor cores work during
//                P_j = exp2(c S_j - c max)         the softmax of S_j
//              The warpgroups take turns at issuing products (ping-pong): one's softmax runs beside
//              the other's products.
//   finish     O / sum, log-sum-exp
//
// What earlier calls left of a row, (O, lse), is where its tile begins: O, max = lse, sum = 1, as
// if their keys had been its first. It is loaded while the first S is computed.
//
// Blocks are persistent and draw tiles from a counter, longest first: under a causal mask the tiles
// of the last rows see the most keys. Both sides walk exactly the key blocks TileInfo names.
#pragma once

#include "burst/kernels/gpu/sm90/online_softmax.cuh"
#include "burst/kernels/gpu/sm90/tile.cuh"

namespace burst {
namespace sm90 {

template <int kHeadDim_, int kConsumers_, int kBlockN_, int kQStages_, int kStages_, bool kRanges_>
struct ForwardTraits {
  static constexpr int kHeadDim = kHeadDim_;      // padded with zeros by the TMA
  static constexpr int kConsumers = kConsumers_;  // warpgroups
  static constexpr int kBlockM = kConsumers * kWgmmaM;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kQStages = kQStages_;
  static constexpr int kStages = kStages_;   // of K and of V
  static constexpr bool kRanges = kRanges_;  // the mask of KeyRanges; else every key
  // With a second buffer of Q, a warp's rows of O leave for global memory from where its Q was.
  static constexpr bool kStoreByTma = kHeadDim == 128 && kQStages > 1;
  static constexpr int kConsumerWarps = kConsumers * kWarpgroupSize / kWarpSize;
  static constexpr int kThreads = (kConsumers + 1) * kWarpgroupSize;
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;
};

// What a tile of query rows sees, in key blocks of kBlockN: those of [block_begin, block_end), and
// the rows of the tile see every key of the blocks in [whole_begin, whole_end).
struct TileInfo {
  int row, head, batch;  // batch < 0: no tile left
  int block_begin, block_end;
  int whole_begin, whole_end;
};

// In the workspace; zero between calls.
struct ForwardCounters {
  unsigned next_tile, finished_blocks;
};

struct ForwardArgs {
  CUtensorMap q, k, v;
  CUtensorMap out_map;  // of kWarpRows rows; only when stored as bf16, for StoreWarpRows
  OutputView out;
  bool out_is_float;
  bool merge;
  bool skip_empty;  // tiles that see no key; merging in place they change nothing
  OutputView sum;   // fp32: what is merged with
  float* lse;
  const int32_t* begin;
  const int32_t* end;
  int64_t ranges_batch_stride;
  int q_len, k_len, num_heads, batch_heads, heads_per_kv, head_dim;
  int tiles, tile_rows;  // all tiles; those of one head
  int group;             // heads whose K and V share the L2 cache
  float scale, inverse_scale;
  ForwardCounters* counters;
};

template <class Traits>
struct ForwardShared {
  Tile<Traits::kBlockM, Traits::kHeadDim> q[Traits::kQStages];
  Tile<Traits::kBlockN, Traits::kHeadDim> k[Traits::kStages];
  Tile<Traits::kBlockN, Traits::kHeadDim> v[Traits::kStages];
  Barrier q_full[Traits::kQStages], q_empty[Traits::kQStages];
  Barrier k_full[Traits::kStages], k_empty[Traits::kStages];
  Barrier v_full[Traits::kStages], v_empty[Traits::kStages];
  // Travels with q, twice as many: a tile's finish still reads its own when its q is free again.
  TileInfo tile[2 * Traits::kQStages];
};

// Within a group of heads: last rows first, and of equal rows head by head.
template <class Traits>
__device__ __forceinline__ TileInfo MakeTile(const ForwardArgs& args, int index) {
  TileInfo tile;
  if (index >= args.tiles) {
    tile.batch = -1;
    return tile;
  }
  const int group = index / (args.group * args.tile_rows);
  const int in_group = index - group * args.group * args.tile_rows;
  const int group_size = min(args.group, args.batch_heads - group * args.group);
  const int batch_head = group * args.group + in_group % group_size;
  tile.batch = batch_head / args.num_heads;
  tile.head = batch_head % args.num_heads;
  tile.row = (args.tile_rows - 1 - in_group / group_size) * Traits::kBlockM;

  constexpr int kBlockN = Traits::kBlockN;
  if (Traits::kRanges) {
    const int last = min(tile.row + Traits::kBlockM, args.q_len) - 1;
    const int32_t* begin = args.begin + tile.batch * args.ranges_batch_stride;
    const int32_t* end = args.end + tile.batch * args.ranges_batch_stride;
    tile.block_begin = max(begin[tile.row], 0) / kBlockN;
    tile.block_end = (min(end[last], args.k_len) + kBlockN - 1) / kBlockN;
    tile.whole_begin = (max(begin[last], 0) + kBlockN - 1) / kBlockN;
    tile.whole_end = min(end[tile.row], args.k_len) / kBlockN;
  } else {
    tile.block_begin = tile.whole_begin = 0;
    tile.block_end = (args.k_len + kBlockN - 1) / kBlockN;
    tile.whole_end = args.k_len / kBlockN;
  }
  return tile;
}

__device__ __forceinline__ bool IsSkipped(const ForwardArgs& args, const TileInfo& tile) {
  return args.skip_empty && tile.batch >= 0 && tile.block_begin >= tile.block_end;
}

template <class Traits>
__device__ __forceinline__ void ForwardProduce(const ForwardArgs& args,
                                               ForwardShared<Traits>& shared) {
  RingPosition<Traits::kQStages> q_slot;
  RingPosition<Traits::kStages> k_slot, v_slot;
  const auto load_k = [&](const TileInfo& tile, int block) {
    Barrier* full = &shared.k_full[k_slot.stage];
    Wait(&shared.k_empty[k_slot.stage], k_slot.parity ^ 1);
    ArriveExpectBytes(full, Tile<Traits::kBlockN, Traits::kHeadDim>::kBytes);
    LoadTile(shared.k[k_slot.stage], args.k, full, block * Traits::kBlockN,
             tile.head / args.heads_per_kv, tile.batch);
    k_slot.Advance();
  };
  const auto load_v = [&](const TileInfo& tile, int block) {
    Barrier* full = &shared.v_full[v_slot.stage];
    Wait(&shared.v_empty[v_slot.stage], v_slot.parity ^ 1);
    ArriveExpectBytes(full, Tile<Traits::kBlockN, Traits::kHeadDim>::kBytes);
    LoadTile(shared.v[v_slot.stage], args.v, full, block * Traits::kBlockN,
             tile.head / args.heads_per_kv, tile.batch);
    v_slot.Advance();
  };

  // Without a mask all tiles are equally long and need no counter.
  const auto after = [&](int index) -> int {
    return Traits::kRanges ? gridDim.x + atomicAdd(&args.counters->next_tile, 1)
                           : index + gridDim.x;
  };
  const auto skip_empty = [&](int& index, TileInfo& tile) {
    while (IsSkipped(args, tile)) {
      index = after(index);
      tile = MakeTile<Traits>(args, index);
    }
  };
  int index = blockIdx.x;
  TileInfo tile = MakeTile<Traits>(args, index);
  skip_empty(index, tile);
  for (;;) {
    int next = after(index);
    Barrier* q_full = &shared.q_full[q_slot.stage];
    Wait(&shared.q_empty[q_slot.stage], q_slot.parity ^ 1);
    shared.tile[q_slot.stage + Traits::kQStages * q_slot.parity] = tile;
    if (tile.batch < 0) {
      Arrive(q_full);
      break;
    }
    ArriveExpectBytes(q_full, Tile<Traits::kBlockM, Traits::kHeadDim>::kBytes);
    LoadTile(shared.q[q_slot.stage], args.q, q_full, tile.row, tile.head, tile.batch);
    q_slot.Advance();
    // K runs one block ahead of V, as S runs ahead of O.
    for (int block = tile.block_end - 1; block >= tile.block_begin; --block) {
      load_k(tile, block);
      if (block < tile.block_end - 1) load_v(tile, block + 1);
    }
    // While the consumers still have two blocks to work on.
    TileInfo next_tile = MakeTile<Traits>(args, next);
    skip_empty(next, next_tile);
    if (tile.block_end > tile.block_begin) load_v(tile, tile.block_begin);
    tile = next_tile;
    index = next;
  }
  // The last block to finish leaves the counters as it found them.
  if (Traits::kRanges && atomicAdd(&args.counters->finished_blocks, 1) == gridDim.x - 1) {
    args.counters->next_tile = args.counters->finished_blocks = 0;
  }
}

// Where lse of a thread's first row is.
__device__ __forceinline__ float* LseRow(const ForwardArgs& args, const TileInfo& tile,
                                         int first_row) {
  return args.lse + (static_cast<int64_t>(tile.batch) * args.num_heads + tile.head) * args.q_len +
         first_row;
}

// What earlier calls left of the thread's rows.
template <class Traits>
__device__ __forceinline__ void ForwardResume(const ForwardArgs& args, const TileInfo& tile,
                                              int first_row, OnlineSoftmax& softmax,
                                              float (&o)[Traits::kHeadDim / 2]) {
  const float* lse_row = LseRow(args, tile, first_row);
  const float* row =
      static_cast<const float*>(args.sum.data) + args.sum.Offset(tile.batch, tile.head, first_row);
  const bool valid[2] = {first_row < args.q_len, first_row + 8 < args.q_len};
  LoadRowFloat<0, Traits::kHeadDim>(row, valid[0], args.head_dim, o);
  LoadRowFloat<1, Traits::kHeadDim>(row + 8 * args.sum.seq_stride, valid[1], args.head_dim, o);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float lse = valid[r] ? __ldcg(lse_row + 8 * r) : -INFINITY;
    softmax.max[r] = lse * args.inverse_scale;
    softmax.sum[r] = threadIdx.x % 4 == 0 && lse != -INFINITY ? 1.f : 0.f;
  }
}

// O / sum and lse of the thread's rows -> global memory. staging: of the warp, for StoreWarpRows.
template <class Traits>
__device__ __forceinline__ void ForwardFinish(const ForwardArgs& args, const TileInfo& tile,
                                              int first_row, OnlineSoftmax& softmax,
                                              const float (&o)[Traits::kHeadDim / 2],
                                              uint32_t staging) {
  constexpr int kHeadDim = Traits::kHeadDim;
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
    const float sum = softmax.sum[r];
    valid[r] = first_row + 8 * r < args.q_len;
    factor[r] = sum > 0 ? __fdividef(1.f, sum) : 0.f;
    const float lse = sum > 0 ? softmax.max[r] * args.scale + __logf(sum) : -INFINITY;
    if (threadIdx.x % 4 == 0 && valid[r]) lse_row[8 * r] = lse;
  }
  if (Traits::kStoreByTma && !args.out_is_float) {
    StoreWarpRows<kHeadDim>(args.out_map, staging, Tile<Traits::kBlockM, kHeadDim>::kBlockBytes, o,
                            factor, threadIdx.x % kWarpSize, first_row, tile.head, tile.batch);
    return;
  }
  const int64_t offset = args.out.Offset(tile.batch, tile.head, first_row);
  StoreRows<kHeadDim>(args.out_is_float, o, factor, args.out, offset, valid, args.head_dim);
}

template <class Traits>
__device__ __forceinline__ void ForwardConsume(const ForwardArgs& args,
                                               ForwardShared<Traits>& shared, int consumer) {
  constexpr int kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  using QTile = Tile<Traits::kBlockM, kHeadDim>;
  using KTile = Tile<kBlockN, kHeadDim>;
  constexpr bool kExpAhead = kHeadDim == 128;  // at 64 slower
  constexpr int kTurnThreads = 2 * kWarpgroupSize;
  const int my_turn = 1 + consumer, next_turn = 1 + (consumer + 1) % Traits::kConsumers;
  const int thread = threadIdx.x % kWarpgroupSize;
  const float scale_log2 = args.scale * kLog2E;
  RingPosition<Traits::kQStages> q_slot;
  RingPosition<Traits::kStages> k_slot, v_slot;
  if (consumer == Traits::kConsumers - 1) NamedBarrierArrive(next_turn, kTurnThreads);

  float s[kBlockN / 2];     // [64, kBlockN]
  float o[kHeadDim / 2];    // [64, kHeadDim]
  uint32_t p[kBlockN / 4];  // bf16 [64, kBlockN]
  OnlineSoftmax softmax;

  const auto issue_s = [&] {  // S = Q K^T
    WgmmaFence();
    ProductSharedShared<kBlockN, kHeadDim>(s, shared.q[q_slot.stage].At(consumer * kWgmmaM),
                                           QTile::kBlockBytes, shared.k[k_slot.stage].At(0),
                                           KTile::kBlockBytes, false);
    WgmmaCommit();
  };
  const auto issue_o = [&] {  // O += P V
    PinRegisters(p);
    WgmmaFence();
    ProductRegisterShared<kHeadDim, kBlockN, Major::kMN>(o, p, shared.v[v_slot.stage].At(0),
                                                         KTile::kBlockBytes, true);
    WgmmaCommit();
  };

  // With kStoreByTma, the barrier of the Q that O of the last tile is leaving from.
  Barrier* leaving = nullptr;
  const auto release_q = [&] {
    if (leaving == nullptr) return;
    if (thread % kWarpSize == 0) BulkWaitRead();
    ArriveWarp(leaving);
    leaving = nullptr;
  };

  for (;; q_slot.Advance()) {
    Wait(&shared.q_full[q_slot.stage], q_slot.parity);
    const TileInfo& tile = shared.tile[q_slot.stage + Traits::kQStages * q_slot.parity];
    if (tile.batch < 0) break;
    const int row_in_tile = consumer * kWgmmaM + thread / kWarpSize * 16 + thread % kWarpSize / 4;
    const int block_begin = tile.block_begin;
    const int whole_begin = tile.whole_begin, whole_end = tile.whole_end;
    int begin[2] = {0, 0}, end[2] = {args.k_len, args.k_len};
    if (Traits::kRanges) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int64_t row = tile.batch * args.ranges_batch_stride +
                            min(tile.row + row_in_tile + 8 * r, args.q_len - 1);
        begin[r] = args.begin[row];
        end[r] = args.end[row];
      }
    }
    const auto mask = [&](int block) {
      if (block >= whole_end) {
        const int limit[2] = {min(end[0], args.k_len), min(end[1], args.k_len)};
        MaskRows<false>(s, block * kBlockN, limit);
      }
      if (Traits::kRanges && block < whole_begin) MaskRows<true>(s, block * kBlockN, begin);
    };
    if (args.merge) {
      ForwardResume<Traits>(args, tile, tile.row + row_in_tile, softmax, o);
    } else {
      softmax.Reset();
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) o[i] = 0;
    }

    int block = tile.block_end - 1;
    if (block >= block_begin) {
      Wait(&shared.k_full[k_slot.stage], k_slot.parity);
      NamedBarrierSync(my_turn, kTurnThreads);
      issue_s();
      NamedBarrierArrive(next_turn, kTurnThreads);
      release_q();
      WgmmaWait<0>();
      PinRegisters(s);
      ArriveWarp(&shared.k_empty[k_slot.stage]);
      k_slot.Advance();
      mask(block);
      softmax.Apply<kExpAhead>(s, scale_log2);
      if (args.merge) softmax.Rescale(o);
      PackOperand(s, p);
      for (--block; block >= block_begin; --block) {
        Wait(&shared.k_full[k_slot.stage], k_slot.parity);
        NamedBarrierSync(my_turn, kTurnThreads);
        issue_s();
        Wait(&shared.v_full[v_slot.stage], v_slot.parity);
        issue_o();
        NamedBarrierArrive(next_turn, kTurnThreads);
        WgmmaWait<1>();
        PinRegisters(s);
        ArriveWarp(&shared.k_empty[k_slot.stage]);
        k_slot.Advance();
        mask(block);
        softmax.Apply<kExpAhead>(s, scale_log2);
        PinRegisters(s);  // the exponentials stay on this side of the wait
        WgmmaWait<0>();
        PinRegisters(o);
        ArriveWarp(&shared.v_empty[v_slot.stage]);
        v_slot.Advance();
        softmax.Rescale(o);
        PackOperand(s, p);
      }
      if (!Traits::kStoreByTma) ArriveWarp(&shared.q_empty[q_slot.stage]);
      Wait(&shared.v_full[v_slot.stage], v_slot.parity);
      issue_o();
      WgmmaWait<0>();
      PinRegisters(o);
      ArriveWarp(&shared.v_empty[v_slot.stage]);
      v_slot.Advance();
    } else {
      if (!Traits::kStoreByTma) ArriveWarp(&shared.q_empty[q_slot.stage]);
      release_q();
    }
    ForwardFinish<Traits>(args, tile, tile.row + row_in_tile, softmax, o,
                          SharedAddress(shared.q[q_slot.stage].At(consumer * kWgmmaM +
                                                                  thread / kWarpSize * kWarpRows)));
    if (Traits::kStoreByTma) leaving = &shared.q_empty[q_slot.stage];
  }
  release_q();
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
    for (int stage = 0; stage < Traits::kQStages; ++stage) {
      InitBarrier(&shared.q_full[stage], 1);
      InitBarrier(&shared.q_empty[stage], Traits::kConsumerWarps);
    }
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      InitBarrier(&shared.k_full[stage], 1);
      InitBarrier(&shared.k_empty[stage], Traits::kConsumerWarps);
      InitBarrier(&shared.v_full[stage], 1);
      InitBarrier(&shared.v_empty[stage], Traits::kConsumerWarps);
    }
    FenceBarrierInit();
  }
  __syncthreads();
  int warpgroup = threadIdx.x / kWarpgroupSize;
  if (Traits::kHeadDim == 128) warpgroup = WarpUniform(warpgroup);  // at 64 slower, by up to 7 %
  if (warpgroup == 0) {
    DecreaseRegisters<Traits::kProducerRegisters>();
    if (threadIdx.x == 0) ForwardProduce<Traits>(args, shared);
  } else {
    IncreaseRegisters<Traits::kConsumerRegisters>();
    ForwardConsume<Traits>(args, shared, warpgroup - 1);
  }
}

}  // namespace sm90
}  // namespace burst
