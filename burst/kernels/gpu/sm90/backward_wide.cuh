// The parts that both passes of the backward of wide heads have in common: shared memory, the
// producer warpgroup, and steps of the consumers. See backward_wide.cu
// for the method.
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
  struct DqPart {  // kBlockM rows of 32 columns of a consumer, in the TMA's swizzle
    alignas(1024) float data[Traits::kBlockM * kFloatBoxColumns];
  };

  // V; with kLateDq it has as many columns as dQ, which takes its place (see Dq), the last ones
  // zero.
  IfDk<Tile<Traits::kBlockN, Traits::kLateDq ? Traits::kHeadDim : Traits::kValueDim>> v;
  Tile<Traits::kBlockN, Traits::kHeadDim> k;
  Tile<Traits::kBlockM, Traits::kHeadDim> q[Traits::kStages];
  Tile<Traits::kBlockM, Traits::kValueDim> dout[Traits::kStages];
  IfDk<Tile<Traits::kBlockM, Traits::kBlockN>> ds[Traits::kLateDq ? 2 : 1];
  std::conditional_t<Traits::kDk && !Traits::kLateDq, DqPart, Nothing> dq[Traits::kConsumers];
  RowStatistics<Traits> rows[Traits::kStages];
  Barrier kv_full;
  // With kLateDq the barriers of q also stand for dout and rows.
  Barrier q_full[Traits::kStages], q_empty[Traits::kStages];
  Barrier dout_full[Traits::kStages], dout_empty[Traits::kStages];
  Barrier rows_full[Traits::kStages], rows_empty[Traits::kStages];
  Barrier dq_full[Traits::kConsumers], dq_empty[Traits::kConsumers];
  Barrier ds_full[2];  // of both consumers
  DqStep dq_steps[kDqSteps];
  QueryTiles tiles;  // of the keys
  Suspicion suspicion;
  Barrier keys_scanned;

  // Returns where a consumer leaves its columns of dQ: with kLateDq all of them, else one box of
  // 32.
  __device__ __forceinline__ uint32_t Dq(int consumer) const {
    if constexpr (Traits::kLateDq) {
      constexpr int kBoxes = Traits::kHeadDim / Traits::kConsumers / kFloatBoxColumns;
      static_assert(Traits::kConsumers * kBoxes * sizeof(DqPart) <= sizeof(v), "");
      return SharedAddress(&v) + consumer * kBoxes * static_cast<int>(sizeof(DqPart));
    } else {
      return SharedAddress(&dq[consumer]);
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
  ForEachQueryTile<Traits>(args, keys, shared.tiles, [&](int head, int tile, int) {
    if constexpr (Traits::kLateDq) {
      Barrier* const full = &shared.q_full[slot.stage];
      Wait(&shared.q_empty[slot.stage], slot.parity ^ 1);
      ArriveExpectBytes(full, QTile::kBytes + DoutTile::kBytes);
      LoadTile(shared.q[slot.stage], args.q, full, tile * Traits::kBlockM, head, keys.batch);
      LoadTile(shared.dout[slot.stage], args.dout, full, tile * Traits::kBlockM, head, keys.batch);
      slot.Advance();
      return;
    }
    const auto load = [&](auto& to, const CUtensorMap& from, Barrier* full, Barrier* empty) {
      Wait(empty, slot.parity ^ 1);
      ArriveExpectBytes(full, std::remove_reference_t<decltype(to)>::kBytes);
      LoadTile(to, from, full, tile * Traits::kBlockM, head, keys.batch);
    };
    const auto load_q = [&] {
      load(shared.q[slot.stage], args.q, &shared.q_full[slot.stage], &shared.q_empty[slot.stage]);
    };
    // The order is the order in which they are needed and, before, become free.
    if (!Traits::kDk) load_q();
    load(shared.dout[slot.stage], args.dout, &shared.dout_full[slot.stage],
         &shared.dout_empty[slot.stage]);
    if (Traits::kDk) load_q();
    slot.Advance();
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
    Wait(&shared.dq_full[consumer], parity);
    const DqStep at = shared.dq_steps[step % kDqSteps];
    const auto no_wait = [] {};
    AddInTurn(args, at, consumer, no_wait, [&](auto add) {
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

// Replaces S^T by P^T, where the mask allows.
template <class Traits>
__device__ __forceinline__ void Exponentiate(const BackwardArgs& args, const KeyTile& keys, int key,
                                             float scale_log2, bool whole,
                                             const RowStatistics<Traits>& rows,
                                             float (&p)[Traits::kBlockM / 2]) {
#pragma unroll
  for (int j = 0; j < Traits::kBlockM / 8; ++j) {
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

// Returns the place of a lane's row of each 8x8 matrix of dS (stmatrix), in the first 16 queries.
template <class Traits>
__device__ __forceinline__ uint32_t DsPlace(const WideShared<Traits>& shared, int consumer,
                                            int warp, int lane) {
  return SharedAddress(shared.ds[0].At(0, consumer)) + (lane / 16 * 8 + lane % 8) * kRowBytes +
         ((warp * 2 + lane / 8 % 2) ^ (lane % 8)) * 16;
}

template <class Traits>
__device__ __forceinline__ void StoreDs(uint32_t place, const uint32_t (&ds)[Traits::kBlockM / 4]) {
#pragma unroll
  for (int k = 0; k < Traits::kBlockM / 16; ++k) {
    StoreMatrixTransposed(place + k * 16 * kRowBytes, ds[4 * k], ds[4 * k + 1], ds[4 * k + 2],
                          ds[4 * k + 3]);
  }
}

// Returns the places of a lane's elements of a box of dQ.
template <class Traits>
__device__ __forceinline__ uint32_t DqPlace(const WideShared<Traits>& shared, int consumer,
                                            int warp, int lane) {
  return shared.Dq(consumer) + (warp * kWarpRows + lane / 4) * kRowBytes +
         ((lane % 4 / 2) ^ (lane / 4)) * 16 + lane % 2 * 8;
}

// Stores 32 columns of dQ in box `box` of several consecutive ones. They are multiplied by the
// softmax's scale unless dS was.
template <class Traits>
__device__ __forceinline__ void StoreDqBox(const BackwardArgs& args, uint32_t place, int box,
                                           const float* dq) {
  const float factor = Traits::kScaleDs ? 1 : args.scale;
#pragma unroll
  for (int j = 0; j < kFloatBoxColumns / 8; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = 4 * j + 2 * r;
      StoreShared((place ^ (j * 32)) + (box * Traits::kBlockM + r * 8) * kRowBytes, dq[i] * factor,
                  dq[i + 1] * factor);
    }
  }
}

// Replaces dP^T by dS^T = P^T (dP^T - delta).
template <class Traits>
__device__ __forceinline__ void ScoreGradients(const BackwardArgs& args,
                                               const RowStatistics<Traits>& rows, int lane,
                                               const float (&p)[Traits::kBlockM / 2],
                                               float (&ds)[Traits::kBlockM / 2]) {
  const float factor = Traits::kScaleDs ? args.scale : 1;
#pragma unroll
  for (int j = 0; j < Traits::kBlockM / 8; ++j) {
    const float2 delta = *reinterpret_cast<const float2*>(&rows.delta[8 * j + lane % 4 * 2]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = 4 * j + 2 * r;
      ds[i] = p[i] * fmaf(ds[i], factor, -delta.x);
      ds[i + 1] = p[i + 1] * fmaf(ds[i + 1], factor, -delta.y);
    }
  }
}

}  // namespace sm90
}  // namespace burst
