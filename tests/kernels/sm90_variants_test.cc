// Tests the choice among the compiled variants of the Hopper kernels (variants.bzl).
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "burst/kernels/gpu/sm90/variants.h"
#include "burst/kernels/limits.h"

namespace burst {
namespace sm90 {
namespace {

constexpr MaskForm kFull = MaskForm::kFull, kRanges = MaskForm::kRanges, kLists = MaskForm::kLists;

// Returns the first row of a table that fits the call, or an empty text if none does.
#define BURST_NAME(name, ...) \
  if (call.Fits##name()) return #name;
std::string Forward(const Call& call) {
  BURST_SM90_FORWARD(BURST_NAME)
  return "";
}
std::string Fp8Forward(const Call& call) {
  BURST_SM90_FORWARD_FP8(BURST_NAME)
  return "";
}
std::string Backward(const Call& call) {
  BURST_SM90_BACKWARD(BURST_NAME)
  return "";
}
std::string BackwardDv(const Call& call) {
  BURST_SM90_BACKWARD_DV(BURST_NAME)
  return "";
}
std::string BackwardDk(const Call& call) {
  BURST_SM90_BACKWARD_DK(BURST_NAME)
  return "";
}
std::string BackwardBoth(const Call& call) {
  BURST_SM90_BACKWARD_BOTH(BURST_NAME)
  return "";
}
#undef BURST_NAME

TEST(Sm90Variants, EveryCallHasOneInEachPass) {
  for (int64_t d = 8; d <= 256; d += 8) {
    for (const MaskForm mask : {kFull, kRanges, kLists}) {
      for (const int64_t length : {1, 1024, 1025, 2048, 2049, 4096, 4097, 8191, 8192, 8193}) {
        for (const bool ordered : {false, true}) {
          const Call call = {d, length, length, mask, /*most_queries=*/0, ordered};
          SCOPED_TRACE(testing::Message() << d << " " << static_cast<int>(mask) << " " << length);
          EXPECT_NE(Forward(call), "");
          EXPECT_EQ(Fp8Forward(call) != "", d <= 128);
          EXPECT_EQ(Backward(call) != "", d <= 128);
          EXPECT_NE(BackwardDv(call), "");
          EXPECT_NE(BackwardDk(call), "");
          EXPECT_EQ(BackwardBoth(call), "");
        }
      }
    }
  }
}

// Every pair of two widths that is served has rows of its own, and no row of one width.
TEST(Sm90Variants, HeadsOfTwoWidthsHaveTheirOwn) {
  for (int64_t d = 8; d <= 264; d += 8) {
    for (int64_t v = 8; v <= 264; v += 8) {
      if (v == d) continue;
      for (const MaskForm mask : {kFull, kRanges, kLists}) {
        const Call call = {{d, v}, 4096, 4096, mask};
        const bool served = HopperKernelsServe({d, v});
        SCOPED_TRACE(testing::Message() << d << " " << v << " " << static_cast<int>(mask));
        EXPECT_EQ(Forward(call).find("ForwardD192V128") == 0, served);
        EXPECT_EQ(BackwardBoth(call).find("BackwardD192V128") == 0, served);
        EXPECT_EQ(Fp8Forward(call) + Backward(call) + BackwardDv(call) + BackwardDk(call), "");
      }
    }
  }
}

// The lengths are on both sides of every condition.
TEST(Sm90Variants, ShortSequencesHaveTheirOwn) {
  const auto forward = [](int64_t d, MaskForm mask, int64_t keys, int64_t most_queries = 0) {
    return Forward({d, keys, keys, mask, most_queries});
  };
  EXPECT_EQ(forward(64, kFull, 1024), "ForwardD64FullShort");
  EXPECT_EQ(forward(64, kFull, 1025), "ForwardD64Full");
  EXPECT_EQ(forward(40, kRanges, 1024), "ForwardD64RangesShort");
  EXPECT_EQ(forward(40, kRanges, 1025), "ForwardD64Ranges");
  EXPECT_EQ(forward(72, kFull, 1024), "ForwardD96FullShort");
  EXPECT_EQ(forward(96, kFull, 1025), "ForwardD96Full");
  EXPECT_EQ(forward(96, kRanges, 4096), "ForwardD96RangesShort");
  EXPECT_EQ(forward(96, kRanges, 4097), "ForwardD96Ranges");
  EXPECT_EQ(forward(104, kFull, 1024), "ForwardD128FullShort");
  EXPECT_EQ(forward(128, kFull, 4096), "ForwardD128FullMedium");
  EXPECT_EQ(forward(128, kFull, 4097), "ForwardD128Full");
  EXPECT_EQ(forward(128, kRanges, 8191), "ForwardD128RangesShort");
  EXPECT_EQ(forward(128, kRanges, 8192), "ForwardD128Ranges");
  // Documents of few tokens are short, in any number.
  EXPECT_EQ(forward(128, kRanges, 65536, 8191), "ForwardD128RangesShort");
  EXPECT_EQ(forward(128, kRanges, 65536, 8192), "ForwardD128Ranges");
  EXPECT_EQ(forward(136, kFull, 100), "ForwardD192Full");
  EXPECT_EQ(forward(200, kRanges, 100), "ForwardD256Ranges");
  EXPECT_EQ(forward(64, kLists, 100), "ForwardD64Lists");
  EXPECT_EQ(forward(256, kLists, 100), "ForwardD256Lists");
}

TEST(Sm90Variants, AFixedOrderHasItsOwn) {
  const auto backward = [](int64_t d, MaskForm mask, int64_t queries, bool ordered) {
    return Backward({d, queries, /*k_len=*/65536, mask, /*most_queries=*/0, ordered});
  };
  EXPECT_EQ(backward(64, kRanges, 2048, true), "BackwardD64RangesOrdered");
  EXPECT_EQ(backward(64, kRanges, 2049, true), "BackwardD64Ranges");
  EXPECT_EQ(backward(64, kRanges, 2048, false), "BackwardD64Ranges");
  EXPECT_EQ(backward(64, kFull, 2048, true), "BackwardD64Full");
  EXPECT_EQ(backward(80, kRanges, 2048, true), "BackwardD96Ranges");
  EXPECT_EQ(backward(128, kFull, 8192, true), "BackwardD128FullOrdered");
  EXPECT_EQ(backward(128, kRanges, 65536, true), "BackwardD128RangesOrdered");
  EXPECT_EQ(backward(128, kFull, 8193, true), "BackwardD128Full");
  EXPECT_EQ(backward(128, kRanges, 8192, false), "BackwardD128Ranges");
  EXPECT_EQ(backward(128, kLists, 8192, true), "BackwardD128Lists");
}

}  // namespace
}  // namespace sm90
}  // namespace burst
