// The backward of wide heads. At a head_dim of 256, dK and dV of 64 keys would take 256 registers
// of each thread. So there are two passes over the tiles of backward.cu:
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
// If v has at most 128 columns (kBoth), dV and dK fit, and one pass makes five matmuls. They leave
// 80 registers, so P is kept in 16 bits, and the matmuls of a consumer do not overlap: S^T, dP^T,
// then dV and dK, then dQ. The other consumer's matmuls fill the gaps.
//
// Compiled once for every variant in variants.h.
#include <cstddef>

#include "burst/kernels/gpu/sm90/backward_wide.cuh"

namespace burst {
namespace sm90 {

// Computes dV of the consumer's 64 keys.
template <class Traits>
__device__ __forceinline__ void WideConsumer<Traits>::SumDv(Dv& dv) const {
  RingSlot<Traits::kStages> q_slot, dout_slot;
  Scores p;  // P^T
  ScoreOperand p_operand;

  const auto issue_s = [&] {  // S^T = K Q^T
    Wait(&shared.q_full[q_slot.stage], q_slot.parity);
    MultiplyScores(shared.q[q_slot.stage], p);
  };
  const auto issue_dv = [&] {  // dV += P^T dO
    Wait(&shared.dout_full[dout_slot.stage], dout_slot.parity);
    PinRegisters(p_operand);
    WgmmaFence();
    AddGradient(p_operand, shared.dout[dout_slot.stage], dv);
  };
  const auto exponentiate = [&] {  // once S^T is there
    const RowStatistics<Traits>& rows = shared.rows[q_slot.stage];
    PinRegisters(p);
    ArriveWarp(&shared.q_empty[q_slot.stage]);
    Wait(&shared.rows_full[q_slot.stage], q_slot.parity);
    Exponentiate(rows, IsWhole<Traits>(args, keys, rows), p);
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
__device__ __forceinline__ void WideConsumer<Traits>::SumDk(Dk& dk) const {
  static_assert(kSecond == 64, "");
  constexpr int kExchangeBarrier = 1, kReadBarrier = 2;
  RingSlot<Traits::kStages> slot;
  int dq_parity = 1;
  const auto store_dq = [&](const FirstDq& dq) {  // two boxes
#pragma unroll
    for (int box = 0; box < 2; ++box) {
      Wait(&shared.dq_empty[consumer], dq_parity);
      dq_parity ^= 1;
      StoreDqBox(0, dq + 16 * box);
      FenceProxyAsync();
      Arrive(&shared.dq_full[consumer]);
    }
  };

  for (int left = StepsOf(args, shared.tiles); left > 0; --left) {
    const QTile& q = shared.q[slot.stage];
    const RowStatistics<Traits>& rows = shared.rows[slot.stage];
    Scores p, ds;
    ScoreOperand ds_operand;
    Wait(&shared.dout_full[slot.stage], slot.parity);
    MultiplyScoreGradients(shared.dout[slot.stage], ds);
    Wait(&shared.q_full[slot.stage], slot.parity);
    MultiplyScores(q, p);
    Wait(&shared.rows_full[slot.stage], slot.parity);
    const bool whole = IsWhole<Traits>(args, keys, rows);
    WgmmaWait<1>();
    PinRegisters(ds);
    ArriveWarp(&shared.dout_empty[slot.stage]);
    WgmmaWait<0>();
    PinRegisters(p);
    Exponentiate(rows, whole, p);
    ScoreGradients(rows, p, ds);
    Arrive(&shared.rows_empty[slot.stage]);
    PackOperand<Element>(ds, ds_operand);
    NamedBarrierSync(kReadBarrier, 2 * kWarpgroupSize);  // for the dS of the last tile
    StoreDs(0, ds_operand);
    FenceProxyAsync();
    NamedBarrierSync(kExchangeBarrier, 2 * kWarpgroupSize);

    // dQ = dS K, dK += dS^T Q
    FirstDq first_dq;
    SecondDq second_dq;
    PinRegisters(ds_operand);
    WgmmaFence();
    MultiplyDq(shared.ds[0], shared.k.At(0, consumer), first_dq);
    WgmmaCommit();
    AddGradient(ds_operand, q, dk);
    WgmmaWait<1>();
    PinRegisters(first_dq);
    store_dq(first_dq);
    WgmmaFence();
    MultiplyDq(shared.ds[0], shared.k.At(0, 2 + consumer), second_dq);
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

// Computes dK and dQ as SumDk does, with dQ one step late and V in registers.
template <class Traits>
__device__ __forceinline__ void WideConsumer<Traits>::SumDkLate(Dk& dk) const {
  constexpr int kReadBarrier = 2;
  ValueOperand v_operand;
  LoadOperand(shared.v, consumer * 64, v_operand);
  NamedBarrierSync(kReadBarrier, 2 * kWarpgroupSize);  // from here on V's place is dQ's
  FirstDq first_dq;
  SecondDq second_dq;
  int step = 0;

#pragma unroll 1
  for (int left = StepsOf(args, shared.tiles); left > 0; --left) {
    const int stage = step % 2;
    const QTile& q = shared.q[stage];
    const RowStatistics<Traits>& rows = shared.rows[stage];
    Scores p, ds;
    ScoreOperand ds_operand;
    Wait(&shared.q_full[stage], step / 2 % 2);
    MultiplyScores(q, p);
    MultiplyScoreGradients(v_operand, shared.dout[stage], ds);
    WgmmaWait<1>();
    PinRegisters(p);
    Exponentiate(rows, IsWhole<Traits>(args, keys, rows), p);
    PinRegisters(p);  // the exponentials stay on this side of the wait
    WgmmaWait<0>();
    PinRegisters(ds);
    ScoreGradients(rows, p, ds);
    PackOperand<Element>(ds, ds_operand);
    PinRegisters(ds_operand);

    // Computes dQ of the step before; in the first step its result is dropped, as in backward.cu.
    // Then computes dK += dS^T Q.
    if (step > 0) WaitForDs(step - 1);
    MultiplyLateDq(step + 1, first_dq, second_dq);
    AddGradient(ds_operand, q, dk);
    WgmmaWait<1>();
    PinRegisters(first_dq);
    PinRegisters(second_dq);
    if (step > 0) StoreLateDq(step - 1, first_dq, second_dq);
    // Stores dS for both consumers. The last readers of this buffer are done, as in backward.cu.
    StoreDs(stage, ds_operand);
    FenceProxyAsync();  // of dQ and dS
    if (step > 0) Arrive(&shared.dq_full[consumer]);
    ArriveWarp(&shared.ds_full[stage]);
    WgmmaWait<0>();
    PinRegisters(dk);
    Arrive(&shared.q_empty[stage]);
    ++step;
  }
  if (step > 0) {
    WaitForDs(step - 1);
    MultiplyLateDq(step - 1, first_dq, second_dq);
    WgmmaWait<0>();
    StoreLateDq(step - 1, first_dq, second_dq);
    FenceProxyAsync();
    Arrive(&shared.dq_full[consumer]);
  }
}

// Computes dK and dV of the consumer's 64 keys, and its columns of dQ one step late.
template <class Traits>
__device__ __forceinline__ void WideConsumer<Traits>::SumBoth(Dk& dk, Dv& dv) const {
  int step = 0;
  const auto add_dq = [&](int n) {
    FirstDq first_dq;
    SecondDq second_dq;
    if (step > 0) WaitForDs(n);
    MultiplyLateDq(n, first_dq, second_dq);
    WgmmaWait<0>();
    if (step == 0) return;
    StoreLateDq(n, first_dq, second_dq);
    FenceProxyAsync();
    Arrive(&shared.dq_full[consumer]);
  };

#pragma unroll 1
  for (int left = StepsOf(args, shared.tiles); left > 0; --left) {
    const int stage = step % 2;
    const QTile& q = shared.q[stage];
    const DoutTile& dout = shared.dout[0];
    const RowStatistics<Traits>& rows = shared.rows[stage];
    // Adds dQ of the step before; in the first step its result is dropped, as in backward.cu.
    add_dq(step > 0 ? step - 1 : 1);

    Scores p, ds;
    ScoreOperand p_half, ds_operand;  // p_half: P in float16
    Wait(&shared.q_full[stage], step / 2 % 2);
    const bool whole = IsWhole<Traits>(args, keys, rows);
    MultiplyScores(q, p);
    WgmmaWait<0>();
    PinRegisters(p);
    Exponentiate(rows, whole, p);
    PackOperand<Float16>(p, p_half);
    PinRegisters(p_half);
    Wait(&shared.dout_full[0], step % 2);
    MultiplyScoreGradients(dout, ds);
    WgmmaWait<0>();
    PinRegisters(ds);
    ScoreGradients(rows, p_half, ds);
    PackOperand<Element>(ds, ds_operand);
    // Stores dS for both consumers. The other consumer arrived for the step before after its last
    // matmul that reads this buffer, and this consumer has waited for that.
    StoreDs(stage, ds_operand);
    FenceProxyAsync();
    ArriveWarp(&shared.ds_full[stage]);
    ScoreOperand& p_operand = p_half;
    if constexpr (!std::is_same_v<Element, Float16>) {
#pragma unroll
      for (uint32_t& pair : p_operand) {
        const float2 x = UnpackHalf(pair);
        pair = Pack<Element>(x.x, x.y);
      }
    }
    PinRegisters(ds_operand);
    PinRegisters(p_operand);
    WgmmaFence();
    AddGradient(p_operand, dout, dv);
    AddGradient(ds_operand, q, dk);
    WgmmaWait<1>();
    PinRegisters(dv);
    ArriveWarp(&shared.dout_empty[0]);
    WgmmaWait<0>();
    PinRegisters(dk);
    Arrive(&shared.q_empty[stage]);
    ++step;
  }
  if (step > 0) add_dq(step - 1);
}

// Stores what the pass has summed, dV, dK or both, from the places of its operands, once no thread
// reads these any more.
template <class Traits>
__device__ __forceinline__ void WideConsumer<Traits>::StoreSums(Dk& dk, Dv& dv) const {
  NamedBarrierSync(1, 2 * kWarpgroupSize);
  constexpr int kDvBytes = Traits::kDv ? sizeof(Dv) * kWarpgroupSize : 0;  // of a consumer
  constexpr int kPartBytes = kDvBytes + (Traits::kDk ? sizeof(Dk) * kWarpgroupSize : 0);
  // The last dQ may still lie in V's place.
  constexpr int kFree = Traits::kDqInV ? offsetof(WideShared<Traits>, k) : 0;
  static_assert(Traits::kConsumers * kPartBytes <= offsetof(WideShared<Traits>, dq) - kFree, "");
  // Values that follow from the indices of the thread and its block are computed again, as in
  // backward.cu.
  const KeyTile own = MakeKeyTile<Traits>(args, BlockIndexAgain());
  const int thread = ThreadIndexAgain(), thread_lane = thread % kWarpSize;
  const int first = thread / kWarpSize % 4 * kWarpRows;
  const int row = own.row + consumer * kWgmmaM + first;
  constexpr int kBoxBytes = kWgmmaM * kRowBytes;
  const uint32_t staging =
      SharedAddress(&shared) + kFree + consumer * kPartBytes + first * kRowBytes;
  if constexpr (Traits::kDk) WaitForScan<Traits>(args, shared);
  if constexpr (Traits::kDv) {
    LeaveToRepair<Traits>(args, shared.suspicion, own, row, cuda::kMissingDv, dv);
  }
  if constexpr (Traits::kDk) {
    LeaveToRepair<Traits>(args, shared.suspicion, own, row, cuda::kMissingDk, dk);
  }
  const GradientStep step =
      MakeGradientStep<Traits>(args, own, consumer * 4 + thread / kWarpSize % 4);
  WaitForTurn(args, step);
  if constexpr (Traits::kDv) {
    StoreGradient<Element, kValueDim>(args, args.dv, args.dv_sum, args.dv_out, args.value_dim,
                                      staging, kBoxBytes, dv, 1.f / (1 << Traits::kScaleBits),
                                      thread_lane, row, own, step);
  }
  if constexpr (Traits::kDk) {
    StoreGradient<Element, kHeadDim>(
        args, args.dk, args.dk_sum, args.dk_out, args.head_dim, staging + kDvBytes, kBoxBytes, dk,
        Traits::kScaleDs ? 1 : args.scale, thread_lane, row, own, step);
  }
  if (thread_lane == 0) PassTurn(args, step);
}

namespace {

// Initializes the barriers, and begins to load K, and V for dK. One thread calls it.
template <class Traits>
__device__ __forceinline__ void WideBegin(const BackwardArgs& args, WideShared<Traits>& shared,
                                          const KeyTile& keys) {
  constexpr bool kLate = Traits::kLateDq;
  constexpr int kConsumerThreads = Traits::kConsumers * kWarpgroupSize;
  InitBarrier(&shared.kv_full, 1);
  for (int stage = 0; stage < Traits::kStages; ++stage) {
    InitBarrier(&shared.q_full[stage], kLate ? 1 + kWarpSize : 1);
    InitBarrier(&shared.q_empty[stage], kLate ? kConsumerThreads : Traits::kConsumerWarps);
    InitBarrier(&shared.dout_full[stage], 1);
    InitBarrier(&shared.dout_empty[stage], Traits::kConsumerWarps);
    InitBarrier(&shared.rows_full[stage], kWarpSize);
    InitBarrier(&shared.rows_empty[stage], kConsumerThreads);
  }
  for (int consumer = 0; consumer < Traits::kConsumers; ++consumer) {
    InitBarrier(&shared.dq_full[consumer], kWarpgroupSize);
    InitBarrier(&shared.dq_empty[consumer], 1);
  }
  for (Barrier& full : shared.dq_step_full) InitBarrier(&full, 1);
  for (Barrier& full : shared.ds_full) InitBarrier(&full, Traits::kConsumerWarps);
  InitBarrier(&shared.keys_scanned, 2);
  FenceBarrierInit();
  ArriveExpectBytes(&shared.kv_full, Tile<Traits::kBlockN, Traits::kHeadDim>::kBytes +
                                         (Traits::kDk ? sizeof(shared.v) : 0));
  LoadTile(shared.k, args.k, &shared.kv_full, keys.row, keys.kv_head, keys.batch);
  if constexpr (Traits::kDk) {
    LoadTile(shared.v, args.v, &shared.kv_full, keys.row, keys.kv_head, keys.batch);
  }
}

// The producer warpgroup: its warps load Q and dO, load the rows' data, and add dQ.
template <class Traits>
__device__ __forceinline__ void WideProduce(const BackwardArgs& args, WideShared<Traits>& shared,
                                            const KeyTile& keys) {
  constexpr bool kLate = Traits::kLateDq;
  const int warp = threadIdx.x / kWarpSize;
  const bool first_lane = threadIdx.x % kWarpSize == 0;
  if (warp == 0 && first_lane) WideLoad<Traits>(args, shared, keys);
  if (warp == 1) {
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
}

// A consumer warpgroup: sums dV and dK of its keys, as the pass demands, and stores them.
template <class Traits>
__device__ __forceinline__ void WideConsume(const BackwardArgs& args, WideShared<Traits>& shared,
                                            const KeyTile& keys, int index) {
  typename WideConsumer<Traits>::Dk dk;
  typename WideConsumer<Traits>::Dv dv;
#pragma unroll
  for (int i = 0; i < Traits::kHeadDim / 2; ++i) dk[i] = 0;
#pragma unroll
  for (int i = 0; i < Traits::kValueDim / 2; ++i) dv[i] = 0;
  Wait(&shared.kv_full, 0);
  const WideConsumer<Traits> consumer(args, shared, keys, index);
  if constexpr (Traits::kBoth) {
    consumer.SumBoth(dk, dv);
  } else if constexpr (Traits::kLateDq) {
    consumer.SumDkLate(dk);
  } else if constexpr (Traits::kDk) {
    consumer.SumDk(dk);
  } else {
    consumer.SumDv(dv);
  }
  consumer.StoreSums(dk, dv);
}

template <class Traits>
__global__ __launch_bounds__(Traits::kThreads,
                             1) void WideBackwardKernel(const __grid_constant__ BackwardArgs args) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<WideShared<Traits>*>(shared_bytes);
  const KeyTile keys = MakeKeyTile<Traits>(args, blockIdx.x);
  if (threadIdx.x == 0) {
    WideBegin<Traits>(args, shared, keys);
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
    WideProduce<Traits>(args, shared, keys);
  } else {
    IncreaseRegisters<Traits::kConsumerRegisters>();
    WideConsume<Traits>(args, shared, keys, warpgroup - 1);
  }
}

}  // namespace

template <class Traits>
void LaunchWideBackward(const FlashBackwardParams& params, const BackwardScratch& scratch) {
  BackwardArgs args = MakeBackwardArgs<Traits>(params, scratch, Traits::kBlockM);
  static_assert(sizeof(WideShared<Traits>) <= 227 * 1024, "more than a thread block can have");
  if (Traits::kDv) {
    LaunchPrepare<Traits>(args);  // for a second pass, too
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
