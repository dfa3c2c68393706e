// Compares gradients of the real ops in double precision with finite differences.
//
// f'(x) = (8 (f(x + h) - f(x - h)) - (f(x + 2h) - f(x - 2h))) / 12h + O(h^4 f'''''): for values and
// derivatives of order 1, h = 1e-3 leaves 3e-14 of truncation and eps |f| / h = 2e-13 of rounding
// for every unit of |f|, far below the tolerance of 1e-8.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "burst/autograd/tape.h"
#include "burst/base/philox.h"
#include "burst/tensor/tensor.h"
#include "tests/testing/test_device.h"

namespace burst {

inline constexpr double kGradientTolerance = 1e-8;

// Returns standard normals (times scale) on the CPU, which depend on the seed.
inline Tensor RandomTensor(const Shape& shape, uint64_t seed, double scale = 1,
                           DType dtype = DType::kFloat64) {
  Tensor tensor = Tensor::Empty(shape, DType::kFloat64);
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    const PhiloxCounter bits = Philox(seed, /*stream=*/0x7e57, i);
    tensor.data<double>()[i] = scale * NormalFromBits(bits[0], bits[1])[0];
  }
  return dtype == DType::kFloat64 ? tensor : tensor.To(dtype);
}

// Makes a leaf on the test's device, with its own gradient buffer of zeros.
inline Variable Leaf(const Tensor& value) {
  const Tensor on_device = value.To(kTestDevice);
  return Variable(on_device, Tensor::ZerosLike(on_device));
}

struct NamedLeaf {
  std::string name;
  Variable variable;  // float64, contiguous, with a gradient
};

// Makes the outputs from the leaves, on the tape; called many times with changed leaves.
using Forward = std::function<std::vector<Variable>(Tape&)>;

// Checks the gradients of L = sum over the outputs y of sum(c y), for random fixed c. It checks
// every element of every leaf, or `samples` random elements of a larger leaf (0: all). The error is
// relative to |derivative| + the root mean square of the leaf's derivatives. Some gradients are
// zero: a softmax does not depend on its keys' bias. The rounding of the differences, 10 eps |L| /
// h, does not count.
inline void CheckGradients(const std::vector<NamedLeaf>& leaves, const Forward& forward,
                           int64_t samples = 0, double tolerance = kGradientTolerance,
                           double h = 1e-3) {
  std::vector<Tensor> weights;  // on the CPU
  for (const NamedLeaf& leaf : leaves) leaf.variable.MutableGrad().Fill(0);
  {
    Tape tape;
    const std::vector<Variable> outputs = forward(tape);
    std::vector<Tensor> grads;
    for (size_t i = 0; i < outputs.size(); ++i) {
      weights.push_back(RandomTensor(outputs[i].shape(), 1000 + i));
      grads.push_back(weights.back().To(outputs[i].value().device()));
    }
    ASSERT_TRUE(tape.Backward(outputs, grads).ok());
  }
  const auto loss = [&] {
    Tape tape(/*recording=*/false);
    const std::vector<Variable> outputs = forward(tape);
    long double sum = 0;
    for (size_t i = 0; i < outputs.size(); ++i) {
      const std::vector<double> y = outputs[i].value().ToVector<double>();
      for (size_t j = 0; j < y.size(); ++j) sum += y[j] * weights[i].data<double>()[j];
    }
    return static_cast<double>(sum);
  };

  const double rounding = 10 * std::numeric_limits<double>::epsilon() * std::abs(loss()) / h;
  for (const NamedLeaf& leaf : leaves) {
    const std::vector<double> x = leaf.variable.value().ToVector<double>();
    const std::vector<double> gradient = leaf.variable.grad().ToVector<double>();
    const int64_t n = leaf.variable.value().numel();
    const Tensor elements = leaf.variable.value().View({n});
    const int64_t count = samples == 0 ? n : std::min(n, samples);
    double square_sum = 0;
    for (double g : gradient) square_sum += g * g;
    const double rms = std::sqrt(square_sum / n);
    ASSERT_TRUE(std::isfinite(rms)) << leaf.name;
    ASSERT_GT(rms, 0) << leaf.name << ": no gradient at all";
    for (int64_t s = 0; s < count; ++s) {
      const int64_t i = count == n ? s : Philox(n, /*stream=*/0x5a, s)[0] % n;
      const Tensor element = elements.Slice(0, i, 1);
      const auto at = [&](double offset) {
        element.CopyFrom(Tensor::FromVector<double>({x[i] + offset}, {1}));
        return loss();
      };
      const double expected = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h);
      element.CopyFrom(Tensor::FromVector<double>({x[i]}, {1}));
      ASSERT_NEAR(gradient[i], expected, tolerance * (std::abs(expected) + rms) + rounding)
          << leaf.name << "[" << i << "]";
    }
  }
}

}  // namespace burst
