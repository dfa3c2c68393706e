// The backward of wide heads, and of heads whose v has another width. At a head_dim of 256, dK and
// dV of 64 keys would take 256 registers of each thread. So there are two passes over the tiles of
// backward.cu:
//
//   dV      S^T = K Q^T, P^T = exp2(c S^T - lse), dV += P^T dO
//   dK, dQ  S^T and P^T again, dP^T = V dO^T, dS^T = P^T (dP^T - delta),
//           dK += dS^T Q, dQ = dS K                                   added in global memory
//
// That makes six matmuls instead of five. In the first pass the consumers need nothing from each
// other. The exponentials of one run in parallel with the matmuls of the other. In the second pass
// they exchange dS through shared memory and divide dQ by columns of the head.
//
// Up to a head_dim of 192 (kLateDq) dQ is computed one step late, as in backward.cu. Consumers keep
// V, the A operand of every dP^T, in registers, because shared-memory bandwidth limits this pass.
// dQ takes V's place in shared memory. The producer warpgroup is the same as in backward.cu.
//
// Compiled once for every variant in variants.h.
#include <cstddef>

#include "burst/kernels/gpu/sm90/backward_wide.cuh"

namespace burst {
namespace sm90 {
namespace {

// Computes dV of the consumer's 64 keys.
template <class Traits>
__device__ __forceinline__ void ConsumeDv(const BackwardArgs& args, WideShared<Traits>& shared,
                                          const KeyTile& keys, int consumer,
                                          float (&dv)[Traits::kValueDim / 2]) {
  using Element = typename Traits::Element;
  constexpr int kBlockM = Traits::kBlockM;
  constexpr int kHeadDim = Traits::kHeadDim, kValueDim = Traits::kValueDim;
  using QTile = Tile<kBlockM, kHeadDim>;
  using DoutTile = Tile<kBlockM, kValueDim>;
  using KTile = Tile<Traits::kBlockN, kHeadDim>;
  const int lane = threadIdx.x % kWarpSize, warp = WarpUniform(threadIdx.x / kWarpSize % 4);
  const int key = keys.row + consumer * 64 + warp * 16 + lane / 4;  // and key + 8
  const float scale_log2 = args.scale * kLog2E;
  RingSlot<Traits::kStages> q_slot, dout_slot;
  float p[kBlockM / 2];  // P^T: [64, kBlockM]
  uint32_t p_operand[kBlockM / 4];

  const auto issue_s = [&] {  // S^T = K Q^T
    Wait(&shared.q_full[q_slot.stage], q_slot.parity);
    WgmmaFence();
    MatmulSharedShared<Element, kBlockM, kHeadDim>(p, shared.k.At(consumer * 64),
                                                   KTile::kBlockBytes, shared.q[q_slot.stage].At(0),
                                                   QTile::kBlockBytes, false);
    WgmmaCommit();
  };
  const auto issue_dv = [&] {  // dV += P^T dO
    Wait(&shared.dout_full[dout_slot.stage], dout_slot.parity);
    PinRegisters(p_operand);
    WgmmaFence();
    MatmulRegisterShared<Element, kValueDim, kBlockM, Major::kMN>(
        dv, p_operand, shared.dout[dout_slot.stage].At(0), DoutTile::kBlockBytes, true);
    WgmmaCommit();
  };
  const auto exponentiate = [&] {  // once S^T is there
    const RowStatistics<Traits>& rows = shared.rows[q_slot.stage];
    PinRegisters(p);
    ArriveWarp(&shared.q_empty[q_slot.stage]);
    Wait(&shared.rows_full[q_slot.stage], q_slot.parity);
    Exponentiate<Traits>(args, keys, key, scale_log2, IsWhole<Traits>(args, keys, rows), rows, p);
    Arrive(&shared.rows_empty[q_slot.stage]);  // every thread for itself, as in backward.cu
    q_slot.Advance();
  };
  const auto finish_dv = [&] {
    WgmmaWait<0>();
    PinRegisters(dv);
    ArriveWarp(&shared.dout_empty[dout_slot.stage]);
    dout_slot.Advance();
  };

  const int tiles = StepsOf(args, shared.tiles);
  if (tiles <= 0) return;
  issue_s();
  WgmmaWait<0>();
  exponentiate();
  PackOperand<Element>(p, p_operand);
  // The exponentials of a tile run in parallel with the matmul of the tile before.
#pragma unroll 1
  for (int tile = 1; tile < tiles; ++tile) {
    issue_s();
    issue_dv();
    WgmmaWait<1>();
    exponentiate();
    PinRegisters(p);  // the exponentials stay on this side of the wait
    finish_dv();
    PackOperand<Element>(p, p_operand);
  }
  issue_dv();
  finish_dv();
}

// Computes dK of the consumer's 64 keys, and its columns of dQ, at a head_dim of 256.
template <class Traits>
__device__ __forceinline__ void ConsumeDk(const BackwardArgs& args, WideShared<Traits>& shared,
                                          const KeyTile& keys, int consumer,
                                          float (&dk)[Traits::kHeadDim / 2]) {
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  using Element = typename Traits::Element;
  constexpr int kHeadDim = Traits::kHeadDim, kValueDim = Traits::kValueDim;
  static_assert(DqParts<Traits>::kSecond == 64, "");
  using QTile = Tile<kBlockM, kHeadDim>;
  using DoutTile = Tile<kBlockM, kValueDim>;
  using KTile = Tile<kBlockN, kHeadDim>;
  using VTile = Tile<kBlockN, kValueDim>;
  using DsTile = Tile<kBlockM, kBlockN>;
  constexpr int kExchangeBarrier = 1, kReadBarrier = 2;
  const int lane = threadIdx.x % kWarpSize, warp = WarpUniform(threadIdx.x / kWarpSize % 4);
  const int key = keys.row + consumer * 64 + warp * 16 + lane / 4;  // and key + 8
  const float scale_log2 = args.scale * kLog2E;
  const uint32_t ds_place = DsPlace(shared, consumer, warp, lane);
  const uint32_t dq_place = DqPlace(shared, consumer, warp, lane);
  RingSlot<Traits::kStages> slot;
  int dq_parity = 1;

  const auto store_dq = [&](const float(&dq)[32]) {  // two boxes
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      Wait(&shared.dq_empty[consumer], dq_parity);
      dq_parity ^= 1;
      StoreDqBox<Traits>(args, dq_place, 0, dq + 16 * box);
      FenceProxyAsync();
      Arrive(&shared.dq_full[consumer]);
    }
  };

  for (int left = StepsOf(args, shared.tiles); left > 0; --left) {
    const QTile& q = shared.q[slot.stage];
    const RowStatistics<Traits>& rows = shared.rows[slot.stage];
    float p[kBlockM / 2], ds[kBlockM / 2];  // P^T, dS^T: [64, kBlockM]
    uint32_t ds_operand[kBlockM / 4];
    Wait(&shared.dout_full[slot.stage], slot.parity);
    WgmmaFence();
    MatmulSharedShared<Element, kBlockM, kValueDim>(
        ds, shared.v.At(consumer * 64), VTile::kBlockBytes, shared.dout[slot.stage].At(0),
        DoutTile::kBlockBytes,
        false);  // dP^T = V dO^T
    WgmmaCommit();
    Wait(&shared.q_full[slot.stage], slot.parity);
    WgmmaFence();
    MatmulSharedShared<Element, kBlockM, kHeadDim>(p, shared.k.At(consumer * 64),
                                                   KTile::kBlockBytes, q.At(0), QTile::kBlockBytes,
                                                   false);  // S^T = K Q^T
    WgmmaCommit();
    Wait(&shared.rows_full[slot.stage], slot.parity);
    const bool whole = IsWhole<Traits>(args, keys, rows);
    WgmmaWait<1>();
    PinRegisters(ds);
    ArriveWarp(&shared.dout_empty[slot.stage]);
    WgmmaWait<0>();
    PinRegisters(p);
    Exponentiate<Traits>(args, keys, key, scale_log2, whole, rows, p);
    ScoreGradients<Traits>(args, rows, lane, p, ds);
    Arrive(&shared.rows_empty[slot.stage]);
    PackOperand<Element>(ds, ds_operand);
    NamedBarrierSync(kReadBarrier, 2 * kWarpgroupSize);  // for the dS of the last tile
    StoreDs<Traits>(ds_place, ds_operand);
    FenceProxyAsync();
    NamedBarrierSync(kExchangeBarrier, 2 * kWarpgroupSize);

    // dQ = dS K, dK += dS^T Q
    float dq[32], second_dq[32];
    PinRegisters(ds_operand);
    WgmmaFence();
    MatmulSharedShared<Element, 64, kBlockN, Major::kK, Major::kMN>(
        dq, shared.ds[0].At(0), DsTile::kBlockBytes, shared.k.At(0, consumer), KTile::kBlockBytes,
        false);
    WgmmaCommit();
    MatmulRegisterShared<Element, kHeadDim, kBlockM, Major::kMN>(dk, ds_operand, q.At(0),
                                                                 QTile::kBlockBytes, true);
    WgmmaCommit();
    WgmmaWait<1>();
    PinRegisters(dq);
    store_dq(dq);
    WgmmaFence();
    MatmulSharedShared<Element, 64, kBlockN, Major::kK, Major::kMN>(
        second_dq, shared.ds[0].At(0), DsTile::kBlockBytes, shared.k.At(0, 2 + consumer),
        KTile::kBlockBytes, false);
    WgmmaCommit();
    WgmmaWait<1>();
    PinRegisters(dk);
    ArriveWarp(&shared.q_empty[slot.stage]);
    WgmmaWait<0>();
    PinRegisters(second_dq);
    store_dq(second_dq);
    slot.Advance();
  }
}

// Computes dK and dQ as ConsumeDk does, with dQ one step late and V in registers.
template <class Traits>
__device__ __forceinline__ void ConsumeDkLate(const BackwardArgs& args, WideShared<Traits>& shared,
                                              const KeyTile& keys, int consumer,
                                              float (&dk)[Traits::kHeadDim / 2]) {
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  using Element = typename Traits::Element;
  constexpr int kHeadDim = Traits::kHeadDim, kValueDim = Traits::kValueDim;
  constexpr int kSecond = DqParts<Traits>::kSecond;
  using QTile = Tile<kBlockM, kHeadDim>;
  using DoutTile = Tile<kBlockM, kValueDim>;
  using KTile = Tile<kBlockN, kHeadDim>;
  using DsTile = Tile<kBlockM, kBlockN>;
  constexpr int kReadBarrier = 2;
  const int lane = threadIdx.x % kWarpSize, warp = WarpUniform(threadIdx.x / kWarpSize % 4);
  const int key = keys.row + consumer * 64 + warp * 16 + lane / 4;  // and key + 8
  const float scale_log2 = args.scale * kLog2E;
  const uint32_t ds_place = DsPlace(shared, consumer, warp, lane);
  const uint32_t dq_place = DqPlace(shared, consumer, warp, lane);
  uint32_t v_operand[kValueDim / 4];
  LoadOperand(shared.v, consumer * 64, v_operand);
  NamedBarrierSync(kReadBarrier, 2 * kWarpgroupSize);  // from here on V's place is dQ's
  float first_dq[32], second_dq[kSecond / 2];
  int step = 0;

  const auto multiply_dq = [&](int n) {  // dQ = dS K of the n-th step
    const DsTile& ds = shared.ds[n % 2];
    WgmmaFence();
    MatmulSharedShared<Element, 64, kBlockN, Major::kK, Major::kMN>(
        first_dq, ds.At(0), DsTile::kBlockBytes, shared.k.At(0, consumer), KTile::kBlockBytes,
        false);
    MatmulSharedShared<Element, kSecond, kBlockN, Major::kK, Major::kMN>(
        second_dq, ds.At(0), DsTile::kBlockBytes, shared.k.At(0, 2) + consumer * kSecond,
        KTile::kBlockBytes, false);
    WgmmaCommit();
  };
  const auto store_dq = [&](int n) {  // a fence and an arrival must follow
    PinRegisters(first_dq);
    PinRegisters(second_dq);
    if (n == 0) WaitForScan<Traits>(args, shared);  // of V, which lay here
    Wait(&shared.dq_empty[consumer], n % 2 ^ 1);
    StoreDqBox<Traits>(args, dq_place, 0, first_dq);
    StoreDqBox<Traits>(args, dq_place, 1, first_dq + 16);
    StoreDqBox<Traits>(args, dq_place, 2, second_dq);
  };

#pragma unroll 1
  for (int left = StepsOf(args, shared.tiles); left > 0; --left) {
    const int stage = step % 2;
    const QTile& q = shared.q[stage];
    const RowStatistics<Traits>& rows = shared.rows[stage];
    float p[kBlockM / 2], ds[kBlockM / 2];  // P^T, dS^T: [64, kBlockM]
    uint32_t ds_operand[kBlockM / 4];
    Wait(&shared.q_full[stage], step / 2 % 2);
    WgmmaFence();
    MatmulSharedShared<Element, kBlockM, kHeadDim>(p, shared.k.At(consumer * 64),
                                                   KTile::kBlockBytes, q.At(0), QTile::kBlockBytes,
                                                   false);  // S^T = K Q^T
    WgmmaCommit();
    MatmulRegisterShared<Element, kBlockM, kValueDim, Major::kK>(
        ds, v_operand, shared.dout[stage].At(0), DoutTile::kBlockBytes, false);  // dP^T = V dO^T
    WgmmaCommit();
    WgmmaWait<1>();
    PinRegisters(p);
    Exponentiate<Traits>(args, keys, key, scale_log2, IsWhole<Traits>(args, keys, rows), rows, p);
    PinRegisters(p);  // the exponentials stay on this side of the wait
    WgmmaWait<0>();
    PinRegisters(ds);
    ScoreGradients<Traits>(args, rows, lane, p, ds);
    PackOperand<Element>(ds, ds_operand);
    PinRegisters(ds_operand);

    // Computes dQ of the step before; in the first step its result is dropped, as in backward.cu.
    // Then computes dK += dS^T Q.
    if (step > 0) Wait(&shared.ds_full[stage ^ 1], (step - 1) / 2 % 2);
    multiply_dq(step + 1);
    MatmulRegisterShared<Element, kHeadDim, kBlockM, Major::kMN>(dk, ds_operand, q.At(0),
                                                                 QTile::kBlockBytes, true);
    WgmmaCommit();
    WgmmaWait<1>();
    PinRegisters(first_dq);
    PinRegisters(second_dq);
    if (step > 0) store_dq(step - 1);
    // Stores dS for both consumers. The last readers of this buffer are done, as in backward.cu.
    StoreDs<Traits>(ds_place + stage * DsTile::kBytes, ds_operand);
    FenceProxyAsync();  // of dQ and dS
    if (step > 0) Arrive(&shared.dq_full[consumer]);
    ArriveWarp(&shared.ds_full[stage]);
    WgmmaWait<0>();
    PinRegisters(dk);
    Arrive(&shared.q_empty[stage]);
    ++step;
  }
  if (step > 0) {
    Wait(&shared.ds_full[(step - 1) % 2], (step - 1) / 2 % 2);
    multiply_dq(step - 1);
    WgmmaWait<0>();
    store_dq(step - 1);
    FenceProxyAsync();
    Arrive(&shared.dq_full[consumer]);
  }
}

template <class Traits>
__global__ __launch_bounds__(Traits::kThreads,
                             1) void WideBackwardKernel(const __grid_constant__ BackwardArgs args) {
  using KTile = Tile<Traits::kBlockN, Traits::kHeadDim>;
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<WideShared<Traits>*>(shared_bytes);
  const KeyTile keys = MakeKeyTile<Traits>(args);
  if (threadIdx.x == 0) {
    InitBarrier(&shared.kv_full, 1);
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      constexpr bool kLate = Traits::kLateDq;
      InitBarrier(&shared.q_full[stage], kLate ? 1 + kWarpSize : 1);
      InitBarrier(&shared.q_empty[stage],
                  kLate ? Traits::kConsumers * kWarpgroupSize : Traits::kConsumerWarps);
      InitBarrier(&shared.dout_full[stage], 1);
      InitBarrier(&shared.dout_empty[stage], Traits::kConsumerWarps);
      InitBarrier(&shared.rows_full[stage], kWarpSize);
      InitBarrier(&shared.rows_empty[stage], Traits::kConsumers * kWarpgroupSize);
    }
    for (int consumer = 0; consumer < Traits::kConsumers; ++consumer) {
      InitBarrier(&shared.dq_full[consumer], kWarpgroupSize);
      InitBarrier(&shared.dq_empty[consumer], 1);
    }
    for (Barrier& full : shared.ds_full) InitBarrier(&full, Traits::kConsumerWarps);
    InitBarrier(&shared.keys_scanned, 2);
    FenceBarrierInit();
    ArriveExpectBytes(&shared.kv_full, KTile::kBytes + (Traits::kDk ? sizeof(shared.v) : 0));
    LoadTile(shared.k, args.k, &shared.kv_full, keys.row, keys.kv_head, keys.batch);
    if constexpr (Traits::kDk) {
      LoadTile(shared.v, args.v, &shared.kv_full, keys.row, keys.kv_head, keys.batch);
    }
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
    if (warp == 0 && first_lane) WideLoad<Traits>(args, shared, keys);
    if (warp == 1) {
      constexpr bool kLate = Traits::kLateDq;
      BackwardLoadRows<Traits>(args, shared, keys, kLate ? shared.q_full : shared.rows_full,
                               kLate ? shared.q_empty : shared.rows_empty,
                               Traits::kScaleDs ? args.scale : 1);
    }
    if constexpr (Traits::kDk) {
      if (warp >= 2) {
        ScanKeys<Traits>(args, shared, keys, warp - 2);
        if (first_lane) WideReduceDq<Traits>(args, shared, keys, warp - 2);
      }
    }
  } else {
    IncreaseRegisters<Traits::kConsumerRegisters>();
    const int consumer = warpgroup - 1;
    constexpr int kSumDim = Traits::kSumDim;
    float sum[kSumDim / 2];  // dV or dK: [64, kSumDim]
#pragma unroll
    for (int i = 0; i < kSumDim / 2; ++i) sum[i] = 0;
    Wait(&shared.kv_full, 0);
    if constexpr (Traits::kLateDq) {
      ConsumeDkLate<Traits>(args, shared, keys, consumer, sum);
    } else if constexpr (Traits::kDk) {
      ConsumeDk<Traits>(args, shared, keys, consumer, sum);
    } else {
      ConsumeDv<Traits>(args, shared, keys, consumer, sum);
    }
    // The sum is stored from the places of K, Q and dO, once no thread reads these any more.
    NamedBarrierSync(1, 2 * kWarpgroupSize);
    constexpr int kPartBytes = kWgmmaM * kSumDim * sizeof(float);  // of a consumer
    static_assert(Traits::kConsumers * kPartBytes <=
                      offsetof(WideShared<Traits>, ds) - offsetof(WideShared<Traits>, k),
                  "");
    const int thread = ThreadIndexAgain();
    const int first = thread / kWarpSize % 4 * kWarpRows;
    const int row = keys.row + consumer * kWgmmaM + first;
    if constexpr (Traits::kDk) WaitForScan<Traits>(args, shared);
    LeaveToRepair<Traits>(args, shared.suspicion, keys, row,
                          Traits::kDk ? cuda::kMissingDk : cuda::kMissingDv, sum);
    const GradientStep step =
        MakeGradientStep<Traits>(args, keys, consumer * 4 + thread / kWarpSize % 4);
    WaitForTurn(args, step);
    StoreGradient<typename Traits::Element, kSumDim>(
        args, Traits::kDk ? args.dk : args.dv, Traits::kDk ? args.dk_sum : args.dv_sum,
        Traits::kDk ? args.dk_out : args.dv_out, Traits::kDk ? args.head_dim : args.value_dim,
        SharedAddress(&shared.k) + consumer * kPartBytes + first * kRowBytes, kWgmmaM * kRowBytes,
        sum, Traits::kDk && !Traits::kScaleDs ? args.scale : 1, thread % kWarpSize, row, keys,
        step);
    if (thread % kWarpSize == 0) PassTurn(args, step);
  }
}

}  // namespace

template <class Traits>
void LaunchWideBackward(const FlashBackwardParams& params, const BackwardScratch& scratch) {
  BackwardArgs args = MakeBackwardArgs<Traits>(params, scratch, Traits::kBlockM);
  static_assert(sizeof(WideShared<Traits>) <= 227 * 1024, "more than a thread block can have");
  if (!Traits::kDk) {
    args.order.reversed_groups = 0;  // dV has no order of additions
    LaunchPrepare<Traits>(args);     // for both passes
  } else if (args.dkv_additions != nullptr) {
    args.dkv_additions += HeadSplitsOf(params).counters / 2;
  }
  LaunchOverKeys<Traits>(WideBackwardKernel<Traits>, sizeof(WideShared<Traits>), args);
}

template void LaunchWideBackward<Variants<BFloat16>::BURST_VARIANT>(const FlashBackwardParams&,
                                                                    const BackwardScratch&);
template void LaunchWideBackward<Variants<Float16>::BURST_VARIANT>(const FlashBackwardParams&,
                                                                   const BackwardScratch&);

}  // namespace sm90
}  // namespace burst
