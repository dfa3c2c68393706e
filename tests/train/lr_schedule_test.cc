#include "train/optimizer/lr_schedule.h"

#include <gtest/gtest.h>

#include <cmath>

namespace burst {
namespace {

LrSchedule Make(LrShape shape) { return {shape, 1.0, 0.1, 10, 110}; }

TEST(LrSchedule, WarmsUpInAStraightLine) {
  for (LrShape shape : {LrShape::kCosine, LrShape::kLinear, LrShape::kConstant, LrShape::kWsd}) {
    EXPECT_DOUBLE_EQ(Make(shape)(0), 0.1);
    EXPECT_DOUBLE_EQ(Make(shape)(4), 0.5);
    EXPECT_DOUBLE_EQ(Make(shape)(9), 1.0);
    EXPECT_DOUBLE_EQ(Make(shape)(10), 1.0) << "the decay starts from lr";
  }
}

TEST(LrSchedule, Cosine) {
  const LrSchedule lr = Make(LrShape::kCosine);
  EXPECT_DOUBLE_EQ(lr(60), 0.55);
  EXPECT_NEAR(lr(35), 0.55 + 0.45 * std::sqrt(0.5), 1e-12);
  EXPECT_DOUBLE_EQ(lr(110), 0.1);
  EXPECT_DOUBLE_EQ(lr(1000), 0.1);
  for (int step = 10; step < 110; ++step) EXPECT_GT(lr(step), lr(step + 1));
}

TEST(LrSchedule, Linear) {
  const LrSchedule lr = Make(LrShape::kLinear);
  EXPECT_DOUBLE_EQ(lr(60), 0.55);
  EXPECT_DOUBLE_EQ(lr(85), 0.325);
  EXPECT_DOUBLE_EQ(lr(109), 0.1 + 0.9 * 0.01);
  EXPECT_DOUBLE_EQ(lr(110), 0.1);
}

TEST(LrSchedule, Constant) {
  const LrSchedule lr = Make(LrShape::kConstant);
  for (int step = 10; step < 200; ++step) EXPECT_EQ(lr(step), 1.0);
}

TEST(LrSchedule, WarmupStableDecay) {
  const LrSchedule lr = Make(LrShape::kWsd);
  for (int step = 10; step <= 88; ++step) EXPECT_EQ(lr(step), 1.0) << step;
  EXPECT_NEAR(lr(99), 0.55, 1e-12);  // half of the last 22 steps
  EXPECT_DOUBLE_EQ(lr(110), 0.1);
}

TEST(LrSchedule, WithoutWarmupAndAllWarmup) {
  EXPECT_DOUBLE_EQ((LrSchedule{LrShape::kCosine, 1.0, 0.0, 0, 10}(0)), 1.0);
  EXPECT_DOUBLE_EQ((LrSchedule{LrShape::kCosine, 1.0, 0.0, 10, 10}(9)), 1.0);
  // A decay that would begin before the warm-up ends is shortened.
  EXPECT_DOUBLE_EQ((LrSchedule{LrShape::kWsd, 1.0, 0.0, 9, 10}(9)), 1.0);
}

TEST(LrSchedule, NamesRoundTrip) {
  for (LrShape shape : {LrShape::kCosine, LrShape::kLinear, LrShape::kConstant, LrShape::kWsd}) {
    EXPECT_EQ(*ParseLrShape(Name(shape)), shape);
  }
  EXPECT_FALSE(ParseLrShape("Cosine").ok());
}

}  // namespace
}  // namespace burst
