#include "burst/kernels/gpu/sm80/flash_attention_sm80.h"

#include "burst/kernels/gpu/common/shared_memory.h"
#include "burst/kernels/gpu/sm80/variants.h"

namespace burst {
namespace sm80 {
namespace {

template <class Traits>
bool Fits() {
  return Traits::kSharedBytes <= cuda::SharedMemoryPerBlock();
}

// Calls use(Traits()) for the variant that serves a backward on this GPU.
template <class Use>
auto WithBackward(int64_t head_dim, Use&& use) {
  if (head_dim <= 64) return Fits<BackwardD64>() ? use(BackwardD64()) : use(BackwardD64Small());
  if (head_dim <= 128) return Fits<BackwardD128>() ? use(BackwardD128()) : use(BackwardD128Small());
  return Fits<BackwardD256>() ? use(BackwardD256()) : use(BackwardD256Small());
}

}  // namespace

void Forward(const FlashForwardParams& params) {
  if (params.shape.head_dim <= 64) return LaunchForward<ForwardD64>(params);
  if (params.shape.head_dim <= 128) return LaunchForward<ForwardD128>(params);
  if (Fits<ForwardD256>()) return LaunchForward<ForwardD256>(params);
  LaunchForward<ForwardD256Small>(params);
}

// One for every tile of queries: the key tiles whose additions to its dQ are done.
int64_t BackwardCounters(const FlashBackwardParams& params) {
  if (!params.deterministic) return 0;
  const FlashAttentionShape& shape = params.shape;
  const int64_t rows = WithBackward(
      shape.head_dim, [](auto traits) -> int64_t { return decltype(traits)::kBlockM; });
  return shape.batch * shape.num_heads * ((shape.q_len + rows - 1) / rows);
}

void Backward(const FlashBackwardParams& params, int32_t* counters) {
  WithBackward(params.shape.head_dim,
               [&](auto traits) { LaunchBackward<decltype(traits)>(params, counters); });
}

}  // namespace sm80
}  // namespace burst
