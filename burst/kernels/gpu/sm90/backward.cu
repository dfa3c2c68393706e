// The backward kernel. A block owns kBlockN keys of a KV head and streams the query tiles that see
// them, of every query head of the group:
//
//   S^T  = K Q^T            P^T  = exp2(c S^T - lse)       [kBlockN, kBlockM], c = scale log2(e)
//   dP^T = V dO^T           dS^T = P^T (dP^T - delta)
//   dV  += P^T dO           dK  += dS^T Q                  P^T, dS^T straight from registers
//   dQ^T = K^T dS^T         added to dQ in global memory
//
// Consumers: two warpgroups of 64 keys each. They exchange dS through shared memory, and share dQ^T
// by columns of the head (kHeadDim 128) or by query rows (64).
// Producer warpgroup: warp 0 loads K, V once, Q, dO as a ring (TMA); warp 1 loads lse, delta and
// the mask's ranges of the rows; warps 2 and 3 each add one consumer's dQ tile to global memory
// (TMA reduction), in a fixed order when determinism is asked for.
//
// Compiled once for every variant in variants.h.
#include <algorithm>

#include "burst/device/cuda.h"
#include "burst/kernels/gpu/sm90/tensor_map.h"
#include "burst/kernels/gpu/sm90/tile.cuh"
#include "burst/kernels/gpu/sm90/variants.h"

namespace burst {
namespace sm90 {
namespace {

struct BackwardArgs {
  CUtensorMap q, k, v, dout, dq;
  CUtensorMap dk, dv;  // of kWarpRows rows
  bool add;            // dk and dv, fp32; else they are bf16
  const float* lse;
  const float* delta;
  KeyRanges visible;
  int q_len, k_len, num_heads, batch_kv_heads, num_kv_heads, heads_per_kv, head_dim;
  int key_tiles, query_tiles;  // of one head
  int group;                   // KV heads whose tensors share the L2 cache
  float scale;
  bool heads_inside;  // the order of ForEachQueryTile
  int* dq_additions;  // [batch, num_heads, query_tiles, 2], zero at the start; null: any order
};

// What the softmax's backward needs of each query row.
template <class Traits>
struct RowStatistics {
  alignas(16) float lse_log2[Traits::kBlockM];  // +inf for a row that saw no key: P = 0
  alignas(16) float delta[Traits::kBlockM];
  alignas(16) int begin[Traits::kBlockM];
  alignas(16) int end[Traits::kBlockM];
};

template <class Traits>
struct BackwardShared {
  Tile<Traits::kBlockN, Traits::kHeadDim> k, v;
  Tile<Traits::kBlockM, Traits::kHeadDim> q[Traits::kStages];
  Tile<Traits::kBlockM, Traits::kHeadDim> dout[Traits::kStages];
  Tile<Traits::kBlockM, Traits::kBlockN> ds[2];
  // Each consumer's [64 / 32][kDqRows][32], in the TMA's swizzle.
  alignas(1024) float dq[Traits::kConsumers][Traits::kDqRows * 64];
  RowStatistics<Traits> rows[Traits::kStages];
  Barrier kv_full;
  Barrier q_full[Traits::kStages], q_empty[Traits::kStages];
  Barrier dout_full[Traits::kStages], dout_empty[Traits::kStages];
  Barrier rows_full[Traits::kStages], rows_empty[Traits::kStages];
  Barrier dq_full[Traits::kConsumers], dq_empty[Traits::kConsumers];
  int tile_begin, tile_end;  // query tiles that see the keys
};

// The keys of a block, and whose.
struct KeyTile {
  int row, kv_head, batch;
};

// Within a group of heads, first keys first: under a causal mask those are seen by the most
// queries.
template <class Traits>
__device__ __forceinline__ KeyTile MakeKeyTile(const BackwardArgs& args) {
  const int index = blockIdx.x;
  const int group = index / (args.group * args.key_tiles);
  const int in_group = index - group * args.group * args.key_tiles;
  const int group_size = min(args.group, args.batch_kv_heads - group * args.group);
  const int batch_head = group * args.group + in_group % group_size;
  return {in_group / group_size * Traits::kBlockN, batch_head % args.num_kv_heads,
          batch_head / args.num_kv_heads};
}

// Calls f(head, tile) for every query tile that the block meets, in the same order for every warp
// that loads or stores. Last tile first: in causal masks too, all key tiles of a head then begin at
// the same query tile, and a fixed order of their additions to dQ costs a short delay at the start
// instead of a long wait. With grouped heads and a fixed order, a block takes the heads of a tile
// one after the other: going through all tiles of a head first, it would meet the next head when
// the blocks before it are still far from there.
template <class Function>
__device__ __forceinline__ void ForEachQueryTile(const BackwardArgs& args, const KeyTile& keys,
                                                 int tile_begin, int tile_end, Function f) {
  const int first_head = keys.kv_head * args.heads_per_kv;
  if (args.heads_inside) {
    for (int tile = tile_end - 1; tile >= tile_begin; --tile) {
      for (int h = 0; h < args.heads_per_kv; ++h) f(first_head + h, tile);
    }
    return;
  }
  for (int h = 0; h < args.heads_per_kv; ++h) {
    for (int tile = tile_end - 1; tile >= tile_begin; --tile) f(first_head + h, tile);
  }
}

// Calls f() as often as ForEachQueryTile: for warps that follow the order of others.
template <class Function>
__device__ __forceinline__ void RepeatForQueryTiles(const BackwardArgs& args, int tile_begin,
                                                    int tile_end, Function f) {
  for (int h = 0; h < args.heads_per_kv; ++h) {
    for (int tile = tile_end - 1; tile >= tile_begin; --tile) f();
  }
}

template <class Traits>
__device__ __forceinline__ void BackwardLoad(const BackwardArgs& args,
                                             BackwardShared<Traits>& shared, const KeyTile& keys) {
  using QTile = Tile<Traits::kBlockM, Traits::kHeadDim>;
  RingSlot<Traits::kStages> slot;
  ForEachQueryTile(args, keys, shared.tile_begin, shared.tile_end, [&](int head, int tile) {
    Wait(&shared.q_empty[slot.stage], slot.parity ^ 1);
    ArriveExpectBytes(&shared.q_full[slot.stage], QTile::kBytes);
    LoadTile(shared.q[slot.stage], args.q, &shared.q_full[slot.stage], tile * Traits::kBlockM, head,
             keys.batch);
    Wait(&shared.dout_empty[slot.stage], slot.parity ^ 1);
    ArriveExpectBytes(&shared.dout_full[slot.stage], QTile::kBytes);
    LoadTile(shared.dout[slot.stage], args.dout, &shared.dout_full[slot.stage],
             tile * Traits::kBlockM, head, keys.batch);
    slot.Advance();
  });
}

template <class Traits>
__device__ __forceinline__ void BackwardLoadRows(const BackwardArgs& args,
                                                 BackwardShared<Traits>& shared,
                                                 const KeyTile& keys) {
  const int lane = threadIdx.x % kWarpSize;
  RingSlot<Traits::kStages> slot;
  ForEachQueryTile(args, keys, shared.tile_begin, shared.tile_end, [&](int head, int tile) {
    RowStatistics<Traits>& rows = shared.rows[slot.stage];
    const int first = tile * Traits::kBlockM;
    const int64_t offset =
        (static_cast<int64_t>(keys.batch) * args.num_heads + head) * args.q_len + first;
    Wait(&shared.rows_empty[slot.stage], slot.parity ^ 1);
#pragma unroll
    for (int i = lane; i < Traits::kBlockM; i += kWarpSize) {
      const bool valid = first + i < args.q_len;
      const float lse = valid ? args.lse[offset + i] : -INFINITY;
      rows.lse_log2[i] = lse == -INFINITY ? INFINITY : lse * kLog2E;
      rows.delta[i] = valid ? args.delta[offset + i] : 0.f;
      if (Traits::kRanges) {
        const int64_t row = keys.batch * args.visible.batch_stride + min(first + i, args.q_len - 1);
        rows.begin[i] = args.visible.begin[row];
        rows.end[i] = min(args.visible.end[row], args.k_len);
      }
    }
    Arrive(&shared.rows_full[slot.stage]);
    slot.Advance();
  });
}

// dQ += a consumer's tile. When deterministic, key tiles add in ascending order: a block waits
// until the count of additions to this part of dQ is the number of key tiles before its own. Those
// belong to blocks launched earlier, so that somebody can always proceed.
template <class Traits>
__device__ __forceinline__ void BackwardReduceDq(const BackwardArgs& args,
                                                 BackwardShared<Traits>& shared,
                                                 const KeyTile& keys, int consumer) {
  int parity = 0;
  const int column = Traits::kHeadDim == 128 ? consumer * 64 : 0;
  const int row = Traits::kHeadDim == 128 ? 0 : consumer * Traits::kDqRows;
  const bool ordered = args.dq_additions != nullptr;
  ForEachQueryTile(args, keys, shared.tile_begin, shared.tile_end, [&](int head, int tile) {
    int* additions = nullptr;
    int turn = keys.row / Traits::kBlockN;
    if (ordered) {
      const int64_t batch_head = static_cast<int64_t>(keys.batch) * args.num_heads + head;
      additions = args.dq_additions + (batch_head * args.query_tiles + tile) * 2 + consumer;
      if (Traits::kRanges) {
        const int begin =
            args.visible.begin[keys.batch * args.visible.batch_stride + tile * Traits::kBlockM];
        turn -= max(begin, 0) / Traits::kBlockN;
      }
    }
    Wait(&shared.dq_full[consumer], parity);
    parity ^= 1;
    if (ordered) {
      while (LoadAcquire(additions) != turn) continue;
    }
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      TmaReduceAdd(args.dq,
                   SharedAddress(shared.dq[consumer] + box * Traits::kDqRows * kFloatBoxColumns),
                   column + box * kFloatBoxColumns, tile * Traits::kBlockM + row, head, keys.batch);
    }
    BulkCommit();
    BulkWaitRead();
    Arrive(&shared.dq_empty[consumer]);
    if (ordered) {
      BulkWait();
      AddRelease(additions, 1);
    }
  });
  BulkWait();
}

// P^T = 0 where a query (a column) does not see a key (one of the thread's two rows).
template <class Traits>
__device__ __forceinline__ void MaskKeys(float (&p)[Traits::kBlockM / 2], int key, int k_len,
                                         const RowStatistics<Traits>& rows) {
#pragma unroll
  for (int j = 0; j < Traits::kBlockM / 8; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int query = 8 * j + threadIdx.x % 4 * 2 + c;
      const int begin = Traits::kRanges ? rows.begin[query] : 0;
      const int end = Traits::kRanges ? rows.end[query] : k_len;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (key + 8 * r < begin || key + 8 * r >= end) p[4 * j + 2 * r + c] = 0;
      }
    }
  }
}

template <class Traits>
__device__ __forceinline__ void BackwardConsume(const BackwardArgs& args,
                                                BackwardShared<Traits>& shared, const KeyTile& keys,
                                                int consumer) {
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  constexpr int kHeadDim = Traits::kHeadDim, kDqRows = Traits::kDqRows;
  using QTile = Tile<kBlockM, kHeadDim>;
  using KTile = Tile<kBlockN, kHeadDim>;
  using DsTile = Tile<kBlockM, kBlockN>;
  constexpr int kExchangeBarrier = 1;
  // At 64 the search for masks and the exchange of dS run before the matmuls that they could run
  // beside. What it brings is near the noise: docs/kernels-notebook.md.
  constexpr bool kEarly = kHeadDim == 64;
  const int lane = threadIdx.x % kWarpSize, warp = WarpUniform(threadIdx.x / kWarpSize % 4);
  const int key = keys.row + consumer * 64 + warp * 16 + lane / 4;  // and key + 8
  const float scale_log2 = args.scale * kLog2E;

  // Where this lane's row of each 8x8 matrix of dS goes (stmatrix), and its elements of dQ^T.
  const uint32_t ds_store = SharedAddress(shared.ds[0].At(0, consumer)) +
                            (lane / 16 * 8 + lane % 8) * kRowBytes +
                            ((warp * 2 + lane / 8 % 2) ^ (lane % 8)) * 16;
  const uint32_t dq_store = SharedAddress(shared.dq[consumer]) + warp / 2 * kDqRows * 128 +
                            lane % 4 * 2 * 128 +
                            (((warp % 2 * 4 + lane / 16) ^ (lane % 4 * 2)) * 16) + lane / 4 % 4 * 4;

  float dk[kHeadDim / 2], dv[kHeadDim / 2];  // [64, kHeadDim]
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) dk[i] = dv[i] = 0;
  RingSlot<Traits::kStages> slot;
  int dq_parity = 1, buffer = 0;

  Wait(&shared.kv_full, 0);
  RepeatForQueryTiles(args, shared.tile_begin, shared.tile_end, [&] {
    const QTile& q = shared.q[slot.stage];
    const QTile& dout = shared.dout[slot.stage];
    const RowStatistics<Traits>& rows = shared.rows[slot.stage];
    float p[kBlockM / 2], ds[kBlockM / 2];  // P^T, dS^T: [64, kBlockM]
    uint32_t p_operand[kBlockM / 4], ds_operand[kBlockM / 4];

    Wait(&shared.q_full[slot.stage], slot.parity);
    WgmmaFence();
    MatmulSharedShared<kBlockM, kHeadDim>(p, shared.k.At(consumer * 64), KTile::kBlockBytes,
                                          q.At(0), QTile::kBlockBytes, false);  // S^T = K Q^T
    WgmmaCommit();
    Wait(&shared.dout_full[slot.stage], slot.parity);
    WgmmaFence();
    MatmulSharedShared<kBlockM, kHeadDim>(ds, shared.v.At(consumer * 64), KTile::kBlockBytes,
                                          dout.At(0), QTile::kBlockBytes,
                                          false);  // dP^T = V dO^T
    WgmmaCommit();

    // Whether every query of the tile sees every key.
    const auto is_whole = [&] {
      return Traits::kRanges
                 ? rows.begin[kBlockM - 1] <= keys.row && rows.end[0] >= keys.row + kBlockN
                 : keys.row + kBlockN <= args.k_len;
    };

    // P^T = exp2(c S^T - lse)
    Wait(&shared.rows_full[slot.stage], slot.parity);
    bool whole = kEarly && is_whole();
    WgmmaWait<1>();
    PinRegisters(p);
#pragma unroll
    for (int j = 0; j < kBlockM / 8; ++j) {
      const float2 lse = *reinterpret_cast<const float2*>(&rows.lse_log2[8 * j + lane % 4 * 2]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        p[4 * j + 2 * r] = Exp2(fmaf(p[4 * j + 2 * r], scale_log2, -lse.x));
        p[4 * j + 2 * r + 1] = Exp2(fmaf(p[4 * j + 2 * r + 1], scale_log2, -lse.y));
      }
    }
    if (!kEarly) whole = is_whole();
    if (!whole) MaskKeys<Traits>(p, key, args.k_len, rows);
    PinRegisters(p);  // the exponentials stay on this side of the wait

    // dS^T = P^T (dP^T - delta)
    WgmmaWait<0>();
    PinRegisters(ds);
#pragma unroll
    for (int j = 0; j < kBlockM / 8; ++j) {
      const float2 delta = *reinterpret_cast<const float2*>(&rows.delta[8 * j + lane % 4 * 2]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = 4 * j + 2 * r;
        ds[i] = p[i] * (ds[i] - delta.x);
        ds[i + 1] = p[i + 1] * (ds[i + 1] - delta.y);
      }
    }
    // Every thread for itself. (For a warp, as with the tiles, one lane could; but these are
    // ordinary reads, which compute-sanitizer's racecheck follows thread by thread.)
    Arrive(&shared.rows_empty[slot.stage]);

    // dV += P^T dO. (Issued before dS it would overlap, but the registers it holds cost more.)
    PackOperand(ds, ds_operand);
    const auto store_ds = [&] {  // for the other consumer
#pragma unroll
      for (int k = 0; k < kBlockM / 16; ++k) {
        StoreMatrixTransposed(ds_store + buffer * DsTile::kBytes + k * 16 * kRowBytes,
                              ds_operand[4 * k], ds_operand[4 * k + 1], ds_operand[4 * k + 2],
                              ds_operand[4 * k + 3]);
      }
      FenceProxyAsync();
    };
    if (kEarly) store_ds();
    PackOperand(p, p_operand);
    PinRegisters(p_operand);
    WgmmaFence();
    MatmulRegisterShared<kHeadDim, kBlockM, Major::kMN>(dv, p_operand, dout.At(0),
                                                        QTile::kBlockBytes, true);
    WgmmaCommit();
    if (!kEarly) store_ds();
    NamedBarrierSync(kExchangeBarrier, 2 * kWarpgroupSize);

    // dQ^T = K^T dS^T
    float dq[kDqRows / 2];  // [64, kDqRows]
    PinRegisters(ds_operand);
    WgmmaFence();
    MatmulSharedShared<kDqRows, kBlockN, Major::kMN, Major::kK>(
        dq, shared.k.At(0, kHeadDim == 128 ? consumer : 0), KTile::kBlockBytes,
        shared.ds[buffer].At(kHeadDim == 128 ? 0 : consumer * kDqRows), DsTile::kBlockBytes, false);
    WgmmaCommit();
    // dK += dS^T Q
    MatmulRegisterShared<kHeadDim, kBlockM, Major::kMN>(dk, ds_operand, q.At(0), QTile::kBlockBytes,
                                                        true);
    WgmmaCommit();

    WgmmaWait<2>();
    PinRegisters(dv);
    ArriveWarp(&shared.dout_empty[slot.stage]);
    WgmmaWait<1>();
    PinRegisters(dq);
    Wait(&shared.dq_empty[consumer], dq_parity);
    dq_parity ^= 1;
#pragma unroll
    for (int j = 0; j < kDqRows / 8; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          StoreShared((dq_store ^ (r * 32) ^ (c * 16)) + c * 128 + j * 8 * 128,
                      dq[4 * j + 2 * r + c] * args.scale);
        }
      }
    }
    FenceProxyAsync();
    Arrive(&shared.dq_full[consumer]);
    WgmmaWait<0>();
    PinRegisters(dk);
    ArriveWarp(&shared.q_empty[slot.stage]);
    slot.Advance();
    buffer ^= 1;
  });

  // dV and dK leave from where K, V, Q and dO were, once nobody reads these any more.
  NamedBarrierSync(kExchangeBarrier, 2 * kWarpgroupSize);
  constexpr int kPartBytes = kWgmmaM * kHeadDim * sizeof(float);  // of a consumer's dV, and dK
  constexpr int kBoxBytes = kWgmmaM * kRowBytes;
  static_assert(2 * Traits::kConsumers * kPartBytes <= offsetof(BackwardShared<Traits>, ds), "");
  // What follows from threadIdx is computed anew: nothing need be kept for it during the loop.
  const int thread = ThreadIndexAgain(), thread_lane = thread % kWarpSize;
  const int first = thread / kWarpSize % 4 * kWarpRows;
  const uint32_t staging = SharedAddress(&shared) + 2 * consumer * kPartBytes + first * kRowBytes;
  const int row = keys.row + consumer * kWgmmaM + first;
  const float one[2] = {1, 1}, scale[2] = {args.scale, args.scale};
  if (args.add) {
    AddWarpRows<kHeadDim>(args.dv, staging, kBoxBytes, dv, one, thread_lane, row, keys.kv_head,
                          keys.batch);
    AddWarpRows<kHeadDim>(args.dk, staging + kPartBytes, kBoxBytes, dk, scale, thread_lane, row,
                          keys.kv_head, keys.batch);
  } else {
    StoreWarpRows<kHeadDim>(args.dv, staging, kBoxBytes, dv, one, thread_lane, row, keys.kv_head,
                            keys.batch);
    StoreWarpRows<kHeadDim>(args.dk, staging + kPartBytes, kBoxBytes, dk, scale, thread_lane, row,
                            keys.kv_head, keys.batch);
  }
  if (thread_lane == 0) BulkWaitRead();
}

template <class Traits>
__global__ __launch_bounds__(Traits::kThreads,
                             1) void BackwardKernel(const __grid_constant__ BackwardArgs args) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<BackwardShared<Traits>*>(shared_bytes);
  const KeyTile keys = MakeKeyTile<Traits>(args);
  if (threadIdx.x == 0) {
    InitBarrier(&shared.kv_full, 1);
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      InitBarrier(&shared.q_full[stage], 1);
      InitBarrier(&shared.q_empty[stage], Traits::kConsumerWarps);
      InitBarrier(&shared.dout_full[stage], 1);
      InitBarrier(&shared.dout_empty[stage], Traits::kConsumerWarps);
      InitBarrier(&shared.rows_full[stage], kWarpSize);
      InitBarrier(&shared.rows_empty[stage], Traits::kConsumers * kWarpgroupSize);
    }
    for (int consumer = 0; consumer < Traits::kConsumers; ++consumer) {
      InitBarrier(&shared.dq_full[consumer], kWarpgroupSize);
      InitBarrier(&shared.dq_empty[consumer], 1);
    }
    FenceBarrierInit();
    ArriveExpectBytes(&shared.kv_full, 2 * Tile<Traits::kBlockN, Traits::kHeadDim>::kBytes);
    LoadTile(shared.k, args.k, &shared.kv_full, keys.row, keys.kv_head, keys.batch);
    LoadTile(shared.v, args.v, &shared.kv_full, keys.row, keys.kv_head, keys.batch);
  }
  int2 rows = {0, args.q_len};
  if (Traits::kRanges) {
    const int64_t offset = keys.batch * args.visible.batch_stride;
    rows = SeeingRows(args.visible.begin + offset, args.visible.end + offset, args.q_len, keys.row,
                      min(keys.row + Traits::kBlockN, args.k_len));
  }
  if (threadIdx.x == 0) {
    shared.tile_begin = rows.x < args.q_len ? rows.x / Traits::kBlockM : args.query_tiles;
    shared.tile_end = (rows.y + Traits::kBlockM - 1) / Traits::kBlockM;
  }
  __syncthreads();
  if (args.add && shared.tile_begin >= shared.tile_end) {  // nothing to add
    Wait(&shared.kv_full, 0);
    return;
  }
  const int warpgroup = WarpUniform(threadIdx.x / kWarpgroupSize);
  if (warpgroup == 0) {
    DecreaseRegisters<Traits::kProducerRegisters>();
    const int warp = threadIdx.x / kWarpSize;
    const bool first_lane = threadIdx.x % kWarpSize == 0;
    if (warp == 0 && first_lane) BackwardLoad<Traits>(args, shared, keys);
    if (warp == 1) BackwardLoadRows<Traits>(args, shared, keys);
    if (warp >= 2 && first_lane) BackwardReduceDq<Traits>(args, shared, keys, warp - 2);
  } else {
    IncreaseRegisters<Traits::kConsumerRegisters>();
    BackwardConsume<Traits>(args, shared, keys, warpgroup - 1);
  }
}

}  // namespace

template <class Traits>
void LaunchBackward(const FlashBackwardParams& params, int32_t* counters) {
  const FlashAttentionShape& shape = params.shape;
  const DType gradient = params.assign ? DType::kBFloat16 : DType::kFloat32;
  const auto map_q = [&](const AttentionOperand& tensor, DType dtype, int box_rows) {
    return MakeTensorMap(tensor, dtype, shape, shape.q_len, shape.num_heads, box_rows);
  };
  const auto map_k = [&](const AttentionOperand& tensor, DType dtype, int box_rows) {
    return MakeTensorMap(tensor, dtype, shape, shape.k_len, shape.num_kv_heads, box_rows);
  };
  BackwardArgs args;
  args.k = map_k(params.k, DType::kBFloat16, Traits::kBlockN);
  args.v = map_k(params.v, DType::kBFloat16, Traits::kBlockN);
  args.q = args.dout = args.dq = args.k;  // without queries nobody uses them; dK and dV become zero
  if (shape.q_len > 0) {
    args.q = map_q(params.q, DType::kBFloat16, Traits::kBlockM);
    args.dout = map_q(params.dout, DType::kBFloat16, Traits::kBlockM);
    args.dq = map_q(params.dq, DType::kFloat32, Traits::kDqRows);
  }
  args.dk = map_k(params.dk, gradient, kWarpRows);
  args.dv = map_k(params.dv, gradient, kWarpRows);
  args.add = !params.assign;
  args.lse = static_cast<const float*>(params.lse);
  args.delta = static_cast<const float*>(params.delta);
  args.visible = shape.visible;
  args.q_len = static_cast<int>(shape.q_len);
  args.k_len = static_cast<int>(shape.k_len);
  args.num_heads = static_cast<int>(shape.num_heads);
  args.num_kv_heads = static_cast<int>(shape.num_kv_heads);
  args.batch_kv_heads = static_cast<int>(shape.batch * shape.num_kv_heads);
  args.heads_per_kv = static_cast<int>(shape.num_heads / shape.num_kv_heads);
  args.head_dim = static_cast<int>(shape.head_dim);
  args.key_tiles = static_cast<int>((shape.k_len + Traits::kBlockN - 1) / Traits::kBlockN);
  args.query_tiles = static_cast<int>((shape.q_len + Traits::kBlockM - 1) / Traits::kBlockM);
  args.scale = static_cast<float>(shape.softmax_scale);
  args.heads_inside = params.deterministic && args.heads_per_kv > 1;
  args.dq_additions = counters;
  // Half of the L2 for the q, dout and fp32 dq of the heads under way.
  constexpr int64_t kGroupBytes = 24 << 20;
  const int64_t head_bytes =
      std::max<int64_t>(1, shape.q_len) * Traits::kHeadDim * 8 * args.heads_per_kv;
  args.group = Traits::kRanges ? HeadsPerGroup(args.batch_kv_heads, kGroupBytes / head_bytes) : 1;

  constexpr int kSharedBytes = sizeof(BackwardShared<Traits>);
  static_assert(kSharedBytes <= 227 * 1024, "more shared memory than a block can have");
  const auto kernel = BackwardKernel<Traits>;
  BURST_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  kernel<<<args.key_tiles * args.batch_kv_heads, Traits::kThreads, kSharedBytes,
           cuda::CurrentStream()>>>(args);
  BURST_CUDA_CHECK_LAUNCH("attention backward");
}

template void LaunchBackward<BURST_VARIANT>(const FlashBackwardParams&, int32_t*);

}  // namespace sm90
}  // namespace burst
