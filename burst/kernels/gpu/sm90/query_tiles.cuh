// Runs before a backward under a mask: finds which query tiles see a tile of keys, and clears dQ of
// query tiles that see no key.
#pragma once

#include <algorithm>

#include "burst/device/cuda.h"
#include "burst/kernels/gpu/common/query_gap.cuh"
#include "burst/kernels/gpu/sm90/backward_args.cuh"

namespace burst {
namespace sm90 {

// Finds the query tiles of a tile of keys, by a whole warp. begin and end do not decrease. So a
// range of rows sees some key of the tile, and a range of rows sees all of them.
template <class Traits>
__device__ __forceinline__ void FindQueryTiles(const BackwardArgs& args, int index) {
  const cuda::RowRanges ranges(args.visible, index / args.key_tiles, args.q_len);
  const int first_key = index % args.key_tiles * Traits::kBlockN;
  const int last_key = min(first_key + Traits::kBlockN, args.k_len) - 1;
  int found[4];
  cuda::LowerBounds<4>({ranges.end, ranges.begin, ranges.end, ranges.begin},
                       {first_key + 1, last_key + 1, last_key + 1, first_key + 1}, args.q_len,
                       found);
  const int first = found[0], last = found[1], whole_first = found[2], whole_last = found[3];
  constexpr int kBlockM = Traits::kBlockM;
  QueryTiles tiles;
  tiles.begin = first < args.q_len ? first / kBlockM : args.query_tiles;
  tiles.end = (last + kBlockM - 1) / kBlockM;
  tiles.whole_begin = (whole_first + kBlockM - 1) / kBlockM;
  tiles.whole_end = whole_last == args.q_len ? args.query_tiles : whole_last / kBlockM;
  // The last tile of keys may be partial. Its missing keys are masked.
  if (last_key + 1 < first_key + Traits::kBlockN) tiles.whole_end = 0;
  const cuda::Run gap = cuda::LongestGap<kBlockM>(ranges, {first, last}, /*origin=*/0);
  tiles.gap_begin = gap.begin;
  tiles.gap = gap.end - gap.begin;
  if (threadIdx.x % kWarpSize == 0) args.query_tiles_of[index] = tiles;
}

// Returns whether some query of the tile sees a key. If not, a tile of keys that meets it anyway
// adds zeros to dQ, or assigns them.
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

// The number of heads for which one warp clears dQ of a query tile.
constexpr int kHeadsPerClearing = 4;
__host__ __device__ inline int ClearingsPerTile(const BackwardArgs& args) {
  return (args.first_dq.end - args.first_dq.begin + kHeadsPerClearing - 1) / kHeadsPerClearing;
}

// Clears dQ where it is to be assigned and no query sees a key. A whole warp does it.
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

// Prepares the backward under a mask. One warp for every tile of keys finds its query tiles. One
// warp for some heads of every query tile clears their dQ if necessary. All clear the counters.
template <class Traits>
__global__ void Prepare(const __grid_constant__ BackwardArgs args, int key_tiles, int clearings,
                        bool one_mask, int counters) {
  const int thread = blockIdx.x * blockDim.x + threadIdx.x;
  for (int i = thread; i < counters; i += gridDim.x * blockDim.x) args.counters[i] = 0;
  int index = thread / kWarpSize;
  if (index < key_tiles) return FindQueryTiles<Traits>(args, index);
  index -= key_tiles;
  if (index < clearings) ClearUnseen<Traits>(args, one_mask, index);
}

template <class Traits>
void LaunchPrepare(const BackwardArgs& args) {
  const int counters = args.num_counters;
  if (!Traits::kMasked) {
    if (counters == 0) return;
    BURST_CUDA_CHECK(
        cudaMemsetAsync(args.counters, 0, counters * sizeof(int32_t), cuda::CurrentStream()));
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

}  // namespace sm90
}  // namespace burst
