#include "burst/kernels/gpu/sm90/flash_attention_sm90.h"

#include "burst/kernels/gpu/sm90/head_splits.h"
#include "burst/kernels/gpu/sm90/quantize_fp8.h"
#include "burst/kernels/gpu/sm90/variants.h"

namespace burst {
namespace sm90 {
namespace {

template <class Element>
void ForwardOf(const FlashForwardParams& params, int32_t* counters) {
  using V = Variants<Element>;
  const FlashAttentionShape& shape = params.shape;
  const int64_t d = shape.head_dim, k_len = shape.k_len;
  if (shape.blocks.key_begin != nullptr) {
    if (d <= 64) return LaunchForward<typename V::ForwardD64Lists>(params, counters);
    if (d <= 96) return LaunchForward<typename V::ForwardD96Lists>(params, counters);
    if (d <= 128) return LaunchForward<typename V::ForwardD128Lists>(params, counters);
    if (d <= 192) return LaunchForward<typename V::ForwardD192Lists>(params, counters);
    return LaunchForward<typename V::ForwardD256Lists>(params, counters);
  }
  const bool ranges = shape.visible.begin != nullptr;
  const auto launch = [&](auto full_traits, auto ranges_traits) {
    ranges ? LaunchForward<decltype(ranges_traits)>(params, counters)
           : LaunchForward<decltype(full_traits)>(params, counters);
  };
  if (d <= 64 && k_len <= 1024) {
    return launch(typename V::ForwardD64FullShort(), typename V::ForwardD64RangesShort());
  }
  if (d <= 64) return launch(typename V::ForwardD64Full(), typename V::ForwardD64Ranges());
  if (d <= 96 && k_len <= (ranges ? 4096 : 1024)) {
    return launch(typename V::ForwardD96FullShort(), typename V::ForwardD96RangesShort());
  }
  if (d <= 96) return launch(typename V::ForwardD96Full(), typename V::ForwardD96Ranges());
  if (d <= 128 && !ranges) {
    if (k_len <= 1024) return LaunchForward<typename V::ForwardD128FullShort>(params, counters);
    if (k_len <= 4096) return LaunchForward<typename V::ForwardD128FullMedium>(params, counters);
    return LaunchForward<typename V::ForwardD128Full>(params, counters);
  }
  if (d <= 128) {
    // A window, or documents, of few keys are short rows, however many keys there are.
    constexpr int64_t kLong = 8192;
    const int64_t most_queries = shape.visible.most_queries;
    return k_len >= kLong && (most_queries == 0 || most_queries >= kLong)
               ? LaunchForward<typename V::ForwardD128Ranges>(params, counters)
               : LaunchForward<typename V::ForwardD128RangesShort>(params, counters);
  }
  if (d <= 192) return launch(typename V::ForwardD192Full(), typename V::ForwardD192Ranges());
  launch(typename V::ForwardD256Full(), typename V::ForwardD256Ranges());
}

template <class Element>
void Fp8ForwardOf(const FlashForwardParams& params, const Fp8Operands& operands,
                  int32_t* counters) {
  using V = Variants<Element>;
  const FlashAttentionShape& shape = params.shape;
  if (shape.blocks.key_begin != nullptr) {
    return LaunchFp8Forward<typename V::ForwardFp8Lists>(params, operands, counters);
  }
  shape.visible.begin != nullptr
      ? LaunchFp8Forward<typename V::ForwardFp8Ranges>(params, operands, counters)
      : LaunchFp8Forward<typename V::ForwardFp8Full>(params, operands, counters);
}

template <class Element>
void BackwardOf(const FlashBackwardParams& params, const BackwardScratch& scratch) {
  using V = Variants<Element>;
  const FlashAttentionShape& shape = params.shape;
  const bool ranges = shape.visible.begin != nullptr && shape.q_len > 0;
  const bool lists = shape.blocks.key_begin != nullptr && shape.q_len > 0;
  const auto launch = [&](auto full_traits, auto ranges_traits, auto lists_traits) {
    if (lists) return LaunchBackward<decltype(lists_traits)>(params, scratch);
    ranges ? LaunchBackward<decltype(ranges_traits)>(params, scratch)
           : LaunchBackward<decltype(full_traits)>(params, scratch);
  };
  const auto launch_wide = [&](auto full_traits, auto ranges_traits, auto lists_traits) {
    if (lists) return LaunchWideBackward<decltype(lists_traits)>(params, scratch);
    ranges ? LaunchWideBackward<decltype(ranges_traits)>(params, scratch)
           : LaunchWideBackward<decltype(full_traits)>(params, scratch);
  };
  const int64_t d = shape.head_dim;
  // Where one block takes all query heads of a tile of keys: split heads gain nothing.
  const bool ordered = params.deterministic && HeadSplitsOf(params).splits == 1;
  if (d <= 64 && ordered && ranges && shape.q_len <= 2048) {
    return LaunchBackward<typename V::BackwardD64RangesOrdered>(params, scratch);
  }
  if (d <= 64) {
    return launch(typename V::BackwardD64Full(), typename V::BackwardD64Ranges(),
                  typename V::BackwardD64Lists());
  }
  if (d <= 96) {
    return launch(typename V::BackwardD96Full(), typename V::BackwardD96Ranges(),
                  typename V::BackwardD96Lists());
  }
  if (d <= 128 && ordered && shape.q_len <= 8192) {
    return launch(typename V::BackwardD128FullOrdered(), typename V::BackwardD128RangesOrdered(),
                  typename V::BackwardD128Lists());
  }
  if (d <= 128) {
    return launch(typename V::BackwardD128Full(), typename V::BackwardD128Ranges(),
                  typename V::BackwardD128Lists());
  }
  if (d <= 192) {
    launch_wide(typename V::BackwardD192DvFull(), typename V::BackwardD192DvRanges(),
                typename V::BackwardD192DvLists());
    return launch_wide(typename V::BackwardD192DkFull(), typename V::BackwardD192DkRanges(),
                       typename V::BackwardD192DkLists());
  }
  launch_wide(typename V::BackwardD256DvFull(), typename V::BackwardD256DvRanges(),
              typename V::BackwardD256DvLists());
  launch_wide(typename V::BackwardD256DkFull(), typename V::BackwardD256DkRanges(),
              typename V::BackwardD256DkLists());
}

}  // namespace

// Blocks draw tiles from a counter; without a mask they stride. The other one counts those that
// are done.
int64_t ForwardCounters(const FlashForwardParams& params) {
  const FlashAttentionShape& shape = params.shape;
  return shape.visible.begin == nullptr && shape.blocks.key_begin == nullptr ? 0 : 2;
}

void Forward(const FlashForwardParams& params, int32_t* counters) {
  const FlashAttentionShape& shape = params.shape;
  if (shape.batch == 0 || shape.num_heads == 0 || shape.q_len == 0) return;
  shape.dtype == DType::kFloat16 ? ForwardOf<Float16>(params, counters)
                                 : ForwardOf<BFloat16>(params, counters);
}

int64_t Fp8Scratch(const FlashForwardParams& params) { return Fp8OperandBytes(params.shape); }

void Fp8Forward(const FlashForwardParams& params, int32_t* counters, uint8_t* scratch) {
  const FlashAttentionShape& shape = params.shape;
  if (shape.batch == 0 || shape.num_heads == 0 || shape.q_len == 0) return;
  const Fp8Operands operands = Fp8OperandsIn(shape, scratch);
  QuantizeFp8(params, operands);
  shape.dtype == DType::kFloat16 ? Fp8ForwardOf<Float16>(params, operands, counters)
                                 : Fp8ForwardOf<BFloat16>(params, operands, counters);
}

// In a fixed order two for every tile of queries: the key tiles whose additions to each half of its
// dQ are done. And those of split heads.
int64_t BackwardCounters(const FlashBackwardParams& params) {
  const int64_t splits = HeadSplitsOf(params).counters;
  if (!params.deterministic) return splits;
  using V = Variants<BFloat16>;
  const FlashAttentionShape& shape = params.shape;
  const int64_t d = shape.head_dim;
  const bool lists = shape.blocks.key_begin != nullptr;
  const int64_t rows = d <= 64             ? V::BackwardD64Full::kBlockM
                       : d <= 96 && !lists ? V::BackwardD96Full::kBlockM
                                           : V::BackwardD128Full::kBlockM;
  static_assert(V::BackwardD128Full::kBlockM == V::BackwardD256DkFull::kBlockM &&
                    V::BackwardD128Full::kBlockM == V::BackwardD96Lists::kBlockM,
                "");
  return shape.batch * shape.num_heads * ((shape.q_len + rows - 1) / rows) * 2 + splits;
}

bool AssignsDq(const FlashBackwardParams& params) {
  return params.deterministic && params.shape.k_len > 0;
}

// Eight for every tile of keys.
int64_t BackwardQueryTiles(const FlashBackwardParams& params) {
  using V = Variants<BFloat16>;
  const FlashAttentionShape& shape = params.shape;
  if (shape.visible.begin == nullptr) return 0;
  static_assert(kBackwardKeys == V::BackwardD128Full::kBlockN &&
                    kBackwardKeys == V::BackwardD64Full::kBlockN &&
                    kBackwardKeys == V::BackwardD96Full::kBlockN &&
                    kBackwardKeys == V::BackwardD256DkFull::kBlockN,
                "");
  const int64_t batch = shape.visible.batch_stride == 0 ? 1 : shape.batch;
  return batch * ((shape.k_len + kBackwardKeys - 1) / kBackwardKeys) * 8;
}

void Backward(const FlashBackwardParams& params, const BackwardScratch& scratch) {
  const FlashAttentionShape& shape = params.shape;
  if (shape.batch == 0 || shape.num_heads == 0 || shape.k_len == 0) return;
  shape.dtype == DType::kFloat16 ? BackwardOf<Float16>(params, scratch)
                                 : BackwardOf<BFloat16>(params, scratch);
}

}  // namespace sm90
}  // namespace burst
