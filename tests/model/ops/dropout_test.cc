// Tests dropout on the CPU and, compiled once more, on a GPU: gradients by finite differences, how
// many elements are dropped, and masks by global position.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "burst/autograd/tape.h"
#include "burst/tensor/tensor.h"
#include "model/ops/ops.h"
#include "tests/model/ops/ops_checks.h"
#include "tests/testing/gradient_check.h"
#include "tests/testing/test_device.h"

namespace burst {
namespace {

DropoutSite Site(double rate, uint64_t step, int64_t site, const std::vector<int32_t>& positions) {
  DropoutSite result;
  result.rate = rate;
  result.key.seed = 42;
  result.key.step = step;
  result.key.enabled = true;
  result.site = site;
  result.positions = Ints(positions, {static_cast<int64_t>(positions.size())});
  return result;
}

std::vector<int32_t> Range(int32_t n) {
  std::vector<int32_t> range(n);
  for (int32_t i = 0; i < n; ++i) range[i] = i;
  return range;
}

Values DropOnes(const Shape& shape, const DropoutSite& site) {
  const Tensor ones = Tensor::Empty(shape, DType::kFloat64, kTestDevice);
  ones.Fill(1);
  Tape tape(false);
  return Dropout(tape, Variable(ones), site).value().ToVector<double>();
}

TEST(Dropout, Gradients) {
  const Variable x = Leaf(RandomTensor({2, 3, 70}, 1)),
                 residual = Leaf(RandomTensor({2, 3, 70}, 2));
  const DropoutSite site = Site(0.3, 5, 1, {4, 9, 11});
  CheckGradients({{"x", x}, {"residual", residual}}, [&](Tape& tape) -> std::vector<Variable> {
    return {Dropout(tape, x, site, residual)};
  });
  CheckGradients({{"x", x}},
                 [&](Tape& tape) -> std::vector<Variable> { return {Dropout(tape, x, site)}; });
}

// Counts of n Bernoulli draws lie within 5 standard deviations, for the whole and along each axis.
TEST(Dropout, Statistics) {
  const int64_t batch = 4, length = 100, width = 200;
  for (const double rate : {0.1, 0.5, 0.9}) {
    const Values y = DropOnes({batch, length, width}, Site(rate, 3, 2, Range(length)));
    std::vector<int64_t> by_token(batch * length), by_channel(width);
    int64_t dropped = 0;
    for (size_t i = 0; i < y.size(); ++i) {
      if (y[i] == 0) {
        ++dropped, ++by_token[i / width], ++by_channel[i % width];
      } else {
        ASSERT_NEAR(y[i], 1 / (1 - rate), 1e-8);
      }
    }
    const auto within = [&](int64_t count, int64_t n) {
      return std::abs(count - n * rate) < 5 * std::sqrt(n * rate * (1 - rate));
    };
    EXPECT_TRUE(within(dropped, y.size())) << dropped;
    for (int64_t count : by_token) EXPECT_TRUE(within(count, width)) << count;
    for (int64_t count : by_channel) EXPECT_TRUE(within(count, batch * length)) << count;
  }
}

TEST(Dropout, MasksOfSitesStepsAndRowsAreIndependent) {
  const Shape shape = {2, 50, 64};
  const Values base = DropOnes(shape, Site(0.5, 3, 2, Range(50)));
  const int64_t n = base.size() / 2;
  const auto agreements = [&](const Values& other, int64_t shift) {
    int64_t same = 0;
    for (int64_t i = 0; i < n; ++i) same += (base[i] == 0) == (other[i + shift] == 0);
    return same;
  };
  const double bound = 5 * std::sqrt(n * 0.25);
  EXPECT_NEAR(agreements(DropOnes(shape, Site(0.5, 4, 2, Range(50))), 0), n / 2, bound);
  EXPECT_NEAR(agreements(DropOnes(shape, Site(0.5, 3, 3, Range(50))), 0), n / 2, bound);
  EXPECT_NEAR(agreements(base, n), n / 2, bound);  // the other batch row
  EXPECT_EQ(base, DropOnes(shape, Site(0.5, 3, 2, Range(50))));
}

TEST(Dropout, MaskBelongsToTheGlobalPosition) {
  const int64_t width = 100, length = 12;
  const Values whole = DropOnes({2, length, width}, Site(0.4, 1, 0, Range(length)));
  const std::vector<int32_t> positions = {0, 1, 2, 9, 10, 11};  // a rank's part, zigzag
  const Values part = DropOnes({2, 6, width}, Site(0.4, 1, 0, positions));
  for (int64_t row = 0; row < 2; ++row) {
    for (int64_t t = 0; t < 6; ++t) {
      for (int64_t c = 0; c < width; ++c) {
        ASSERT_EQ(part[(row * 6 + t) * width + c],
                  whole[(row * length + positions[t]) * width + c]);
      }
    }
  }
}

TEST(Dropout, InactiveIsIdentity) {
  const Variable x = Leaf(RandomTensor({1, 2, 3}, 1));
  DropoutSite site = Site(0.5, 1, 0, Range(2));
  site.key.enabled = false;
  Tape tape(false);
  ExpectClose(Dropout(tape, x, site).value(), x.value().ToVector<double>(), 0);
}

}  // namespace
}  // namespace burst
