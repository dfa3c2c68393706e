// The forward for few queries and many keys, as when a model generates text. Its limit is reading K
// and V once. Several blocks share the keys of a KV head (FlashDecoding, Dao et al., 2023), and the
// warps of a block share its keys:
//
//   block    16 or 32 rows, each a query of one of the heads that share the KV head, and a part of
//            the keys that these rows see; its warps take 16 keys each in turn
//   warp     S = Q K^T, softmax and O += P V as forward.cu; K and V come through a ring of blocks
//            of its own, so that warps wait for memory only
//   finish   the warps' (O, lse) are merged in shared memory, and those of the parts by a second
//            kernel, each in a fixed order: the same bits in every run
//
// Keys that no row of the block sees are not read.
//
// Compiled once for every variant in variants.h.
#include <algorithm>
#include <cmath>

#include "burst/kernels/gpu/common/isolation.cuh"
#include "burst/kernels/gpu/common/shared_memory.h"
#include "burst/kernels/gpu/sm80/softmax.cuh"
#include "burst/kernels/gpu/sm80/variants.h"
#include "burst/kernels/merge.h"

namespace burst {
namespace sm80 {
namespace {

struct DecodeArgs {
  FlashForwardParams params;
  int parts;       // parts of the keys
  int rows;        // rows of a KV head: queries times the heads of its group
  int row_tiles;   // tiles of these rows
  float* partial;  // [batch, num_heads, q_len, parts, kHeadDim] if parts > 1
  float* lse;      // [batch, num_heads, q_len, parts] if parts > 1
  int32_t* marks;  // marks of common/isolation.h
};

// A row of a KV head. The heads of a group are neighbors, so that few queries fill few tiles.
struct Row {
  __device__ __forceinline__ Row(const FlashAttentionShape& shape, int kv_head, int row) {
    const int group = static_cast<int>(shape.num_heads / shape.num_kv_heads);
    query = row / group;
    head = kv_head * group + row % group;
  }
  // Returns the row's place in [batch, num_heads, q_len].
  __device__ __forceinline__ int64_t Index(const FlashAttentionShape& shape, int64_t b) const {
    return (b * shape.num_heads + head) * shape.q_len + query;
  }
  int query, head;
};

// The work of a block. Blocks that share keys are neighbors. So are blocks of the heads of the same
// tokens, whose K and V are neighbors in memory.
template <class Traits>
struct Work {
  __device__ __forceinline__ explicit Work(const DecodeArgs& args) {
    const int kv_heads = static_cast<int>(args.params.shape.num_kv_heads);
    int index = BlockIndex();
    first_row = index % args.row_tiles * Traits::kRows;
    index /= args.row_tiles;
    kv_head = index % kv_heads;
    index /= kv_heads;
    part = index % args.parts;
    b = index / args.parts;
  }
  __device__ __forceinline__ int LastRow(const DecodeArgs& args) const {
    return min(first_row + Traits::kRows, args.rows) - 1;
  }
  int first_row, kv_head, part, b;
};

// Loads a warp's blocks of K or V: kKeys rows of its head each, the next block kStep rows further
// on. Rows beyond the end are zeros and not read.
template <class Traits>
class BlockLoader {
 public:
  __device__ __forceinline__ BlockLoader(const AttentionOperand& operand, int b, int head, int row)
      : source_(Head<const uint16_t>(operand, b, head).row(row + FirstRow()) + Column()) {}

  __device__ __forceinline__ void Load(int64_t stride, int rows, int head_dim, uint32_t slot) {
    const int rows_left = Column() < head_dim ? rows - FirstRow() : 0;
    const uint16_t* source = source_;
#pragma unroll
    for (int i = 0; i < Traits::kKeys; i += kRowsAtOnce) {
      CopyAsync16(TileAddress<Traits::kHeadDim>(slot, FirstRow() + i, Column()), source,
                  i < rows_left);
      source += kRowsAtOnce * stride;
    }
    source_ += Traits::kStep * stride;
  }

 private:
  static constexpr int kPieces = Traits::kHeadDim / 8;
  static constexpr int kRowsAtOnce = 32 / kPieces;
  __device__ __forceinline__ static int FirstRow() { return threadIdx.x % 32 / kPieces; }
  __device__ __forceinline__ static int Column() { return threadIdx.x % kPieces * 8; }

  const uint16_t* source_;
};

// Loads rows of Q from global memory as operands of a warp's matmul, with zeros after the last.
template <class Traits>
struct Queries {
  __device__ __forceinline__ Queries(const DecodeArgs& args, int b, int kv_head, int first_row) {
    const int lane = threadIdx.x % 32;
    const FlashAttentionShape& shape = args.params.shape;
#pragma unroll
    for (int eight = 0; eight < Traits::kRows / 8; ++eight) {
      const int i = first_row + lane / 4 + 8 * eight;
      const Row row(shape, kv_head, min(i, args.rows - 1));
      const uint16_t* source = Head<const uint16_t>(args.params.q, b, row.head).row(row.query);
#pragma unroll
      for (int k = 0; k < Traits::kHeadDim / 8; ++k) {
        const int column = 8 * k + lane % 4 * 2;
        const bool valid = i < args.rows && column < shape.head_dim;
        part[eight / 2][k / 2][k % 2 * 2 + eight % 2] =
            valid ? *reinterpret_cast<const uint32_t*>(source + column) : 0;
      }
    }
  }
  __device__ __forceinline__ void Load(int m, int k, uint32_t (&d)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) d[i] = part[m / 16][k / 16][i];
  }
  uint32_t part[Traits::kM][Traits::kHeadDim / 16][4];
};

// The keys that some row of a tile sees, and the keys that all its rows see.
template <class Traits>
struct TileRanges {
  __device__ __forceinline__ TileRanges(const DecodeArgs& args, const Work<Traits>& work) {
    const FlashAttentionShape& shape = args.params.shape;
    const Visible visible(shape, work.b);
    const int first = Row(shape, work.kv_head, work.first_row).query;
    const int last = Row(shape, work.kv_head, work.LastRow(args)).query;
    any_begin = visible.begin(first);
    any_end = visible.end(last);
    all_begin = visible.begin(last);
    all_end = visible.end(first);
  }
  int any_begin, any_end, all_begin, all_end;
};

// Sets S = -inf where a row does not see a key; the warp's part begins at `key`.
template <class Traits, int kN>
__device__ __forceinline__ void MaskRows(const DecodeArgs& args, int key,
                                         float (&s)[Traits::kM][kN][4]) {
  const FlashAttentionShape& shape = args.params.shape;
  const Work<Traits> work(args);  // computed again, to save registers
  const Visible visible(shape, work.b);
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int eight = 0; eight < Traits::kRows / 8; ++eight) {
    const int row = min(work.first_row + lane / 4 + 8 * eight, work.LastRow(args));
    const int query = Row(shape, work.kv_head, row).query;
    const int begin = visible.begin(query), end = visible.end(query);
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int j = key + 8 * n + lane % 4 * 2 + c;
        if (j < begin || j >= end) s[eight / 2][n][eight % 2 * 2 + c] = -INFINITY;
      }
    }
  }
}

// Merges (O, lse) of a row in one warp. Lane l holds columns 64 j + 2 l and the next one.
template <int kHeadDim>
struct Merged {
  static constexpr int kPairs = kHeadDim / 64;

  __device__ __forceinline__ static int Column(int pair) {
    return 64 * pair + static_cast<int>(threadIdx.x) % 32 * 2;
  }
  // Adds a part whose O is value / value_sum, and whose lse is value_max + log value_sum.
  __device__ __forceinline__ void Add(float value_max, float value_sum, const float* value) {
    if (value_max == -INFINITY && value_sum == 0) return;  // it has seen no key
    const float top = fmaxf(max, value_max);
    const float keep = Exp2((max - top) * kLog2E), weight = Exp2((value_max - top) * kLog2E);
    max = top;
    sum = fmaf(sum, keep, weight * value_sum);
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const float2 x = *reinterpret_cast<const float2*>(value + Column(j));
      o[j] = {fmaf(o[j].x, keep, weight * x.x), fmaf(o[j].y, keep, weight * x.y)};
    }
  }
  __device__ __forceinline__ void Divide(float scale = 1) {
    const float factor = sum != 0 ? scale / sum : 0.f;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) o[j] = {o[j].x * factor, o[j].y * factor};
  }
  // Divides by the sum of all parts and the head's sink.
  __device__ __forceinline__ void DivideAll(const FlashForwardParams& params, int head) {
    const auto* sinks = static_cast<const float*>(params.sinks);
    Divide(sinks == nullptr ? 1.f : AddSink(sinks[head], &max, &sum));
  }
  __device__ __forceinline__ float Lse() const { return sum != 0 ? max + logf(sum) : -INFINITY; }

  // Returns whether all channels of all lanes are finite.
  __device__ __forceinline__ bool IsFinite() const {
    float all = 0;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) all += o[j].x + o[j].y;
    return __all_sync(0xffffffff, cuda::IsFinite(all));
  }

  float max = -INFINITY, sum = 0;
  float2 o[kPairs] = {};
};

// Stores the row's divided result, merged with the result of earlier calls. A row that is not
// finite is left to the repair of common/isolation.h.
template <class Element, int kHeadDim>
__device__ __forceinline__ void StoreRow(const DecodeArgs& args, int b, const Row& row,
                                         Merged<kHeadDim>& merged) {
  const FlashForwardParams& params = args.params;
  const FlashAttentionShape& shape = params.shape;
  const int head_dim = static_cast<int>(shape.head_dim);
  const int64_t calls_left = params.rows.Left(b, row.query);
  if (calls_left < 0) return;
  if (args.marks != nullptr && !merged.IsFinite()) {
    const int64_t head = b * shape.num_heads + row.head;
    if (threadIdx.x % 32 == 0) {
      cuda::Mark(args.marks, head * cuda::MarkGroups(shape.q_len) + row.query / cuda::kMarkRows,
                 1 << row.query % cuda::kMarkRows);
    }
    return;
  }
  float* const lse = static_cast<float*>(params.lse) + row.Index(shape, b);
  MergeWeights<float> weights = {merged.Lse(), 0, 1};
  const AttentionOperand& so_far = params.sum.data == nullptr ? params.out : params.sum;
  const float* there = nullptr;
  if (params.merge) {
    weights = Merge(__ldcg(lse), weights.lse);
    there = Head<const float>(so_far, b, row.head).row(row.query);
    __syncwarp();  // all lanes have read lse
  }
  if (threadIdx.x % 32 == 0) *lse = weights.lse;
  const bool is_float = calls_left > 0 || params.out_dtype == DType::kFloat32;
  const AttentionOperand& to = calls_left > 0 ? so_far : params.out;
  const int64_t offset = cuda::Offset(to, b, row.head, row.query);
#pragma unroll
  for (int j = 0; j < merged.kPairs; ++j) {
    const int column = merged.Column(j);
    if (column >= head_dim) continue;
    float2 x = {merged.o[j].x * weights.b, merged.o[j].y * weights.b};
    if (params.merge) {
      const float2 y = __ldcg(reinterpret_cast<const float2*>(there + column));
      x = {fmaf(y.x, weights.a, x.x), fmaf(y.y, weights.a, x.y)};
    }
    if (is_float) {
      *reinterpret_cast<float2*>(static_cast<float*>(to.data) + offset + column) = x;
    } else {
      *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(to.data) + offset + column) =
          Pack<Element>(x.x, x.y);
    }
  }
}

// The shared memory where the warps of a block leave their results.
template <class Traits>
struct WarpResults {
  // Rows are a little longer, so that the rows of an accumulator lie in different banks.
  float o[Traits::kWarps][Traits::kRows][Traits::kHeadDim + 8];
  float max[Traits::kWarps][Traits::kRows], sum[Traits::kWarps][Traits::kRows];
};

// Merges the warps' results, and stores the rows or leaves them to MergeParts.
template <class Traits>
__device__ __forceinline__ void Finish(const DecodeArgs& args, WarpResults<Traits>& results,
                                       const Softmax<Traits::kM>& softmax,
                                       const float (&o)[Traits::kM][Traits::kHeadDim / 8][4]) {
  constexpr int kHeadDim = Traits::kHeadDim;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int eight = 0; eight < Traits::kRows / 8; ++eight) {
    const int row = 8 * eight + lane / 4, m = eight / 2, half = eight % 2;
    const float sum = RowSum(softmax.sum[m][half]);
    if (lane % 4 == 0) {
      results.max[warp][row] =
          softmax.max[m][half] * static_cast<float>(args.params.shape.softmax_scale);
      results.sum[warp][row] = sum;
    }
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      *reinterpret_cast<float2*>(&results.o[warp][row][8 * n + lane % 4 * 2]) = {
          o[m][n][2 * half], o[m][n][2 * half + 1]};
    }
  }
  __syncthreads();
  const FlashAttentionShape& shape = args.params.shape;
  const Work<Traits> work(args);
  for (int i = warp; i < Traits::kRows && work.first_row + i < args.rows; i += Traits::kWarps) {
    const Row row(shape, work.kv_head, work.first_row + i);
    Merged<kHeadDim> merged;
    for (int w = 0; w < Traits::kWarps; ++w) {
      merged.Add(results.max[w][i], results.sum[w][i], results.o[w][i]);
    }
    if (args.parts == 1) {
      merged.DivideAll(args.params, row.head);
      StoreRow<typename Traits::Element>(args, work.b, row, merged);
      continue;
    }
    merged.Divide();
    const int64_t index = row.Index(shape, work.b) * args.parts + work.part;
    if (lane == 0) args.lse[index] = merged.Lse();
#pragma unroll
    for (int j = 0; j < merged.kPairs; ++j) {
      *reinterpret_cast<float2*>(args.partial + index * kHeadDim + merged.Column(j)) = merged.o[j];
    }
  }
}

template <class Traits>
__global__ __launch_bounds__(Traits::kThreads,
                             2) void DecodeKernel(const __grid_constant__ DecodeArgs args) {
  using Element = typename Traits::Element;
  constexpr int kHeadDim = Traits::kHeadDim, kM = Traits::kM;
  constexpr int kSlots = Traits::kSlots, kStep = Traits::kStep;
  extern __shared__ __align__(128) unsigned char shared[];
  static_assert(sizeof(WarpResults<Traits>) <= Traits::kSharedBytes, "");
  const FlashForwardParams& params = args.params;
  const FlashAttentionShape& shape = params.shape;
  const Work<Traits> work(args);
  const int warp = threadIdx.x / 32, head_dim = static_cast<int>(shape.head_dim);
  const TileRanges<Traits> ranges(args, work);

  // The block's part of the keys: whole steps of its warps.
  const int seen = max(0, ranges.any_end - ranges.any_begin);
  const int64_t length =
      (static_cast<int64_t>(seen) + args.parts * kStep - 1) / (args.parts * kStep) * kStep;
  const int64_t part_begin = ranges.any_begin + work.part * length;
  const int end = static_cast<int>(min(part_begin + length, static_cast<int64_t>(ranges.any_end)));
  const int begin =
      static_cast<int>(min(part_begin, static_cast<int64_t>(end))) + warp * Traits::kKeys;
  const int blocks = max(0, (end - begin + kStep - 1) / kStep);

  // Loads K of a block, then V, then K of the next block, into slot after slot.
  BlockLoader<Traits> k(params.k, work.b, work.kv_head, begin);
  BlockLoader<Traits> v(params.v, work.b, work.kv_head, begin);
  const uint32_t ring = SharedAddress(shared) + warp * (kSlots * Traits::kSlotBytes);
  int load_slot = 0, use_slot = 0;
  const auto next = [](int slot) { return slot + 1 == kSlots ? 0 : slot + 1; };
  const auto load = [&](int use) {
    if (use < 2 * blocks) {
      const uint32_t slot = ring + load_slot * Traits::kSlotBytes;
      const int rows = end - begin - use / 2 * kStep;
      if (use & 1) {
        v.Load(params.v.seq_stride, rows, head_dim, slot);
      } else {
        k.Load(params.k.seq_stride, rows, head_dim, slot);
      }
    }
    CommitCopies();
    load_slot = next(load_slot);
  };
  // Waits until the next slot has its block, which may be read until the next call.
  const auto use = [&](int use) {
    WaitCopies<kSlots - 2>();
    __syncwarp();
    load(use + kSlots - 1);
    const uint32_t slot = ring + use_slot * Traits::kSlotBytes;
    use_slot = next(use_slot);
    return slot;
  };
#pragma unroll
  for (int i = 0; i < kSlots - 1; ++i) load(i);

  const Queries<Traits> queries(args, work.b, work.kv_head, work.first_row);
  const float c = static_cast<float>(shape.softmax_scale) * kLog2E;
  float o[kM][kHeadDim / 8][4];
  Clear<kM, kHeadDim / 8>(o);
  Softmax<kM> softmax;
  softmax.Reset();
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    float s[kM][Traits::kKeys / 8][4];
    Clear<kM, Traits::kKeys / 8>(s);
    Multiply<Element, kHeadDim>(queries, B<kHeadDim>(use(2 * block), 0), s);
    const int key = begin + block * kStep;
    if (key < ranges.all_begin || key + Traits::kKeys > ranges.all_end) {
      MaskRows<Traits>(args, key, s);
    }
    Update(c, s, softmax, o);
    MultiplyAccumulators<Element>(s, BT<kHeadDim>(use(2 * block + 1), 0), o);
  }
  WaitCopies<0>();
  __syncthreads();  // no warp uses the rings any more
  Finish(args, *reinterpret_cast<WarpResults<Traits>*>(shared), softmax, o);
}

// Merges the parts of a row. A warp takes every kWarps-th part, in order. Then the results of the
// warps are merged in order.
template <class Traits>
__global__ __launch_bounds__(Traits::kThreads) void MergeParts(
    const __grid_constant__ DecodeArgs args) {
  constexpr int kHeadDim = Traits::kHeadDim;
  __shared__ float o[Traits::kWarps][kHeadDim];
  __shared__ float max[Traits::kWarps], sum[Traits::kWarps];
  const FlashAttentionShape& shape = args.params.shape;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * args.parts;
  const int warp = threadIdx.x / 32;
  Merged<kHeadDim> merged;
#pragma unroll 4
  for (int part = warp; part < args.parts; part += Traits::kWarps) {
    const float lse = args.lse[first + part];
    merged.Add(lse, lse == -INFINITY ? 0 : 1, args.partial + (first + part) * kHeadDim);
  }
  if (threadIdx.x % 32 == 0) {
    max[warp] = merged.max;
    sum[warp] = merged.sum;
  }
#pragma unroll
  for (int j = 0; j < merged.kPairs; ++j) {
    *reinterpret_cast<float2*>(&o[warp][merged.Column(j)]) = merged.o[j];
  }
  __syncthreads();
  if (warp > 0) return;
  Merged<kHeadDim> all;
  for (int w = 0; w < Traits::kWarps; ++w) all.Add(max[w], sum[w], o[w]);
  Row row(shape, 0, 0);
  row.query = static_cast<int>(blockIdx.x % shape.q_len);
  const int64_t batch_head = blockIdx.x / shape.q_len;
  row.head = static_cast<int>(batch_head % shape.num_heads);
  all.DivideAll(args.params, row.head);
  StoreRow<typename Traits::Element>(args, static_cast<int>(batch_head / shape.num_heads), row,
                                     all);
}

}  // namespace

template <class Traits>
void LaunchDecode(const FlashForwardParams& params, int parts, float* scratch, int32_t* marks) {
  const FlashAttentionShape& shape = params.shape;
  DecodeArgs args;
  args.params = params;
  args.parts = parts;
  args.marks = marks;
  args.rows = static_cast<int>(shape.q_len * (shape.num_heads / shape.num_kv_heads));
  args.row_tiles = (args.rows + Traits::kRows - 1) / Traits::kRows;
  const int64_t rows = shape.batch * shape.num_heads * shape.q_len;
  args.partial = scratch;
  args.lse = scratch + rows * parts * Traits::kHeadDim;
  const int64_t blocks = shape.batch * shape.num_kv_heads * args.row_tiles * parts;
  const auto kernel = DecodeKernel<Traits>;
  cuda::AllowSharedMemory(reinterpret_cast<const void*>(kernel), Traits::kSharedBytes);
  kernel<<<static_cast<unsigned>(blocks), Traits::kThreads, Traits::kSharedBytes,
           cuda::CurrentStream()>>>(args);
  BURST_CUDA_CHECK_LAUNCH("attention of few queries");
  if (parts == 1) return;
  MergeParts<Traits>
      <<<static_cast<unsigned>(rows), Traits::kThreads, 0, cuda::CurrentStream()>>>(args);
  BURST_CUDA_CHECK_LAUNCH("attention of few queries, merge");
}

template void LaunchDecode<Variants<BFloat16>::BURST_VARIANT>(const FlashForwardParams&, int,
                                                              float*, int32_t*);
template void LaunchDecode<Variants<Float16>::BURST_VARIANT>(const FlashForwardParams&, int, float*,
                                                             int32_t*);

}  // namespace sm80
}  // namespace burst
