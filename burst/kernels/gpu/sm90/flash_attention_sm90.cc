#include "burst/kernels/gpu/sm90/flash_attention_sm90.h"

#include "burst/kernels/gpu/sm90/variants.h"

namespace burst {
namespace sm90 {

// Blocks draw tiles from a counter; without a mask they stride. The other one counts those that
// are done.
int64_t ForwardCounters(const FlashForwardParams& params) {
  return params.shape.visible.begin == nullptr ? 0 : 2;
}

void Forward(const FlashForwardParams& params, int32_t* counters) {
  const FlashAttentionShape& shape = params.shape;
  if (shape.batch == 0 || shape.num_heads == 0 || shape.q_len == 0) return;
  const bool ranges = shape.visible.begin != nullptr, is_short = shape.k_len <= 1024;
  if (shape.head_dim <= 64 && is_short) {
    return ranges ? LaunchForward<ForwardD64RangesShort>(params, counters)
                  : LaunchForward<ForwardD64FullShort>(params, counters);
  }
  if (shape.head_dim <= 64) {
    return ranges ? LaunchForward<ForwardD64Ranges>(params, counters)
                  : LaunchForward<ForwardD64Full>(params, counters);
  }
  if (ranges) return LaunchForward<ForwardD128Ranges>(params, counters);
  is_short ? LaunchForward<ForwardD128FullShort>(params, counters)
           : LaunchForward<ForwardD128Full>(params, counters);
}

// Two for every tile of queries: the key tiles whose additions to each half of its dQ are done.
int64_t BackwardCounters(const FlashBackwardParams& params) {
  if (!params.deterministic) return 0;
  const FlashAttentionShape& shape = params.shape;
  const int64_t rows = shape.head_dim <= 64 ? BackwardD64Full::kBlockM : BackwardD128Full::kBlockM;
  return shape.batch * shape.num_heads * ((shape.q_len + rows - 1) / rows) * 2;
}

void Backward(const FlashBackwardParams& params, int32_t* counters) {
  const FlashAttentionShape& shape = params.shape;
  if (shape.batch == 0 || shape.num_heads == 0 || shape.k_len == 0) return;
  const bool ranges = shape.visible.begin != nullptr && shape.q_len > 0;
  if (shape.head_dim <= 64) {
    return ranges ? LaunchBackward<BackwardD64Ranges>(params, counters)
                  : LaunchBackward<BackwardD64Full>(params, counters);
  }
  ranges ? LaunchBackward<BackwardD128Ranges>(params, counters)
         : LaunchBackward<BackwardD128Full>(params, counters);
}

}  // namespace sm90
}  // namespace burst
