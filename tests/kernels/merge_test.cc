// The weights with which partial results of attention merge.

#include "burst/kernels/merge.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace burst {
namespace {

template <typename T>
void CheckMerge() {
  constexpr double kTolerance = 4 * std::numeric_limits<T>::epsilon();
  for (double a : {-1000.0, -90.0, -1.0, 0.0, 3.5, 89.0, 1e4}) {
    for (double b : {-1000.0, -88.5, -1.0, 0.25, 100.0, 1e4}) {
      const double m = std::max(a, b), sum = std::exp(a - m) + std::exp(b - m);
      const MergeWeights<T> merged = Merge(static_cast<T>(a), static_cast<T>(b));
      EXPECT_NEAR(merged.lse, m + std::log(sum), kTolerance * std::max(1.0, std::abs(m)));
      EXPECT_NEAR(merged.a, std::exp(a - m) / sum, kTolerance);
      EXPECT_NEAR(merged.b, std::exp(b - m) / sum, kTolerance);
    }
  }
}

TEST(MergeTest, IsTheLogOfTheSumOfExponentials) {
  CheckMerge<float>();
  CheckMerge<double>();
}

TEST(MergeTest, EmptyPartials) {
  constexpr float kEmpty = -std::numeric_limits<float>::infinity();
  const MergeWeights<float> both = Merge(kEmpty, kEmpty);
  EXPECT_EQ(both.lse, kEmpty);
  EXPECT_EQ(both.a, 0);
  EXPECT_EQ(both.b, 0);
  const MergeWeights<float> one = Merge(kEmpty, 90.f);
  EXPECT_EQ(one.lse, 90.f);
  EXPECT_EQ(one.a, 0);
  EXPECT_EQ(one.b, 1);
}

}  // namespace
}  // namespace burst
