// The backward kernel. A block owns kBlockN keys of a KV head. It streams the query tiles that see
// them, of every query head of the group:
//
//   S^T  = K Q^T            P^T  = exp2(c S^T - lse)       [kBlockN, kBlockM], c = scale log2(e)
//   dP^T = V dO^T           dS^T = P^T (dP^T - delta)
//   dV  += P^T dO           dK  += dS^T Q                  P^T, dS^T straight from registers
//   dQ^T = K^T dS^T         added to dQ in global memory
//
// Consumers: two warpgroups of 64 keys each, which keep a part of their V in registers. They
// exchange dS through shared memory, and divide dQ^T by columns of the head (kHeadDim 96 and 128)
// or by query rows (64). They compute dQ one step late. So neither waits for the other's dS, and
// the exponentials of one run in parallel with the matmuls of the other. Producer warpgroup: warp 0
// loads K and V once, and Q and dO into a ring (TMA). Warp 1 loads lse, delta and mask ranges of
// the rows, and finds where and when dQ is added. Warps 2 and 3 add one consumer's dQ tile each to
// global memory (TMA reduction), in a deterministic call in a fixed order. With lists, and in
// Ordered variants, they take turns at the tiles of both consumers.
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
  // With kOneBarrier the barriers of q also stand for dout and rows.
  Barrier q_full[Traits::kStages], q_empty[Traits::kStages];
  Barrier dout_full[Traits::kStages], dout_empty[Traits::kStages];
  Barrier rows_full[Traits::kStages], rows_empty[Traits::kStages];
  Barrier ds_full[2];  // of both consumers
  Barrier dq_full[Traits::kConsumers * Traits::kDqTurns];
  Barrier dq_empty[Traits::kConsumers * Traits::kDqBuffers];
  QueryTiles tiles;  // of the keys
  Suspicion suspicion;
  Barrier keys_scanned;
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

// Stores, or with kAdd adds, a consumer's part of dQ, which lies in shared.dq[slot].
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

// Adds tiles to dQ, as warp `which` of the two warps that do this. The warp adds one consumer's
// tile of every step. With kDqTurns it adds both consumers' tiles of every other step.
//
// With lists, a block seldom meets query tiles in the order of its neighbors. It can catch up only
// if an addition may begin before the previous one is complete. With kTurnFirst a warp waits for
// its turn before its own tile is ready, during the other warp's addition.
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
      if (LeavesDqToRepair<Traits>(args, shared.suspicion)) {
        ClearDq(SharedAddress(shared.dq[first_slot]), kTiles * Traits::kDqRows * 64);
      }
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

// A thread of a consumer warpgroup: its keys, and its places in shared memory.
template <class Traits>
struct BackwardConsumer {
  using Element = typename Traits::Element;
  static constexpr int kBlockM = Traits::kBlockM, kHeadDim = Traits::kHeadDim;
  static constexpr int kDqRows = Traits::kDqRows;
  using QTile = Tile<kBlockM, kHeadDim>;
  using KTile = Tile<Traits::kBlockN, kHeadDim>;
  using DsTile = Tile<kBlockM, Traits::kBlockN>;
  using Scores = float[kBlockM / 2];           // S^T or dP^T: [64, kBlockM]
  using ScoreOperand = uint32_t[kBlockM / 4];  // P^T or dS^T, of Element
  using Gradient = float[kHeadDim / 2];        // dK or dV: [64, kHeadDim]
  using Dq = float[kDqRows / 2];               // dQ^T: [64, kDqRows]

  const BackwardArgs& args;
  BackwardShared<Traits>& shared;
  const KeyTile& keys;
  const int consumer;
  int key;  // the thread's first key; the other one is key + 8
  float scale_log2;
  uint32_t ds_place;  // of the lane's row of each 8x8 matrix of dS (stmatrix)
  uint32_t dq_place;  // of its elements of dQ^T
  int column;         // its first query of every eight

  __device__ __forceinline__ BackwardConsumer(const BackwardArgs& args_,
                                              BackwardShared<Traits>& shared_, const KeyTile& keys_,
                                              int consumer_)
      : args(args_), shared(shared_), keys(keys_), consumer(consumer_) {
    const int lane = threadIdx.x % kWarpSize, warp = WarpUniform(threadIdx.x / kWarpSize % 4);
    key = keys.row + consumer * 64 + warp * 16 + lane / 4;
    scale_log2 = args.scale * kLog2E;
    ds_place = SharedAddress(shared.ds[0].At(0, consumer)) +
               (lane / 16 * 8 + lane % 8) * kRowBytes +
               ((warp * 2 + lane / 8 % 2) ^ (lane % 8)) * 16;
    dq_place = SharedAddress(shared.dq[consumer]) + warp / 2 * kDqRows * 128 + lane % 4 * 2 * 128 +
               (((warp % 2 * 4 + lane / 16) ^ (lane % 4 * 2)) * 16) + lane / 4 % 4 * 4;
    // If read anew from threadIdx, it would come between the matmuls.
    column = lane % 4 * 2;
    asm volatile("" : "+r"(column));
  }

  // Returns the statistics of the two queries that a lane needs at step j.
  __device__ __forceinline__ float2 RowsOf(const float* statistics, int j) const {
    return *reinterpret_cast<const float2*>(&statistics[8 * j + column]);
  }

  // Begins S^T = K Q^T.
  __device__ __forceinline__ void MultiplyScores(const QTile& q, Scores& s) const {
    WgmmaFence();
    MatmulSharedShared<Element, kBlockM, kHeadDim>(
        s, shared.k.At(consumer * 64), KTile::kBlockBytes, q.At(0), QTile::kBlockBytes, false);
    WgmmaCommit();
  }

  // Begins dP^T = V dO^T.
  __device__ __forceinline__ void MultiplyScoreGradients(
      const QTile& dout, const uint32_t (&v_operand)[4 * Traits::kValueSteps], Scores& dp) const {
    WgmmaFence();
    MatmulPartlyFromRegisters<Element, kBlockM, kHeadDim>(dp, v_operand, shared.v.At(consumer * 64),
                                                          KTile::kBlockBytes, dout.At(0),
                                                          QTile::kBlockBytes);
    WgmmaCommit();
  }

  // Waits for S^T. Computes P^T = exp2(c S^T - lse), where the mask allows.
  __device__ __forceinline__ void Exponentiate(const RowStatistics<Traits>& rows, Scores& p) const {
    float2 lse[kBlockM / 8];
    if constexpr (Traits::kRowsEarly) {
#pragma unroll
      for (int j = 0; j < kBlockM / 8; ++j) Pin(lse[j] = RowsOf(rows.lse_log2, j));
    }
    bool whole = Traits::kEarly && IsWhole<Traits>(args, keys, rows);
    WgmmaWait<1>();
    PinRegisters(p);
#pragma unroll
    for (int j = 0; j < kBlockM / 8; ++j) {
      if constexpr (!Traits::kRowsEarly) lse[j] = RowsOf(rows.lse_log2, j);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        p[4 * j + 2 * r] = Exp2(fmaf(p[4 * j + 2 * r], scale_log2, -lse[j].x));
        p[4 * j + 2 * r + 1] = Exp2(fmaf(p[4 * j + 2 * r + 1], scale_log2, -lse[j].y));
      }
    }
    if (!Traits::kEarly) whole = IsWhole<Traits>(args, keys, rows);
    if (!whole) MaskKeys<Traits>(p, key, args.k_len, rows);
    PinRegisters(p);  // the exponentials stay on this side of the wait
  }

  // Waits for dP^T. Computes dS^T = P^T (dP^T - delta), times the softmax's scale with kScaleDs.
  __device__ __forceinline__ void ScoreGradients(const RowStatistics<Traits>& rows, const Scores& p,
                                                 Scores& ds) const {
    float2 delta[kBlockM / 8];
    if constexpr (Traits::kRowsEarly) {
#pragma unroll
      for (int j = 0; j < kBlockM / 8; ++j) Pin(delta[j] = RowsOf(rows.delta, j));
    }
    WgmmaWait<0>();
    PinRegisters(ds);
#pragma unroll
    for (int j = 0; j < kBlockM / 8; ++j) {
      if constexpr (!Traits::kRowsEarly) delta[j] = RowsOf(rows.delta, j);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = 4 * j + 2 * r;
        const float factor = Traits::kScaleDs ? args.scale : 1;
        ds[i] = p[i] * fmaf(ds[i], factor, -delta[j].x);
        ds[i + 1] = p[i + 1] * fmaf(ds[i + 1], factor, -delta[j].y);
      }
    }
  }

  // Begins sum += scores^T rows: dV += P^T dO, or dK += dS^T Q.
  __device__ __forceinline__ void AddGradient(const ScoreOperand& scores, const QTile& rows,
                                              Gradient& sum) const {
    MatmulRegisterShared<Element, kHeadDim, kBlockM, Major::kMN>(sum, scores, rows.At(0),
                                                                 QTile::kBlockBytes, true);
    WgmmaCommit();
  }

  // Begins dQ^T = K^T dS^T of the n-th step.
  __device__ __forceinline__ void MultiplyDq(int n, Dq& dq) const {
    WgmmaFence();
    MatmulSharedShared<Element, kDqRows, Traits::kBlockN, Major::kMN, Major::kK>(
        dq, shared.k.At(0, Traits::kDqByColumns ? consumer : 0), KTile::kBlockBytes,
        shared.ds[n % 2].At(Traits::kDqByColumns ? 0 : consumer * kDqRows), DsTile::kBlockBytes,
        false);
    WgmmaCommit();
  }

  // Stores dQ^T in shared memory. A fence and GiveDq must follow.
  __device__ __forceinline__ void StoreDq(int n, const Dq& dq) const {
    const float factor = Traits::kScaleDs ? 1 : args.scale;
    const int buffer = n % 2;
    uint32_t to = dq_place;
    if constexpr (Traits::kDqBuffers > 1) {
      Wait(&shared.dq_empty[consumer + buffer * Traits::kConsumers], n / 2 % 2 ^ 1);
      to += buffer * static_cast<int>(Traits::kConsumers * sizeof(shared.dq[0]));
    } else {
      Wait(&shared.dq_empty[consumer], n % 2 ^ 1);
    }
#pragma unroll
    for (int j = 0; j < kDqRows / 8; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          StoreShared((to ^ (r * 32) ^ (c * 16)) + c * 128 + j * 8 * 128,
                      dq[4 * j + 2 * r + c] * factor);
        }
      }
    }
  }
  __device__ __forceinline__ void GiveDq(int n) const {
    Arrive(&shared.dq_full[consumer + (Traits::kDqTurns > 1 ? n % 2 * Traits::kConsumers : 0)]);
  }

  // Stores dS for both consumers. The buffer's last readers were the matmuls for dQ two steps ago.
  // Every warp had completed them before it arrived at the other buffer's barrier.
  __device__ __forceinline__ void StoreDs(int buffer, const ScoreOperand& ds) const {
#pragma unroll
    for (int k = 0; k < kBlockM / 16; ++k) {
      StoreMatrixTransposed(ds_place + buffer * DsTile::kBytes + k * 16 * kRowBytes, ds[4 * k],
                            ds[4 * k + 1], ds[4 * k + 2], ds[4 * k + 3]);
    }
  }

  __device__ __forceinline__ void Run();
  __device__ __forceinline__ void StoreGradients(Gradient& dk, Gradient& dv) const;
};

template <class Traits>
__device__ __forceinline__ void BackwardConsumer<Traits>::Run() {
  constexpr bool kOne = Traits::kOneBarrier;
  static_assert(Traits::kStages == 2, "");
  Gradient dk, dv;
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) dk[i] = dv[i] = 0;
  int step = 0;
  Wait(&shared.kv_full, 0);
  uint32_t v_operand[4 * Traits::kValueSteps];
  LoadOperand(shared.v, consumer * 64, v_operand);
  for (int left = StepsOf(args, shared.tiles); left > 0; --left) {
    const int stage = step % 2, parity = step / 2 % 2;
    const QTile& q = shared.q[stage];
    const QTile& dout = shared.dout[stage];
    const RowStatistics<Traits>& rows = shared.rows[stage];
    Scores p, ds;
    ScoreOperand p_operand, ds_operand;

    Wait(&shared.q_full[stage], parity);
    MultiplyScores(q, p);
    if constexpr (!kOne) Wait(&shared.dout_full[stage], parity);
    MultiplyScoreGradients(dout, v_operand, ds);
    if constexpr (!kOne) Wait(&shared.rows_full[stage], parity);
    Exponentiate(rows, p);
    ScoreGradients(rows, p, ds);
    // Every thread arrives for itself. One lane could do it for a warp, as with the tiles. But
    // compute-sanitizer's racecheck follows such ordinary reads thread by thread.
    if constexpr (!kOne) Arrive(&shared.rows_empty[stage]);
    PackOperand<Element>(ds, ds_operand);
    PackOperand<Element>(p, p_operand);
    PinRegisters(ds_operand);
    PinRegisters(p_operand);

    // Computes dQ of the step before. In the first step its input is undefined and its result is
    // dropped, because a branch around a matmul makes ptxas serialize all matmuls.
    Dq dq;
    if (step > 0) Wait(&shared.ds_full[stage ^ 1], (step - 1) / 2 % 2);
    MultiplyDq(step + 1, dq);
    AddGradient(p_operand, dout, dv);
    AddGradient(ds_operand, q, dk);
    WgmmaWait<2>();
    PinRegisters(dq);
    if (step > 0) StoreDq(step - 1, dq);
    StoreDs(stage, ds_operand);
    FenceProxyAsync();  // of dQ and dS
    if (step > 0) GiveDq(step - 1);
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
    Dq dq;
    Wait(&shared.ds_full[(step - 1) % 2], (step - 1) / 2 % 2);
    MultiplyDq(step - 1, dq);
    WgmmaWait<0>();
    PinRegisters(dq);
    StoreDq(step - 1, dq);
    FenceProxyAsync();
    GiveDq(step - 1);
  }
  StoreGradients(dk, dv);
}

// Stores dV and dK from the places of K, V, Q and dO, once no thread reads these any more.
template <class Traits>
__device__ __forceinline__ void BackwardConsumer<Traits>::StoreGradients(Gradient& dk,
                                                                         Gradient& dv) const {
  constexpr int kExchangeBarrier = 1;
  NamedBarrierSync(kExchangeBarrier, 2 * kWarpgroupSize);
  constexpr int kPartBytes = kWgmmaM * kHeadDim * sizeof(float);  // bytes of a consumer's dV or dK
  constexpr int kBoxBytes = kWgmmaM * kRowBytes;
  static_assert(2 * Traits::kConsumers * kPartBytes <= offsetof(BackwardShared<Traits>, ds), "");
  // Values that follow from threadIdx are computed again, so that they hold no registers during the
  // loop.
  const int thread = ThreadIndexAgain(), thread_lane = thread % kWarpSize;
  const int first = thread / kWarpSize % 4 * kWarpRows;
  const uint32_t staging = SharedAddress(&shared) + 2 * consumer * kPartBytes + first * kRowBytes;
  const int row = keys.row + consumer * kWgmmaM + first;
  WaitForScan<Traits>(args, shared);
  LeaveToRepair<Traits>(args, shared.suspicion, keys, row, cuda::kMissingDv, dv);
  LeaveToRepair<Traits>(args, shared.suspicion, keys, row, cuda::kMissingDk, dk);
  const GradientStep step =
      MakeGradientStep<Traits>(args, keys, consumer * 4 + thread / kWarpSize % 4);
  WaitForTurn(args, step);
  const int width = args.head_dim;  // also dV's
  StoreGradient<Element, kHeadDim>(args, args.dv, args.dv_sum, args.dv_out, width, staging,
                                   kBoxBytes, dv, 1, thread_lane, row, keys, step);
  StoreGradient<Element, kHeadDim>(args, args.dk, args.dk_sum, args.dk_out, width,
                                   staging + kPartBytes, kBoxBytes, dk,
                                   Traits::kScaleDs ? 1 : args.scale, thread_lane, row, keys, step);
  if (thread_lane == 0) PassTurn(args, step);
}

template <class Traits>
__global__ __launch_bounds__(Traits::kThreads,
                             1) void BackwardKernel(const __grid_constant__ BackwardArgs args) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<BackwardShared<Traits>*>(shared_bytes);
  const KeyTile keys = MakeKeyTile<Traits>(args, blockIdx.x);
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
    InitBarrier(&shared.keys_scanned, 2);
    FenceBarrierInit();
    ArriveExpectBytes(&shared.kv_full, 2 * Tile<Traits::kBlockN, Traits::kHeadDim>::kBytes);
    LoadTile(shared.k, args.k, &shared.kv_full, keys.row, keys.kv_head, keys.batch);
    LoadTile(shared.v, args.v, &shared.kv_full, keys.row, keys.kv_head, keys.batch);
  }
  if (threadIdx.x == 0) {
    shared.tiles = QueryTilesOf<Traits>(args, keys);
    shared.suspicion = {0, 0};
  }
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
    if (warp >= 2) {
      ScanKeys<Traits>(args, shared, keys, warp - 2);
      if (first_lane) BackwardReduceDq<Traits>(args, shared, keys, warp - 2);
    }
  } else {
    IncreaseRegisters<Traits::kConsumerRegisters>();
    BackwardConsumer<Traits>(args, shared, keys, warpgroup - 1).Run();
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
