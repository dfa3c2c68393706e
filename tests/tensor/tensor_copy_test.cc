// Copies of many strided tensors at once, on the device: against indices computed by hand.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
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

// Every element that `to` shares with nobody keeps its value: slices are compared within the whole.
struct Case {
  Tensor from, to, whole;
  std::vector<float> expected;  // of whole
};

// What to.CopyFrom(from) must make of `whole`, of which `to` is rows begin, begin + step, ... and
// heads first, first + 1, ...
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
  for (DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16}) {
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

}  // namespace
}  // namespace burst
