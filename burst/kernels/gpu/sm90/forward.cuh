// Shared code of the forward kernels: the tiles of queries, the order in which blocks draw them,
// and the producer, which loads Q, K and V.
#pragma once

#include <algorithm>
#include <type_traits>

#include "burst/device/cuda.h"
#include "burst/kernels/gpu/common/isolation.cuh"
#include "burst/kernels/gpu/sm90/block_order.h"
#include "burst/kernels/gpu/sm90/tile.cuh"
#include "burst/kernels/gpu/sm90/variants.h"
#include "burst/kernels/merge.h"

namespace burst {
namespace sm90 {

// The traits of a kernel that follows RowCalls. It is a kernel of its own: the code for RowCalls
// would make short rows in a single call up to 4 % slower.
template <class Traits>
struct WithRowCalls : Traits {
  static constexpr bool kRowCalls = true;
};

// Where a call stores its results (RowCalls).
enum class RowsGo { kToOut = 0, kToSum = 1, kNowhere = 2 };

// The blocks of kBlockN keys that a tile of query rows sees: [block_begin, block_end). All rows of
// the tile see every key of [whole_begin, whole_end). With lists these are places in
// KeyBlocks::key_list, kListParts for each of its entries.
struct TileInfo {
  int row, head, kv_head, batch;  // batch < 0: no tile left
  int block_begin, block_end;     // begin <= end
  int whole_begin, whole_end;
};

struct RowCallsTileInfo : TileInfo {
  int rows_go;  // two bits for the rows of each consumer: RowsGo
};

template <class Traits>
using TileInfoOf = std::conditional_t<Traits::kRowCalls, RowCallsTileInfo, TileInfo>;

// Counters, which are zero between calls.
struct ForwardCounters {
  unsigned next_tile, finished_blocks;
};
static_assert(sizeof(ForwardCounters) == kForwardCounters * sizeof(int32_t), "");

struct ForwardArgs {
  CUtensorMap q, k, v;
  CUtensorMap out_map;  // boxes of kWarpRows rows, for StoreWarpRows of Element
  AttentionOperand out;
  bool out_is_float;
  bool merge;
  bool skip_empty;            // skips tiles that see no key: other calls finish them
  AttentionOperand sum;       // fp32: the result of the calls so far
  const int32_t* last_calls;  // RowCalls::last
  int last_calls_stride, call;
  float* lse;
  const float* sinks;
  KeyRanges visible;
  KeyBlocks blocks;
  int q_len, k_len, num_heads, batch_heads, heads_per_kv, value_dim;
  int tiles, tile_rows;  // all tiles; the tiles of one head
  int tile_rows_end;     // the tile of a head after the last one
  int group;             // heads whose K and V share the L2 cache
  float scale, inverse_scale;
  ForwardCounters* counters;
  int32_t* marks;  // marks of common/isolation.h
};

// The tiles of Q, K and V. In e4m3, 128 elements fill the row that 64 elements of 16 bits fill, and
// V is transposed.
template <class Traits>
struct ForwardTiles {
  static constexpr int kColumns = Traits::kHeadDim / (Traits::kFp8 ? 2 : 1);
  using Q = Tile<Traits::kBlockM, kColumns>;
  using K = Tile<Traits::kBlockN, kColumns>;
  using V = std::conditional_t<Traits::kFp8, Tile<Traits::kValueDim, Traits::kBlockN / 2>,
                               Tile<Traits::kBlockN, Traits::kValueDim>>;
};

template <class Traits>
struct ForwardShared {
  typename ForwardTiles<Traits>::Q q[Traits::kQStages];
  typename ForwardTiles<Traits>::K k[Traits::kStages];
  typename ForwardTiles<Traits>::V v[Traits::kStages];
  Barrier q_full[Traits::kQStages], q_empty[Traits::kQStages];
  Barrier k_full[Traits::kStages], k_empty[Traits::kStages];
  Barrier v_full[Traits::kStages], v_empty[Traits::kStages];
  // Describes the tiles of q. There are twice as many: a tile's finish reads it after q is free.
  TileInfoOf<Traits> tile[2 * Traits::kQStages];
  TileInfoOf<Traits> next_tile;  // of the producer
};

// Returns a tile. In a group of heads the last rows come first, and equal rows head by head.
template <class Traits>
__device__ __forceinline__ TileInfoOf<Traits> MakeTile(const ForwardArgs& args, int index) {
  TileInfoOf<Traits> tile;
  if (index >= args.tiles) {
    tile.batch = -1;
    return tile;
  }
  const BlockPlace place = PlaceOf(index, args.tile_rows, args.batch_heads, args.group);
  tile.batch = place.head / args.num_heads;
  tile.head = place.head % args.num_heads;
  tile.kv_head = tile.head / args.heads_per_kv;
  const int end = Traits::kRowCalls ? args.tile_rows_end : args.tile_rows;
  tile.row = (end - 1 - place.nth) * Traits::kBlockM;

  if constexpr (Traits::kRowCalls) {
    static_assert(kRowGroup == kWgmmaM, "a consumer has one group of rows");
    tile.rows_go = 0;
    const int32_t* const last_calls = args.last_calls + tile.batch * args.last_calls_stride;
#pragma unroll
    for (int consumer = 0; consumer < Traits::kConsumers; ++consumer) {
      const int row = tile.row + consumer * kWgmmaM;
      const int left = row < args.q_len ? last_calls[row / kWgmmaM] - args.call : 0;
      const RowsGo go = left < 0 ? RowsGo::kNowhere : left > 0 ? RowsGo::kToSum : RowsGo::kToOut;
      tile.rows_go |= static_cast<int>(go) << (2 * consumer);
    }
  }

  constexpr int kBlockN = Traits::kBlockN;
  if (Traits::kRanges) {
    const int last = min(tile.row + Traits::kBlockM, args.q_len) - 1;
    const int32_t* begin = args.visible.begin + tile.batch * args.visible.batch_stride;
    const int32_t* end = args.visible.end + tile.batch * args.visible.batch_stride;
    tile.block_begin = max(begin[tile.row], 0) / kBlockN;
    tile.block_end = (min(end[last], args.k_len) + kBlockN - 1) / kBlockN;
    tile.whole_begin = (max(begin[last], 0) + kBlockN - 1) / kBlockN;
    tile.whole_end = min(end[tile.row], args.k_len) / kBlockN;
  } else if (Traits::kLists) {
    constexpr int kBlock = static_cast<int>(kListBlock), kParts = Traits::kListParts;
    const int32_t* begin =
        args.blocks.key_begin + tile.batch * args.blocks.key_stride + tile.row / kBlock;
    tile.block_begin = tile.whole_begin = begin[0] * kParts;
    tile.block_end = tile.whole_end = begin[1] * kParts;
    const int left = args.k_len % kBlock;  // keys of the partial block
    if (left > 0 && begin[0] < begin[1] &&
        args.blocks.key_list[begin[1] - 1] == args.k_len / kBlock) {
      tile.block_end -= kParts - (left + kBlockN - 1) / kBlockN;
      tile.whole_end -= kParts - left / kBlockN;
    }
  } else {
    tile.block_begin = tile.whole_begin = 0;
    tile.block_end = (args.k_len + kBlockN - 1) / kBlockN;
    tile.whole_end = args.k_len / kBlockN;
  }
  tile.block_end = max(tile.block_end, tile.block_begin);
  return tile;
}

__device__ __forceinline__ bool IsSkipped(const ForwardArgs& args, const TileInfo& tile) {
  return args.skip_empty && tile.batch >= 0 && tile.block_begin >= tile.block_end;
}

// The thread that loads Q, K and V: its places in the rings, and how it draws tiles.
template <class Traits>
struct ForwardProducer {
  const ForwardArgs& args;
  ForwardShared<Traits>& shared;
  RingSlot<Traits::kQStages> q_slot;
  RingSlot<Traits::kStages> k_slot, v_slot;

  __device__ __forceinline__ ForwardProducer(const ForwardArgs& args_,
                                             ForwardShared<Traits>& shared_)
      : args(args_), shared(shared_) {}

  __device__ __forceinline__ int FirstKey(int block) const {
    if constexpr (Traits::kLists) {
      constexpr int kParts = Traits::kListParts;
      block = __ldg(args.blocks.key_list + block / kParts) * kParts + block % kParts;
    }
    return block * Traits::kBlockN;
  }

  __device__ __forceinline__ void LoadK(const TileInfo& tile, int block) {
    Barrier* full = &shared.k_full[k_slot.stage];
    Wait(&shared.k_empty[k_slot.stage], k_slot.parity ^ 1);
    ArriveExpectBytes(full, ForwardTiles<Traits>::K::kBytes);
    LoadTile<Traits::kKeepKeys>(shared.k[k_slot.stage], args.k, full, FirstKey(block), tile.kv_head,
                                tile.batch);
    k_slot.Advance();
  }

  __device__ __forceinline__ void LoadV(const TileInfo& tile, int block) {
    Barrier* full = &shared.v_full[v_slot.stage];
    Wait(&shared.v_empty[v_slot.stage], v_slot.parity ^ 1);
    ArriveExpectBytes(full, ForwardTiles<Traits>::V::kBytes);
    if constexpr (Traits::kFp8) {  // [value_dim, keys]
      TmaLoad<Traits::kKeepKeys>(shared.v[v_slot.stage].data, args.v, full, FirstKey(block), 0,
                                 tile.kv_head, tile.batch);
    } else {
      LoadTile<Traits::kKeepKeys>(shared.v[v_slot.stage], args.v, full, FirstKey(block),
                                  tile.kv_head, tile.batch);
    }
    v_slot.Advance();
  }

  // Returns the number of the tile after tile `index`. Without a mask all tiles are equally long
  // and need no counter.
  __device__ __forceinline__ int After(int index) const {
    return Traits::kMasked ? gridDim.x + atomicAdd(&args.counters->next_tile, 1)
                           : index + gridDim.x;
  }

  // Returns tile `index`, or the next one that is not skipped, whose number `index` becomes.
  __device__ __forceinline__ TileInfoOf<Traits> Find(int& index) const {
    TileInfoOf<Traits> found = MakeTile<Traits>(args, index);
    while (IsSkipped(args, found)) {
      index = After(index);
      found = MakeTile<Traits>(args, index);
    }
    return found;
  }

  __device__ __forceinline__ void Run();
};

template <class Traits>
__device__ __forceinline__ void ForwardProducer<Traits>::Run() {
  // If the consumers leave the producer few registers, it keeps its tiles in shared memory.
  constexpr bool kInShared = Traits::kProducerRegisters < 40;
  TileInfoOf<Traits> own_tile, own_next_tile;
  TileInfoOf<Traits>& next_tile = kInShared ? shared.next_tile : own_next_tile;
  int index = blockIdx.x;
  next_tile = Find(index);
  for (;;) {
    int next = 0;
    Barrier* q_full = &shared.q_full[q_slot.stage];
    Wait(&shared.q_empty[q_slot.stage], q_slot.parity ^ 1);
    TileInfoOf<Traits>& shared_tile = shared.tile[q_slot.stage + Traits::kQStages * q_slot.parity];
    shared_tile = next_tile;
    if (!kInShared) own_tile = next_tile;
    const TileInfoOf<Traits>& tile = kInShared ? shared_tile : own_tile;
    if (tile.batch < 0) {
      Arrive(q_full);
      break;
    }
    ArriveExpectBytes(q_full, ForwardTiles<Traits>::Q::kBytes);
    LoadTile(shared.q[q_slot.stage], args.q, q_full, tile.row, tile.head, tile.batch);
    q_slot.Advance();
    // K runs one block ahead of V, as S runs ahead of O. The next tile is drawn late, so that the
    // first free block gets the longest remaining tile. But two blocks of keys are left by then, so
    // that the consumers do not wait for it.
    const int draw_at = min(tile.block_begin, tile.block_end - 1);
#pragma unroll 1
    for (int block = tile.block_end - 1; block >= tile.block_begin - 1; --block) {
      if (block == draw_at) next = After(index);
      if (block >= tile.block_begin) {
        LoadK(tile, block);
      } else {
        next_tile = Find(next);
      }
      if (block + 1 < tile.block_end) LoadV(tile, block + 1);
    }
    index = next;
  }
  // The last block to finish resets the counters.
  if (Traits::kMasked && atomicAdd(&args.counters->finished_blocks, 1) == gridDim.x - 1) {
    args.counters->next_tile = args.counters->finished_blocks = 0;
  }
}

// Returns the place of lse for a thread's first row.
__device__ __forceinline__ float* LseRow(const ForwardArgs& args, const TileInfo& tile,
                                         int first_row) {
  return args.lse + (static_cast<int64_t>(tile.batch) * args.num_heads + tile.head) * args.q_len +
         first_row;
}

// Returns where the rows of a consumer go.
template <class Tile>
__device__ __forceinline__ RowsGo WhereRowsGo(const Tile& tile, int consumer) {
  if constexpr (std::is_same_v<Tile, TileInfo>) {
    return RowsGo::kToOut;
  } else {
    return static_cast<RowsGo>(tile.rows_go >> (2 * consumer) & 3);
  }
}

// Returns the tensor that rows go to. The sum has the strides of `out` (RowCalls).
__device__ __forceinline__ AttentionOperand TargetOf(const ForwardArgs& args, RowsGo rows_go) {
  AttentionOperand to = args.out;
  if (rows_go == RowsGo::kToSum) to.data = args.sum.data;
  return to;
}

// Returns whether a warp's rows are left to the repair of common/isolation.h: O is not finite.
template <class Traits>
__device__ __forceinline__ bool LeaveToRepair(const ForwardArgs& args, const TileInfo& tile,
                                              int first_row,
                                              const float (&o)[Traits::kValueDim / 2]) {
  if (!Traits::kRanges || args.marks == nullptr) return false;
  if (!cuda::IsPoisoned<Traits::kValueDim>(o)) return false;
  const int lane = threadIdx.x % kWarpSize, row = first_row - lane / 4;
  if (lane == 0 && row < args.q_len) {
    const int64_t head = static_cast<int64_t>(tile.batch) * args.num_heads + tile.head;
    cuda::Mark(args.marks, head * cuda::MarkGroups(args.q_len) + row / cuda::kMarkRows, 0xFFFF);
  }
  return true;
}

// Adds the head's sink to a row's maximum (natural, after softmax_scale) and sum. Returns the
// factor by which the row's O must be multiplied.
__device__ __forceinline__ float AddSinkOf(const ForwardArgs& args, const TileInfo& tile,
                                           float* max, float* sum) {
  return args.sinks == nullptr ? 1.f : AddSink(__ldg(args.sinks + tile.head), max, sum);
}

// Initializes the barriers of a block, before any of its threads goes on.
template <class Traits>
__device__ __forceinline__ void InitForwardBarriers(ForwardShared<Traits>& shared) {
  for (int stage = 0; stage < Traits::kQStages; ++stage) {
    InitBarrier(&shared.q_full[stage], 1);
    InitBarrier(&shared.q_empty[stage], Traits::kOneLaneReads
                                            ? Traits::kConsumerWarps
                                            : Traits::kConsumers * kWarpgroupSize);
  }
  for (int stage = 0; stage < Traits::kStages; ++stage) {
    InitBarrier(&shared.k_full[stage], 1);
    InitBarrier(&shared.k_empty[stage], Traits::kConsumerWarps);
    InitBarrier(&shared.v_full[stage], 1);
    InitBarrier(&shared.v_empty[stage], Traits::kConsumerWarps);
  }
  FenceBarrierInit();
}

// Makes the arguments of a launch from the call; the caller makes the tensor maps. kv_row_bytes:
// bytes of a key and its value.
template <class Traits>
void SetForwardArgs(const FlashForwardParams& params, int32_t* counters, int64_t kv_row_bytes,
                    ForwardArgs* args) {
  const FlashAttentionShape& shape = params.shape;
  args->out = params.out;
  args->out_is_float = params.out_dtype == DType::kFloat32;
  args->merge = params.merge;
  args->sum = params.sum.data == nullptr ? params.out : params.sum;
  args->last_calls = params.rows.last;
  args->last_calls_stride = static_cast<int>(params.rows.batch_stride);
  args->call = params.rows.call;
  args->skip_empty = params.merge && (params.rows.last != nullptr || params.sum.data == nullptr);
  args->lse = static_cast<float*>(params.lse);
  args->sinks = static_cast<const float*>(params.sinks);
  args->visible = shape.visible;
  args->blocks = shape.blocks;
  args->q_len = static_cast<int>(shape.q_len);
  args->k_len = static_cast<int>(shape.k_len);
  args->num_heads = static_cast<int>(shape.num_heads);
  args->batch_heads = static_cast<int>(shape.batch * shape.num_heads);
  args->heads_per_kv = static_cast<int>(shape.num_heads / shape.num_kv_heads);
  args->value_dim = static_cast<int>(shape.value_dim);
  const bool some_rows = params.merge && params.rows.last != nullptr;
  const int64_t end_row = some_rows ? params.rows.end : shape.q_len;
  args->tile_rows_end = static_cast<int>((end_row + Traits::kBlockM - 1) / Traits::kBlockM);
  args->tile_rows =
      args->tile_rows_end - (some_rows ? static_cast<int>(params.rows.begin / Traits::kBlockM) : 0);
  args->tiles = args->tile_rows * args->batch_heads;
  args->scale = static_cast<float>(shape.softmax_scale);
  args->inverse_scale = 1 / args->scale;
  args->counters = reinterpret_cast<ForwardCounters*>(counters);
  args->marks = shape.visible.documents ? counters + kForwardCounters : nullptr;
  args->group = ForwardGroup(Traits::kMask, shape.k_len, kv_row_bytes,
                             args->batch_heads / args->heads_per_kv, args->heads_per_kv);
}

template <class Traits, class Args>
void StartForward(void (*kernel)(Args), const Args& args, bool non_persistent) {
  constexpr int kSharedBytes = sizeof(ForwardShared<Traits>);
  static_assert(kSharedBytes <= 227 * 1024, "more shared memory than a block can have");
  BURST_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  const int multiprocessors = cuda::CurrentContext().multiprocessors;
  if (args.tiles == 0) return;
  const int blocks = non_persistent ? args.tiles : std::min(args.tiles, multiprocessors);
  kernel<<<blocks, Traits::kThreads, kSharedBytes, cuda::CurrentStream()>>>(args);
  BURST_CUDA_CHECK_LAUNCH("attention forward");
}

}  // namespace sm90
}  // namespace burst
