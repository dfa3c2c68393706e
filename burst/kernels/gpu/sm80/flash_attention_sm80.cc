#include "burst/kernels/gpu/sm80/flash_attention_sm80.h"

#include "burst/kernels/gpu/sm80/variants.h"

namespace burst {
namespace sm80 {

void Forward(const FlashForwardParams& params) {
  if (params.shape.head_dim <= 64) return LaunchForward<ForwardD64>(params);
  if (params.shape.head_dim <= 128) return LaunchForward<ForwardD128>(params);
  LaunchForward<ForwardD256>(params);
}

// One for every tile of queries: the key tiles whose additions to its dQ are done.
int64_t BackwardCounters(const FlashBackwardParams& params) {
  if (!params.deterministic) return 0;
  const FlashAttentionShape& shape = params.shape;
  static_assert(BackwardD128::kBlockM == BackwardD256::kBlockM, "");
  const int64_t rows = shape.head_dim <= 64 ? BackwardD64::kBlockM : BackwardD128::kBlockM;
  return shape.batch * shape.num_heads * ((shape.q_len + rows - 1) / rows);
}

void Backward(const FlashBackwardParams& params, int32_t* counters) {
  if (params.shape.head_dim <= 64) return LaunchBackward<BackwardD64>(params, counters);
  if (params.shape.head_dim <= 128) return LaunchBackward<BackwardD128>(params, counters);
  LaunchBackward<BackwardD256>(params, counters);
}

}  // namespace sm80
}  // namespace burst
