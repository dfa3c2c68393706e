// The arguments of the backward kernels, and the number of heads in progress at the same time.
#pragma once

#include "burst/kernels/gpu/common/isolation.h"
#include "burst/kernels/gpu/sm90/block_order.h"
#include "burst/kernels/gpu/sm90/head_splits.h"
#include "burst/kernels/gpu/sm90/tensor_map.h"
#include "burst/kernels/gpu/sm90/tile.cuh"
#include "burst/kernels/gpu/sm90/variants.h"

namespace burst {
namespace sm90 {

// The query tiles that see some key of a tile of keys: [begin, end) without `gap` tiles from
// gap_begin on. In [whole_begin, whole_end) every query sees every key. With lists these are places
// in KeyBlocks::query_list, kListParts for each of its entries.
struct alignas(16) QueryTiles {
  int begin, end;
  int whole_begin, whole_end;
  int gap_begin, gap;  // tiles whose queries see no key at all
  int unused[2];
};

// A HeadRange that takes few registers.
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
  CUtensorMap dk, dv;  // fp32 sums of dK and dV, in boxes of kWarpRows rows
  const float* lse;
  const float* delta;
  KeyRanges visible;
  KeyBlocks blocks;
  QueryTiles* query_tiles_of;  // with ranges: [batch or 1, key_tiles]
  int q_len, k_len, num_heads, batch, num_kv_heads, head_dim;
  // The query heads of a KV head are split among head_splits blocks of heads_per_block heads each.
  int head_splits, heads_per_block;
  int batch_splits;            // splits of all KV heads of the batch
  int key_tiles, query_tiles;  // tiles of one head
  BackwardOrder order;
  float scale;
  int* counters;  // [num_counters], cleared by Prepare; the next three point into it
  int num_counters;
  int value_dim;       // here it moves no other argument, so that other kernels keep their code
  int* dq_additions;   // [batch, num_heads, query_tiles, 2]; null: any order
  int* dkv_additions;  // [sums, key_tiles, kBackwardWarps]; null: heads are not split
  int32_t* marks;      // marks of common/isolation.h
  int sums;            // HeadSplits::sums
  Heads first_dq;      // query heads whose first addition assigns dQ
  // This call begins dK and dV of the KV heads first_dkv: it overwrites the sums. It ends dK and dV
  // of last_dkv: it adds the sums to its part and stores the results.
  Heads first_dkv, last_dkv;
  AttentionOperand dq_sum, dk_sum, dv_sum;
  CUtensorMap dk_out, dv_out;  // the results, of Element, in the same boxes
};

// Makes tensor maps of a call's operands by queries and by keys, in boxes of box_rows rows.
struct OperandMaps {
  const FlashAttentionShape& shape;

  CUtensorMap OfQueries(const AttentionOperand& tensor, DType dtype, int64_t columns,
                        int box_rows) const {
    return MakeTensorMap(tensor, dtype, {shape.batch, shape.q_len, shape.num_heads, columns},
                         box_rows);
  }
  CUtensorMap OfKeys(const AttentionOperand& tensor, DType dtype, int64_t columns,
                     int box_rows) const {
    return MakeTensorMap(tensor, dtype, {shape.batch, shape.k_len, shape.num_kv_heads, columns},
                         box_rows);
  }
};

// Sets where dQ, dK and dV go: their sums, and the results of dK and dV. Without sums, or without
// results, the maps of these are unused. dq_rows: the rows of a box of dQ.
inline void SetGradients(const FlashBackwardParams& params, const BackwardScratch& scratch,
                         const HeadSplits& splits, int dq_rows, BackwardArgs* args) {
  const FlashAttentionShape& shape = params.shape;
  const OperandMaps maps = {shape};
  const int64_t head_dim = shape.head_dim, value_dim = shape.value_dim;
  args->first_dq = Heads(params.dq.first);
  args->dq_sum = params.dq.sum;
  args->dq = args->k;  // not used without queries
  if (shape.q_len > 0) {
    args->dq = maps.OfQueries(params.dq.sum, DType::kFloat32, head_dim, dq_rows);
  }
  const HeadRange all_kv_heads = {0, shape.num_kv_heads};
  args->first_dkv = Heads(params.dk.assigned() ? all_kv_heads : params.dk.first);
  args->last_dkv = Heads(params.dk.assigned() ? all_kv_heads : params.dk.last);
  args->dk = args->dv = args->dk_out = args->dv_out = args->k;
  if (!args->last_dkv.empty()) {
    args->dk_out = maps.OfKeys(params.dk.result, shape.dtype, head_dim, kWarpRows);
    args->dv_out = maps.OfKeys(params.dv.result, shape.dtype, value_dim, kWarpRows);
  }
  args->dk_sum = params.dk.sum;
  args->dv_sum = params.dv.sum;
  args->sums = 0;
  if (!params.dk.assigned()) {
    args->dk = maps.OfKeys(params.dk.sum, DType::kFloat32, head_dim, kWarpRows);
    args->dv = maps.OfKeys(params.dv.sum, DType::kFloat32, value_dim, kWarpRows);
  } else if (splits.splits > 1) {
    args->sums = static_cast<int>(splits.sums);
    const auto make = [&](float* sums, int64_t columns, AttentionOperand* sum, CUtensorMap* map) {
      *sum = {sums, 0, columns, shape.k_len * columns};
      *map =
          MakeTensorMap(*sum, DType::kFloat32, {1, shape.k_len, splits.sums, columns}, kWarpRows);
    };
    make(scratch.sums, head_dim, &args->dk_sum, &args->dk);
    make(scratch.sums + splits.sums * shape.k_len * head_dim, value_dim, &args->dv_sum, &args->dv);
  }
}

// Sets the counters of the fixed orders, and the marks, once the sizes are set.
inline void SetCounters(const FlashBackwardParams& params, const BackwardScratch& scratch,
                        const HeadSplits& splits, BackwardArgs* args) {
  const int dq_counters =
      HasFixedOrder(params) ? args->batch * args->num_heads * args->query_tiles * 2 : 0;
  const int order_counters = dq_counters + static_cast<int>(splits.counters);
  args->counters = scratch.counters;
  args->num_counters =
      order_counters + static_cast<int>(cuda::BackwardMarks(params.shape, splits.splits));
  args->marks = params.shape.visible.documents ? args->counters + order_counters : nullptr;
  args->dq_additions = HasFixedOrder(params) ? args->counters : nullptr;
  args->dkv_additions = args->head_splits > 1 ? args->counters + dq_counters : nullptr;
}

// Returns the order of the blocks, once the sizes are set.
template <class Traits>
BackwardOrder MakeBackwardOrder(const FlashBackwardParams& params, const BackwardArgs& args) {
  BackwardWork work;
  work.mask = Traits::kMask;
  work.fixed_order = HasFixedOrder(params);
  work.walks_from_first_queries = WalksFromFirstQueries(params);
  work.wide = Traits::kHeadDim > kNarrowHeadDim;
  work.q_len = params.shape.q_len;
  work.most_queries = MostQueries(params.shape);
  work.row_bytes = int64_t{Traits::kHeadDim} * 6 + Traits::kValueDim * 2;
  work.heads_per_block = args.heads_per_block;
  work.key_tiles = args.key_tiles;
  work.splits = args.batch_splits;
  work.splits_heads = args.head_splits > 1;
  return BackwardOrderOf(work);
}

// dq_rows: the rows of a box of dQ.
template <class Traits>
BackwardArgs MakeBackwardArgs(const FlashBackwardParams& params, const BackwardScratch& scratch,
                              int dq_rows) {
  const FlashAttentionShape& shape = params.shape;
  const HeadSplits splits = HeadSplitsOf(params);
  const OperandMaps maps = {shape};
  BackwardArgs args;
  args.k = maps.OfKeys(params.k, shape.dtype, shape.head_dim, Traits::kBlockN);
  args.v = maps.OfKeys(params.v, shape.dtype, shape.value_dim, Traits::kBlockN);
  args.q = args.dout = args.k;  // not used without queries; dK and dV become zero
  if (shape.q_len > 0) {
    args.q = maps.OfQueries(params.q, shape.dtype, shape.head_dim, Traits::kBlockM);
    args.dout = maps.OfQueries(params.dout, shape.dtype, shape.value_dim, Traits::kBlockM);
  }
  SetGradients(params, scratch, splits, dq_rows, &args);
  args.lse = static_cast<const float*>(params.lse);
  args.delta = static_cast<const float*>(params.delta);
  args.visible = shape.visible;
  args.blocks = shape.blocks;
  args.query_tiles_of = reinterpret_cast<QueryTiles*>(scratch.query_tiles);
  args.batch = static_cast<int>(shape.batch);
  args.q_len = static_cast<int>(shape.q_len);
  args.k_len = static_cast<int>(shape.k_len);
  args.num_heads = static_cast<int>(shape.num_heads);
  args.num_kv_heads = static_cast<int>(shape.num_kv_heads);
  args.head_splits = static_cast<int>(splits.splits);
  args.heads_per_block = static_cast<int>(shape.num_heads / shape.num_kv_heads) / args.head_splits;
  args.batch_splits = static_cast<int>(shape.batch * shape.num_kv_heads) * args.head_splits;
  args.head_dim = static_cast<int>(shape.head_dim);
  args.value_dim = static_cast<int>(shape.value_dim);
  args.key_tiles = static_cast<int>((shape.k_len + Traits::kBlockN - 1) / Traits::kBlockN);
  args.query_tiles = static_cast<int>((shape.q_len + Traits::kBlockM - 1) / Traits::kBlockM);
  args.scale = static_cast<float>(shape.softmax_scale);
  SetCounters(params, scratch, splits, &args);
  args.order = MakeBackwardOrder<Traits>(params, args);
  return args;
}

}  // namespace sm90
}  // namespace burst
