// The compiled variants of Ampere's kernels, and their launches. BUILD compiles a source once for
// each of its variants, for both types of Element: BFloat16 and Float16. "Small" variants need at
// most 99 KB of shared memory, the limit of a thread block on compute capability 8.6, 8.9 and 12.0.
// They serve GPUs without room for the others.
#pragma once

#include <cstdint>

#include "burst/kernels/flash_attention.h"

namespace burst {
namespace sm80 {

inline constexpr int kSmallSharedBytes = 99 << 10;

template <class ElementType, int kHeadDimPadded, int kRows, int kKeys, int kWarps>
struct ForwardTraits {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimPadded;
  static constexpr int kBlockM = kRows, kBlockN = kKeys;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kM = kBlockM / (16 * kWarps);  // row tiles of a warp
  static constexpr bool kChanged = false;
  static constexpr int kSharedBytes = (kBlockM + 2 * kBlockN) * kHeadDim * 2;
};

// marks: see common/isolation.h.
template <class Traits>
void LaunchForward(const FlashForwardParams& params, int32_t* marks);

// The forward of few queries. A warp has a ring of kSlots blocks of keys or values.
template <class ElementType, int kHeadDimPadded, int kRowTiles>
struct DecodeTraits {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimPadded;
  static constexpr int kM = kRowTiles;
  static constexpr int kRows = 16 * kM;  // queries times heads
  static constexpr int kKeys = 16;       // keys of a block
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kStep = kWarps * kKeys;
  static constexpr int kSlotBytes = kKeys * kHeadDim * 2;
  static constexpr int kSlots = (24 << 10) / kSlotBytes;
  static constexpr int kSharedBytes = kWarps * kSlots * kSlotBytes;
  static_assert(kSharedBytes <= kSmallSharedBytes, "");
};

// parts, scratch: see flash_attention_sm80.h. marks: see common/isolation.h.
template <class Traits>
void LaunchDecode(const FlashForwardParams& params, int parts, float* scratch, int32_t* marks);

// Warps divide S and dP, [kBlockM, kBlockN], and dQ, [kBlockM, head_dim], as kWarpsM x (kWarps /
// kWarpsM). They divide dK and dV, [kBlockN, head_dim], as kWarpsN x (kWarps / kWarpsN).
template <class ElementType, int kHeadDimPadded, int kQueries, int kKeys, int kQueryStages,
          int kSWarps, int kKWarps, int kAllWarps = 8>
struct BackwardTraits {
  using Element = ElementType;
  static constexpr int kHeadDim = kHeadDimPadded;
  static constexpr int kBlockM = kQueries, kBlockN = kKeys;
  static constexpr int kStages = kQueryStages;  // stages of Q, dO and the statistics
  static constexpr int kWarps = kAllWarps;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kWarpsM = kSWarps, kWarpsN = kKWarps;
  static constexpr bool kChanged = false;

  static constexpr int kSRows = kBlockM / kWarpsM, kSColumns = kBlockN / (kWarps / kWarpsM);
  static constexpr int kDqColumns = kHeadDim / (kWarps / kWarpsM);
  static constexpr int kDkRows = kBlockN / kWarpsN, kDkColumns = kHeadDim / (kWarps / kWarpsN);
  static_assert(kSRows % 16 == 0 && kSColumns % 16 == 0 && kDqColumns % 16 == 0, "");
  static_assert(kDkRows % 16 == 0 && kDkColumns % 16 == 0, "");

  // Bytes of shared memory.
  static constexpr int kKTile = kBlockN * kHeadDim * 2, kQTile = kBlockM * kHeadDim * 2;
  static constexpr int kScoreTile = kBlockM * kBlockN * 2;
  static constexpr int kStatistic = kBlockM * 4;  // lse, delta
  static constexpr int kSharedBytes =
      2 * kKTile + 2 * kScoreTile + kStages * 2 * (kQTile + kStatistic);
};

// counters: of the fixed order; null if the order is free. marks: see common/isolation.h.
template <class Traits>
void LaunchBackward(const FlashBackwardParams& params, int32_t* counters, int32_t* marks);

// A variant with changed scores and weights, and the largest score (burst/kernels/scores.h).
template <class Plain>
struct Changed : Plain {
  static constexpr bool kChanged = true;
};

// The variants for Element: BFloat16 or Float16.
template <class Element>
struct Variants {
  using ForwardD64 = ForwardTraits<Element, 64, 128, 128, 4>;
  using ForwardD128 = ForwardTraits<Element, 128, 128, 64, 4>;
  using ForwardD256 = ForwardTraits<Element, 256, 128, 64, 8>;
  using ForwardD256Small = ForwardTraits<Element, 256, 128, 32, 8>;
  using DecodeD64 = DecodeTraits<Element, 64, 1>;
  using DecodeD64Rows32 = DecodeTraits<Element, 64, 2>;
  using DecodeD128 = DecodeTraits<Element, 128, 1>;
  using DecodeD128Rows32 = DecodeTraits<Element, 128, 2>;
  using DecodeD256 = DecodeTraits<Element, 256, 1>;

  using BackwardD64 = BackwardTraits<Element, 64, 128, 128, 2, 4, 4>;
  using BackwardD128 = BackwardTraits<Element, 128, 64, 128, 2, 2, 4>;
  using BackwardD256 = BackwardTraits<Element, 256, 64, 64, 1, 2, 2>;
  using BackwardD64Small = BackwardTraits<Element, 64, 64, 128, 2, 2, 4>;
  using BackwardD128Small = BackwardTraits<Element, 128, 64, 64, 1, 2, 2>;
  using BackwardD256Small = BackwardTraits<Element, 256, 32, 32, 1, 2, 2, 4>;

  // Score changes need registers, so tiles are smaller. They fit every GPU; only
  // BackwardD256Changed needs as much shared memory as BackwardD256.
  using ForwardD64Changed = Changed<ForwardTraits<Element, 64, 64, 64, 4>>;
  using ForwardD128Changed = Changed<ForwardTraits<Element, 128, 64, 64, 4>>;
  using ForwardD256Changed = Changed<ForwardD256Small>;
  using BackwardD64Changed = Changed<BackwardD64Small>;
  using BackwardD128Changed = Changed<BackwardD128Small>;
  using BackwardD256Changed = Changed<BackwardD256>;
  using BackwardD256SmallChanged = Changed<BackwardD256Small>;
};
static_assert(Variants<BFloat16>::ForwardD128::kSharedBytes <= kSmallSharedBytes, "");
static_assert(Variants<BFloat16>::ForwardD256Small::kSharedBytes <= kSmallSharedBytes, "");
static_assert(Variants<BFloat16>::BackwardD64Small::kSharedBytes <= kSmallSharedBytes, "");
static_assert(Variants<BFloat16>::BackwardD128Small::kSharedBytes <= kSmallSharedBytes, "");
static_assert(Variants<BFloat16>::BackwardD256Small::kSharedBytes <= kSmallSharedBytes, "");

}  // namespace sm80
}  // namespace burst
