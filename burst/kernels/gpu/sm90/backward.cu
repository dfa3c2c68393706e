// The backward kernel. A block owns kBlockN keys of a KV head and streams the query tiles that see
// them, of every query head of the group:
//
//   S^T  = K Q^T            P^T  = exp2(c S^T - lse)       [kBlockN, kBlockM], c = scale log2(e)
//   dP^T = V dO^T           dS^T = P^T (dP^T - delta)
//   dV  += P^T dO           dK  += dS^T Q                  P^T, dS^T straight from registers
//   dQ^T = K^T dS^T         added to dQ in global memory
//
// Consumers: two warpgroups of 64 keys each, which keep a part of their V in registers. They
// exchange dS through shared memory, and divide dQ^T by columns of the head (kHeadDim 96 and 128)
// or by query rows (64). dQ is computed one step late. So neither consumer waits for the other's
// dS, and the exponentials of one run in parallel with the matmuls of the other. Producer
// warpgroup: warp 0 loads K and V once, and Q and dO into a ring (TMA). Warp 1 loads lse, delta and
// the rows' mask ranges, and finds where dQ goes, and when. Warps 2 and 3 each add one consumer's
// dQ tile to global memory (TMA reduction), in a fixed order if the call is deterministic. With
// lists, and in the Ordered variants, they take turns with both consumers' tiles.
//
// Compiled once for every variant in variants.h.
#include "burst/kernels/gpu/sm90/backward.cuh"

namespace burst {
namespace sm90 {
namespace {

template <class Traits>
struct BackwardShared {
  Tile<Traits::kBlockN, Traits::kHeadDim> k, v;
  Tile<Traits::kBlockM, Traits::kHeadDim> q[Traits::kStages];
  Tile<Traits::kBlockM, Traits::kHeadDim> dout[Traits::kStages];
  Tile<Traits::kBlockM, Traits::kBlockN> ds[2];
  // Each consumer's [64 / 32][kDqRows][32], in the TMA's swizzle.
  alignas(1024) float dq[Traits::kConsumers * Traits::kDqBuffers][Traits::kDqRows * 64];
  RowStatistics<Traits> rows[Traits::kStages];
  DqStep dq_steps[kDqSteps];
  Barrier dq_step_full[kDqSteps];  // with kTurnFirst
  Barrier kv_full;
  // With kOneBarrier those of q are also those of dout and rows.
  Barrier q_full[Traits::kStages], q_empty[Traits::kStages];
  Barrier dout_full[Traits::kStages], dout_empty[Traits::kStages];
  Barrier rows_full[Traits::kStages], rows_empty[Traits::kStages];
  Barrier ds_full[2];  // of both consumers
  Barrier dq_full[Traits::kConsumers * Traits::kDqTurns];
  Barrier dq_empty[Traits::kConsumers * Traits::kDqBuffers];
  QueryTiles tiles;  // of the keys
};

template <class Traits>
__device__ __forceinline__ void BackwardLoad(const BackwardArgs& args,
                                             BackwardShared<Traits>& shared, const KeyTile& keys) {
  using QTile = Tile<Traits::kBlockM, Traits::kHeadDim>;
  RingSlot<Traits::kStages> slot;
  ForEachQueryTile<Traits>(args, keys, shared.tiles, [&](int head, int tile, int) {
    constexpr bool kOne = Traits::kOneBarrier;
    const int row = tile * Traits::kBlockM, stage = slot.stage;
    Barrier* const q_full = &shared.q_full[stage];
    Barrier* const dout_full = kOne ? q_full : &shared.dout_full[stage];
    Wait(&shared.q_empty[stage], slot.parity ^ 1);
    ArriveExpectBytes(q_full, kOne ? 2 * QTile::kBytes : QTile::kBytes);
    LoadTile(shared.q[stage], args.q, q_full, row, head, keys.batch);
    if constexpr (!kOne) {
      Wait(&shared.dout_empty[stage], slot.parity ^ 1);
      ArriveExpectBytes(dout_full, QTile::kBytes);
    }
    LoadTile(shared.dout[stage], args.dout, dout_full, row, head, keys.batch);
    slot.Advance();
  });
}

// dQ = or dQ += a consumer's part, which lies in shared.dq[slot].
template <class Traits, bool kAdd>
__device__ __forceinline__ void StoreDq(const BackwardArgs& args, BackwardShared<Traits>& shared,
                                        int consumer, int slot, const DqStep& step, int batch) {
  const int column = Traits::kDqByColumns ? consumer * 64 : 0;
  const int row = Traits::kDqByColumns ? 0 : consumer * Traits::kDqRows;
#pragma unroll
  for (int box = 0; box < 2; ++box) {
    if (column + box * kFloatBoxColumns >= Traits::kHeadDim) break;
    StoreOrAdd(kAdd, args.dq,
               SharedAddress(shared.dq[slot] + box * Traits::kDqRows * kFloatBoxColumns),
               column + box * kFloatBoxColumns, step.row + row, step.head, batch);
  }
  BulkCommit();
}

// Adds tiles to dQ, for warp `which` of the two warps that do this. The warp adds one consumer's
// tile of every step or, with kDqTurns, both consumers' tiles of every other step.
//
// With lists a block seldom meets query tiles in the order of its neighbors. It can catch up only
// if an addition may begin before the previous one is complete. With kTurnFirst a warp waits for
// its turn during the other warp's addition, before its own tile is ready.
template <class Traits>
__device__ __forceinline__ void BackwardReduceDq(const BackwardArgs& args,
                                                 BackwardShared<Traits>& shared,
                                                 const KeyTile& keys, int which) {
  constexpr bool kTurns = Traits::kDqTurns > 1;
  constexpr int kTiles = kTurns ? Traits::kConsumers : 1;
  const int first_consumer = kTurns ? 0 : which;
  const int first_full = kTurns ? which * Traits::kConsumers : which;
  const int first_slot = Traits::kDqBuffers > 1 ? first_full : first_consumer;
  const int steps = StepsOf(args, shared.tiles);
  int parity = 0;
#pragma unroll 1
  for (int step = kTurns ? which : 0; step < steps; step += Traits::kDqTurns) {
    const auto wait_for_dq = [&] {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) Wait(&shared.dq_full[first_full + i], parity);
      parity ^= 1;
    };
    if constexpr (Traits::kTurnFirst) {
      Wait(&shared.dq_step_full[step % kDqSteps], step / kDqSteps % 2);
    } else {
      wait_for_dq();
    }
    const DqStep at = shared.dq_steps[step % kDqSteps];
    const auto wait = [&] {
      if constexpr (Traits::kTurnFirst) wait_for_dq();
    };
    AddInTurn(args, at, first_consumer, wait, [&](auto add) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        StoreDq<Traits, add()>(args, shared, first_consumer + i, first_slot + i, at, keys.batch);
      }
      BulkWaitRead();
#pragma unroll
      for (int i = 0; i < kTiles; ++i) Arrive(&shared.dq_empty[first_slot + i]);
    });
  }
  BulkWait();
}

template <class Traits>
__device__ __forceinline__ void BackwardConsume(const BackwardArgs& args,
                                                BackwardShared<Traits>& shared, const KeyTile& keys,
                                                int consumer) {
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  using Element = typename Traits::Element;
  constexpr int kHeadDim = Traits::kHeadDim, kDqRows = Traits::kDqRows;
  using QTile = Tile<kBlockM, kHeadDim>;
  using KTile = Tile<kBlockN, kHeadDim>;
  using DsTile = Tile<kBlockM, kBlockN>;
  constexpr int kExchangeBarrier = 1;
  constexpr bool kEarly = Traits::kEarly, kOne = Traits::kOneBarrier;
  const int lane = threadIdx.x % kWarpSize, warp = WarpUniform(threadIdx.x / kWarpSize % 4);
  const int key = keys.row + consumer * 64 + warp * 16 + lane / 4;  // and key + 8
  const float scale_log2 = args.scale * kLog2E;

  // The places to which this lane's row of each 8x8 matrix of dS goes (stmatrix), and its elements
  // of dQ^T.
  const uint32_t ds_store = SharedAddress(shared.ds[0].At(0, consumer)) +
                            (lane / 16 * 8 + lane % 8) * kRowBytes +
                            ((warp * 2 + lane / 8 % 2) ^ (lane % 8)) * 16;
  const uint32_t dq_store = SharedAddress(shared.dq[consumer]) + warp / 2 * kDqRows * 128 +
                            lane % 4 * 2 * 128 +
                            (((warp % 2 * 4 + lane / 16) ^ (lane % 4 * 2)) * 16) + lane / 4 % 4 * 4;

  float dk[kHeadDim / 2], dv[kHeadDim / 2];  // [64, kHeadDim]
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) dk[i] = dv[i] = 0;
  static_assert(Traits::kStages == 2, "");
  int step = 0;
  // Read anew from threadIdx, it would come between the matmuls.
  int column = lane % 4 * 2;
  asm volatile("" : "+r"(column));
  // The values of each two queries that a lane needs.
  const auto rows_of = [&](const float* statistics, int j) {
    return *reinterpret_cast<const float2*>(&statistics[8 * j + column]);
  };

  // dQ^T = K^T dS^T
  const auto multiply_dq = [&](float(&dq)[kDqRows / 2], int n) {  // [64, kDqRows], of the n-th step
    WgmmaFence();
    MatmulSharedShared<Element, kDqRows, kBlockN, Major::kMN, Major::kK>(
        dq, shared.k.At(0, Traits::kDqByColumns ? consumer : 0), KTile::kBlockBytes,
        shared.ds[n % 2].At(Traits::kDqByColumns ? 0 : consumer * kDqRows), DsTile::kBlockBytes,
        false);
    WgmmaCommit();
  };
  // To be followed by a fence, and give_dq.
  const auto store_dq = [&](float(&dq)[kDqRows / 2], int n) {
    const float factor = Traits::kScaleDs ? 1 : args.scale;
    const int buffer = n % 2;
    uint32_t dq_to = dq_store;
    if constexpr (Traits::kDqBuffers > 1) {
      Wait(&shared.dq_empty[consumer + buffer * Traits::kConsumers], n / 2 % 2 ^ 1);
      dq_to += buffer * static_cast<int>(Traits::kConsumers * sizeof(shared.dq[0]));
    } else {
      Wait(&shared.dq_empty[consumer], n % 2 ^ 1);
    }
#pragma unroll
    for (int j = 0; j < kDqRows / 8; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          StoreShared((dq_to ^ (r * 32) ^ (c * 16)) + c * 128 + j * 8 * 128,
                      dq[4 * j + 2 * r + c] * factor);
        }
      }
    }
  };
  const auto give_dq = [&](int n) {
    Arrive(&shared.dq_full[consumer + (Traits::kDqTurns > 1 ? n % 2 * Traits::kConsumers : 0)]);
  };

  Wait(&shared.kv_full, 0);
  uint32_t v_operand[4 * Traits::kValueSteps];
  LoadOperand(shared.v, consumer * 64, v_operand);
  for (int left = StepsOf(args, shared.tiles); left > 0; --left) {
    const int stage = step % 2, parity = step / 2 % 2;
    const QTile& q = shared.q[stage];
    const QTile& dout = shared.dout[stage];
    const RowStatistics<Traits>& rows = shared.rows[stage];
    float p[kBlockM / 2], ds[kBlockM / 2];  // P^T, dS^T: [64, kBlockM]
    uint32_t p_operand[kBlockM / 4], ds_operand[kBlockM / 4];

    Wait(&shared.q_full[stage], parity);
    WgmmaFence();
    MatmulSharedShared<Element, kBlockM, kHeadDim>(p, shared.k.At(consumer * 64),
                                                   KTile::kBlockBytes, q.At(0), QTile::kBlockBytes,
                                                   false);  // S^T = K Q^T
    WgmmaCommit();
    if constexpr (!kOne) Wait(&shared.dout_full[stage], parity);
    WgmmaFence();
    MatmulPartlyFromRegisters<Element, kBlockM, kHeadDim>(ds, v_operand, shared.v.At(consumer * 64),
                                                          KTile::kBlockBytes, dout.At(0),
                                                          QTile::kBlockBytes);  // dP^T = V dO^T
    WgmmaCommit();

    // P^T = exp2(c S^T - lse)
    if constexpr (!kOne) Wait(&shared.rows_full[stage], parity);
    float2 lse[kBlockM / 8], delta[kBlockM / 8];
    if constexpr (Traits::kRowsEarly) {
#pragma unroll
      for (int j = 0; j < kBlockM / 8; ++j) Pin(lse[j] = rows_of(rows.lse_log2, j));
    }
    bool whole = kEarly && IsWhole<Traits>(args, keys, rows);
    WgmmaWait<1>();
    PinRegisters(p);
#pragma unroll
    for (int j = 0; j < kBlockM / 8; ++j) {
      if constexpr (!Traits::kRowsEarly) lse[j] = rows_of(rows.lse_log2, j);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        p[4 * j + 2 * r] = Exp2(fmaf(p[4 * j + 2 * r], scale_log2, -lse[j].x));
        p[4 * j + 2 * r + 1] = Exp2(fmaf(p[4 * j + 2 * r + 1], scale_log2, -lse[j].y));
      }
    }
    if (!kEarly) whole = IsWhole<Traits>(args, keys, rows);
    if (!whole) MaskKeys<Traits>(p, key, args.k_len, rows);
    PinRegisters(p);  // the exponentials stay on this side of the wait

    // dS^T = P^T (dP^T - delta)
    if constexpr (Traits::kRowsEarly) {
#pragma unroll
      for (int j = 0; j < kBlockM / 8; ++j) Pin(delta[j] = rows_of(rows.delta, j));
    }
    WgmmaWait<0>();
    PinRegisters(ds);
#pragma unroll
    for (int j = 0; j < kBlockM / 8; ++j) {
      if constexpr (!Traits::kRowsEarly) delta[j] = rows_of(rows.delta, j);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = 4 * j + 2 * r;
        const float factor = Traits::kScaleDs ? args.scale : 1;
        ds[i] = p[i] * fmaf(ds[i], factor, -delta[j].x);
        ds[i + 1] = p[i + 1] * fmaf(ds[i + 1], factor, -delta[j].y);
      }
    }
    // Every thread for itself. (For a warp, as with the tiles, one lane could; but these are
    // ordinary reads, which compute-sanitizer's racecheck follows thread by thread.)
    if constexpr (!kOne) Arrive(&shared.rows_empty[stage]);
    PackOperand<Element>(ds, ds_operand);
    PackOperand<Element>(p, p_operand);
    PinRegisters(ds_operand);
    PinRegisters(p_operand);

    // dQ of the step before. In the first step its input is undefined and its result is dropped,
    // because a branch around a matmul would make ptxas serialize all matmuls.
    float dq[kDqRows / 2];
    if (step > 0) Wait(&shared.ds_full[stage ^ 1], (step - 1) / 2 % 2);
    multiply_dq(dq, step + 1);
    // dV += P^T dO
    MatmulRegisterShared<Element, kHeadDim, kBlockM, Major::kMN>(dv, p_operand, dout.At(0),
                                                                 QTile::kBlockBytes, true);
    WgmmaCommit();
    // dK += dS^T Q
    MatmulRegisterShared<Element, kHeadDim, kBlockM, Major::kMN>(dk, ds_operand, q.At(0),
                                                                 QTile::kBlockBytes, true);
    WgmmaCommit();
    WgmmaWait<2>();
    PinRegisters(dq);
    if (step > 0) store_dq(dq, step - 1);

      // dS, for both consumers. This buffer's last readers were the matmuls for dQ of two steps
      // ago, which every warp had completed before it arrived at the other buffer's barrier.
#pragma unroll
    for (int k = 0; k < kBlockM / 16; ++k) {
      StoreMatrixTransposed(ds_store + stage * DsTile::kBytes + k * 16 * kRowBytes,
                            ds_operand[4 * k], ds_operand[4 * k + 1], ds_operand[4 * k + 2],
                            ds_operand[4 * k + 3]);
    }
    FenceProxyAsync();  // of dQ and dS
    if (step > 0) give_dq(step - 1);
    ArriveWarp(&shared.ds_full[stage]);
    if constexpr (!kOne) {
      WgmmaWait<1>();
      PinRegisters(dv);
      ArriveWarp(&shared.dout_empty[stage]);
    }
    WgmmaWait<0>();
    PinRegisters(dv);
    PinRegisters(dk);
    if constexpr (kOne) {
      Arrive(&shared.q_empty[stage]);
    } else {
      ArriveWarp(&shared.q_empty[stage]);
    }
    ++step;
  }
  if (step > 0) {
    float dq[kDqRows / 2];
    Wait(&shared.ds_full[(step - 1) % 2], (step - 1) / 2 % 2);
    multiply_dq(dq, step - 1);
    WgmmaWait<0>();
    PinRegisters(dq);
    store_dq(dq, step - 1);
    FenceProxyAsync();
    give_dq(step - 1);
  }

  // dV and dK are stored from the places of K, V, Q and dO, once no thread reads these any more.
  NamedBarrierSync(kExchangeBarrier, 2 * kWarpgroupSize);
  constexpr int kPartBytes = kWgmmaM * kHeadDim * sizeof(float);  // of a consumer's dV, and dK
  constexpr int kBoxBytes = kWgmmaM * kRowBytes;
  static_assert(2 * Traits::kConsumers * kPartBytes <= offsetof(BackwardShared<Traits>, ds), "");
  // Values that follow from threadIdx are computed again, so that no registers hold them during the
  // loop.
  const int thread = ThreadIndexAgain(), thread_lane = thread % kWarpSize;
  const int first = thread / kWarpSize % 4 * kWarpRows;
  const uint32_t staging = SharedAddress(&shared) + 2 * consumer * kPartBytes + first * kRowBytes;
  const int row = keys.row + consumer * kWgmmaM + first;
  const GradientStep gradient_step =
      MakeGradientStep<Traits>(args, keys, consumer * 4 + thread / kWarpSize % 4);
  WaitForTurn(args, gradient_step);
  StoreGradient<Element, kHeadDim>(args, args.dv, args.dv_sum, args.dv_out, staging, kBoxBytes, dv,
                                   1, thread_lane, row, keys, gradient_step);
  StoreGradient<Element, kHeadDim>(args, args.dk, args.dk_sum, args.dk_out, staging + kPartBytes,
                                   kBoxBytes, dk, Traits::kScaleDs ? 1 : args.scale, thread_lane,
                                   row, keys, gradient_step);
  if (thread_lane == 0) PassTurn(args, gradient_step);
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
      constexpr bool kOne = Traits::kOneBarrier;
      InitBarrier(&shared.q_full[stage], kOne ? 1 + kWarpSize : 1);
      InitBarrier(&shared.q_empty[stage],
                  kOne ? Traits::kConsumers * kWarpgroupSize : Traits::kConsumerWarps);
      InitBarrier(&shared.dout_full[stage], 1);
      InitBarrier(&shared.dout_empty[stage], Traits::kConsumerWarps);
      InitBarrier(&shared.rows_full[stage], kWarpSize);
      InitBarrier(&shared.rows_empty[stage], Traits::kConsumers * kWarpgroupSize);
    }
    for (int consumer = 0; consumer < Traits::kConsumers; ++consumer) {
      for (int turn = 0; turn < Traits::kDqTurns; ++turn) {
        InitBarrier(&shared.dq_full[turn * Traits::kConsumers + consumer], kWarpgroupSize);
      }
      for (int slot = 0; slot < Traits::kDqBuffers; ++slot) {
        InitBarrier(&shared.dq_empty[slot * Traits::kConsumers + consumer], 1);
      }
    }
    for (Barrier& full : shared.dq_step_full) InitBarrier(&full, 1);
    for (Barrier& full : shared.ds_full) InitBarrier(&full, Traits::kConsumerWarps);
    FenceBarrierInit();
    ArriveExpectBytes(&shared.kv_full, 2 * Tile<Traits::kBlockN, Traits::kHeadDim>::kBytes);
    LoadTile(shared.k, args.k, &shared.kv_full, keys.row, keys.kv_head, keys.batch);
    LoadTile(shared.v, args.v, &shared.kv_full, keys.row, keys.kv_head, keys.batch);
  }
  if (threadIdx.x == 0) shared.tiles = QueryTilesOf<Traits>(args, keys);
  __syncthreads();
  if (StepsOf(args, shared.tiles) == 0 && !StoresUnseen(args, keys)) {  // nothing to add
    Wait(&shared.kv_full, 0);
    return;
  }
  const int warpgroup = WarpUniform(threadIdx.x / kWarpgroupSize);
  if (warpgroup == 0) {
    DecreaseRegisters<Traits::kProducerRegisters>();
    const int warp = threadIdx.x / kWarpSize;
    const bool first_lane = threadIdx.x % kWarpSize == 0;
    if (warp == 0 && first_lane) BackwardLoad<Traits>(args, shared, keys);
    if (warp == 1) {
      constexpr bool kOne = Traits::kOneBarrier;
      BackwardLoadRows<Traits>(args, shared, keys, kOne ? shared.q_full : shared.rows_full,
                               kOne ? shared.q_empty : shared.rows_empty,
                               Traits::kScaleDs ? args.scale : 1);
    }
    if (warp >= 2 && first_lane) {
      BackwardReduceDq<Traits>(args, shared, keys, warp - 2);
    }
  } else {
    IncreaseRegisters<Traits::kConsumerRegisters>();
    BackwardConsume<Traits>(args, shared, keys, warpgroup - 1);
  }
}

}  // namespace

template <class Traits>
void LaunchBackward(const FlashBackwardParams& params, const BackwardScratch& scratch) {
  const BackwardArgs args = MakeBackwardArgs<Traits>(params, scratch, Traits::kDqRows);
  static_assert(sizeof(BackwardShared<Traits>) <= 227 * 1024, "more than a thread block can have");
  LaunchPrepare<Traits>(args);
  LaunchOverKeys<Traits>(BackwardKernel<Traits>, sizeof(BackwardShared<Traits>), args);
}

template void LaunchBackward<Variants<BFloat16>::BURST_VARIANT>(const FlashBackwardParams&,
                                                                const BackwardScratch&);
template void LaunchBackward<Variants<Float16>::BURST_VARIANT>(const FlashBackwardParams&,
                                                               const BackwardScratch&);

}  // namespace sm90
}  // namespace burst
