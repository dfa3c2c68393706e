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
  const bool ranges = shape.visible.begin != nullptr;
  const auto launch = [&](auto full_traits, auto ranges_traits) {
    ranges ? LaunchForward<decltype(ranges_traits)>(params, counters)
           : LaunchForward<decltype(full_traits)>(params, counters);
  };
  const int64_t d = shape.head_dim, k_len = shape.k_len;
  if (d <= 64 && k_len <= 1024) return launch(ForwardD64FullShort(), ForwardD64RangesShort());
  if (d <= 64) return launch(ForwardD64Full(), ForwardD64Ranges());
  if (d <= 96 && k_len <= (ranges ? 4096 : 1024)) {
    return launch(ForwardD96FullShort(), ForwardD96RangesShort());
  }
  if (d <= 96) return launch(ForwardD96Full(), ForwardD96Ranges());
  if (d <= 128 && k_len <= 1024) return launch(ForwardD128FullShort(), ForwardD128Ranges());
  if (d <= 128) return launch(ForwardD128Full(), ForwardD128Ranges());
  if (d <= 192) return launch(ForwardD192Full(), ForwardD192Ranges());
  launch(ForwardD256Full(), ForwardD256Ranges());
}

// Two for every tile of queries: the key tiles whose additions to each half of its dQ are done.
int64_t BackwardCounters(const FlashBackwardParams& params) {
  if (!params.deterministic) return 0;
  const FlashAttentionShape& shape = params.shape;
  const int64_t d = shape.head_dim;
  const int64_t rows = d <= 64   ? BackwardD64Full::kBlockM
                       : d <= 96 ? BackwardD96Full::kBlockM
                                 : BackwardD128Full::kBlockM;
  static_assert(BackwardD128Full::kBlockM == BackwardD256DkFull::kBlockM, "");
  return shape.batch * shape.num_heads * ((shape.q_len + rows - 1) / rows) * 2;
}

void Backward(const FlashBackwardParams& params, int32_t* counters) {
  const FlashAttentionShape& shape = params.shape;
  if (shape.batch == 0 || shape.num_heads == 0 || shape.k_len == 0) return;
  const bool ranges = shape.visible.begin != nullptr && shape.q_len > 0;
  const auto launch = [&](auto full_traits, auto ranges_traits) {
    ranges ? LaunchBackward<decltype(ranges_traits)>(params, counters)
           : LaunchBackward<decltype(full_traits)>(params, counters);
  };
  const auto launch_wide = [&](auto full_traits, auto ranges_traits) {
    ranges ? LaunchWideBackward<decltype(ranges_traits)>(params, counters)
           : LaunchWideBackward<decltype(full_traits)>(params, counters);
  };
  if (shape.head_dim <= 64) return launch(BackwardD64Full(), BackwardD64Ranges());
  if (shape.head_dim <= 96) return launch(BackwardD96Full(), BackwardD96Ranges());
  if (shape.head_dim <= 128) return launch(BackwardD128Full(), BackwardD128Ranges());
  if (shape.head_dim <= 192) {
    launch_wide(BackwardD192DvFull(), BackwardD192DvRanges());
    return launch_wide(BackwardD192DkFull(), BackwardD192DkRanges());
  }
  launch_wide(BackwardD256DvFull(), BackwardD256DvRanges());
  launch_wide(BackwardD256DkFull(), BackwardD256DkRanges());
}

}  // namespace sm90
}  // namespace burst
