// The compiled variants of the Hopper kernels, and their launches. BUILD compiles a source once for
// each of its variants, for both types of Element: BFloat16 and Float16.
#pragma once

#include <algorithm>
#include <cstdint>

#include "burst/kernels/flash_attention.h"

namespace burst {
namespace sm90 {

template <class Element_, int kHeadDim_, int kConsumers_, int kBlockN_, int kQStages_, int kStages_,
          bool kRanges_>
struct ForwardTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;       // padded with zeros by the TMA
  static constexpr int kConsumers = kConsumers_;   // warpgroups
  static constexpr int kBlockM = kConsumers * 64;  // queries
  static constexpr int kBlockN = kBlockN_;         // keys
  static constexpr int kQStages = kQStages_;
  static constexpr int kStages = kStages_;   // of K and of V
  static constexpr bool kRanges = kRanges_;  // the mask of KeyRanges; else every key
  // With a second buffer of Q, a warp's rows of O leave for global memory from where its Q was.
  static constexpr bool kStoreByTma = kHeadDim > 64 && kQStages > 1;
  // K and V of a wide head fill a good part of the L2 cache, and tiles under a mask read them at
  // different times: nothing else is to displace them.
  static constexpr bool kKeepKeys = kRanges && kHeadDim > 128;
  // One lane of a warp reads a tile's description for all, and frees it. Elsewhere every lane does
  // so for itself, which here takes 2 to 4 % longer.
  static constexpr bool kOneLaneReads = kRanges && kHeadDim > 192;
  static constexpr int kConsumerWarps = kConsumers * 4;
  static constexpr int kThreads = (kConsumers + 1) * 128;
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;
};

// counters: those that flash_attention_sm90.h asks for.
template <class Traits>
void LaunchForward(const FlashForwardParams& params, int32_t* counters);

// Heads to work on at the same time: about `fit`, as many as the L2 cache has room for, and if
// possible a divisor of `heads`. A small last group would leave most multiprocessors idle at the
// end (4 % of causal attention with 8K tokens and 32 heads).
inline int HeadsPerGroup(int64_t heads, int64_t fit) {
  fit = std::clamp<int64_t>(fit, 1, std::max<int64_t>(1, heads));
  for (int64_t group = std::min(heads, fit * 4 / 3); group > 0 && 2 * group >= fit; --group) {
    if (heads % group == 0) return static_cast<int>(group);
  }
  return static_cast<int>(fit);
}

template <class Element_, int kHeadDim_, int kBlockM_, bool kRanges_, bool kEarly_ = false>
struct BackwardTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;  // padded with zeros by the TMA
  static constexpr int kBlockM = kBlockM_;    // queries
  static constexpr int kBlockN = 128;         // keys
  static constexpr int kStages = 2;
  static constexpr bool kRanges = kRanges_;
  static constexpr int kConsumers = 2;  // warpgroups
  static constexpr int kConsumerWarps = kConsumers * 4;
  static constexpr int kThreads = (kConsumers + 1) * 128;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
  // The search for masks and the exchange of dS before the matmuls that they could run beside.
  static constexpr bool kEarly = kEarly_;
  // A consumer's part of dQ: kDqRows queries, 64 columns.
  static constexpr bool kDqByColumns = kHeadDim > 64;
  static constexpr int kDqRows = kDqByColumns ? kBlockM : kBlockM / 2;
};

// counters, query_tiles: those that flash_attention_sm90.h asks for.
template <class Traits>
void LaunchBackward(const FlashBackwardParams& params, int32_t* counters, int32_t* query_tiles);

// Wide heads, whose dK and dV do not both fit into registers, take two passes: dV, then dK and dQ.
template <class Element_, int kHeadDim_, bool kDk_, bool kRanges_>
struct WideBackwardTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;  // padded with zeros by the TMA
  static constexpr int kBlockM = 64;          // queries
  static constexpr int kBlockN = 128;         // keys
  static constexpr bool kDk = kDk_;           // the pass for dK and dQ; else that for dV
  static constexpr int kStages = kDk && kHeadDim > 192 ? 1 : 2;
  static constexpr bool kRanges = kRanges_;
  static constexpr int kConsumers = 2;  // warpgroups
  static constexpr int kConsumerWarps = kConsumers * 4;
  static constexpr int kThreads = (kConsumers + 1) * 128;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
};

template <class Traits>
void LaunchWideBackward(const FlashBackwardParams& params, int32_t* counters, int32_t* query_tiles);

// The variants for Element: BFloat16 or Float16.
template <class Element>
struct Variants {
  // Tiles of 192 rows read K and V from the L2 cache a third less often than tiles of 128, which
  // waste fewer rows of short sequences.
  using ForwardD64Full = ForwardTraits<Element, 64, 3, 128, 2, 4, false>;
  using ForwardD64Ranges = ForwardTraits<Element, 64, 3, 128, 2, 4, true>;
  using ForwardD64FullShort = ForwardTraits<Element, 64, 2, 128, 2, 4, false>;
  using ForwardD64RangesShort = ForwardTraits<Element, 64, 2, 128, 2, 4, true>;
  using ForwardD96Full = ForwardTraits<Element, 96, 3, 112, 1, 3, false>;
  using ForwardD96Ranges = ForwardTraits<Element, 96, 3, 112, 1, 3, true>;
  using ForwardD96FullShort = ForwardTraits<Element, 96, 2, 128, 2, 2, false>;
  using ForwardD96RangesShort = ForwardTraits<Element, 96, 2, 128, 2, 2, true>;
  using ForwardD128Full = ForwardTraits<Element, 128, 2, 176, 1, 2, false>;
  // With few keys a second buffer for Q is worth more than longer key blocks.
  using ForwardD128FullShort = ForwardTraits<Element, 128, 2, 128, 2, 2, false>;
  using ForwardD128Ranges = ForwardTraits<Element, 128, 2, 128, 2, 2, true>;
  // The widest: O takes 96 or 128 registers a thread, Q 48 or 64 KB.
  using ForwardD192Full = ForwardTraits<Element, 192, 2, 112, 1, 2, false>;
  using ForwardD192Ranges = ForwardTraits<Element, 192, 2, 112, 1, 2, true>;
  using ForwardD256Full = ForwardTraits<Element, 256, 2, 80, 1, 2, false>;
  using ForwardD256Ranges = ForwardTraits<Element, 256, 2, 80, 1, 2, true>;

  using BackwardD64Full = BackwardTraits<Element, 64, 128, false, true>;
  using BackwardD64Ranges = BackwardTraits<Element, 64, 128, true, true>;
  using BackwardD96Full = BackwardTraits<Element, 96, 80, false, true>;
  using BackwardD96Ranges = BackwardTraits<Element, 96, 80, true>;
  using BackwardD128Full = BackwardTraits<Element, 128, 64, false>;
  using BackwardD128Ranges = BackwardTraits<Element, 128, 64, true>;

  using BackwardD192DvFull = WideBackwardTraits<Element, 192, false, false>;
  using BackwardD192DvRanges = WideBackwardTraits<Element, 192, false, true>;
  using BackwardD192DkFull = WideBackwardTraits<Element, 192, true, false>;
  using BackwardD192DkRanges = WideBackwardTraits<Element, 192, true, true>;
  using BackwardD256DvFull = WideBackwardTraits<Element, 256, false, false>;
  using BackwardD256DvRanges = WideBackwardTraits<Element, 256, false, true>;
  using BackwardD256DkFull = WideBackwardTraits<Element, 256, true, false>;
  using BackwardD256DkRanges = WideBackwardTraits<Element, 256, true, true>;
};

}  // namespace sm90
}  // namespace burst
