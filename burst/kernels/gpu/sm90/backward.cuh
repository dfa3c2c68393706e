// Shared code of the backward kernels: a block's keys, the order of its query tiles, their
// statistics and masks, and the stores to global memory.
#pragma once

#include <type_traits>

#include "burst/device/cuda.h"
#include "burst/kernels/gpu/common/isolation.cuh"
#include "burst/kernels/gpu/sm90/backward_args.cuh"
#include "burst/kernels/gpu/sm90/query_tiles.cuh"
#include "burst/kernels/gpu/sm90/tile.cuh"
#include "burst/kernels/gpu/sm90/variants.h"

namespace burst {
namespace sm90 {

using cuda::Suspicion;

// The values of each query row that the softmax's backward needs.
template <class Traits>
struct RowStatistics {
  alignas(16) float lse_log2[Traits::kBlockM];  // +inf for a row that saw no key: P = 0
  alignas(16) float delta[Traits::kBlockM];
  alignas(16) int begin[Traits::kBlockM];
  alignas(16) int end[Traits::kBlockM];
  int whole;  // every query sees every key of the block; else begin and end hold
};

// The keys of a block, their KV head, and the first of the query heads that the block takes.
//
// By default blocks begin with the first keys, which the most queries see under a causal mask, and
// walk query tiles from the last one. The blocks of a head then begin together at that tile. If
// their additions to dQ have a fixed order, by ascending keys, each block waits until the one
// before has added its first tile. That costs about one step for every block of a head.
//
// So with a mask and a fixed order the walk may be `reversed`: last keys first, query tiles from
// the first one, additions by descending keys. The blocks of a causal mask or of documents then
// begin at different query tiles, and do not meet. With grouped heads each block walks one head
// after the other, all in the same order. The last group of heads is not reversed: it keeps the
// longest blocks first, so that all multiprocessors are busy to the end. block_order.h chooses.
struct KeyTile {
  int row, first_head, kv_head, batch;
  bool reversed;
};

template <class Traits>
__device__ __forceinline__ KeyTile MakeKeyTile(const BackwardArgs& args, int block) {
  const BlockPlace place =
      PlaceOf(block, args.key_tiles, args.batch_splits, args.order.group, args.order.groups);
  const int batch_split = place.head;
  const int batch_head = batch_split / args.head_splits;
  const int batch = batch_head / args.num_kv_heads;
  // Wide heads never are (WalksFromFirstQueries). A constant saves registers.
  constexpr bool kMayBeReversed = Traits::kRanges && Traits::kHeadDim <= kNarrowHeadDim;
  const bool reversed = kMayBeReversed && args.order.reversed && place.group < args.order.groups;
  return {(reversed ? args.key_tiles - 1 - place.nth : place.nth) * Traits::kBlockN,
          (batch_split - batch * args.num_kv_heads * args.head_splits) * args.heads_per_block,
          batch_head - batch * args.num_kv_heads, batch, reversed};
}

// A step of a block is a query tile of one head.
__device__ __forceinline__ int StepsOf(const BackwardArgs& args, const QueryTiles& tiles) {
  return max(0, tiles.end - tiles.begin - tiles.gap) * args.heads_per_block;
}

// Calls f(head, tile, place) for every query tile that the block meets, in the same order in every
// warp. `place` is the tile's place in the list, or the tile itself.
//
// With grouped heads and a fixed order of additions, a block takes all heads of a tile before the
// next tile. If it walked all tiles of a head first, it would reach the next head while the blocks
// before it are still far from there. One loop serves all cases, to save registers.
template <class Traits, class Function>
__device__ __forceinline__ void ForEachQueryTile(const BackwardArgs& args, const KeyTile& keys,
                                                 const QueryTiles& tiles, Function f) {
  const bool heads_inside = args.order.heads_inside && !keys.reversed;
  int i = tiles.begin, head = 0;
#pragma unroll 1
  for (int left = StepsOf(args, tiles); left > 0; --left) {
    int place = i;
    if (!keys.reversed && !Traits::kLists) {
      place = tiles.begin + tiles.end - 1 - i;
      if (Traits::kRanges && place < tiles.gap_begin + tiles.gap) place -= tiles.gap;
    } else if (Traits::kRanges && place >= tiles.gap_begin) {
      place += tiles.gap;
    }
    int tile = place;
    if constexpr (Traits::kLists) {
      constexpr int kParts = Traits::kListParts;
      tile = __ldg(args.blocks.query_list + place / kParts) * kParts + place % kParts;
    }
    f(keys.first_head + head, tile, place);
    if (heads_inside) {
      if (++head == args.heads_per_block) {
        head = 0;
        ++i;
      }
    } else if (++i == tiles.end - tiles.gap) {
      i = tiles.begin;
      ++head;
    }
  }
}

// Sets P^T = 0 where a query (a column) does not see a key (one of the thread's two rows).
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
__device__ __forceinline__ QueryTiles QueryTilesOf(const BackwardArgs& args, const KeyTile& keys) {
  if (Traits::kLists) {
    const int32_t* begin = args.blocks.query_begin + keys.batch * args.blocks.query_stride +
                           keys.row / Traits::kBlockN;
    return {begin[0] * Traits::kListParts, begin[1] * Traits::kListParts, 0, 0, 0, 0, {}};
  }
  if (!Traits::kRanges) {
    const int whole = keys.row + Traits::kBlockN <= args.k_len ? args.query_tiles : 0;
    return {0, args.query_tiles, 0, whole, 0, 0, {}};
  }
  const int batch = args.visible.batch_stride == 0 ? 0 : keys.batch;
  const int4* const of = reinterpret_cast<const int4*>(
      args.query_tiles_of + static_cast<int64_t>(batch) * args.key_tiles +
      keys.row / Traits::kBlockN);
  const int4 tiles = __ldg(of), gap = __ldg(of + 1);
  return {tiles.x, tiles.y, tiles.z, tiles.w, gap.x, gap.y, {}};
}

// Returns the mark of one of the block's keys.
__device__ __forceinline__ int64_t MarkOf(const BackwardArgs& args, const KeyTile& keys, int key) {
  const int64_t split = static_cast<int64_t>(keys.batch) * args.num_kv_heads * args.head_splits +
                        keys.first_head / args.heads_per_block;
  return split * cuda::MarkGroups(args.k_len) + key / cuda::kMarkRows;
}

// Returns whether the lane's part of a tile in shared memory is finite. x * 0 is NaN for other
// numbers.
template <class Element, int kRows, int kColumns>
__device__ __forceinline__ bool IsTileFinite(const Tile<kRows, kColumns>& tile) {
  constexpr bool kHalf = std::is_same_v<Element, Float16>;
  const uint32_t end = SharedAddress(tile.data) + Tile<kRows, kColumns>::kBytes;
  uint32_t zeros = 0;  // two of Element
#pragma unroll 4
  for (uint32_t place = SharedAddress(tile.data) + threadIdx.x % kWarpSize * 16; place < end;
       place += kWarpSize * 16) {
    uint32_t x[4];
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(place));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kHalf) {
        asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(zeros) : "r"(x[i]), "r"(0));
      } else {
        asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(zeros) : "r"(x[i]), "r"(0));
      }
    }
  }
  return (zeros & 0x7FFF7FFF) == 0;
}

constexpr int kScanBarrier = 3;  // for the two warps that add dQ

// Finds out whether the block's keys and values are finite, before anything is added to dQ. If not,
// dQ misses what the block would add. The two warps that add dQ do it, which have nothing to do
// until then.
template <class Traits, class Shared>
__device__ __forceinline__ void ScanKeys(const BackwardArgs& args, Shared& shared,
                                         const KeyTile& keys, int which) {
  if (!Traits::kRanges || args.marks == nullptr) return;
  using Element = typename Traits::Element;
  const int lane = threadIdx.x % kWarpSize;
  Wait(&shared.kv_full, 0);
  if (!(which == 0 ? IsTileFinite<Element>(shared.k) : IsTileFinite<Element>(shared.v))) {
    shared.suspicion.keys = 1;
  }
  NamedBarrierSync(kScanBarrier, 2 * kWarpSize);
  if (lane == 0) Arrive(&shared.keys_scanned);
  const int row = keys.row + lane * cuda::kMarkRows;
  if (which == 0 && shared.suspicion.keys != 0 && lane < Traits::kBlockN / cuda::kMarkRows &&
      row < args.k_len) {
    cuda::Mark(args.marks, MarkOf(args, keys, row), cuda::kMissingDq);
  }
}

// Waits for the scan. A consumer calls it before it uses what the scan found, or V's place.
template <class Traits, class Shared>
__device__ __forceinline__ void WaitForScan(const BackwardArgs& args, Shared& shared) {
  if (Traits::kRanges && args.marks != nullptr) Wait(&shared.keys_scanned, 0);
}

// Returns whether dQ of the block's keys is left to the repair of common/isolation.h.
template <class Traits>
__device__ __forceinline__ bool LeavesDqToRepair(const BackwardArgs& args,
                                                 const Suspicion& suspicion) {
  return Traits::kRanges && args.marks != nullptr && suspicion.keys != 0;
}

// Clears a part of dQ that would be added, in one lane. `floats` is a multiple of 4.
__device__ __forceinline__ void ClearDq(uint32_t place, int floats) {
#pragma unroll 1
  for (int i = 0; i < floats; i += 4) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %1, %1, %1};" ::"r"(place + i * 4), "f"(0.f)
                 : "memory");
  }
  FenceProxyAsync();
}

// Clears the warp's rows of dK or dV if they are not finite, and marks them for the repair of
// common/isolation.h. missing: kMissingDk or kMissingDv.
template <class Traits, int kCount>
__device__ __forceinline__ void LeaveToRepair(const BackwardArgs& args, const Suspicion& suspicion,
                                              const KeyTile& keys, int row, int missing,
                                              float (&d)[kCount]) {
  if (!Traits::kRanges || args.marks == nullptr) return;
  if ((suspicion.keys | suspicion.queries) == 0) return;
  if (__all_sync(0xffffffff, cuda::AreFinite(d))) return;
  if (row < args.k_len && ThreadIndexAgain() % kWarpSize == 0) {
    cuda::Mark(args.marks, MarkOf(args, keys, row), missing);
  }
#pragma unroll
  for (float& x : d) x = 0;
}

// Returns whether every query of the tile sees every key of the block.
template <class Traits>
__device__ __forceinline__ bool IsWhole(const BackwardArgs& args, const KeyTile& keys,
                                        const RowStatistics<Traits>& rows) {
  return Traits::kRanges ? rows.whole != 0 : keys.row + Traits::kBlockN <= args.k_len;
}

// The part of dQ that a step adds to, and its turn. In a deterministic call, the key tiles that see
// a query tile add to it in the order of their blocks. A block waits until the count of additions
// equals the number of blocks before it. These were launched earlier, so some block can always
// proceed. With lists the number is the block's place in the list of the queries.
struct alignas(16) DqStep {
  int row, head;
  int counter;  // part 0's in BackwardArgs::dq_additions; negative: any order
  int turn;
};

// Steps whose DqStep is kept. The rows of a step are loaded at most two steps ahead of the matmuls.
// dQ leaves at most four steps behind them.
constexpr int kDqSteps = 8;

template <class Traits>
__device__ __forceinline__ DqStep MakeDqStep(const BackwardArgs& args, const KeyTile& keys,
                                             int head, int tile, int place) {
  DqStep step = {tile * Traits::kBlockM, head, -1, 0};
  if (args.dq_additions == nullptr) return step;
  // The last block of queries may have fewer tiles than a list's block has room for.
  if (Traits::kLists && tile >= args.query_tiles) return step;
  step.counter = ((keys.batch * args.num_heads + head) * args.query_tiles + tile) * 2;
  if constexpr (Traits::kLists) {
    step.turn = __ldg(args.blocks.place_list + place / Traits::kListParts);
    return step;
  }
  const int own = keys.row / Traits::kBlockN;
  step.turn = own;  // less the first of the blocks that see the tile
  if constexpr (Traits::kRanges) {
    const int64_t offset = keys.batch * args.visible.batch_stride;
    if (keys.reversed) {
      const int last_query = min((tile + 1) * Traits::kBlockM, args.q_len) - 1;
      step.turn =
          (min(args.visible.end[offset + last_query], args.k_len) - 1) / Traits::kBlockN - own;
    } else {
      step.turn -= max(args.visible.begin[offset + tile * Traits::kBlockM], 0) / Traits::kBlockN;
    }
  }
  return step;
}

// Waits for the step's turn, and with wait() for its dQ in shared memory. Then calls store(add),
// which adds dQ to global memory, or stores it if it is the first and dQ is assigned. The TMA has
// read its source when store returns. In a fixed order `add` is a constant between two additions.
template <class WaitFunction, class StoreFunction>
__device__ __forceinline__ void AddInTurn(const BackwardArgs& args, const DqStep& step, int part,
                                          WaitFunction wait, StoreFunction store) {
  int* const additions = args.dq_additions + step.counter + part;
  const bool in_turn = args.dq_additions != nullptr && step.counter >= 0;
  if (in_turn && step.turn == 0 && args.first_dq.has(step.head)) {
    wait();
    store(std::false_type());
  } else {
    if (in_turn) {
      while (LoadAcquire(additions) != step.turn) continue;
    }
    wait();
    store(std::true_type());
  }
  if (in_turn) {
    BulkWait();
    AddRelease(additions, 1);
  }
}

// Loads the statistics and ranges of the rows of every step into shared.rows, and its DqStep. One
// warp runs it once. full and empty: the barriers of a stage. delta is stored times delta_factor.
// P then comes out times 2^kScaleBits, and dS does not.
template <class Traits, class Shared>
__device__ __forceinline__ void BackwardLoadRows(const BackwardArgs& args, Shared& shared,
                                                 const KeyTile& keys, Barrier* full, Barrier* empty,
                                                 float delta_factor) {
  // A lane has two or four rows; with three, the loop would need too many registers.
  constexpr int kUnroll = Traits::kBlockM % 64 == 0 ? 4 : 1;
  constexpr int kScaleBits = Traits::kScaleBits;
  const int lane = threadIdx.x % kWarpSize;
  int step = 0;
  const QueryTiles& tiles = shared.tiles;
  ForEachQueryTile<Traits>(args, keys, tiles, [&](int head, int tile, int place) {
    const int stage = step % Traits::kStages;
    RowStatistics<Traits>& rows = shared.rows[stage];
    const bool whole = tile >= tiles.whole_begin && tile < tiles.whole_end;
    const int first = tile * Traits::kBlockM;
    // The offset fits 32 bits, because 2^32 rows do not fit into a GPU's memory.
    const uint32_t offset = (keys.batch * args.num_heads + head) * uint32_t(args.q_len) + first;
    const DqStep dq_step = MakeDqStep<Traits>(args, keys, head, tile, place);
    Wait(&empty[stage], step / Traits::kStages % 2 ^ 1);
    if (lane == 0) {
      shared.dq_steps[step % kDqSteps] = dq_step;
      if constexpr (Traits::kTurnFirst) Arrive(&shared.dq_step_full[step % kDqSteps]);
      rows.whole = whole;
    }
#pragma unroll(kUnroll)
    for (int i = lane; i < Traits::kBlockM; i += kWarpSize) {
      const bool valid = first + i < args.q_len;
      const float lse = valid ? args.lse[offset + i] : -INFINITY;
      float delta = valid ? args.delta[offset + i] * delta_factor : 0.f;
      if constexpr (kScaleBits > 0) delta *= 1.f / (1 << kScaleBits);
      rows.lse_log2[i] = lse == -INFINITY ? INFINITY : __fmul_rn(lse, kLog2E) - kScaleBits;
      rows.delta[i] = delta;
      if (Traits::kRanges && args.marks != nullptr) {
        // If Q or dO is not finite, lse or delta is not finite.
        if (valid && !cuda::IsFinite(fabsf(lse) + fabsf(delta))) shared.suspicion.queries = 1;
      }
    }
    if (Traits::kRanges && !whole) {
#pragma unroll(kUnroll)
      for (int i = lane; i < Traits::kBlockM; i += kWarpSize) {
        // The offset fits 32 bits here, too.
        const uint32_t row = keys.batch * static_cast<uint32_t>(args.visible.batch_stride) +
                             min(first + i, args.q_len - 1);
        rows.begin[i] = args.visible.begin[row];
        rows.end[i] = min(args.visible.end[row], args.k_len);
      }
    }
    Arrive(&full[stage]);
    ++step;
  });
}

// How a warp stores its rows of dK or dV.
struct GradientStep {
  int head, batch;  // place in the sums
  bool first, last;
  int* counter;  // counts the warp's additions; null: no other block adds
  int turn;
};

// `warp` counts the warps of all consumers.
template <class Traits>
__device__ __forceinline__ GradientStep MakeGradientStep(const BackwardArgs& args,
                                                         const KeyTile& keys, int warp) {
  const int split = keys.first_head / args.heads_per_block - keys.kv_head * args.head_splits;
  GradientStep step = {keys.kv_head,
                       keys.batch,
                       split == 0 && args.first_dkv.has(keys.kv_head),
                       split == args.head_splits - 1 && args.last_dkv.has(keys.kv_head),
                       nullptr,
                       split};
  if (args.dkv_additions == nullptr) return step;
  int sum = keys.batch * args.num_kv_heads + keys.kv_head;
  if (args.sums > 0) {
    step.turn += sum / args.sums * args.head_splits;
    sum %= args.sums;
    step.head = sum;
    step.batch = 0;
  }
  step.counter = args.dkv_additions +
                 (sum * args.key_tiles + keys.row / Traits::kBlockN) * kBackwardWarps + warp;
  return step;
}

__device__ __forceinline__ void WaitForTurn(const BackwardArgs& args, const GradientStep& step) {
  if (args.dkv_additions == nullptr) return;
  while (__any_sync(~0u, LoadAcquire(step.counter) != step.turn)) continue;
}

// Passes the turn on, in one lane, after all stores of the warp.
__device__ __forceinline__ void PassTurn(const BackwardArgs& args, const GradientStep& step) {
  if (args.dkv_additions == nullptr) return BulkWaitRead();
  BulkWait();
  AddRelease(step.counter, 1);
}

// Computes d = d * factor + the warp's rows of the sums, of `width` columns, two rows a thread. It
// rounds like an addition in memory.
template <int kColumns>
__device__ __forceinline__ void AddSums(const BackwardArgs& args, const AttentionOperand& sums,
                                        int width, float factor, int lane, int row,
                                        const GradientStep& step, float (&d)[kColumns / 2]) {
  const int first_column = lane % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = row + lane / 4 + 8 * r;
    const int columns = key < args.k_len ? width - first_column : 0;
    const float* from = static_cast<const float*>(sums.data) +
                        Offset(sums, step.batch, step.head, key) + first_column;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      if (j % 8 == 0) __syncwarp();  // keeps ptxas from loading more than fits registers
      float2 sum = {0, 0};
      if (8 * j < columns) sum = __ldcg(reinterpret_cast<const float2*>(from + 8 * j));
      float& x = d[4 * j + 2 * r];
      float& y = d[4 * j + 2 * r + 1];
      x = __fadd_rn(sum.x, __fmul_rn(x, factor));
      y = __fadd_rn(sum.y, __fmul_rn(y, factor));
    }
  }
}

// Stores a warp's rows of dK or dV, times factor, in global memory by the TMA. `width`: their
// columns in memory.
template <class Element, int kColumns>
__device__ __forceinline__ void StoreGradient(const BackwardArgs& args, const CUtensorMap& sum_map,
                                              const AttentionOperand& sums,
                                              const CUtensorMap& out_map, int width,
                                              uint32_t staging, int block_bytes,
                                              float (&d)[kColumns / 2], float factor, int lane,
                                              int row, const KeyTile& keys,
                                              const GradientStep& step) {
  if (!step.last) {
    const float factors[2] = {factor, factor};
    return StoreFloatWarpRows<kColumns>(!step.first, sum_map, staging, block_bytes, d, factors,
                                        lane, row, step.head, step.batch);
  }
  if (!step.first) {
    AddSums<kColumns>(args, sums, width, factor, lane, row, step, d);
    factor = 1;
  }
  const float factors[2] = {factor, factor};
  StoreWarpRows<Element, kColumns>(out_map, staging, block_bytes, d, factors, lane, row,
                                   keys.kv_head, keys.batch);
}

// Returns whether a block that no query sees has something to do: assign zeros, convert sums, or
// let other blocks have their turn.
__device__ __forceinline__ bool StoresUnseen(const BackwardArgs& args, const KeyTile& keys) {
  return args.head_splits > 1 || args.first_dkv.has(keys.kv_head) ||
         args.last_dkv.has(keys.kv_head);
}

// Starts a thread block for every key tile.
template <class Traits>
void LaunchOverKeys(void (*kernel)(BackwardArgs), size_t shared_bytes, const BackwardArgs& args) {
  BURST_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(shared_bytes)));
  kernel<<<args.key_tiles * args.batch_splits, Traits::kThreads, shared_bytes,
           cuda::CurrentStream()>>>(args);
  BURST_CUDA_CHECK_LAUNCH("attention backward");
}

}  // namespace sm90
}  // namespace burst
