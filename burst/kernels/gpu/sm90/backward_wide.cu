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

// Computes dV of the consumer's 64 keys.
template <class Traits>
__device__ __forceinline__ void WideConsumer<Traits>::SumDv(Gradient& dv) const {
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
__device__ __forceinline__ void WideConsumer<Traits>::SumDk(Gradient& dk) const {
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
__device__ __forceinline__ void WideConsumer<Traits>::SumDkLate(Gradient& dk) const {
  constexpr int kReadBarrier = 2;
  ValueOperand v_operand;
  LoadOperand(shared.v, consumer * 64, v_operand);
  NamedBarrierSync(kReadBarrier, 2 * kWarpgroupSize);  // from here on V's place is dQ's
  FirstDq first_dq;
  SecondDq second_dq;
  int step = 0;
  const auto multiply_dq = [&](int n) {  // dQ = dS K of the n-th step
    const DsTile& ds = shared.ds[n % 2];
    WgmmaFence();
    MultiplyDq(ds, shared.k.At(0, consumer), first_dq);
    MultiplyDq(ds, shared.k.At(0, 2) + consumer * kSecond, second_dq);
    WgmmaCommit();
  };

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
    if (step > 0) Wait(&shared.ds_full[stage ^ 1], (step - 1) / 2 % 2);
    multiply_dq(step + 1);
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
    Wait(&shared.ds_full[(step - 1) % 2], (step - 1) / 2 % 2);
    multiply_dq(step - 1);
    WgmmaWait<0>();
    StoreLateDq(step - 1, first_dq, second_dq);
    FenceProxyAsync();
    Arrive(&shared.dq_full[consumer]);
  }
}

// Stores dV or dK from the places of K, Q and dO, once no thread reads these any more.
template <class Traits>
__device__ __forceinline__ void WideConsumer<Traits>::StoreSum(Gradient& sum) const {
  NamedBarrierSync(1, 2 * kWarpgroupSize);
  constexpr bool kDk = Traits::kDk;
  constexpr int kPartBytes = kWgmmaM * kSumDim * sizeof(float);  // of a consumer
  static_assert(Traits::kConsumers * kPartBytes <=
                    offsetof(WideShared<Traits>, ds) - offsetof(WideShared<Traits>, k),
                "");
  // Values that follow from threadIdx are computed again, as in backward.cu.
  const int thread = ThreadIndexAgain();
  const int first = thread / kWarpSize % 4 * kWarpRows;
  const int row = keys.row + consumer * kWgmmaM + first;
  if constexpr (kDk) WaitForScan<Traits>(args, shared);
  LeaveToRepair<Traits>(args, shared.suspicion, keys, row,
                        kDk ? cuda::kMissingDk : cuda::kMissingDv, sum);
  const GradientStep step =
      MakeGradientStep<Traits>(args, keys, consumer * 4 + thread / kWarpSize % 4);
  WaitForTurn(args, step);
  StoreGradient<Element, kSumDim>(
      args, kDk ? args.dk : args.dv, kDk ? args.dk_sum : args.dv_sum,
      kDk ? args.dk_out : args.dv_out, kDk ? args.head_dim : args.value_dim,
      SharedAddress(&shared.k) + consumer * kPartBytes + first * kRowBytes, kWgmmaM * kRowBytes,
      sum, kDk && !Traits::kScaleDs ? args.scale : 1, thread % kWarpSize, row, keys, step);
  if (thread % kWarpSize == 0) PassTurn(args, step);
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

// A consumer warpgroup: sums dV or dK of its keys, and stores the sum.
template <class Traits>
__device__ __forceinline__ void WideConsume(const BackwardArgs& args, WideShared<Traits>& shared,
                                            const KeyTile& keys, int index) {
  typename WideConsumer<Traits>::Gradient sum;
#pragma unroll
  for (int i = 0; i < Traits::kSumDim / 2; ++i) sum[i] = 0;
  Wait(&shared.kv_full, 0);
  const WideConsumer<Traits> consumer(args, shared, keys, index);
  if constexpr (Traits::kLateDq) {
    consumer.SumDkLate(sum);
  } else if constexpr (Traits::kDk) {
    consumer.SumDk(sum);
  } else {
    consumer.SumDv(sum);
  }
  consumer.StoreSum(sum);
}

template <class Traits>
__global__ __launch_bounds__(Traits::kThreads,
                             1) void WideBackwardKernel(const __grid_constant__ BackwardArgs args) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  auto& shared = *reinterpret_cast<WideShared<Traits>*>(shared_bytes);
  const KeyTile keys = MakeKeyTile<Traits>(args);
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
  if (!Traits::kDk) {
    LaunchPrepare<Traits>(args);  // for both passes
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
