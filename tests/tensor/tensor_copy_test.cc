// Tests copies of many strided tensors at once, on the device. The reference computes indices by
// hand.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "burst/tensor/tensor.h"
#include "tests/testing/test_device.h"

namespace burst {
namespace {

Tensor Numbered(const Shape& shape, DType dtype, double first) {
  const Tensor numbers = Tensor::Empty(shape, DType::kFloat32);
  std::iota(numbers.data<float>(), numbers.data<float>() + numbers.numel(), first);
  return (dtype == DType::kFloat32 ? numbers : numbers.To(dtype)).To(kTestDevice);
}

// Elements that are not in `to` keep their values, so slices are compared within the whole.
struct Case {
  Tensor from, to, whole;
  std::vector<float> expected;  // the expected content of whole
};

// Makes a case with the expected result of to.CopyFrom(from) in `whole`. `to` is rows begin, begin
// + step, ... and heads first, first + 1, ... of it.
Case MakeCase(DType dtype, int64_t batch, int64_t rows, int64_t heads, int64_t dim, int64_t begin,
              int64_t step, int64_t first, int64_t count, bool gather) {
  const int64_t length = (rows - begin + step - 1) / step;
  const Tensor whole = Numbered({batch, rows, heads, dim}, dtype, 0);
  const Tensor part = whole.Slice(1, begin, length, step).Slice(2, first, count);
  if (gather) {  // from the slice to contiguous memory
    Case c;
    c.from = part;
    c.whole = c.to = Tensor::Zeros(part.shape(), dtype, kTestDevice);
    const std::vector<float> all = whole.ToVector<float>();
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t r = 0; r < length; ++r) {
        for (int64_t h = 0; h < count; ++h) {
          for (int64_t d = 0; d < dim; ++d) {
            c.expected.push_back(
                all[((b * rows + begin + r * step) * heads + first + h) * dim + d]);
          }
        }
      }
    }
    return c;
  }
  Case c;
  c.from = Numbered(part.shape(), dtype, 1);
  c.to = part;
  c.whole = whole;
  c.expected = whole.ToVector<float>();
  const std::vector<float> values = c.from.ToVector<float>();
  size_t at = 0;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t r = 0; r < length; ++r) {
      for (int64_t h = 0; h < count; ++h) {
        for (int64_t d = 0; d < dim; ++d) {
          c.expected[((b * rows + begin + r * step) * heads + first + h) * dim + d] = values[at++];
        }
      }
    }
  }
  return c;
}

TEST(CopyAll, IsEveryCopy) {
  std::vector<Case> cases;
  for (DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
    for (int64_t dim : {1, 3, 8, 64}) {
      for (int64_t rows : {1, 7, 130}) {
        for (const auto& [begin, step] : {std::pair(0, 1), std::pair(0, 2), std::pair(0, 3)}) {
          for (const bool gather : {false, true}) {
            cases.push_back(MakeCase(dtype, 2, rows, 4, dim, begin, step, 1, 2, gather));
            cases.push_back(MakeCase(dtype, 1, rows, 3, dim, begin, step, 0, 3, gather));
          }
        }
      }
    }
  }
  EXPECT_GT(cases.size(), 100u) << "more than a kernel takes";
  std::vector<TensorCopy> copies;
  for (const Case& c : cases) copies.push_back({c.from, c.to});
  const Tensor nothing = Tensor::Empty({0, 5}, DType::kFloat32, kTestDevice);
  copies.push_back({nothing, nothing});
  CopyAll(copies);
  for (size_t i = 0; i < cases.size(); ++i) {
    EXPECT_EQ(cases[i].whole.ToVector<float>(), cases[i].expected) << i;
  }
  CopyAll({});
}

TEST(ConvertFrom, RoundsAndAdds) {
  const std::vector<float> values = {1.0f, 1.00390625f, -3.5f, 1e30f, 0.0f};
  const Tensor x = Tensor::FromVector<float>(values, {5}, kTestDevice);
  const Tensor narrow = Tensor::Empty({5}, DType::kBFloat16, kTestDevice);
  narrow.ConvertFrom(x);
  const Tensor wide = Tensor::EmptyLike(x);
  wide.ConvertFrom(narrow);
  const std::vector<float> rounded = wide.ToVector<float>();
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_NEAR(rounded[i], values[i], 0x1p-8 * std::abs(values[i]));  // 8 bits
  }
  EXPECT_EQ(rounded[0], 1.0f);
  EXPECT_EQ(rounded[1], 1.0f) << "ties go to even";
  x.Add(narrow);
  const std::vector<float> sum = x.ToVector<float>();
  for (size_t i = 0; i < values.size(); ++i) EXPECT_EQ(sum[i], values[i] + rounded[i]);
}

// Tests every float16, and the floats between any two neighbors where rounding turns.
TEST(ConvertFrom, Float16) {
  std::vector<float> values;  // all finite numbers that are not negative, by IEEE 754's definition
  for (int exponent = 0; exponent < 31; ++exponent) {
    for (int fraction = 0; fraction < 1024; ++fraction) {
      values.push_back(exponent == 0 ? std::ldexp(fraction, -24)
                                     : std::ldexp(1024 + fraction, exponent - 25));
    }
  }
  EXPECT_EQ(values.back(), 65504);
  std::vector<float> from, to;
  const auto expect = [&](float x, float rounded) {
    for (float sign : {1.f, -1.f}) {
      from.push_back(sign * x);
      to.push_back(sign * rounded);
    }
  };
  const float infinity = std::numeric_limits<float>::infinity();
  for (size_t i = 0; i < values.size(); ++i) {
    const bool is_last = i + 1 == values.size();
    const float next = is_last ? infinity : values[i + 1];
    const float middle = (values[i] + (is_last ? 65536 : next)) / 2;
    expect(values[i], values[i]);
    expect(std::nextafter(middle, 0.f), values[i]);
    expect(middle, i % 2 == 0 ? values[i] : next);  // ties to even
    expect(std::nextafter(middle, infinity), next);
  }
  expect(1e30f, infinity);
  expect(infinity, infinity);
  expect(1e-30f, 0);
  const Tensor x =
      Tensor::FromVector<float>(from, {static_cast<int64_t>(from.size())}, kTestDevice);
  const Tensor narrow = x.To(DType::kFloat16);
  const std::vector<float> rounded = narrow.To(DType::kFloat32).ToVector<float>();
  for (size_t i = 0; i < from.size(); ++i) {
    ASSERT_EQ(rounded[i], to[i]) << from[i];
    ASSERT_EQ(std::signbit(rounded[i]), std::signbit(to[i])) << from[i];
  }
  EXPECT_EQ(narrow.To(DeviceType::kCpu).ToVector<float>(), to) << "read by the CPU";
  x.Fill(std::numeric_limits<double>::quiet_NaN());
  for (float nan : x.To(DType::kFloat16).ToVector<float>()) ASSERT_TRUE(std::isnan(nan));
}

}  // namespace
}  // namespace burst
