#include "burst/kernels/gpu/sm90/flash_attention_sm90.h"

#include "burst/kernels/gpu/common/isolation.h"
#include "burst/kernels/gpu/sm90/head_splits.h"
#include "burst/kernels/gpu/sm90/quantize_fp8.h"
#include "burst/kernels/gpu/sm90/variants.h"

namespace burst {
namespace sm90 {
namespace {

MaskForm MaskOf(const FlashAttentionShape& shape) {
  if (shape.q_len == 0) return MaskForm::kFull;
  if (shape.blocks.key_begin != nullptr) return MaskForm::kLists;
  return shape.visible.begin != nullptr ? MaskForm::kRanges : MaskForm::kFull;
}

Call CallOf(const FlashAttentionShape& shape, bool ordered = false) {
  return {shape.widths(), shape.q_len, shape.k_len, MaskOf(shape), shape.visible.most_queries,
          ordered};
}

Call CallOf(const FlashBackwardParams& params) {
  return CallOf(params.shape, HasFixedOrder(params));
}

template <class Element>
void ForwardOf(const FlashForwardParams& params, int32_t* counters) {
  const Call call = CallOf(params.shape);
#define BURST_LAUNCH(name, ...) \
  if (call.Fits##name()) return LaunchForward<typename Variants<Element>::name>(params, counters);
  BURST_SM90_FORWARD(BURST_LAUNCH)
#undef BURST_LAUNCH
}

template <class Element>
void Fp8ForwardOf(const FlashForwardParams& params, const Fp8Operands& operands,
                  int32_t* counters) {
  const Call call = CallOf(params.shape);
#define BURST_LAUNCH(name, ...) \
  if (call.Fits##name())        \
    return LaunchFp8Forward<typename Variants<Element>::name>(params, operands, counters);
  BURST_SM90_FORWARD_FP8(BURST_LAUNCH)
#undef BURST_LAUNCH
}

// Launches the pass that computes all gradients of wide heads, or else both passes.
template <class Element>
void WideBackwardOf(const Call& call, const FlashBackwardParams& params,
                    const BackwardScratch& scratch) {
#define BURST_LAUNCH_FIRST(name, ...)                                      \
  if (call.Fits##name()) {                                                 \
    LaunchWideBackward<typename Variants<Element>::name>(params, scratch); \
  } else
  BURST_SM90_BACKWARD_BOTH(BURST_LAUNCH_FIRST) {}
  BURST_SM90_BACKWARD_DV(BURST_LAUNCH_FIRST) {}
  BURST_SM90_BACKWARD_DK(BURST_LAUNCH_FIRST) {}
#undef BURST_LAUNCH_FIRST
}

template <class Element>
void BackwardOf(const FlashBackwardParams& params, const BackwardScratch& scratch) {
  const Call call = CallOf(params);
#define BURST_LAUNCH(name, ...) \
  if (call.Fits##name()) return LaunchBackward<typename Variants<Element>::name>(params, scratch);
  BURST_SM90_BACKWARD(BURST_LAUNCH)
#undef BURST_LAUNCH
  WideBackwardOf<Element>(call, params, scratch);
}

// Returns the queries of a tile of the backward that computes dQ.
int64_t QueriesOfTile(const Call& call) {
#define BURST_QUERIES(name, ...) \
  if (call.Fits##name()) return Variants<BFloat16>::name::kBlockM;
  BURST_SM90_BACKWARD(BURST_QUERIES)
  BURST_SM90_BACKWARD_DK(BURST_QUERIES)
  BURST_SM90_BACKWARD_BOTH(BURST_QUERIES)
#undef BURST_QUERIES
  return 0;
}

#define BURST_KEYS(name, ...) static_assert(Variants<BFloat16>::name::kBlockN == kBackwardKeys, "");
BURST_SM90_BACKWARD(BURST_KEYS)
BURST_SM90_BACKWARD_DV(BURST_KEYS)
BURST_SM90_BACKWARD_DK(BURST_KEYS)
BURST_SM90_BACKWARD_BOTH(BURST_KEYS)
#undef BURST_KEYS

}  // namespace

// Blocks draw tiles from a counter. Without a mask they take tiles by index and need none.
int64_t ForwardCounters(const FlashForwardParams& params) {
  const FlashAttentionShape& shape = params.shape;
  if (shape.visible.begin == nullptr && shape.blocks.key_begin == nullptr) return 0;
  return kForwardCounters + cuda::ForwardMarks(shape);
}

// Repairs what a forward has marked; the marks follow its counters.
void Repair(const FlashForwardParams& params, const int32_t* counters) {
  if (params.shape.visible.documents) cuda::RepairForward(params, counters + kForwardCounters);
}

void Forward(const FlashForwardParams& params, int32_t* counters) {
  const FlashAttentionShape& shape = params.shape;
  if (shape.batch == 0 || shape.num_heads == 0 || shape.q_len == 0) return;
  shape.dtype == DType::kFloat16 ? ForwardOf<Float16>(params, counters)
                                 : ForwardOf<BFloat16>(params, counters);
  Repair(params, counters);
}

int64_t Fp8Scratch(const FlashForwardParams& params) { return Fp8OperandBytes(params.shape); }

void Fp8Forward(const FlashForwardParams& params, int32_t* counters, uint8_t* scratch) {
  const FlashAttentionShape& shape = params.shape;
  if (shape.batch == 0 || shape.num_heads == 0 || shape.q_len == 0) return;
  const Fp8Operands operands = Fp8OperandsIn(shape, scratch);
  QuantizeFp8(params, operands);
  shape.dtype == DType::kFloat16 ? Fp8ForwardOf<Float16>(params, operands, counters)
                                 : Fp8ForwardOf<BFloat16>(params, operands, counters);
  Repair(params, counters);
}

namespace {

// Returns the counters of a fixed order: two for every tile of queries, the key tiles that have
// added to each half of its dQ. The counters of split heads follow.
int64_t OrderCounters(const FlashBackwardParams& params) {
  const int64_t splits = HeadSplitsOf(params).counters;
  if (!HasFixedOrder(params)) return splits;
  const FlashAttentionShape& shape = params.shape;
  if (shape.q_len == 0) return splits;
  const int64_t rows = QueriesOfTile(CallOf(params));
  return shape.batch * shape.num_heads * ((shape.q_len + rows - 1) / rows) * 2 + splits;
}

}  // namespace

// The marks follow the other counters.
int64_t BackwardCounters(const FlashBackwardParams& params) {
  return OrderCounters(params) + cuda::BackwardMarks(params.shape, HeadSplitsOf(params).splits);
}

bool AssignsDq(const FlashBackwardParams& params) {
  return HasFixedOrder(params) && params.shape.k_len > 0;
}

// There are eight numbers for every tile of keys.
int64_t BackwardQueryTiles(const FlashBackwardParams& params) {
  const FlashAttentionShape& shape = params.shape;
  if (shape.visible.begin == nullptr) return 0;
  const int64_t batch = shape.visible.batch_stride == 0 ? 1 : shape.batch;
  return batch * ((shape.k_len + kBackwardKeys - 1) / kBackwardKeys) * 8;
}

void Backward(const FlashBackwardParams& params, const BackwardScratch& scratch) {
  const FlashAttentionShape& shape = params.shape;
  if (shape.batch == 0 || shape.num_heads == 0 || shape.k_len == 0) return;
  shape.dtype == DType::kFloat16 ? BackwardOf<Float16>(params, scratch)
                                 : BackwardOf<BFloat16>(params, scratch);
  if (!shape.visible.documents) return;
  cuda::RepairBackward(params, scratch.counters + OrderCounters(params),
                       HeadSplitsOf(params).splits);
}

}  // namespace sm90
}  // namespace burst
