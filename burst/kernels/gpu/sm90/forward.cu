// The forward kernel: FlashAttention-3's plan (Shah et al., arXiv 2407.08608).
//
//   producer   one thread; TMA loads Q of a tile, then its K and V blocks, last block first
//   consumers  a warpgroup for every 64 query rows:
//                S_j = Q K_j^T                     issued together with
//                O  += P_(j+1) V_(j+1)             so that the tensor cores work during
//                P_j = exp2(c S_j - c max)         the softmax of S_j
//              The warpgroups take turns at issuing matmuls (ping-pong): one's softmax runs beside
//              the other's matmuls.
//   finish     O / sum, log-sum-exp
//
// When it merges, a tile begins with the result of the earlier calls, (O, lse): O, max = lse,
// sum = 1, as if their keys had been its first. It is loaded while the first S is computed.
//
// Blocks are persistent and draw tiles from a counter, longest first: under a causal mask the tiles
// of the last rows see the most keys. Both sides walk exactly the key blocks TileInfo names. With
// lists these are places in the list of a tile's rows, and the producer looks up which keys they
// are; the consumers need only know where the last, partial block of the keys is.
//
// Compiled once for every variant in variants.h.
#include <algorithm>
#include <type_traits>

#include "burst/device/cuda.h"
#include "burst/kernels/gpu/sm90/online_softmax.cuh"
#include "burst/kernels/gpu/sm90/tensor_map.h"
#include "burst/kernels/gpu/sm90/tile.cuh"
#include "burst/kernels/gpu/sm90/variants.h"

namespace burst {
namespace sm90 {
namespace {

// What a tile of query rows sees, in key blocks of kBlockN: those of [block_begin, block_end), and
// the rows of the tile see every key of the blocks in [whole_begin, whole_end). With lists: places
// in KeyBlocks::key_list, kListParts for each of its.
struct TileInfo {
  int row, head, kv_head, batch;  // batch < 0: no tile left
  int block_begin, block_end;     // begin <= end
  int whole_begin, whole_end;
};

// Zero between calls.
struct ForwardCounters {
  unsigned next_tile, finished_blocks;
};

struct ForwardArgs {
  CUtensorMap q, k, v;
  CUtensorMap out_map;  // of kWarpRows rows; only when stored as Element, for StoreWarpRows
  AttentionOperand out;
  bool out_is_float;
  bool merge;
  bool skip_empty;       // tiles that see no key; merging in place they change nothing
  AttentionOperand sum;  // fp32: what is merged with
  float* lse;
  KeyRanges visible;
  KeyBlocks blocks;
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
  TileInfo next_tile;  // the producer's
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
  tile.kv_head = tile.head / args.heads_per_kv;
  tile.row = (args.tile_rows - 1 - in_group / group_size) * Traits::kBlockM;

  constexpr int kBlockN = Traits::kBlockN;
  if (Traits::kRanges) {
    const int last = min(tile.row + Traits::kBlockM, args.q_len) - 1;
    const int32_t* begin = args.visible.begin + tile.batch * args.visible.batch_stride;
    const int32_t* end = args.visible.end + tile.batch * args.visible.batch_stride;
    tile.block_begin = max(begin[tile.row], 0) / kBlockN;
    tile.block_end = (min(end[last], args.k_len) + kBlockN - 1) / kBlockN;
    tile.whole_begin = (max(begin[last], 0) + kBlockN - 1) / kBlockN;
    tile.whole_end = min(end[tile.row], args.k_len) / kBlockN;
  } else if (Traits::kLists) {
    constexpr int kBlock = static_cast<int>(kListBlock), kParts = Traits::kListParts;
    const int32_t* begin =
        args.blocks.key_begin + tile.batch * args.blocks.key_stride + tile.row / kBlock;
    tile.block_begin = tile.whole_begin = begin[0] * kParts;
    tile.block_end = tile.whole_end = begin[1] * kParts;
    const int left = args.k_len % kBlock;  // keys of the partial block
    if (left > 0 && begin[0] < begin[1] &&
        args.blocks.key_list[begin[1] - 1] == args.k_len / kBlock) {
      tile.block_end -= kParts - (left + kBlockN - 1) / kBlockN;
      tile.whole_end -= kParts - left / kBlockN;
    }
  } else {
    tile.block_begin = tile.whole_begin = 0;
    tile.block_end = (args.k_len + kBlockN - 1) / kBlockN;
    tile.whole_end = args.k_len / kBlockN;
  }
  tile.block_end = max(tile.block_end, tile.block_begin);
  return tile;
}

__device__ __forceinline__ bool IsSkipped(const ForwardArgs& args, const TileInfo& tile) {
  return args.skip_empty && tile.batch >= 0 && tile.block_begin >= tile.block_end;
}

template <class Traits>
__device__ __forceinline__ void ForwardProduce(const ForwardArgs& args,
                                               ForwardShared<Traits>& shared) {
  RingSlot<Traits::kQStages> q_slot;
  RingSlot<Traits::kStages> k_slot, v_slot;
  const auto first_key = [&](int block) -> int {
    if constexpr (Traits::kLists) {
      constexpr int kParts = Traits::kListParts;
      block = __ldg(args.blocks.key_list + block / kParts) * kParts + block % kParts;
    }
    return block * Traits::kBlockN;
  };
  const auto load_k = [&](const TileInfo& tile, int block) {
    Barrier* full = &shared.k_full[k_slot.stage];
    Wait(&shared.k_empty[k_slot.stage], k_slot.parity ^ 1);
    ArriveExpectBytes(full, Tile<Traits::kBlockN, Traits::kHeadDim>::kBytes);
    LoadTile<Traits::kKeepKeys>(shared.k[k_slot.stage], args.k, full, first_key(block),
                                tile.kv_head, tile.batch);
    k_slot.Advance();
  };
  const auto load_v = [&](const TileInfo& tile, int block) {
    Barrier* full = &shared.v_full[v_slot.stage];
    Wait(&shared.v_empty[v_slot.stage], v_slot.parity ^ 1);
    ArriveExpectBytes(full, Tile<Traits::kBlockN, Traits::kHeadDim>::kBytes);
    LoadTile<Traits::kKeepKeys>(shared.v[v_slot.stage], args.v, full, first_key(block),
                                tile.kv_head, tile.batch);
    v_slot.Advance();
  };

  // Without a mask all tiles are equally long and need no counter.
  const auto after = [&](int index) -> int {
    return Traits::kMasked ? gridDim.x + atomicAdd(&args.counters->next_tile, 1)
                           : index + gridDim.x;
  };
  // Beside three consumers the producer has few registers, and keeps its tiles in shared memory.
  constexpr bool kInShared = Traits::kConsumers > 2;
  TileInfo own_tile, own_next_tile;
  TileInfo& next_tile = kInShared ? shared.next_tile : own_next_tile;
  const auto find = [&](int& index) {
    TileInfo found = MakeTile<Traits>(args, index);
    while (IsSkipped(args, found)) {
      index = after(index);
      found = MakeTile<Traits>(args, index);
    }
    next_tile = found;
  };
  int index = blockIdx.x;
  find(index);
  for (;;) {
    int next = 0;
    Barrier* q_full = &shared.q_full[q_slot.stage];
    Wait(&shared.q_empty[q_slot.stage], q_slot.parity ^ 1);
    TileInfo& shared_tile = shared.tile[q_slot.stage + Traits::kQStages * q_slot.parity];
    shared_tile = next_tile;
    if (!kInShared) own_tile = next_tile;
    const TileInfo& tile = kInShared ? shared_tile : own_tile;
    if (tile.batch < 0) {
      Arrive(q_full);
      break;
    }
    ArriveExpectBytes(q_full, Tile<Traits::kBlockM, Traits::kHeadDim>::kBytes);
    LoadTile(shared.q[q_slot.stage], args.q, q_full, tile.row, tile.head, tile.batch);
    q_slot.Advance();
    // K runs one block ahead of V, as S runs ahead of O. The next tile is drawn late, so that the
    // longest one left goes to the first block that is free, and yet early enough that finding it
    // takes no time from the consumers, who have two blocks of keys to work on.
    const int draw_at = min(tile.block_begin, tile.block_end - 1);
#pragma unroll 1
    for (int block = tile.block_end - 1; block >= tile.block_begin - 1; --block) {
      if (block == draw_at) next = after(index);
      if (block >= tile.block_begin) {
        load_k(tile, block);
      } else {
        find(next);
      }
      if (block + 1 < tile.block_end) load_v(tile, block + 1);
    }
    index = next;
  }
  // The last block to finish leaves the counters as it found them.
  if (Traits::kMasked && atomicAdd(&args.counters->finished_blocks, 1) == gridDim.x - 1) {
    args.counters->next_tile = args.counters->finished_blocks = 0;
  }
}

// Where lse of a thread's first row is.
__device__ __forceinline__ float* LseRow(const ForwardArgs& args, const TileInfo& tile,
                                         int first_row) {
  return args.lse + (static_cast<int64_t>(tile.batch) * args.num_heads + tile.head) * args.q_len +
         first_row;
}

// The result of the earlier calls for the thread's rows.
template <class Traits>
__device__ __forceinline__ void ForwardResume(const ForwardArgs& args, const TileInfo& tile,
                                              int first_row, OnlineSoftmax& softmax,
                                              float (&o)[Traits::kHeadDim / 2]) {
  const float* lse_row = LseRow(args, tile, first_row);
  const float* row =
      static_cast<const float*>(args.sum.data) + Offset(args.sum, tile.batch, tile.head, first_row);
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
  using Element = typename Traits::Element;
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
    StoreWarpRows<Element, kHeadDim>(args.out_map, staging,
                                     Tile<Traits::kBlockM, kHeadDim>::kBlockBytes, o, factor,
                                     threadIdx.x % kWarpSize, first_row, tile.head, tile.batch);
    return;
  }
  const int64_t offset = Offset(args.out, tile.batch, tile.head, first_row);
  StoreRows<Element, kHeadDim>(args.out_is_float, o, factor, args.out, offset, valid,
                               args.head_dim);
}

template <class Traits>
__device__ __forceinline__ void ForwardConsume(const ForwardArgs& args,
                                               ForwardShared<Traits>& shared, int consumer) {
  constexpr int kBlockN = Traits::kBlockN, kHeadDim = Traits::kHeadDim;
  using Element = typename Traits::Element;
  using QTile = Tile<Traits::kBlockM, kHeadDim>;
  using KTile = Tile<kBlockN, kHeadDim>;
  constexpr int kTurnThreads = 2 * kWarpgroupSize;
  const int my_turn = 1 + consumer, next_turn = 1 + (consumer + 1) % Traits::kConsumers;
  const int thread = threadIdx.x % kWarpgroupSize;
  const float scale_log2 = args.scale * kLog2E;
  RingSlot<Traits::kQStages> q_slot;
  RingSlot<Traits::kStages> k_slot, v_slot;
  if (consumer == Traits::kConsumers - 1) NamedBarrierArrive(next_turn, kTurnThreads);

  float s[kBlockN / 2];     // [64, kBlockN]
  float o[kHeadDim / 2];    // [64, kHeadDim]
  uint32_t p[kBlockN / 4];  // [64, kBlockN] of Element
  OnlineSoftmax softmax;

  const auto issue_s = [&] {  // S = Q K^T
    WgmmaFence();
    MatmulSharedShared<Element, kBlockN, kHeadDim>(s, shared.q[q_slot.stage].At(consumer * kWgmmaM),
                                                   QTile::kBlockBytes, shared.k[k_slot.stage].At(0),
                                                   KTile::kBlockBytes, false);
    WgmmaCommit();
  };
  const auto issue_o = [&] {  // O += P V
    PinRegisters(p);
    WgmmaFence();
    MatmulRegisterShared<Element, kHeadDim, kBlockN, Major::kMN>(o, p, shared.v[v_slot.stage].At(0),
                                                                 KTile::kBlockBytes, true);
    WgmmaCommit();
  };

  // Frees a Q, and with it the description of the tile before: whoever read that.
  const auto free_q = [](Barrier* barrier) {
    Traits::kOneLaneReads ? ArriveWarp(barrier) : Arrive(barrier);
  };
  // With kStoreByTma, the barrier of the Q that O of the last tile is leaving from.
  Barrier* leaving = nullptr;
  const auto release_q = [&] {
    if (leaving == nullptr) return;
    if (thread % kWarpSize == 0) BulkWaitRead();
    free_q(leaving);
    leaving = nullptr;
  };

  for (;; q_slot.Advance()) {
    Wait(&shared.q_full[q_slot.stage], q_slot.parity);
    const TileInfo& place = shared.tile[q_slot.stage + Traits::kQStages * q_slot.parity];
    TileInfo own;
    const TileInfo& tile = Traits::kOneLaneReads ? own : place;
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
    const auto mask = [&](int block) {
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
      softmax.UpdateMax<true>(0, s, scale_log2);
      softmax.UpdateMax<true>(1, s, scale_log2);
      softmax.Exponentiate(0, s, scale_log2);
      softmax.Exponentiate(1, s, scale_log2);
      if (args.merge) softmax.Rescale(o);
      PackOperand<Element>(s, p);
      // Row 0's exponentials run beside the matmul with V, row 1's after it.
      const auto step = [&](auto masked) {
        constexpr bool kMasked = decltype(masked)::value;
        Wait(&shared.k_full[k_slot.stage], k_slot.parity);
        NamedBarrierSync(my_turn, kTurnThreads);
        issue_s();
        Wait(&shared.v_full[v_slot.stage], v_slot.parity);
        issue_o();
        NamedBarrierArrive(next_turn, kTurnThreads);
        WgmmaWait<1>();
        PinRegisters(s);
        if (kMasked) mask(block);
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
      };
      for (--block; block >= max(block_begin, whole_end); --block) step(std::true_type());
#pragma unroll 1
      for (; block >= max(block_begin, whole_begin); --block) step(std::false_type());
#pragma unroll 1
      for (; block >= block_begin; --block) step(std::true_type());
      if (!Traits::kStoreByTma) free_q(&shared.q_empty[q_slot.stage]);
      Wait(&shared.v_full[v_slot.stage], v_slot.parity);
      issue_o();
      WgmmaWait<0>();
      PinRegisters(o);
      ArriveWarp(&shared.v_empty[v_slot.stage]);
      v_slot.Advance();
    } else {
      if (!Traits::kStoreByTma) free_q(&shared.q_empty[q_slot.stage]);
      release_q();
    }
    if constexpr (Traits::kOneLaneReads) {  // again: no register holds them in between
      own.batch = ReadByOneLane(place.batch);
      own.row = ReadByOneLane(place.row);
      own.head = ReadByOneLane(place.head);
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
      InitBarrier(&shared.q_empty[stage], Traits::kOneLaneReads
                                              ? Traits::kConsumerWarps
                                              : Traits::kConsumers * kWarpgroupSize);
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
  const int warpgroup = WarpUniform(threadIdx.x / kWarpgroupSize);
  if (warpgroup == 0) {
    DecreaseRegisters<Traits::kProducerRegisters>();
    if (threadIdx.x == 0) ForwardProduce<Traits>(args, shared);
  } else {
    IncreaseRegisters<Traits::kConsumerRegisters>();
    ForwardConsume<Traits>(args, shared, warpgroup - 1);
  }
}

}  // namespace

template <class Traits>
void LaunchForward(const FlashForwardParams& params, int32_t* counters) {
  const FlashAttentionShape& shape = params.shape;
  const auto map = [&](const AttentionOperand& tensor, int64_t seqlen, int64_t heads,
                       int box_rows) {
    return MakeTensorMap(tensor, shape.dtype, shape, seqlen, heads, box_rows);
  };
  ForwardArgs args;
  args.q = map(params.q, shape.q_len, shape.num_heads, Traits::kBlockM);
  args.k = args.v = args.q;  // without keys nothing is loaded from them
  if (shape.k_len > 0) {
    args.k = map(params.k, shape.k_len, shape.num_kv_heads, Traits::kBlockN);
    args.v = map(params.v, shape.k_len, shape.num_kv_heads, Traits::kBlockN);
  }
  args.out = params.out;
  args.out_is_float = params.out_dtype == DType::kFloat32;
  if (Traits::kStoreByTma && !args.out_is_float) {
    args.out_map = map(params.out, shape.q_len, shape.num_heads, kWarpRows);
  }
  args.merge = params.merge;
  if (params.merge) args.sum = params.sum.data == nullptr ? params.out : params.sum;
  args.skip_empty = args.out_is_float && args.sum.data == args.out.data;
  args.lse = static_cast<float*>(params.lse);
  args.visible = shape.visible;
  args.blocks = shape.blocks;
  args.q_len = static_cast<int>(shape.q_len);
  args.k_len = static_cast<int>(shape.k_len);
  args.num_heads = static_cast<int>(shape.num_heads);
  args.batch_heads = static_cast<int>(shape.batch * shape.num_heads);
  args.heads_per_kv = static_cast<int>(shape.num_heads / shape.num_kv_heads);
  args.head_dim = static_cast<int>(shape.head_dim);
  args.tile_rows = static_cast<int>((shape.q_len + Traits::kBlockM - 1) / Traits::kBlockM);
  args.tiles = args.tile_rows * args.batch_heads;
  args.scale = static_cast<float>(shape.softmax_scale);
  args.inverse_scale = 1 / args.scale;
  args.counters = reinterpret_cast<ForwardCounters*>(counters);
  // Half of the 50 to 60 MB of L2 for the keys and values of the heads under way. Without a mask
  // all tiles are equally long, and one head after the other is best.
  constexpr int64_t kGroupBytes = 24 << 20;
  constexpr int64_t kMaxGroup = 32;  // short sequences: measured faster than all that would fit
  const int64_t kv_bytes = std::max<int64_t>(1, shape.k_len) * Traits::kHeadDim * 4;
  const int64_t fit = std::min(kGroupBytes / kv_bytes, kMaxGroup);
  args.group = Traits::kMasked
                   ? HeadsPerGroup(args.batch_heads / args.heads_per_kv, fit) * args.heads_per_kv
                   : 1;

  constexpr int kSharedBytes = sizeof(ForwardShared<Traits>);
  static_assert(kSharedBytes <= 227 * 1024, "more shared memory than a block can have");
  const auto kernel = ForwardKernel<Traits>;
  BURST_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  const int multiprocessors = cuda::CurrentContext().multiprocessors;
  const int blocks = params.non_persistent ? args.tiles : std::min(args.tiles, multiprocessors);
  kernel<<<blocks, Traits::kThreads, kSharedBytes, cuda::CurrentStream()>>>(args);
  BURST_CUDA_CHECK_LAUNCH("attention forward");
}

template void LaunchForward<Variants<BFloat16>::BURST_VARIANT>(const FlashForwardParams&, int32_t*);
template void LaunchForward<Variants<Float16>::BURST_VARIANT>(const FlashForwardParams&, int32_t*);

}  // namespace sm90
}  // namespace burst
