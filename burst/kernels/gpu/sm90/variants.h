// The compiled variants of the Hopper kernels (variants.bzl): which calls each fits, their types,
// and their launches. BUILD compiles a source once for each of its variants, for both types of
// Element: BFloat16 and Float16.
#pragma once

#include <cstdint>
#include <type_traits>

#include "burst/kernels/flash_attention.h"
#include "burst/kernels/gpu/sm90/head_splits.h"
#include "burst/kernels/gpu/sm90/variant_table.h"
#include "burst/kernels/limits.h"

namespace burst {
namespace sm90 {

// The mask of a variant: none, KeyRanges or KeyBlocks.
enum class MaskForm { kFull, kRanges, kLists };

// The properties of a call on which the choice depends.
struct Call {
  HeadWidths widths = 0;
  int64_t q_len = 0, k_len = 0;
  MaskForm mask = MaskForm::kFull;
  int64_t most_queries = 0;  // KeyRanges::most_queries; 0: not known
  bool ordered = false;      // HasFixedOrder, of a backward

  // Returns whether a row of these widths has room for the call's heads. Heads of one width take
  // rows of one width, and others take the other rows.
  bool FitInto(const HeadWidths& row) const {
    return widths.head_dim <= row.head_dim && widths.value_dim <= row.value_dim &&
           widths.equal() == row.equal();
  }

  // Returns whether a row fits the call: FitsForwardD64Full() and so on.
#define BURST_FITS(name, most_head_dim, most_value_dim, form, when, ...)                 \
  bool Fits##name() const {                                                              \
    return FitInto({most_head_dim, most_value_dim}) && mask == MaskForm::form && (when); \
  }
  BURST_SM90_FORWARD(BURST_FITS)
  BURST_SM90_FORWARD_FP8(BURST_FITS)
  BURST_SM90_BACKWARD(BURST_FITS)
  BURST_SM90_BACKWARD_DV(BURST_FITS)
  BURST_SM90_BACKWARD_DK(BURST_FITS)
  BURST_SM90_BACKWARD_BOTH(BURST_FITS)
#undef BURST_FITS
};

template <class Element_, int kHeadDim_, int kValueDim_, int kConsumers_, int kBlockN_,
          int kQStages_, int kStages_, MaskForm kForm>
struct ForwardTraits {
  using Element = Element_;
  // Both widths are padded with zeros by the TMA.
  static constexpr int kHeadDim = kHeadDim_, kValueDim = kValueDim_;
  static_assert(kValueDim <= kHeadDim, "O leaves from Q's place");
  static constexpr int kConsumers = kConsumers_;   // warpgroups
  static constexpr int kBlockM = kConsumers * 64;  // queries
  static constexpr int kBlockN = kBlockN_;         // keys
  static constexpr int kQStages = kQStages_;
  static constexpr int kStages = kStages_;  // stages of K, and of V
  static constexpr bool kFp8 = false, kRowCalls = false;
  static constexpr MaskForm kMask = kForm;
  static constexpr bool kRanges = kForm == MaskForm::kRanges, kLists = kForm == MaskForm::kLists;
  static constexpr bool kMasked = kRanges || kLists;
  // Blocks of kBlockN keys in a block of a list.
  static constexpr int kListParts = kListBlock / kBlockN;
  static_assert(!kLists || (kBlockM == kListBlock && kListParts * kBlockN == kListBlock), "");
  // With a second buffer of Q, a warp's rows of O leave for global memory from their Q's place.
  static constexpr bool kStoreByTma = kHeadDim > 64 && kQStages > 1;
  // Keeps K and V in the L2 cache. In wide heads they fill a good part of it, and tiles under a
  // mask read them at different times.
  static constexpr bool kKeepKeys = kMasked && kHeadDim > 128;
  // One lane of a warp reads a tile's description for all, and frees it. Where every lane does so
  // for itself, wide heads take 2 to 4 % longer.
  static constexpr bool kOneLaneReads = kMasked && kHeadDim > 192;
  static constexpr int kConsumerWarps = kConsumers * 4;
  static constexpr int kThreads = (kConsumers + 1) * 128;
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;
};

// The counters of a forward under a mask: the next tile to draw, and the number of finished blocks.
// The call's marks (common/isolation.h) follow them.
constexpr int64_t kForwardCounters = 2;

// counters, and scratch below: see flash_attention_sm90.h.
template <class Traits>
void LaunchForward(const FlashForwardParams& params, int32_t* counters);

// Q, K and V are in the form of quantize_fp8.h. Element is the result's type.
template <class Element_, MaskForm kForm>
struct Fp8ForwardTraits {
  using Element = Element_;
  // Both widths are padded with zeros by the quantization.
  static constexpr int kHeadDim = 128, kValueDim = 128;
  static constexpr int kConsumers = 2;             // warpgroups
  static constexpr int kBlockM = kConsumers * 64;  // queries
  static constexpr int kBlockN = 128;              // keys
  static constexpr int kQStages = 2;
  static constexpr int kStages = 4;  // stages of K, and of V
  static constexpr bool kFp8 = true, kRowCalls = false;
  static constexpr MaskForm kMask = kForm;
  static constexpr bool kRanges = kForm == MaskForm::kRanges, kLists = kForm == MaskForm::kLists;
  static constexpr bool kMasked = kRanges || kLists;
  static constexpr int kListParts = 1;
  static_assert(kBlockM == kListBlock && kBlockN == kListBlock, "");
  static constexpr bool kKeepKeys = false;
  static constexpr bool kOneLaneReads = false;
  static constexpr int kConsumerWarps = kConsumers * 4;
  static constexpr int kThreads = (kConsumers + 1) * 128;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
};

struct Fp8Operands;  // quantize_fp8.h

template <class Traits>
void LaunchFp8Forward(const FlashForwardParams& params, const Fp8Operands& operands,
                      int32_t* counters);

template <class Element_, int kHeadDim_, int kValueDim_, int kBlockM_, MaskForm kForm, bool kEarly_,
          bool kOrdered>
struct BackwardTraits {
  using Element = Element_;
  // Both widths are padded with zeros by the TMA.
  static constexpr int kHeadDim = kHeadDim_, kValueDim = kValueDim_;
  static_assert(kHeadDim == kValueDim && kHeadDim <= kNarrowHeadDim, "others are wide");
  static constexpr int kBlockM = kBlockM_;  // queries
  static constexpr int kBlockN = 128;       // keys
  static constexpr int kStages = 2;
  static constexpr MaskForm kMask = kForm;
  static constexpr bool kRanges = kForm == MaskForm::kRanges, kLists = kForm == MaskForm::kLists;
  static constexpr bool kMasked = kRanges || kLists;
  // Tiles of kBlockM queries in a block of a list.
  static constexpr int kListParts = kListBlock / kBlockM;
  static_assert(!kLists || kListParts * kBlockM == kListBlock, "");
  static constexpr int kConsumers = 2;  // warpgroups
  static constexpr int kConsumerWarps = kConsumers * 4;
  static constexpr int kThreads = (kConsumers + 1) * 128;
  static constexpr int kProducerRegisters = kHeadDim > 96 ? 24 : 40;
  static constexpr int kConsumerRegisters = kHeadDim > 96 ? 240 : 232;
  // Searches for masks before the matmuls instead of in parallel with them.
  static constexpr bool kEarly = kEarly_;
  static constexpr int kScaleBits = 0;  // as in WideBackwardTraits
  // Waits for Q, dO and the rows' data together, and frees them together. At a head_dim of 64,
  // short sequences gain more by beginning as soon as Q has come.
  static constexpr bool kOneBarrier = kHeadDim > 64;
  // Reads lse and delta into registers before it waits for the matmuls, if there is room.
  static constexpr bool kRowsEarly = kHeadDim > 64;
  // Multiplies dS, not dQ and dK, by the softmax's scale. Not in fp16, whose numbers end at 2^-24.
  static constexpr bool kScaleDs = std::is_same<Element, BFloat16>::value;
  // V is the A operand of every dP^T product, and shared-memory bandwidth limits the kernel.
  // Consumers therefore keep kValueSteps groups of 16 columns of V in registers. The values were
  // measured; more is not faster even where registers are free.
  static constexpr int kValueSteps = kHeadDim <= 64 ? 3 : kHeadDim <= 96 ? 6 : kMasked ? 5 : 4;
  // A consumer's part of dQ is kDqRows queries by 64 columns.
  static constexpr bool kDqByColumns = kHeadDim > 64;
  static constexpr int kDqRows = kDqByColumns ? kBlockM : kBlockM / 2;
  // With two, the warps that add dQ to global memory take turns at the query tiles. With one, each
  // adds a consumer's part of every tile.
  static constexpr int kDqTurns = kLists || kOrdered ? 2 : 1;
  // These warps wait for a step's turn in the fixed order before they wait for its dQ. Measured:
  // kDqTurns or kTurnFirst alone is slower, both together make short sequences faster.
  static constexpr bool kTurnFirst = kOrdered;
  // With two buffers, each warp has its own, so a block may be two query tiles ahead of its turn.
  // At a head_dim of 64 shared memory holds one buffer.
  static constexpr int kDqBuffers = kLists && kHeadDim > 64 ? 2 : 1;
};

template <class Traits>
void LaunchBackward(const FlashBackwardParams& params, const BackwardScratch& scratch);

// What a pass over wide heads computes: dV, or dK and dQ, or all three. dK and dV fit registers
// together only if v is narrower.
enum class WidePass { kDv, kDk, kBoth };

template <class Element_, int kHeadDim_, int kValueDim_, WidePass kPass, MaskForm kForm>
struct WideBackwardTraits {
  using Element = Element_;
  // Both widths are padded with zeros by the TMA.
  static constexpr int kHeadDim = kHeadDim_, kValueDim = kValueDim_;
  static constexpr int kBlockM = 64;                   // queries
  static constexpr int kBlockN = 128;                  // keys
  static constexpr bool kDk = kPass != WidePass::kDv;  // the pass computes dK and dQ
  static constexpr bool kDv = kPass != WidePass::kDk;  // the pass computes dV
  static constexpr bool kBoth = kDk && kDv;
  static_assert(!kBoth || kHeadDim + kValueDim <= 320, "more registers than a thread has");
  // Computes dQ one step after its operands. The rows' data then come with Q.
  static constexpr bool kLateDq = kDk && kHeadDim <= 192;
  // Keeps V in registers, and dQ in V's place in shared memory. dO comes with Q.
  static constexpr bool kDqInV = kLateDq && !kBoth;
  // Consumers compute P times 2^kScaleBits. With kBoth they keep it in float16, to save registers.
  // So it has 11 bits down to 2^-28, and it may exceed 1 by the rounding of large scores. dV is
  // summed times 2^kScaleBits, too. It overflows above 2^114.
  static constexpr int kScaleBits = kBoth ? 14 : 0;
  // As in BackwardTraits. Without kLateDq consumers stand still until the first box of dQ has left.
  static constexpr bool kTurnFirst = kDk && !kLateDq;
  static constexpr int kStages = kDk && kHeadDim > 192 ? 1 : 2;
  static constexpr int kDoutStages = kBoth ? 1 : kStages;
  static constexpr MaskForm kMask = kForm;
  static constexpr bool kRanges = kForm == MaskForm::kRanges, kLists = kForm == MaskForm::kLists;
  static constexpr bool kMasked = kRanges || kLists;
  // Tiles of kBlockM queries in a block of a list.
  static constexpr int kListParts = kListBlock / kBlockM;
  static_assert(!kLists || kListParts * kBlockM == kListBlock, "");
  static constexpr int kConsumers = 2;  // warpgroups
  static constexpr int kConsumerWarps = kConsumers * 4;
  static constexpr int kThreads = (kConsumers + 1) * 128;
  static constexpr int kProducerRegisters = kLateDq ? 24 : 40;
  static constexpr int kConsumerRegisters = kLateDq ? 240 : 232;
  static constexpr bool kScaleDs = kDk && std::is_same<Element, BFloat16>::value;
};

template <class Traits>
void LaunchWideBackward(const FlashBackwardParams& params, const BackwardScratch& scratch);

// The variants of variants.bzl for Element: BFloat16 or Float16.
template <class Element>
struct Variants {
#define BURST_FORWARD(name, head_dim, value_dim, mask, when, consumers, keys, q_stages, stages) \
  using name = ForwardTraits<Element, head_dim, value_dim, consumers, keys, q_stages, stages,   \
                             MaskForm::mask>;
#define BURST_FORWARD_FP8(name, head_dim, value_dim, mask, when) \
  using name = Fp8ForwardTraits<Element, MaskForm::mask>;
#define BURST_BACKWARD(name, head_dim, value_dim, mask, when, queries, early, ordered) \
  using name =                                                                         \
      BackwardTraits<Element, head_dim, value_dim, queries, MaskForm::mask, early, ordered>;
#define BURST_BACKWARD_WIDE(name, head_dim, value_dim, mask, when, pass) \
  using name = WideBackwardTraits<Element, head_dim, value_dim, WidePass::pass, MaskForm::mask>;

  BURST_SM90_FORWARD(BURST_FORWARD)
  BURST_SM90_FORWARD_FP8(BURST_FORWARD_FP8)
  BURST_SM90_BACKWARD(BURST_BACKWARD)
  BURST_SM90_BACKWARD_DV(BURST_BACKWARD_WIDE)
  BURST_SM90_BACKWARD_DK(BURST_BACKWARD_WIDE)
  BURST_SM90_BACKWARD_BOTH(BURST_BACKWARD_WIDE)

#undef BURST_FORWARD
#undef BURST_FORWARD_FP8
#undef BURST_BACKWARD
#undef BURST_BACKWARD_WIDE
};

}  // namespace sm90
}  // namespace burst
