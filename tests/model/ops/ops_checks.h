// Functions that the tests of the ops share. They compare with a naive loop, and float with double.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "burst/autograd/tape.h"
#include "burst/tensor/tensor.h"
#include "tests/testing/gradient_check.h"
#include "tests/testing/test_device.h"

namespace burst {

using Values = std::vector<double>;

inline constexpr double kEps64 = std::numeric_limits<double>::epsilon();
inline constexpr double kEps32 = std::numeric_limits<float>::epsilon();

inline Values ValuesOf(const Variable& variable) { return variable.value().ToVector<double>(); }

inline Tensor Ints(const std::vector<int32_t>& values, const Shape& shape) {
  return Tensor::FromVector(values, shape, kTestDevice);
}

// Expects |actual - expected| <= tolerance * max(1, largest |expected|) for every element.
inline void ExpectClose(const Tensor& actual, const Values& expected, double tolerance) {
  const Values values = actual.ToVector<double>();
  ASSERT_EQ(values.size(), expected.size());
  double scale = 1;
  for (double value : expected) scale = std::max(scale, std::abs(value));
  for (size_t i = 0; i < values.size(); ++i) {
    ASSERT_NEAR(values[i], expected[i], tolerance * scale) << "element " << i;
  }
}

// Runs an op in both precisions on the same numbers. Outputs and gradients must agree to
// `tolerance`, relative to the largest element of each array.
inline void ExpectFloatAgrees(
    const std::vector<Tensor>& inputs,
    const std::function<Variable(Tape&, const std::vector<Variable>&)>& op, double tolerance) {
  std::vector<std::vector<Values>> results;
  for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
    std::vector<Variable> leaves;
    // Both get inputs that are rounded to float, so only the arithmetic differs.
    for (const Tensor& input : inputs) leaves.push_back(Leaf(input.To(DType::kFloat32).To(dtype)));
    Tape tape;
    const Variable y = op(tape, leaves);
    const Tensor dy = RandomTensor(y.shape(), 7).To(DType::kFloat32).To(dtype).To(kTestDevice);
    ASSERT_TRUE(tape.Backward(std::vector<Variable>{y}, {dy}).ok());
    results.push_back({y.value().ToVector<double>()});
    for (const Variable& leaf : leaves) results.back().push_back(leaf.grad().ToVector<double>());
  }
  for (size_t array = 0; array < results[0].size(); ++array) {
    double scale = 0;
    for (double value : results[1][array]) scale = std::max(scale, std::abs(value));
    for (size_t i = 0; i < results[0][array].size(); ++i) {
      ASSERT_NEAR(results[0][array][i], results[1][array][i], tolerance * scale)
          << (array == 0 ? "output" : "gradient") << " " << array << " element " << i;
    }
  }
}

}  // namespace burst
