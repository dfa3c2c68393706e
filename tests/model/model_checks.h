// Compares the logits of whole models.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "burst/autograd/tape.h"
#include "tests/model/small_models.h"

namespace burst {

using Values = std::vector<double>;

inline Values Logits(const Transformer& model, const Text& text, int64_t window = 0) {
  SingleRank single(text, window, model.config());
  Tape tape(/*recording=*/false);
  const Variable logits = model.Logits(tape, *single.attention, single.batch);
  EXPECT_TRUE(tape.status().ok()) << tape.status();
  return logits.value().ToVector<double>();
}

// The tolerance of two computations in double: sums of at most 20 terms through a dozen operations
// in a row, and logits of order 10.
inline constexpr double kDoubleTolerance = 1e-12;

inline void ExpectClose(const Values& actual, const Values& expected, double tolerance) {
  ASSERT_EQ(actual.size(), expected.size());
  double scale = 0;
  for (double value : expected) scale = std::max(scale, std::abs(value));
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_NEAR(actual[i], expected[i], tolerance * scale) << "element " << i;
  }
}

}  // namespace burst
