// Tests sums that do not depend on the order of their terms, on the device. They have equal bits in
// any order and division, are near the true sum, and are never wrong in silence.
#include "burst/tensor/exact_sum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "burst/base/philox.h"
#include "burst/tensor/tensor.h"
#include "tests/testing/test_device.h"

namespace burst {
namespace {

// Returns terms of many magnitudes, up to `largest`, with both signs.
std::vector<std::vector<double>> RandomTerms(int64_t terms, int64_t n, double largest) {
  std::vector<std::vector<double>> all(terms, std::vector<double>(n));
  for (int64_t t = 0; t < terms; ++t) {
    for (int64_t i = 0; i < n; ++i) {
      const PhiloxCounter bits = Philox(7, t, i);
      all[t][i] = largest * std::ldexp(bits[0] * 0x1p-31 - 1, -static_cast<int>(bits[1] % 40));
    }
  }
  return all;
}

Tensor OnDevice(const std::vector<double>& values, DType dtype) {
  const Tensor tensor = Tensor::FromVector(values, {static_cast<int64_t>(values.size())});
  return tensor.To(dtype).To(kTestDevice);
}

std::vector<double> Sum(const std::vector<std::vector<double>>& terms,
                        const std::vector<int>& order, const ExactGrid& grid, DType dtype) {
  const Tensor sum =
      Tensor::Zeros({static_cast<int64_t>(terms[0].size())}, DType::kFloat64, kTestDevice);
  for (const int t : order) AddExactly(OnDevice(terms[t], dtype), grid, sum);
  return sum.ToVector<double>();
}

class ExactSum : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(DTypes, ExactSum, testing::Values(DType::kFloat32, DType::kFloat64),
                         [](const auto& info) { return Name(info.param); });

// The lengths are around the vectors of a GPU's kernel.
TEST_P(ExactSum, HasTheSameBitsInAnyOrderAndAnyDivision) {
  constexpr int64_t kTerms = 64;
  const ExactGrid grid = ExactGrid::For(0x1p-40, kTerms);
  for (const int64_t n : {1, 3, 4, 5, 1000, 4099}) {
    const auto terms = RandomTerms(kTerms, n, grid.largest);
    std::vector<int> order(kTerms);
    std::iota(order.begin(), order.end(), 0);
    const std::vector<double> expected = Sum(terms, order, grid, GetParam());
    std::reverse(order.begin(), order.end());
    EXPECT_EQ(Sum(terms, order, grid, GetParam()), expected) << n;
    // total is the sum of three ranks' sums.
    std::vector<double> total(n);
    for (const auto& part : {std::vector<int>(order.begin(), order.begin() + 7),
                             std::vector<int>(order.begin() + 7, order.begin() + 40),
                             std::vector<int>(order.begin() + 40, order.end())}) {
      const std::vector<double> sum = Sum(terms, part, grid, GetParam());
      for (int64_t i = 0; i < n; ++i) total[i] += sum[i];
    }
    EXPECT_EQ(total, expected) << n;
  }
}

// Every term is rounded by at most half a unit.
TEST_P(ExactSum, IsNearTheTrueSum) {
  constexpr int64_t kTerms = 100, kElements = 500;
  const ExactGrid grid = ExactGrid::For(0x1p-40, kTerms);
  const auto terms = RandomTerms(kTerms, kElements, grid.largest);
  std::vector<int> order(kTerms);
  std::iota(order.begin(), order.end(), 0);
  const std::vector<double> sum = Sum(terms, order, grid, GetParam());
  for (int64_t i = 0; i < kElements; ++i) {
    long double truth = 0;
    for (const auto& term : terms) {
      truth += GetParam() == DType::kFloat32 ? static_cast<float>(term[i]) : term[i];
    }
    EXPECT_LE(std::abs(static_cast<double>(sum[i] - truth)), kTerms * grid.unit / 2);
    EXPECT_EQ(std::fmod(sum[i], grid.unit), 0);
  }
}

// With the largest number of the largest terms, no bit is lost.
TEST_P(ExactSum, OfTheLargestTermsIsExact) {
  for (const int64_t terms : {1, 5, 64}) {
    const ExactGrid grid = ExactGrid::For(1, terms);
    const float largest = std::nextafter(static_cast<float>(grid.largest), 0.f);
    const Tensor sum = Tensor::Zeros({1}, DType::kFloat64, kTestDevice);
    for (int64_t t = 0; t < terms; ++t) AddExactly(OnDevice({largest}, GetParam()), grid, sum);
    EXPECT_EQ(sum.ToVector<double>()[0], static_cast<double>(largest) * terms);
    AddExactly(OnDevice({-1}, GetParam()), grid, sum);
    EXPECT_EQ(sum.ToVector<double>()[0], static_cast<double>(largest) * terms - 1);
  }
}

TEST_P(ExactSum, IsNotANumberWhereATermIsTooLarge) {
  const ExactGrid grid = ExactGrid::For(0x1p-40, 4);
  const double infinity = std::numeric_limits<double>::infinity();
  for (const double bad :
       {1.01 * grid.largest, -1.01 * grid.largest, infinity, -infinity, std::nan("")}) {
    for (const int64_t n : {1, 8}) {
      const Tensor sum = Tensor::Zeros({n}, DType::kFloat64, kTestDevice);
      std::vector<double> terms(n, 0.25);
      terms[n / 2] = bad;
      AddExactly(OnDevice(terms, GetParam()), grid, sum);
      AddExactly(OnDevice(std::vector<double>(n, 0.5), GetParam()), grid, sum);
      const std::vector<double> result = sum.ToVector<double>();
      for (int64_t i = 0; i < n; ++i) {
        const bool is_sum = i == n / 2 ? std::isnan(result[i]) : result[i] == 0.75;
        EXPECT_TRUE(is_sum) << bad << ", element " << i << " of " << n << ": " << result[i];
      }
    }
  }
}

TEST_P(ExactSum, MayBeAssigned) {
  const ExactGrid grid = ExactGrid::For(0x1p-40, 4);
  for (const int64_t n : {1, 8, 9}) {
    const Tensor sum = Tensor::Empty({n}, DType::kFloat64, kTestDevice);
    sum.Fill(std::nan(""));
    AddExactly(OnDevice(std::vector<double>(n, 0.5), GetParam()), grid, sum, /*assign=*/true);
    AddExactly(OnDevice(std::vector<double>(n, 0.25), GetParam()), grid, sum);
    EXPECT_EQ(sum.ToVector<double>(), std::vector<double>(n, 0.75));
  }
}

TEST(ExactGridTest, LeavesRoomForAllTerms) {
  for (const int64_t terms : {1, 2, 3, 1000, 1024}) {
    const ExactGrid grid = ExactGrid::For(0x1p-40, terms);
    EXPECT_LE(grid.largest * terms, 0x1p52 * grid.unit);
    EXPECT_GT(grid.largest * terms, 0x1p51 * grid.unit);
  }
  EXPECT_DEATH(ExactGrid::For(0.3, 1), "power of two");
}

}  // namespace
}  // namespace burst
