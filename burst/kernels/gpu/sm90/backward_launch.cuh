// The host side of the backward kernel: one instantiation a file.
#pragma once

#include <algorithm>

#include "burst/kernels/gpu/sm90/backward.cuh"
#include "burst/kernels/gpu/sm90/tensor_map.h"

namespace burst {
namespace sm90 {

template <class Traits>
cudaError_t LaunchBackwardKernel(const BackwardParams& params, cudaStream_t stream) {
  const Shape& shape = params.shape;
  BackwardArgs args;
  cudaError_t error = cudaSuccess;
  const auto make_map = [&](const Operand& tensor, bool is_float, int64_t seqlen, int64_t heads,
                            int box_rows, CUtensorMap* map) {
    if (error != cudaSuccess) return;
    error =
        MakeTensorMap(tensor, is_float, shape.batch, seqlen, heads, shape.head_dim, box_rows, map);
  };
  make_map(params.k, false, shape.k_len, shape.num_kv_heads, Traits::kBlockN, &args.k);
  make_map(params.v, false, shape.k_len, shape.num_kv_heads, Traits::kBlockN, &args.v);
  if (shape.q_len > 0) {
    make_map(params.q, false, shape.q_len, shape.num_heads, Traits::kBlockM, &args.q);
    make_map(params.dout, false, shape.q_len, shape.num_heads, Traits::kBlockM, &args.dout);
    make_map(params.dq, true, shape.q_len, shape.num_heads, Traits::kDqRows, &args.dq);
  } else {
    args.q = args.dout = args.dq = args.k;  // never used: dK and dV become zero
  }
  make_map(params.dk, params.add, shape.k_len, shape.num_kv_heads, kWarpRows, &args.dk);
  make_map(params.dv, params.add, shape.k_len, shape.num_kv_heads, kWarpRows, &args.dv);
  if (error != cudaSuccess) return error;
  args.add = params.add;
  args.lse = params.lse;
  args.delta = params.delta;
  args.begin = shape.begin;
  args.end = shape.end;
  args.ranges_batch_stride = shape.ranges_batch_stride;
  args.q_len = static_cast<int>(shape.q_len);
  args.k_len = static_cast<int>(shape.k_len);
  args.num_heads = static_cast<int>(shape.num_heads);
  args.num_kv_heads = static_cast<int>(shape.num_kv_heads);
  args.batch_kv_heads = static_cast<int>(shape.batch * shape.num_kv_heads);
  args.heads_per_kv = static_cast<int>(shape.num_heads / shape.num_kv_heads);
  args.head_dim = static_cast<int>(shape.head_dim);
  args.key_tiles = static_cast<int>((shape.k_len + Traits::kBlockN - 1) / Traits::kBlockN);
  args.query_tiles = static_cast<int>((shape.q_len + Traits::kBlockM - 1) / Traits::kBlockM);
  args.scale = shape.softmax_scale;
  args.dq_additions = params.deterministic ? static_cast<int*>(params.workspace) : nullptr;
  // Half of the L2 for the q, dout and fp32 dq of the heads under way.
  constexpr int64_t kGroupBytes = 24 << 20;
  const int64_t head_bytes =
      std::max<int64_t>(1, shape.q_len) * Traits::kHeadDim * 8 * args.heads_per_kv;
  args.group = Traits::kRanges
                   ? static_cast<int>(std::min<int64_t>(
                         std::max<int64_t>(1, kGroupBytes / head_bytes), args.batch_kv_heads))
                   : 1;

  constexpr int kSharedBytes = sizeof(BackwardShared<Traits>);
  static_assert(kSharedBytes <= 227 * 1024, "more shared memory than a block can have");
  const auto kernel = BackwardKernel<Traits>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  if (params.deterministic) {
    error = cudaMemsetAsync(params.workspace, 0, BackwardWorkspaceBytes(shape, true), stream);
    if (error != cudaSuccess) return error;
  }
  kernel<<<args.key_tiles * args.batch_kv_heads, Traits::kThreads, kSharedBytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace sm90
}  // namespace burst
