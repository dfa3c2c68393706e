#include "burst/kernels/gpu/sm90/flash_attention_sm90.h"

#include "burst/kernels/gpu/sm90/configs.h"
#include "burst/kernels/gpu/sm90/tensor_map.h"

namespace burst {
namespace sm90 {

// ForwardCounters.
size_t ForwardWorkspaceBytes(const Shape&) { return 16; }

cudaError_t LaunchForward(const ForwardParams& params, cudaStream_t stream) {
  const Shape& shape = params.shape;
  if (!IsServed(shape)) return cudaErrorInvalidValue;
  if (shape.batch == 0 || shape.num_heads == 0 || shape.q_len == 0) return cudaSuccess;
  const bool ranges = shape.begin != nullptr;
  if (shape.head_dim <= 64) {
    return ranges ? ForwardD64Ranges(params, stream) : ForwardD64Full(params, stream);
  }
  if (ranges) return ForwardD128Ranges(params, stream);
  // With few keys a second buffer for Q is worth more than longer key blocks.
  return shape.k_len <= 1024 ? ForwardD128Short(params, stream) : ForwardD128Full(params, stream);
}

// Two counters for every tile of (at least 64) query rows.
size_t BackwardWorkspaceBytes(const Shape& shape, bool deterministic) {
  if (!deterministic) return 0;
  return shape.batch * shape.num_heads * ((shape.q_len + 63) / 64) * 2 * sizeof(int32_t);
}

cudaError_t LaunchBackward(const BackwardParams& params, cudaStream_t stream) {
  const Shape& shape = params.shape;
  if (!IsServed(shape)) return cudaErrorInvalidValue;
  if (shape.batch == 0 || shape.num_heads == 0 || shape.k_len == 0) return cudaSuccess;
  const bool ranges = shape.begin != nullptr && shape.q_len > 0;
  if (shape.head_dim <= 64) {
    return ranges ? BackwardD64Ranges(params, stream) : BackwardD64Full(params, stream);
  }
  return ranges ? BackwardD128Ranges(params, stream) : BackwardD128Full(params, stream);
}

}  // namespace sm90
}  // namespace burst
