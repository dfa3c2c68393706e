// The host side of the forward kernel: one instantiation a file, so that they compile in parallel.
#pragma once

#include <algorithm>

#include "burst/kernels/gpu/sm90/forward.cuh"
#include "burst/kernels/gpu/sm90/tensor_map.h"

namespace burst {
namespace sm90 {

template <class Traits>
cudaError_t LaunchForwardKernel(const ForwardParams& params, cudaStream_t stream) {
  const Shape& shape = params.shape;
  ForwardArgs args;
  const auto make_map = [&](const Operand& tensor, int64_t seqlen, int64_t heads, int box_rows,
                            CUtensorMap* map) {
    return MakeTensorMap(tensor, false, shape.batch, seqlen, heads, shape.head_dim, box_rows, map);
  };
  cudaError_t error = make_map(params.q, shape.q_len, shape.num_heads, Traits::kBlockM, &args.q);
  if (error != cudaSuccess) return error;
  if (shape.k_len > 0) {
    error = make_map(params.k, shape.k_len, shape.num_kv_heads, Traits::kBlockN, &args.k);
    if (error != cudaSuccess) return error;
    error = make_map(params.v, shape.k_len, shape.num_kv_heads, Traits::kBlockN, &args.v);
    if (error != cudaSuccess) return error;
  } else {
    args.k = args.v = args.q;  // never loaded from
  }
  if (Traits::kStoreByTma && !params.out_is_float) {
    error = make_map(params.out, shape.q_len, shape.num_heads, kWarpRows, &args.out_map);
    if (error != cudaSuccess) return error;
  }
  args.out = View(params.out);
  args.out_is_float = params.out_is_float;
  args.merge = params.sum.data != nullptr;
  args.skip_empty = params.out_is_float && params.sum.data == params.out.data;
  args.sum = View(params.sum);
  args.lse = params.lse;
  args.begin = shape.begin;
  args.end = shape.end;
  args.ranges_batch_stride = shape.ranges_batch_stride;
  args.q_len = static_cast<int>(shape.q_len);
  args.k_len = static_cast<int>(shape.k_len);
  args.num_heads = static_cast<int>(shape.num_heads);
  args.batch_heads = static_cast<int>(shape.batch * shape.num_heads);
  args.heads_per_kv = static_cast<int>(shape.num_heads / shape.num_kv_heads);
  args.head_dim = static_cast<int>(shape.head_dim);
  args.tile_rows = static_cast<int>((shape.q_len + Traits::kBlockM - 1) / Traits::kBlockM);
  args.tiles = args.tile_rows * args.batch_heads;
  args.scale = shape.softmax_scale;
  args.inverse_scale = 1 / shape.softmax_scale;
  args.counters = static_cast<ForwardCounters*>(params.workspace);
  // Half of the 50 to 60 MB of L2 for the keys and values of the heads under way. Without a mask
  // all tiles are equally long, and one head after the other is best.
  constexpr int64_t kGroupBytes = 24 << 20;
  constexpr int64_t kMaxGroup = 32;  // short sequences: measured faster than all that would fit
  const int64_t kv_bytes = std::max<int64_t>(1, shape.k_len) * Traits::kHeadDim * 4;
  const int64_t kv_heads = std::clamp<int64_t>(kGroupBytes / kv_bytes, 1, kMaxGroup);
  args.group =
      Traits::kRanges
          ? static_cast<int>(std::min<int64_t>(kv_heads * args.heads_per_kv, args.batch_heads))
          : 1;

  constexpr int kSharedBytes = sizeof(ForwardShared<Traits>);
  static_assert(kSharedBytes <= 227 * 1024, "more shared memory than a block can have");
  const auto kernel = ForwardKernel<Traits>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  const int blocks =
      params.non_persistent ? args.tiles : std::min(args.tiles, MultiprocessorCount());
  kernel<<<blocks, Traits::kThreads, kSharedBytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace sm90
}  // namespace burst
