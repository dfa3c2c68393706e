// What the backward kernels share: a block's keys, the order of the query tiles it streams, their
// statistics and masks, and what goes into global memory.
#pragma once

#include <algorithm>
#include <type_traits>

#include "burst/device/cuda.h"
#include "burst/kernels/gpu/sm90/tensor_map.h"
#include "burst/kernels/gpu/sm90/tile.cuh"
#include "burst/kernels/gpu/sm90/variants.h"

namespace burst {
namespace sm90 {

// The query tiles that see some key of a tile of keys, [begin, end) without gap tiles from
// gap_begin on, and those of which every query sees every key, [whole_begin, whole_end). With
// lists: places in KeyBlocks::query_list, kListParts for each of its.
struct alignas(16) QueryTiles {
  int begin, end;
  int whole_begin, whole_end;
  int gap_begin, gap;  // of queries that see no key at all
  int unused[2];
};

// HeadRange in few registers.
struct Heads {
  int begin = 0, end = 0;

  Heads() = default;
  explicit Heads(const HeadRange& heads)
      : begin(static_cast<int>(heads.begin)), end(static_cast<int>(heads.end)) {}
  __host__ __device__ bool empty() const { return begin >= end; }
  __device__ bool has(int head) const { return begin <= head && head < end; }
};

struct BackwardArgs {
  CUtensorMap q, k, v, dout, dq;
  CUtensorMap dk, dv;  // their sums, fp32, of kWarpRows rows
  const float* lse;
  const float* delta;
  KeyRanges visible;
  KeyBlocks blocks;
  QueryTiles* query_tiles_of;  // with ranges: [batch or 1, key_tiles]
  int q_len, k_len, num_heads, batch, batch_kv_heads, num_kv_heads, heads_per_kv, head_dim;
  int key_tiles, query_tiles;  // of one head
  int group;                   // KV heads whose tensors share the L2 cache
  int reversed_groups;  // the first so many groups of heads have the order of KeyTile::reversed
  float scale;
  bool heads_inside;  // the order of ForEachQueryTile
  int* dq_additions;  // [batch, num_heads, query_tiles, 2], cleared by Prepare; null: any order
  Heads first_dq;     // of these query heads the first addition to dQ assigns it
  // Of these KV heads dK and dV begin here, the sums are assigned; or end here: what is in the sums
  // is added to this part of them, and the results are stored.
  Heads first_dkv, last_dkv;
  AttentionOperand dq_sum, dk_sum, dv_sum;
  CUtensorMap dk_out, dv_out;  // the results, of Element, likewise
};

// What the softmax's backward needs of each query row.
template <class Traits>
struct RowStatistics {
  alignas(16) float lse_log2[Traits::kBlockM];  // +inf for a row that saw no key: P = 0
  alignas(16) float delta[Traits::kBlockM];
  alignas(16) int begin[Traits::kBlockM];
  alignas(16) int end[Traits::kBlockM];
  int whole;  // every query sees every key of the block; else begin and end hold
};

// The keys of a block, and whose.
//
// Blocks begin with the first keys, which under a causal mask the most queries see, and go through
// query tiles from the last one, where the blocks of a head then begin together. A fixed order of
// their additions to dQ, by ascending keys, makes each wait until the one before has added its
// first tile: which takes about as long as a step, for every block of a head in turn. So with a
// mask and a fixed order all of this may be `reversed`: last keys first, query tiles from the first
// one, additions by descending keys. Blocks of a causal mask or of documents then begin at
// different query tiles, and meet at none. (With grouped heads each goes through a head after the
// other, all in the same order.) Only the last group of heads keeps the longest blocks
// first, so that all multiprocessors are busy to the end.
struct KeyTile {
  int row, kv_head, batch;
  bool reversed;
};

template <class Traits>
__device__ __forceinline__ KeyTile MakeKeyTile(const BackwardArgs& args) {
  const int index = blockIdx.x;
  const int group = index / (args.group * args.key_tiles);
  const int in_group = index - group * args.group * args.key_tiles;
  const int group_size = min(args.group, args.batch_kv_heads - group * args.group);
  const int batch_head = group * args.group + in_group % group_size;
  const bool reversed = Traits::kRanges && group < args.reversed_groups;
  const int nth = in_group / group_size;
  return {(reversed ? args.key_tiles - 1 - nth : nth) * Traits::kBlockN,
          batch_head % args.num_kv_heads, batch_head / args.num_kv_heads, reversed};
}

// A step of a block is a query tile of one head.
__device__ __forceinline__ int StepsOf(const BackwardArgs& args, const QueryTiles& tiles) {
  return max(0, tiles.end - tiles.begin - tiles.gap) * args.heads_per_kv;
}

// Calls f(head, tile, place) for every query tile that the block meets, in the same order for every
// warp that calls it; the tile is at that place of the list, or itself the place. With
// grouped heads and a fixed order of additions, a block takes the heads of a tile one after the
// other: going through all tiles of a head first, it would meet the next head when the blocks
// before it are still far from there. (One loop, with few registers, for all of this.)
template <class Traits, class Function>
__device__ __forceinline__ void ForEachQueryTile(const BackwardArgs& args, const KeyTile& keys,
                                                 const QueryTiles& tiles, Function f) {
  const bool heads_inside = args.heads_inside && !keys.reversed;
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
    f(keys.kv_head * args.heads_per_kv + head, tile, place);
    if (heads_inside) {
      if (++head == args.heads_per_kv) {
        head = 0;
        ++i;
      }
    } else if (++i == tiles.end - tiles.gap) {
      i = tiles.begin;
      ++head;
    }
  }
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

// The first index of each of the non-decreasing values[i][0, n) whose value is at least bounds[i];
// n if there is none. By a whole warp, all searches at a time.
template <int kCount>
__device__ __forceinline__ void LowerBounds(const int32_t* const (&values)[kCount],
                                            const int (&bounds)[kCount], int n,
                                            int (&first)[kCount]) {
  const int lane = threadIdx.x % kWarpSize;
  int length[kCount];  // first + length bounds the answer
  bool open = n > 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) first[i] = 0, length[i] = n;
  while (open) {
    bool below[kCount];
    int stride[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      stride[i] = max(1, (length[i] + kWarpSize - 1) / kWarpSize);
      const int at = (lane + 1) * stride[i] - 1;  // the last of the lane's part
      below[i] = at < length[i] && values[i][first[i] + at] < bounds[i];
    }
    open = false;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int skip = __popc(__ballot_sync(~0u, below[i])) * stride[i];
      first[i] += skip;
      length[i] = min(stride[i] - 1, length[i] - skip);
      open = open || length[i] > 0;
    }
  }
}

// By a whole warp. begin and end do not decrease: a range of rows sees some key of the tile, and a
// range of rows all of them.
template <class Traits>
__device__ __forceinline__ void FindQueryTiles(const BackwardArgs& args, int index) {
  const int64_t offset = index / args.key_tiles * args.visible.batch_stride;
  const int32_t *begin = args.visible.begin + offset, *end = args.visible.end + offset;
  const int first_key = index % args.key_tiles * Traits::kBlockN;
  const int last_key = min(first_key + Traits::kBlockN, args.k_len) - 1;
  int found[4];
  LowerBounds<4>({end, begin, end, begin},
                 {first_key + 1, last_key + 1, last_key + 1, first_key + 1}, args.q_len, found);
  const int first = found[0], last = found[1], whole_first = found[2], whole_last = found[3];
  constexpr int kBlockM = Traits::kBlockM;
  QueryTiles tiles;
  tiles.begin = first < args.q_len ? first / kBlockM : args.query_tiles;
  tiles.end = (last + kBlockM - 1) / kBlockM;
  tiles.whole_begin = (whole_first + kBlockM - 1) / kBlockM;
  tiles.whole_end = whole_last == args.q_len ? args.query_tiles : whole_last / kBlockM;
  // Of the last keys there are fewer than the tile has room for, and what is there is masked.
  if (last_key + 1 < first_key + Traits::kBlockN) tiles.whole_end = 0;
  // A tile in which the keys of one document end and those of another begin is met by all queries
  // in between, which may be many that see none of the keys given (those of another rank, say):
  // rows with begin >= x >= end, where the first document ends at x, or the last one begins. The
  // longer of these two gaps is left out.
  tiles.gap_begin = tiles.gap = 0;
  if (first < last) {
    const int after = end[first], before = begin[last - 1];
    LowerBounds<4>({begin, end, begin, end}, {after, after + 1, before, before + 1}, args.q_len,
                   found);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const int gap_begin = max((found[i] + kBlockM - 1) / kBlockM, tiles.begin);
      const int gap_end = min(found[i + 1] / kBlockM, tiles.end);
      if (gap_end - gap_begin <= tiles.gap) continue;
      tiles.gap_begin = gap_begin;
      tiles.gap = gap_end - gap_begin;
    }
  }
  if (threadIdx.x % kWarpSize == 0) args.query_tiles_of[index] = tiles;
}

// Whether some query of the tile sees a key. If none does, a tile of keys that meets it all the
// same adds zeros to dQ, or assigns them.
template <class Traits>
__device__ __forceinline__ bool IsSeen(const BackwardArgs& args, int batch, int tile) {
  if (Traits::kLists) {
    const int32_t* begin =
        args.blocks.key_begin + batch * args.blocks.key_stride + tile / Traits::kListParts;
    return begin[0] < begin[1];
  }
  const int64_t offset = batch * args.visible.batch_stride;
  const int last_query = min((tile + 1) * Traits::kBlockM, args.q_len) - 1;
  const int first_key = max(args.visible.begin[offset + tile * Traits::kBlockM], 0);
  return first_key < args.k_len && args.visible.end[offset + last_query] > first_key;
}

// A warp clears dQ of a query tile for so many heads.
constexpr int kHeadsPerClearing = 4;
__host__ __device__ inline int ClearingsPerTile(const BackwardArgs& args) {
  return (args.first_dq.end - args.first_dq.begin + kHeadsPerClearing - 1) / kHeadsPerClearing;
}

// Zeros where dQ is to be assigned and no query sees a key. By a whole warp.
template <class Traits>
__device__ __forceinline__ void ClearUnseen(const BackwardArgs& args, bool one_mask, int index) {
  const int parts = ClearingsPerTile(args);
  const int tile = index % args.query_tiles, part = index / args.query_tiles % parts;
  const int mask = index / args.query_tiles / parts;
  if (IsSeen<Traits>(args, mask, tile)) return;
  const int end = min((tile + 1) * Traits::kBlockM, args.q_len);
  const int last_batch = one_mask ? args.batch : mask + 1;
  const int first_head = args.first_dq.begin + part * kHeadsPerClearing;
  const int last_head = min(first_head + kHeadsPerClearing, args.first_dq.end);
  for (int batch = mask; batch < last_batch; ++batch) {
    for (int row = tile * Traits::kBlockM; row < end; ++row) {
      for (int head = first_head; head < last_head; ++head) {
        float* dq = static_cast<float*>(args.dq_sum.data) + Offset(args.dq_sum, batch, head, row);
        for (int i = threadIdx.x % kWarpSize * 4; i < args.head_dim; i += kWarpSize * 4) {
          *reinterpret_cast<float4*>(dq + i) = {0, 0, 0, 0};
        }
      }
    }
  }
}

// Before the backward itself, under a mask: a warp for every tile of keys whose query tiles are to
// be found, and one for some heads of every query tile, whose dQ may have to be cleared; all clear
// the counters.
template <class Traits>
__global__ void Prepare(const __grid_constant__ BackwardArgs args, int key_tiles, int clearings,
                        bool one_mask, int counters) {
  const int thread = blockIdx.x * blockDim.x + threadIdx.x;
  for (int i = thread; i < counters; i += gridDim.x * blockDim.x) args.dq_additions[i] = 0;
  int index = thread / kWarpSize;
  if (index < key_tiles) return FindQueryTiles<Traits>(args, index);
  index -= key_tiles;
  if (index < clearings) ClearUnseen<Traits>(args, one_mask, index);
}

template <class Traits>
void LaunchPrepare(const BackwardArgs& args) {
  const int counters =
      args.dq_additions == nullptr ? 0 : args.batch * args.num_heads * args.query_tiles * 2;
  if (!Traits::kMasked) {
    if (counters == 0) return;
    BURST_CUDA_CHECK(
        cudaMemsetAsync(args.dq_additions, 0, counters * sizeof(int32_t), cuda::CurrentStream()));
    return;
  }
  constexpr int kWarpsPerBlock = 4, kClearingWarps = 256;
  const bool one_mask = (Traits::kLists ? args.blocks.key_stride : args.visible.batch_stride) == 0;
  const int masks = one_mask ? 1 : args.batch;
  const int key_tiles = Traits::kRanges ? masks * args.key_tiles : 0;
  const int clearings =
      args.first_dq.empty() ? 0 : masks * args.query_tiles * ClearingsPerTile(args);
  const int warps =
      std::max(key_tiles + clearings, std::min(counters / kWarpSize + 1, kClearingWarps));
  Prepare<Traits><<<(warps + kWarpsPerBlock - 1) / kWarpsPerBlock, kWarpsPerBlock * kWarpSize, 0,
                    cuda::CurrentStream()>>>(args, key_tiles, clearings, one_mask, counters);
  BURST_CUDA_CHECK_LAUNCH("attention backward, preparation");
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

// Whether every query of the tile sees every key of the block.
template <class Traits>
__device__ __forceinline__ bool IsWhole(const BackwardArgs& args, const KeyTile& keys,
                                        const RowStatistics<Traits>& rows) {
  return Traits::kRanges ? rows.whole != 0 : keys.row + Traits::kBlockN <= args.k_len;
}

// What a step adds to dQ, and its turn. When deterministic, the tiles of keys that see its queries
// add in the order of their blocks: a block waits until the count of additions to this part is the
// number of those before its own. They are launched earlier, so that somebody can always proceed.
// With lists that number is the block's place in the list of the queries.
struct alignas(16) DqStep {
  int row, head;
  int counter;  // in BackwardArgs::dq_additions, that of part 0; negative: in any order
  int turn;
};

// Steps whose DqStep is kept. The rows of a step are loaded at most two steps ahead of the matmuls,
// dQ leaves at most four steps behind them.
constexpr int kDqSteps = 8;

template <class Traits>
__device__ __forceinline__ DqStep MakeDqStep(const BackwardArgs& args, const KeyTile& keys,
                                             int head, int tile, int place) {
  DqStep step = {tile * Traits::kBlockM, head, -1, 0};
  if (args.dq_additions == nullptr) return step;
  // Of the last queries there may be fewer than a list's block has tiles for.
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

// Once the dQ of the step lies in shared memory: store(add) adds it to global memory, when it is
// its turn, or, the first where dQ is assigned, stores it; by the TMA, whose source it gives back
// before it returns. Between two additions of a fixed order nothing is decided: add is a constant.
template <class Function>
__device__ __forceinline__ void AddInTurn(const BackwardArgs& args, const DqStep& step, int part,
                                          Function store) {
  int* const additions = args.dq_additions + step.counter + part;
  const bool in_turn = args.dq_additions != nullptr && step.counter >= 0;
  if (in_turn && step.turn == 0 && args.first_dq.has(step.head)) {
    store(std::false_type());
  } else {
    if (in_turn) {
      while (LoadAcquire(additions) != step.turn) continue;
    }
    store(std::true_type());
  }
  if (in_turn) {
    BulkWait();
    AddRelease(additions, 1);
  }
}

// Once a warp. For every step of the block the statistics and ranges of its rows, into shared.rows,
// and its DqStep. full and empty: the barriers of a stage. delta is stored times delta_factor.
template <class Traits, class Shared>
__device__ __forceinline__ void BackwardLoadRows(const BackwardArgs& args, Shared& shared,
                                                 const KeyTile& keys, Barrier* full, Barrier* empty,
                                                 float delta_factor) {
  // A lane has two or four rows; of three the registers of a loop are too few.
  constexpr int kUnroll = Traits::kBlockM % 64 == 0 ? 4 : 1;
  const int lane = threadIdx.x % kWarpSize;
  int step = 0;
  const QueryTiles& tiles = shared.tiles;
  ForEachQueryTile<Traits>(args, keys, tiles, [&](int head, int tile, int place) {
    const int stage = step % Traits::kStages;
    RowStatistics<Traits>& rows = shared.rows[stage];
    const bool whole = tile >= tiles.whole_begin && tile < tiles.whole_end;
    const int first = tile * Traits::kBlockM;
    // Of fewer than 2^32 rows: so many do not fit into a GPU's memory.
    const uint32_t offset = (keys.batch * args.num_heads + head) * uint32_t(args.q_len) + first;
    const DqStep dq_step = MakeDqStep<Traits>(args, keys, head, tile, place);
    Wait(&empty[stage], step / Traits::kStages % 2 ^ 1);
    if (lane == 0) {
      shared.dq_steps[step % kDqSteps] = dq_step;
      rows.whole = whole;
    }
#pragma unroll(kUnroll)
    for (int i = lane; i < Traits::kBlockM; i += kWarpSize) {
      const bool valid = first + i < args.q_len;
      const float lse = valid ? args.lse[offset + i] : -INFINITY;
      rows.lse_log2[i] = lse == -INFINITY ? INFINITY : lse * kLog2E;
      rows.delta[i] = valid ? args.delta[offset + i] * delta_factor : 0.f;
    }
    if (Traits::kRanges && !whole) {
#pragma unroll(kUnroll)
      for (int i = lane; i < Traits::kBlockM; i += kWarpSize) {
        // Of fewer than 2^32 rows, as above.
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

// d = d * factor + the warp's rows of the sums: two rows of a thread. Rounded as in an addition
// to memory.
template <int kColumns>
__device__ __forceinline__ void AddSums(const BackwardArgs& args, const AttentionOperand& sums,
                                        float factor, int lane, int row, const KeyTile& keys,
                                        float (&d)[kColumns / 2]) {
  const int first_column = lane % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = row + lane / 4 + 8 * r;
    const int columns = key < args.k_len ? args.head_dim - first_column : 0;
    const float* from = static_cast<const float*>(sums.data) +
                        Offset(sums, keys.batch, keys.kv_head, key) + first_column;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      if (j % 8 == 0) __syncwarp();  // or ptxas loads more ahead than there are registers
      float2 sum = {0, 0};
      if (8 * j < columns) sum = __ldcg(reinterpret_cast<const float2*>(from + 8 * j));
      float& x = d[4 * j + 2 * r];
      float& y = d[4 * j + 2 * r + 1];
      x = __fadd_rn(sum.x, __fmul_rn(x, factor));
      y = __fadd_rn(sum.y, __fmul_rn(y, factor));
    }
  }
}

// A warp's rows of dK or dV, times factor, to global memory by the TMA.
template <class Element, int kColumns>
__device__ __forceinline__ void StoreGradient(const BackwardArgs& args, const CUtensorMap& sum_map,
                                              const AttentionOperand& sums,
                                              const CUtensorMap& out_map, uint32_t staging,
                                              int block_bytes, float (&d)[kColumns / 2],
                                              float factor, int lane, int row,
                                              const KeyTile& keys) {
  const bool first = args.first_dkv.has(keys.kv_head);
  if (!args.last_dkv.has(keys.kv_head)) {
    const float factors[2] = {factor, factor};
    return StoreFloatWarpRows<kColumns>(!first, sum_map, staging, block_bytes, d, factors, lane,
                                        row, keys.kv_head, keys.batch);
  }
  if (!first) {
    AddSums<kColumns>(args, sums, factor, lane, row, keys, d);
    factor = 1;
  }
  const float factors[2] = {factor, factor};
  StoreWarpRows<Element, kColumns>(out_map, staging, block_bytes, d, factors, lane, row,
                                   keys.kv_head, keys.batch);
}

// Whether a block that no query sees has something to do: zeros to assign, sums to convert.
__device__ __forceinline__ bool StoresUnseen(const BackwardArgs& args, const KeyTile& keys) {
  return args.first_dkv.has(keys.kv_head) || args.last_dkv.has(keys.kv_head);
}

// dq_rows: of a box of dQ.
template <class Traits>
BackwardArgs MakeBackwardArgs(const FlashBackwardParams& params, int32_t* counters,
                              int32_t* query_tiles, int dq_rows) {
  const FlashAttentionShape& shape = params.shape;
  const auto map_q = [&](const AttentionOperand& tensor, DType dtype, int box_rows) {
    return MakeTensorMap(tensor, dtype, shape, shape.q_len, shape.num_heads, box_rows);
  };
  const auto map_k = [&](const AttentionOperand& tensor, DType dtype, int box_rows) {
    return MakeTensorMap(tensor, dtype, shape, shape.k_len, shape.num_kv_heads, box_rows);
  };
  BackwardArgs args;
  args.k = map_k(params.k, shape.dtype, Traits::kBlockN);
  args.v = map_k(params.v, shape.dtype, Traits::kBlockN);
  args.q = args.dout = args.dq = args.k;  // without queries nobody uses them; dK and dV become zero
  if (shape.q_len > 0) {
    args.q = map_q(params.q, shape.dtype, Traits::kBlockM);
    args.dout = map_q(params.dout, shape.dtype, Traits::kBlockM);
    args.dq = map_q(params.dq, DType::kFloat32, dq_rows);
  }
  // Without sums, or without results, nobody uses the maps of these.
  const HeadRange all_kv_heads = {0, shape.num_kv_heads};
  args.first_dkv = Heads(params.assign ? all_kv_heads : params.first_dkv);
  args.last_dkv = Heads(params.assign ? all_kv_heads : params.last_dkv);
  const AttentionOperand& dk_out = params.assign ? params.dk : params.dk_out;
  const AttentionOperand& dv_out = params.assign ? params.dv : params.dv_out;
  args.dk = args.dv = args.dk_out = args.dv_out = args.k;
  if (!args.last_dkv.empty()) {
    args.dk_out = map_k(dk_out, shape.dtype, kWarpRows);
    args.dv_out = map_k(dv_out, shape.dtype, kWarpRows);
  }
  if (!params.assign) {
    args.dk = map_k(params.dk, DType::kFloat32, kWarpRows);
    args.dv = map_k(params.dv, DType::kFloat32, kWarpRows);
  }
  args.dk_sum = params.dk;
  args.dv_sum = params.dv;
  args.first_dq = Heads(params.first_dq);
  args.dq_sum = params.dq;
  args.lse = static_cast<const float*>(params.lse);
  args.delta = static_cast<const float*>(params.delta);
  args.visible = shape.visible;
  args.blocks = shape.blocks;
  args.query_tiles_of = reinterpret_cast<QueryTiles*>(query_tiles);
  args.batch = static_cast<int>(shape.batch);
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
  // Of a KV head: q, dout and fp32 dq of its query heads.
  const int64_t row_bytes = int64_t{Traits::kHeadDim} * 8 * args.heads_per_kv;
  // Reversed, the blocks of a head read different query tiles at the same time. Measured faster
  // while what all of them read stays in the L2 cache.
  const int64_t limit = (args.heads_per_kv == 1 ? 36 : 20) << 20;
  const int64_t most_queries =
      shape.visible.most_queries == 0 ? shape.q_len : shape.visible.most_queries;
  const bool reversed =
      Traits::kRanges && params.deterministic && most_queries * row_bytes <= limit;
  const auto within = [](int64_t mib, int64_t bytes) {
    return (mib << 20) / std::max<int64_t>(1, bytes);
  };
  // Half of the L2 for the heads under way. Without a mask the blocks of a head stay at the same
  // query tile.
  const int64_t kv_head_bytes = shape.q_len * row_bytes;
  int64_t fit = Traits::kMasked ? within(24, kv_head_bytes) : 1;
  if (params.deterministic) {
    // More, so that fewer blocks meet at a query tile, though not all of what they read stays in
    // the L2 cache. Reversed they do not meet; but of short sequences very many would fit, and the
    // last group, which is not reversed, be long.
    if (Traits::kLists) {
      fit = std::clamp<int64_t>(within(64, kv_head_bytes), 2, 4);
    } else if (reversed) {
      fit = std::min<int64_t>(fit, 8);
    } else if (args.heads_inside) {
      // Of packed documents, or of another rank's keys, little is under way at a time. But if the
      // blocks of a head alone fill the GPU twice, more heads only read more.
      constexpr int64_t kMultiprocessors = 132;
      const bool fills = args.key_tiles > 2 * kMultiprocessors;
      fit =
          std::clamp<int64_t>(within(256, (fills ? shape.q_len : most_queries) * row_bytes), 1, 8);
    } else if (!Traits::kMasked) {
      fit = std::clamp<int64_t>(within(32, kv_head_bytes), 1, 8);
    }
  } else if (Traits::kRanges) {
    // Of every KV head one query head is under way.
    fit = within(24, kv_head_bytes / args.heads_per_kv);
  }
  args.group = HeadsPerGroup(args.batch_kv_heads, fit);
  args.reversed_groups = reversed ? (args.batch_kv_heads + args.group - 1) / args.group - 1 : 0;
  return args;
}

// A thread block for every key tile.
template <class Traits>
void LaunchOverKeys(void (*kernel)(BackwardArgs), size_t shared_bytes, const BackwardArgs& args) {
  BURST_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(shared_bytes)));
  kernel<<<args.key_tiles * args.batch_kv_heads, Traits::kThreads, shared_bytes,
           cuda::CurrentStream()>>>(args);
  BURST_CUDA_CHECK_LAUNCH("attention backward");
}

}  // namespace sm90
}  // namespace burst
