// The backward on Ampere's tensor cores. A block owns kBlockN keys of a KV head. It reads the query
// tiles that see them, of every query head of the group. While it computes with one tile, it copies
// the next:
//
//   S = Q K^T;  P = 2^(c S - lse log2 e), c = softmax_scale log2 e;  dP = dO V^T
//   dS = P * (dP - delta);  dV += P^T dO;  dK += dS^T Q;  dQ += dS K
//
// dK and dV stay in registers and need no addition across blocks. P and dS go through shared
// memory, because the warps divide each matmul in another way. dQ is added atomically in global
// memory, in float32. In a deterministic call, blocks add to a query tile in the order of their
// keys, by a counter. All blocks begin with the last tile, so they wait for each other only at the
// start, and always for blocks of smaller index.
//
// Traits::kChanged: scores are changed and weights dropped (burst/kernels/scores.h); dV is
// multiplied by 1 / (1 - dropout) at the end.
//
// Compiled once for every variant in variants.h.
#include <cmath>

#include "burst/kernels/gpu/common/isolation.cuh"
#include "burst/kernels/gpu/common/query_gap.cuh"
#include "burst/kernels/gpu/common/shared_memory.h"
#include "burst/kernels/gpu/sm80/tile.cuh"
#include "burst/kernels/gpu/sm80/variants.h"

namespace burst {
namespace sm80 {

namespace {

// The addresses of one (query head, query tile) in a stage of shared memory.
template <class Traits>
struct Stage {
  __device__ __forceinline__ explicit Stage(uint32_t base)
      : q(base),
        dout(q + Traits::kQTile),
        lse(dout + Traits::kQTile),
        delta(lse + Traits::kStatistic) {}
  static constexpr int kBytes = 2 * (Traits::kQTile + Traits::kStatistic);
  uint32_t q, dout;
  uint32_t lse, delta;  // [kBlockM], float
};

// The query tiles first, ..., last of a tile of keys, without [gap_begin, gap_end). A block walks
// them from the last to the first.
struct QueryTiles {
  // Returns the tile after `tile` in this order, below `first` after the last one.
  __device__ __forceinline__ int Next(int tile) const {
    return (tile == gap_end ? gap_begin : tile) - 1;
  }
  int first, last;
  int gap_begin, gap_end;
};

struct Step {
  int h, tile;  // query head, query tile
};

// Returns the query tiles whose range [begin of the first row, end of the last row) meets the keys
// [key, key_end), without the longest gap. Some of these tiles may see none of the keys. But the
// key tiles that a query tile meets are consecutive, from the one that holds its first row's
// `begin`. They take turns in that order. A query tile in a gap meets one tile of keys alone.
template <int kBlockM>
__device__ __forceinline__ QueryTiles VisibleTiles(const cuda::RowRanges& ranges, int key,
                                                   int key_end) {
  const cuda::Run near = cuda::QueriesNear(ranges, key, key_end);
  if (near.begin == ranges.q_len) return {0, -1, 0, 0};
  const cuda::Run gap = cuda::LongestGap<kBlockM>(ranges, near, /*origin=*/0);
  QueryTiles tiles = {near.begin / kBlockM, 0, gap.begin, gap.end};
  tiles.last = tiles.Next((near.end + kBlockM - 1) / kBlockM);
  return tiles;
}

template <class Traits>
__device__ __forceinline__ void LoadStage(const FlashBackwardParams& params, int b, int h, int tile,
                                          uint32_t base) {
  constexpr int kBlockM = Traits::kBlockM, kThreads = Traits::kThreads;
  using Loader = TileLoader<kBlockM, Traits::kHeadDim, kThreads>;
  const FlashAttentionShape& shape = params.shape;
  const Stage<Traits> stage(base);
  const int first = tile * kBlockM, q_len = static_cast<int>(shape.q_len);
  const int head_dim = static_cast<int>(shape.head_dim);
  Loader(params.q, b, h, first).Load(params.q.seq_stride, q_len - first, head_dim, stage.q);
  Loader(params.dout, b, h, first)
      .Load(params.dout.seq_stride, q_len - first, head_dim, stage.dout);
  static_assert(2 * kBlockM <= kThreads, "a thread brings one statistic");
  if (threadIdx.x < 2 * kBlockM) {
    const int i = threadIdx.x % kBlockM;
    const int64_t row = (b * shape.num_heads + h) * shape.q_len + first + i;
    const void* source = threadIdx.x < kBlockM ? params.lse : params.delta;
    CopyAsync4(stage.lse + threadIdx.x * 4, static_cast<const float*>(source) + row,
               first + i < q_len);
  }
}

__device__ __forceinline__ float LoadShared(uint32_t address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address));
  return x;
}

// Adds scale * d, the warp's part, to rows of dQ. Row 0 is query `first`.
template <int kM, int kN>
__device__ __forceinline__ void AddRows(const float (&d)[kM][kN][4], float scale,
                                        const Head<float>& dq, int first, int q_len, int column,
                                        int head_dim) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = first + 16 * m + 8 * half + lane / 4;
      if (i >= q_len) continue;
      float* row = dq.row(i) + column + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        if (column + 8 * n >= head_dim) continue;
        AddGlobal(row + 8 * n, scale * d[m][n][2 * half], scale * d[m][n][2 * half + 1]);
      }
    }
  }
}

// Blocks of keys take turns at a query tile: *counter is the number of blocks that have added.
__device__ __forceinline__ void WaitForTurn(const int* counter, int turn) {
  if (threadIdx.x == 0) {
    while (LoadAcquire(counter) != turn) {
    }
  }
  __syncthreads();
}
__device__ __forceinline__ void PassTurn(int* counter, int turn) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) StoreRelease(counter, turn + 1);
}

// Looks at a warp's first row of S or dP. A key or value that is not finite makes its whole column
// not finite, so one row shows it.
template <int kM, int kN>
__device__ __forceinline__ void SuspectKeys(const float (&s)[kM][kN][4],
                                            cuda::Suspicion& suspicion) {
  float sum = 0;
#pragma unroll
  for (int n = 0; n < kN; ++n) sum += fabsf(s[0][n][0]) + fabsf(s[0][n][1]);
  if (!cuda::IsFinite(sum)) suspicion.keys = 1;
}

// Looks at a warp's first column of S or dP. A row of Q or dO that is not finite makes its whole
// row of S or dP not finite.
template <int kM, int kN>
__device__ __forceinline__ void SuspectQueries(const float (&s)[kM][kN][4],
                                               cuda::Suspicion& suspicion) {
  float sum = 0;
#pragma unroll
  for (int m = 0; m < kM; ++m) sum += fabsf(s[m][0][0]) + fabsf(s[m][0][2]);
  if (!cuda::IsFinite(sum)) suspicion.queries = 1;
}

// Looks at lse and delta of a stage's rows, of which `rows` exist. They show what the queries have
// met in other tiles of keys.
template <class Traits>
__device__ __forceinline__ void SuspectQueries(const Stage<Traits>& stage, int rows,
                                               cuda::Suspicion& suspicion) {
  const int row = static_cast<int>(threadIdx.x);
  if (row >= min(rows, Traits::kBlockM)) return;
  const float lse = LoadShared(stage.lse + row * 4), delta = LoadShared(stage.delta + row * 4);
  if (!cuda::IsFinite(fabsf(lse) + fabsf(delta))) suspicion.queries = 1;
}

// Finds whether a warp's channels of dK or dV of 16 keys are not finite. All warps then clear their
// channels of these keys, for the repair of common/isolation.h.
template <int kN>
__device__ __forceinline__ void FindMissing(const float (&d)[kN][4], int bit, int* missing) {
  float sum = 0;
#pragma unroll
  for (int n = 0; n < kN; ++n) sum += d[n][0] + d[n][1] + d[n][2] + d[n][3];
  if (!cuda::IsFinite(sum)) atomicOr(missing, bit);
}
template <int kN>
__device__ __forceinline__ void ClearMissing(int bit, const int* missing, float (&d)[kN][4]) {
  if ((*missing & bit) == 0) return;
#pragma unroll
  for (int n = 0; n < kN; ++n) d[n][0] = d[n][1] = d[n][2] = d[n][3] = 0;
}

// counters: [batch, num_heads, query_tiles], zeros; null if the additions may come in any order.
template <class Traits>
__global__ __launch_bounds__(Traits::kThreads) void BackwardKernel(
    const __grid_constant__ FlashBackwardParams params, int key_tiles, int query_tiles,
    int* counters, int32_t* marks) {
  constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  using Element = typename Traits::Element;
  constexpr int kHeadDim = Traits::kHeadDim, kThreads = Traits::kThreads;
  constexpr int kSM = Traits::kSRows / 16, kSN = Traits::kSColumns / 8;
  constexpr int kDkM = Traits::kDkRows / 16, kDkN = Traits::kDkColumns / 8;
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t k_tile = SharedAddress(shared);
  const uint32_t v_tile = k_tile + Traits::kKTile;
  const uint32_t p_tile = v_tile + Traits::kKTile;  // [kBlockM, kBlockN]
  const uint32_t ds_tile = p_tile + Traits::kScoreTile;
  const uint32_t stages = ds_tile + Traits::kScoreTile;

  const FlashAttentionShape& shape = params.shape;
  const int q_len = static_cast<int>(shape.q_len), k_len = static_cast<int>(shape.k_len);
  const int head_dim = static_cast<int>(shape.head_dim);
  const int num_kv_heads = static_cast<int>(shape.num_kv_heads);
  const int group = static_cast<int>(shape.num_heads) / num_kv_heads;
  const int key_tile = static_cast<int>(blockIdx.x) % key_tiles, key = key_tile * kBlockN;
  const int kv_head = static_cast<int>(blockIdx.x) / key_tiles % num_kv_heads;
  const int b = static_cast<int>(blockIdx.x) / key_tiles / num_kv_heads;
  const Visible visible(shape, b);
  const float scale = static_cast<float>(shape.softmax_scale), c = scale * kLog2E;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int s_row = warp % Traits::kWarpsM * Traits::kSRows;
  const int s_column = warp / Traits::kWarpsM * Traits::kSColumns;
  const int dq_column = warp / Traits::kWarpsM * Traits::kDqColumns;
  const int dk_row = warp % Traits::kWarpsN * Traits::kDkRows;
  const int dk_column = warp / Traits::kWarpsN * Traits::kDkColumns;

  __shared__ cuda::Suspicion suspicion;
  __shared__ int missing[kBlockN / cuda::kMarkRows];  // kMissing bits
  if (threadIdx.x < kBlockN / cuda::kMarkRows) missing[threadIdx.x] = 0;
  if (threadIdx.x == 0) suspicion = {0, 0};
  float dk[kDkM][kDkN][4], dv[kDkM][kDkN][4];
  Clear<kDkM, kDkN>(dk);
  Clear<kDkM, kDkN>(dv);

  __shared__ QueryTiles tiles;  // here it takes no registers
  {
    const cuda::RowRanges ranges(shape.visible, b, q_len);
    const QueryTiles found = VisibleTiles<kBlockM>(ranges, key, min(key + kBlockN, k_len));
    if (threadIdx.x == 0) tiles = found;
    __syncthreads();
  }
  if (tiles.first <= tiles.last) {
    using Loader = TileLoader<kBlockN, kHeadDim, kThreads>;
    Loader(params.k, b, kv_head, key).Load(params.k.seq_stride, k_len - key, head_dim, k_tile);
    Loader(params.v, b, kv_head, key).Load(params.v.seq_stride, k_len - key, head_dim, v_tile);
    LoadStage<Traits>(params, b, kv_head * group, tiles.last, stages);
    CommitCopies();
  }
  uint32_t base = stages;
  for (Step step = {kv_head * group, tiles.last}, next;
       tiles.first <= tiles.last && step.h < (kv_head + 1) * group; step = next) {
    const Stage<Traits> stage(base);
    next = {step.h, tiles.Next(step.tile)};
    if (next.tile < tiles.first) ++next.h, next.tile = tiles.last;
    const bool is_last = next.h == (kv_head + 1) * group;
    if (Traits::kStages > 1) base = 2 * stages + Stage<Traits>::kBytes - base;
    WaitCopies<0>();
    __syncthreads();  // this stage is here, and no warp reads P, dS or the last stage any more
    if (Traits::kStages > 1 && !is_last) {
      LoadStage<Traits>(params, b, next.h, next.tile, base);
      CommitCopies();
    }

    float s[kSM][kSN][4], dp[kSM][kSN][4];
    Clear<kSM, kSN>(s);
    Multiply<Element, kHeadDim>(A<kHeadDim>(stage.q, s_row), B<kHeadDim>(k_tile, s_column), s);
    Clear<kSM, kSN>(dp);
    Multiply<Element, kHeadDim>(A<kHeadDim>(stage.dout, s_row), B<kHeadDim>(v_tile, s_column), dp);
    const int first = step.tile * kBlockM;
    if (marks != nullptr) {
      if (step.h == kv_head * group && step.tile == tiles.last) {
        SuspectKeys(s, suspicion);
        SuspectKeys(dp, suspicion);
      }
      SuspectQueries(s, suspicion);
      SuspectQueries(dp, suspicion);
      SuspectQueries(stage, q_len - first, suspicion);
    }
    if constexpr (Traits::kChanged) {
      const ChangedScores<float> changed(shape, b, step.h);
      const ChangedRows<kSM> rows(changed, visible, first + s_row, q_len);
      rows.template ForEach<kSN>(changed, key + s_column, k_len,
                                 [&](int m, int n, int e, bool sees, bool kept, auto change) {
                                   const int row = s_row + 16 * m + e / 2 * 8 + lane / 4;
                                   const float lse = LoadShared(stage.lse + row * 4);
                                   const float delta = LoadShared(stage.delta + row * 4);
                                   float slope, p = 0, ds = 0;
                                   if (sees && lse != -INFINITY) {
                                     p = Exp2((change(scale * s[m][n][e], &slope) - lse) * kLog2E);
                                     ds = p * ((kept ? changed.kept() * dp[m][n][e] : 0) - delta) *
                                          slope;
                                   }
                                   s[m][n][e] = kept ? p : 0;
                                   dp[m][n][e] = ds;
                                 });
    } else {
      if (!KeySpan(visible, first + s_row, Traits::kSRows, q_len)
               .Contains(key + s_column, Traits::kSColumns)) {
        MaskScores(visible, first + s_row, q_len, key + s_column, s);
      }
#pragma unroll
      for (int m = 0; m < kSM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = s_row + 16 * m + 8 * half + lane / 4;
          const float row_lse = LoadShared(stage.lse + row * 4);
          const float delta = LoadShared(stage.delta + row * 4);
          // A query that sees nothing has P = 2^-inf. Queries from q_len on are zeros, and their dS
          // and dO are zeros, too.
          const float lse = row_lse == -INFINITY ? INFINITY : row_lse * kLog2E;
#pragma unroll
          for (int n = 0; n < kSN; ++n) {
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i) {
              s[m][n][i] = Exp2(fmaf(s[m][n][i], c, -lse));
              dp[m][n][i] = s[m][n][i] * (dp[m][n][i] - delta);
            }
          }
        }
      }
    }
    StoreToTile<Element, kBlockN>(s, p_tile, s_row, s_column);
    StoreToTile<Element, kBlockN>(dp, ds_tile, s_row, s_column);
    __syncthreads();  // P and dS are there

    Multiply<Element, kBlockM>(AT<kBlockN>(p_tile, 0, dk_row),
                               BT<kHeadDim>(stage.dout, 0, dk_column), dv);
    Multiply<Element, kBlockM>(AT<kBlockN>(ds_tile, 0, dk_row), BT<kHeadDim>(stage.q, 0, dk_column),
                               dk);
    if (Traits::kStages == 1 && !is_last) {
      __syncthreads();  // no warp reads Q and dO any more
      LoadStage<Traits>(params, b, next.h, next.tile, stages);
      CommitCopies();
    }
    float dq[kSM][Traits::kDqColumns / 8][4];
    Clear<kSM, Traits::kDqColumns / 8>(dq);
    Multiply<Element, kBlockN>(A<kBlockN>(ds_tile, s_row), BT<kHeadDim>(k_tile, 0, dq_column), dq);
    if (marks != nullptr && suspicion.keys != 0) Clear<kSM, Traits::kDqColumns / 8>(dq);
    int* counter = nullptr;
    int turn = 0;
    if (counters != nullptr) {
      counter = counters + (b * shape.num_heads + step.h) * query_tiles + step.tile;
      turn = key_tile - visible.begin(first) / kBlockN;
      WaitForTurn(counter, turn);
    }
    AddRows(dq, scale, Head<float>(params.dq.sum, b, step.h), first + s_row, q_len, dq_column,
            head_dim);
    if (counters != nullptr) PassTurn(counter, turn);
  }

  if (marks != nullptr) {
    __syncthreads();  // all suspicions are there
    if ((suspicion.keys | suspicion.queries) != 0) {
#pragma unroll
      for (int m = 0; m < kDkM; ++m) {
        int* const of = &missing[dk_row / cuda::kMarkRows + m];
        FindMissing(dk[m], cuda::kMissingDk, of);
        FindMissing(dv[m], cuda::kMissingDv, of);
      }
      __syncthreads();
#pragma unroll
      for (int m = 0; m < kDkM; ++m) {
        const int* const of = &missing[dk_row / cuda::kMarkRows + m];
        ClearMissing(cuda::kMissingDk, of, dk[m]);
        ClearMissing(cuda::kMissingDv, of, dv[m]);
      }
      const int of = static_cast<int>(threadIdx.x);
      if (of < kBlockN / cuda::kMarkRows && key + of * cuda::kMarkRows < k_len) {
        const int bits = missing[of] | (suspicion.keys != 0 ? cuda::kMissingDq : 0);
        const int64_t first_group =
            (b * shape.num_kv_heads + kv_head) * cuda::MarkGroups(k_len) + key / cuda::kMarkRows;
        if (bits != 0) cuda::Mark(marks, first_group + of, bits);
      }
    }
  }
  if constexpr (Traits::kChanged) {
    const float kept = ChangedScores<float>(shape, b, kv_head * group).kept();
#pragma unroll
    for (int m = 0; m < kDkM; ++m) {
#pragma unroll
      for (int n = 0; n < kDkN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) dv[m][n][i] *= kept;
      }
    }
  }
  const bool first = params.dk.Begins(kv_head), last = params.dk.Ends(kv_head);
  const AttentionOperand &dk_to = params.dk.Of(kv_head), &dv_to = params.dv.Of(kv_head);
  const float one[2] = {1, 1}, scales[2] = {scale, scale};
#pragma unroll
  for (int m = 0; m < kDkM; ++m) {
    const int row = key + dk_row + 16 * m + lane / 4;
    const bool valid[2] = {row < k_len, row + 8 < k_len};
    const RowPair rows{b, kv_head, row, valid, head_dim, dk_column};
    if (!first) {
      MergeRows<Traits::kDkColumns>(params.dv.sum, rows, one, one, dv[m]);
      MergeRows<Traits::kDkColumns>(params.dk.sum, rows, scales, one, dk[m]);
    }
    StoreRows<typename Traits::Element, Traits::kDkColumns>(!last, dv[m], one, dv_to, rows);
    StoreRows<typename Traits::Element, Traits::kDkColumns>(!last, dk[m], first ? scales : one,
                                                            dk_to, rows);
  }
}

}  // namespace

template <class Traits>
void LaunchBackward(const FlashBackwardParams& params, int32_t* counters, int32_t* marks) {
  const FlashAttentionShape& shape = params.shape;
  const int key_tiles = static_cast<int>((shape.k_len + Traits::kBlockN - 1) / Traits::kBlockN);
  const int query_tiles = static_cast<int>((shape.q_len + Traits::kBlockM - 1) / Traits::kBlockM);
  const int64_t blocks = key_tiles * shape.num_kv_heads * shape.batch;
  if (blocks == 0) return;
  const auto kernel = BackwardKernel<Traits>;
  cuda::AllowSharedMemory(reinterpret_cast<const void*>(kernel), Traits::kSharedBytes);
  kernel<<<static_cast<unsigned>(blocks), Traits::kThreads, Traits::kSharedBytes,
           cuda::CurrentStream()>>>(params, key_tiles, query_tiles, counters, marks);
  BURST_CUDA_CHECK_LAUNCH("attention backward");
}

template void LaunchBackward<Variants<BFloat16>::BURST_VARIANT>(const FlashBackwardParams&,
                                                                int32_t*, int32_t*);
template void LaunchBackward<Variants<Float16>::BURST_VARIANT>(const FlashBackwardParams&, int32_t*,
                                                               int32_t*);

}  // namespace sm80
}  // namespace burst
