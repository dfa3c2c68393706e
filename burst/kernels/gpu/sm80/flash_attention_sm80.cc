#include "burst/kernels/gpu/sm80/flash_attention_sm80.h"

#include <algorithm>

#include "burst/device/cuda.h"
#include "burst/kernels/gpu/common/isolation.h"
#include "burst/kernels/gpu/common/shared_memory.h"
#include "burst/kernels/gpu/sm80/variants.h"

namespace burst {
namespace sm80 {
namespace {

template <class Traits>
bool Fits() {
  return Traits::kSharedBytes <= cuda::SharedMemoryPerBlock();
}

// Calls use(Variants<Element>()) for the element type of `dtype`.
template <class Use>
auto WithVariants(DType dtype, Use&& use) {
  return dtype == DType::kFloat16 ? use(Variants<Float16>()) : use(Variants<BFloat16>());
}

// Calls use(Traits()) for the variant that serves a backward on this GPU.
template <class Use>
auto WithBackward(const FlashAttentionShape& shape, Use&& use) {
  return WithVariants(shape.dtype, [&](auto variants) {
    using V = decltype(variants);
    using D64 = typename V::BackwardD64;
    using D128 = typename V::BackwardD128;
    using D256 = typename V::BackwardD256;
    if (shape.scores.any()) {
      using Wide = typename V::BackwardD256Changed;
      if (shape.head_dim <= 64) return use(typename V::BackwardD64Changed());
      if (shape.head_dim <= 128) return use(typename V::BackwardD128Changed());
      return Fits<Wide>() ? use(Wide()) : use(typename V::BackwardD256SmallChanged());
    }
    if (shape.head_dim <= 64) {
      return Fits<D64>() ? use(D64()) : use(typename V::BackwardD64Small());
    }
    if (shape.head_dim <= 128) {
      return Fits<D128>() ? use(D128()) : use(typename V::BackwardD128Small());
    }
    return Fits<D256>() ? use(D256()) : use(typename V::BackwardD256Small());
  });
}

// Calls use(Traits()) for the variant that serves few queries. Every tile of rows reads all keys,
// so more rows take larger tiles.
template <class Use>
auto WithDecode(const FlashAttentionShape& shape, Use&& use) {
  return WithVariants(shape.dtype, [&](auto variants) {
    using V = decltype(variants);
    const int64_t rows = shape.q_len * (shape.num_heads / shape.num_kv_heads);
    const bool few = rows <= V::DecodeD128::kRows;
    if (shape.head_dim <= 64) {
      return few ? use(typename V::DecodeD64()) : use(typename V::DecodeD64Rows32());
    }
    if (shape.head_dim <= 128) {
      return few ? use(typename V::DecodeD128()) : use(typename V::DecodeD128Rows32());
    }
    return use(typename V::DecodeD256());
  });
}

}  // namespace

// A forward needs the marks alone.
int64_t ForwardCounters(const FlashForwardParams& params) {
  return cuda::ForwardMarks(params.shape);
}

void Forward(const FlashForwardParams& params, int32_t* marks) {
  WithVariants(params.shape.dtype, [&](auto variants) {
    using V = decltype(variants);
    if (params.shape.scores.any() || params.max_logits != nullptr) {
      if (params.shape.head_dim <= 64) {
        return LaunchForward<typename V::ForwardD64Changed>(params, marks);
      }
      if (params.shape.head_dim <= 128) {
        return LaunchForward<typename V::ForwardD128Changed>(params, marks);
      }
      return LaunchForward<typename V::ForwardD256Changed>(params, marks);
    }
    if (params.shape.head_dim <= 64) return LaunchForward<typename V::ForwardD64>(params, marks);
    if (params.shape.head_dim <= 128) return LaunchForward<typename V::ForwardD128>(params, marks);
    if (Fits<typename V::ForwardD256>())
      return LaunchForward<typename V::ForwardD256>(params, marks);
    LaunchForward<typename V::ForwardD256Small>(params, marks);
  });
  cuda::RepairForward(params, marks);
}

// Returns the number of parts of the keys with which the GPU's thread blocks finish earliest, in
// one or more waves. A block takes the time of its keys and of kStart more keys. A part has at
// least kFewest keys.
int DecodeParts(const FlashAttentionShape& shape) {
  constexpr int64_t kStart = 160, kFewest = 256, kWaves = 8;
  const int64_t rows = shape.q_len * (shape.num_heads / shape.num_kv_heads);
  const int64_t tile_rows =
      WithDecode(shape, [](auto traits) -> int64_t { return decltype(traits)::kRows; });
  const int64_t tiles =
      std::max<int64_t>(1, shape.batch * shape.num_kv_heads * ((rows + tile_rows - 1) / tile_rows));
  const int64_t at_once =
      cuda::CurrentContext().multiprocessors *
      std::clamp<int64_t>(
          cuda::SharedMemoryPerBlock() / Variants<BFloat16>::DecodeD128::kSharedBytes, 1, 2);
  const int64_t most = std::max<int64_t>(1, shape.k_len / kFewest);
  int64_t best = 1, best_time = 0;
  for (int64_t filled = 1; filled <= kWaves; ++filled) {
    const int64_t parts = std::clamp<int64_t>(filled * at_once / tiles, 1, most);
    const int64_t waves = (tiles * parts + at_once - 1) / at_once;
    const int64_t time = waves * ((shape.k_len + parts - 1) / parts + kStart);
    if (filled > 1 && time >= best_time) continue;
    best = parts;
    best_time = time;
  }
  return static_cast<int>(best);
}

int64_t DecodeScratch(const FlashAttentionShape& shape, int parts) {
  if (parts == 1) return 0;
  const int64_t columns =
      WithDecode(shape, [](auto traits) -> int64_t { return decltype(traits)::kHeadDim; });
  return shape.batch * shape.num_heads * shape.q_len * parts * (columns + 1);
}

void Decode(const FlashForwardParams& params, int parts, float* scratch, int32_t* marks) {
  const FlashAttentionShape& shape = params.shape;
  if (shape.batch == 0 || shape.num_heads == 0 || shape.q_len == 0) return;
  WithDecode(shape,
             [&](auto traits) { LaunchDecode<decltype(traits)>(params, parts, scratch, marks); });
  cuda::RepairForward(params, marks);
}

namespace {

// A counter for every tile of queries: the number of key tiles that have added to its dQ.
int64_t OrderCounters(const FlashBackwardParams& params) {
  if (!params.deterministic) return 0;
  const FlashAttentionShape& shape = params.shape;
  const int64_t rows =
      WithBackward(shape, [](auto traits) -> int64_t { return decltype(traits)::kBlockM; });
  return shape.batch * shape.num_heads * ((shape.q_len + rows - 1) / rows);
}

}  // namespace

// The marks follow the order's counters.
int64_t BackwardCounters(const FlashBackwardParams& params) {
  return OrderCounters(params) + cuda::BackwardMarks(params.shape, /*splits=*/1);
}

void Backward(const FlashBackwardParams& params, int32_t* counters) {
  int32_t* const order = params.deterministic ? counters : nullptr;
  int32_t* const marks =
      params.shape.visible.documents ? counters + OrderCounters(params) : nullptr;
  WithBackward(params.shape,
               [&](auto traits) { LaunchBackward<decltype(traits)>(params, order, marks); });
  cuda::RepairBackward(params, marks, /*splits=*/1);
}

}  // namespace sm80
}  // namespace burst
