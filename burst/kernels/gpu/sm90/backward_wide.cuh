// The parts that the passes of the backward of wide heads have in common: shared memory, the
// producer warpgroup, and steps of the consumers. See backward_wide.cu for the method.
#pragma once

#include <cstdint>
#include <type_traits>

#include "burst/kernels/gpu/sm90/backward.cuh"

namespace burst {
namespace sm90 {

template <class Traits>
struct WideShared {
  struct Nothing {};
  template <class T>
  using IfDk = std::conditional_t<Traits::kDk, T, Nothing>;
  struct DqBox {  // kBlockM rows of 32 columns of a consumer, in the TMA's swizzle
    alignas(1024) float data[Traits::kBlockM * kFloatBoxColumns];
  };

  // Boxes that hold a consumer's columns of dQ at a time.
  static constexpr int kDqBoxes =
      Traits::kLateDq ? Traits::kHeadDim / Traits::kConsumers / kFloatBoxColumns : 1;

  IfDk<Tile<Traits::kBlockN, Traits::kValueDim>> v;
  Tile<Traits::kBlockN, Traits::kHeadDim> k;
  Tile<Traits::kBlockM, Traits::kHeadDim> q[Traits::kStages];
  Tile<Traits::kBlockM, Traits::kValueDim> dout[Traits::kDoutStages];
  IfDk<Tile<Traits::kBlockM, Traits::kBlockN>> ds[Traits::kLateDq ? 2 : 1];
  std::conditional_t<Traits::kDk && !Traits::kDqInV, DqBox, Nothing>
      dq[Traits::kConsumers * kDqBoxes];
  RowStatistics<Traits> rows[Traits::kStages];
  Barrier kv_full;
  // With kLateDq the barriers of q also stand for rows, and with kDqInV for dout.
  Barrier q_full[Traits::kStages], q_empty[Traits::kStages];
  Barrier dout_full[Traits::kStages], dout_empty[Traits::kStages];
  Barrier rows_full[Traits::kStages], rows_empty[Traits::kStages];
  Barrier dq_full[Traits::kConsumers], dq_empty[Traits::kConsumers];
  Barrier ds_full[2];  // of both consumers
  DqStep dq_steps[kDqSteps];
  Barrier dq_step_full[kDqSteps];  // with kTurnFirst
  QueryTiles tiles;                // of the keys
  Suspicion suspicion;
  Barrier keys_scanned;

  // Returns where a consumer leaves its columns of dQ, kDqBoxes boxes at a time.
  __device__ __forceinline__ uint32_t Dq(int consumer) const {
    const int offset = consumer * kDqBoxes * static_cast<int>(sizeof(DqBox));
    if constexpr (Traits::kDqInV) {
      static_assert(Traits::kConsumers * kDqBoxes * sizeof(DqBox) <= sizeof(v), "");
      return SharedAddress(&v) + offset;
    } else {
      return SharedAddress(&dq) + offset;
    }
  }
};

// A consumer's columns of dQ, in boxes of 32: 64 of the first 128, and with kSecond half of the
// others.
template <class Traits>
struct DqParts {
  static constexpr int kSecond = (Traits::kHeadDim - 128) / 2;
  static constexpr int kBoxes = (64 + kSecond) / kFloatBoxColumns;
  static_assert(kSecond == 64 || kSecond == 32, "");
  __device__ __forceinline__ static int Column(int box, int consumer) {
    return (box < 2 ? consumer * 64 : 64 + consumer * kSecond) + box * kFloatBoxColumns;
  }
};

template <class Traits>
__device__ __forceinline__ void WideLoad(const BackwardArgs& args, WideShared<Traits>& shared,
                                         const KeyTile& keys) {
  using QTile = Tile<Traits::kBlockM, Traits::kHeadDim>;
  using DoutTile = Tile<Traits::kBlockM, Traits::kValueDim>;
  RingSlot<Traits::kStages> slot;
  RingSlot<Traits::kDoutStages> dout_slot;
  ForEachQueryTile<Traits>(args, keys, shared.tiles, [&](int head, int tile, int) {
    if constexpr (Traits::kDqInV) {
      Barrier* const full = &shared.q_full[slot.stage];
      Wait(&shared.q_empty[slot.stage], slot.parity ^ 1);
      ArriveExpectBytes(full, QTile::kBytes + DoutTile::kBytes);
      LoadTile(shared.q[slot.stage], args.q, full, tile * Traits::kBlockM, head, keys.batch);
      LoadTile(shared.dout[slot.stage], args.dout, full, tile * Traits::kBlockM, head, keys.batch);
      slot.Advance();
      return;
    }
    const auto load = [&](auto* tiles, const CUtensorMap& from, Barrier* full, Barrier* empty,
                          auto& at) {
      Wait(&empty[at.stage], at.parity ^ 1);
      ArriveExpectBytes(&full[at.stage], std::remove_pointer_t<decltype(tiles)>::kBytes);
      LoadTile(tiles[at.stage], from, &full[at.stage], tile * Traits::kBlockM, head, keys.batch);
      at.Advance();
    };
    const auto load_q = [&] { load(shared.q, args.q, shared.q_full, shared.q_empty, slot); };
    // The order is the order in which they are needed and, before, become free.
    if (Traits::kDv) load_q();
    load(shared.dout, args.dout, shared.dout_full, shared.dout_empty, dout_slot);
    if (!Traits::kDv) load_q();
  });
}

// Adds a consumer's columns to dQ.
template <class Traits>
__device__ __forceinline__ void WideReduceDq(const BackwardArgs& args, WideShared<Traits>& shared,
                                             const KeyTile& keys, int consumer) {
  const int steps = StepsOf(args, shared.tiles);
  int parity = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const auto wait_for_dq = [&] { Wait(&shared.dq_full[consumer], parity); };
    if constexpr (Traits::kTurnFirst) {
      Wait(&shared.dq_step_full[step % kDqSteps], step / kDqSteps % 2);
    } else {
      wait_for_dq();
    }
    const DqStep at = shared.dq_steps[step % kDqSteps];
    const auto wait = [&] {
      if constexpr (Traits::kTurnFirst) wait_for_dq();
    };
    AddInTurn(args, at, consumer, wait, [&](auto add) {
      constexpr int kBoxes = DqParts<Traits>::kBoxes;
      const bool leave = LeavesDqToRepair<Traits>(args, shared.suspicion);
      const auto store = [&](int box, uint32_t from) {
        if (leave) ClearDq(from, Traits::kBlockM * kFloatBoxColumns);
        StoreOrAdd(add(), args.dq, from, DqParts<Traits>::Column(box, consumer), at.row, at.head,
                   keys.batch);
      };
      const auto give_back = [&] {
        BulkCommit();
        BulkWaitRead();
        Arrive(&shared.dq_empty[consumer]);
      };
      if constexpr (Traits::kLateDq) {  // all boxes at once
        constexpr int kBoxBytes = Traits::kBlockM * kRowBytes;
        parity ^= 1;
#pragma unroll
        for (int box = 0; box < kBoxes; ++box) store(box, shared.Dq(consumer) + box * kBoxBytes);
        give_back();
      } else {  // one after the other
#pragma unroll
        for (int box = 0; box < kBoxes; ++box) {
          if (box > 0) Wait(&shared.dq_full[consumer], parity);
          parity ^= 1;
          store(box, shared.Dq(consumer));
          give_back();
        }
      }
    });
  }
  BulkWait();
}

// A thread of a consumer warpgroup: its keys, its places in shared memory, and the passes' steps.
template <class Traits>
struct WideConsumer {
  using Element = typename Traits::Element;
  static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  static constexpr int kHeadDim = Traits::kHeadDim, kValueDim = Traits::kValueDim;
  static constexpr int kSecond = DqParts<Traits>::kSecond;
  using QTile = Tile<kBlockM, kHeadDim>;
  using DoutTile = Tile<kBlockM, kValueDim>;
  using KTile = Tile<kBlockN, kHeadDim>;
  using DsTile = Tile<kBlockM, kBlockN>;
  using Scores = float[kBlockM / 2];           // S^T or dP^T: [64, kBlockM]
  using ScoreOperand = uint32_t[kBlockM / 4];  // P^T or dS^T, of Element
  using ValueOperand = uint32_t[kValueDim / 4];
  using Dk = float[kHeadDim / 2];       // [64, kHeadDim]
  using Dv = float[kValueDim / 2];      // [64, kValueDim]
  using FirstDq = float[32];            // 64 columns of dQ: [kBlockM, 64]
  using SecondDq = float[kSecond / 2];  // the other columns: [kBlockM, kSecond]

  const BackwardArgs& args;
  WideShared<Traits>& shared;
  const KeyTile& keys;
  const int consumer;
  int lane;
  int key;  // the thread's first key; the other one is key + 8
  float scale_log2;
  uint32_t ds_place = 0;  // of the lane's row of each 8x8 matrix of dS (stmatrix)
  uint32_t dq_place = 0;  // of its elements of a box of dQ

  __device__ __forceinline__ WideConsumer(const BackwardArgs& args_, WideShared<Traits>& shared_,
                                          const KeyTile& keys_, int consumer_)
      : args(args_), shared(shared_), keys(keys_), consumer(consumer_) {
    lane = threadIdx.x % kWarpSize;
    const int warp = WarpUniform(threadIdx.x / kWarpSize % 4);
    key = keys.row + consumer * 64 + warp * 16 + lane / 4;
    scale_log2 = args.scale * kLog2E;
    if constexpr (Traits::kDk) {
      ds_place = SharedAddress(shared.ds[0].At(0, consumer)) +
                 (lane / 16 * 8 + lane % 8) * kRowBytes +
                 ((warp * 2 + lane / 8 % 2) ^ (lane % 8)) * 16;
      dq_place = shared.Dq(consumer) + (warp * kWarpRows + lane / 4) * kRowBytes +
                 ((lane % 4 / 2) ^ (lane / 4)) * 16 + lane % 2 * 8;
    }
  }

  // Begins S^T = K Q^T.
  __device__ __forceinline__ void MultiplyScores(const QTile& q, Scores& s) const {
    WgmmaFence();
    MatmulSharedShared<Element, kBlockM, kHeadDim>(
        s, shared.k.At(consumer * 64), KTile::kBlockBytes, q.At(0), QTile::kBlockBytes, false);
    WgmmaCommit();
  }

  // Begins dP^T = V dO^T.
  __device__ __forceinline__ void MultiplyScoreGradients(const DoutTile& dout, Scores& dp) const {
    WgmmaFence();
    MatmulSharedShared<Element, kBlockM, kValueDim>(dp, shared.v.At(consumer * 64),
                                                    Tile<kBlockN, kValueDim>::kBlockBytes,
                                                    dout.At(0), DoutTile::kBlockBytes, false);
    WgmmaCommit();
  }

  // Begins the same with V in registers, after another matmul's fence.
  __device__ __forceinline__ void MultiplyScoreGradients(const ValueOperand& v,
                                                         const DoutTile& dout, Scores& dp) const {
    MatmulRegisterShared<Element, kBlockM, kValueDim, Major::kK>(dp, v, dout.At(0),
                                                                 DoutTile::kBlockBytes, false);
    WgmmaCommit();
  }

  // Begins sum += scores^T rows: dV += P^T dO, or dK += dS^T Q.
  template <int kColumns>
  __device__ __forceinline__ void AddGradient(const ScoreOperand& scores,
                                              const Tile<kBlockM, kColumns>& rows,
                                              float (&sum)[kColumns / 2]) const {
    MatmulRegisterShared<Element, kColumns, kBlockM, Major::kMN>(
        sum, scores, rows.At(0), Tile<kBlockM, kColumns>::kBlockBytes, true);
    WgmmaCommit();
  }

  // Replaces S^T by P^T, where the mask allows. whole: IsWhole of the rows.
  __device__ __forceinline__ void Exponentiate(const RowStatistics<Traits>& rows, bool whole,
                                               Scores& p) const {
#pragma unroll
    for (int j = 0; j < kBlockM / 8; ++j) {
      const float2 lse =
          *reinterpret_cast<const float2*>(&rows.lse_log2[8 * j + threadIdx.x % 4 * 2]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        p[4 * j + 2 * r] = Exp2(fmaf(p[4 * j + 2 * r], scale_log2, -lse.x));
        p[4 * j + 2 * r + 1] = Exp2(fmaf(p[4 * j + 2 * r + 1], scale_log2, -lse.y));
      }
    }
    if (!whole) MaskKeys<Traits>(p, key, args.k_len, rows);
  }

  // Returns elements i and i + 1 of P^T, in float32 or float16.
  __device__ __forceinline__ static float2 PairOf(const Scores& p, int i) {
    return {p[i], p[i + 1]};
  }
  __device__ __forceinline__ static float2 PairOf(const ScoreOperand& p, int i) {
    return UnpackHalf(p[i / 2]);
  }

  // Replaces dP^T by dS^T = P^T (dP^T - delta).
  template <class Probabilities>
  __device__ __forceinline__ void ScoreGradients(const RowStatistics<Traits>& rows,
                                                 const Probabilities& p, Scores& ds) const {
    const float factor = (Traits::kScaleDs ? args.scale : 1) / (1 << Traits::kScaleBits);
#pragma unroll
    for (int j = 0; j < kBlockM / 8; ++j) {
      const float2 delta = *reinterpret_cast<const float2*>(&rows.delta[8 * j + lane % 4 * 2]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = 4 * j + 2 * r;
        const float2 pair = PairOf(p, i);
        ds[i] = pair.x * fmaf(ds[i], factor, -delta.x);
        ds[i + 1] = pair.y * fmaf(ds[i + 1], factor, -delta.y);
      }
    }
  }

  // Stores dS in a buffer that both consumers read.
  __device__ __forceinline__ void StoreDs(int buffer, const ScoreOperand& ds) const {
    const uint32_t place = ds_place + buffer * DsTile::kBytes;
#pragma unroll
    for (int k = 0; k < kBlockM / 16; ++k) {
      StoreMatrixTransposed(place + k * 16 * kRowBytes, ds[4 * k], ds[4 * k + 1], ds[4 * k + 2],
                            ds[4 * k + 3]);
    }
  }

  // Computes dQ = dS K for some of K's columns, from `k` on. A fence must come before, and a commit
  // after it.
  template <int kCount>
  __device__ __forceinline__ void MultiplyDq(const DsTile& ds, const uint16_t* k,
                                             float (&dq)[kCount]) const {
    MatmulSharedShared<Element, 2 * kCount, kBlockN, Major::kK, Major::kMN>(
        dq, ds.At(0), DsTile::kBlockBytes, k, KTile::kBlockBytes, false);
  }

  // Stores 32 columns of dQ in box `box` of several consecutive ones. They are multiplied by the
  // softmax's scale unless dS was.
  __device__ __forceinline__ void StoreDqBox(int box, const float* dq) const {
    const float factor = Traits::kScaleDs ? 1 : args.scale;
#pragma unroll
    for (int j = 0; j < kFloatBoxColumns / 8; ++j) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = 4 * j + 2 * r;
        StoreShared((dq_place ^ (j * 32)) + (box * kBlockM + r * 8) * kRowBytes, dq[i] * factor,
                    dq[i + 1] * factor);
      }
    }
  }

  // Begins dQ = dS K of the n-th step, all columns.
  __device__ __forceinline__ void MultiplyLateDq(int n, FirstDq& first, SecondDq& second) const {
    const DsTile& ds = shared.ds[n % 2];
    WgmmaFence();
    MultiplyDq(ds, shared.k.At(0, consumer), first);
    MultiplyDq(ds, shared.k.At(0, 2) + consumer * kSecond, second);
    WgmmaCommit();
  }

  // Waits until both consumers have stored dS of the n-th step.
  __device__ __forceinline__ void WaitForDs(int n) const {
    Wait(&shared.ds_full[n % 2], n / 2 % 2);
  }

  // Stores dQ of the n-th step, all columns at once. A fence and an arrival must follow.
  __device__ __forceinline__ void StoreLateDq(int n, FirstDq& first, SecondDq& second) const {
    PinRegisters(first);
    PinRegisters(second);
    if (Traits::kDqInV && n == 0) WaitForScan<Traits>(args, shared);
    Wait(&shared.dq_empty[consumer], n % 2 ^ 1);
    StoreDqBox(0, first);
    StoreDqBox(1, first + 16);
    StoreDqBox(2, second);
  }

  __device__ __forceinline__ void SumDv(Dv& dv) const;
  __device__ __forceinline__ void SumDk(Dk& dk) const;
  __device__ __forceinline__ void SumDkLate(Dk& dk) const;
  __device__ __forceinline__ void SumBoth(Dk& dk, Dv& dv) const;
  __device__ __forceinline__ void StoreSums(Dk& dk, Dv& dv) const;
};

}  // namespace sm90
}  // namespace burst
