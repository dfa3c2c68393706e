// Compares GEMMs on the CPU with a naive loop, in every orientation.
#include "model/ops/matmul.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "burst/base/parallel.h"
#include "burst/tensor/tensor.h"
#include "tests/testing/gradient_check.h"

namespace burst {
namespace {

struct Size {
  int64_t m, n, k;
};

// Holds a matrix [rows, cols] of random numbers. In memory 3 more elements follow each row, or each
// column of a transposed one.
template <typename T>
struct RandomMatrix {
  RandomMatrix(int64_t rows, int64_t cols, bool transposed, uint64_t seed)
      : memory(RandomTensor({transposed ? cols : rows, (transposed ? rows : cols) + 3}, seed, 1,
                            DTypeOf<T>::value)),
        view{memory.data<T>(), memory.dim(0), memory.dim(1) - 3, memory.dim(1)} {
    if (transposed) view = view.Transposed();
  }
  double operator()(int64_t i, int64_t j) const {
    return memory.data<T>()[view.transposed ? j * view.stride + i : i * view.stride + j];
  }

  Tensor memory;
  MatrixView<T> view;
};

// Compares C with sums in double. The k products and their k sums round by at most half an epsilon
// of the terms' absolute sum each, and so does the sum with C.
template <typename T>
void ExpectNaive(const Size& size, bool transpose_a, bool transpose_b, Into into) {
  const RandomMatrix<T> a(size.m, size.k, transpose_a, 1), b(size.k, size.n, transpose_b, 2);
  const RandomMatrix<T> before(size.m, size.n, false, 3), c(size.m, size.n, false, 3);
  MatMul(a.view, b.view, c.view, into);
  const double epsilon = std::numeric_limits<T>::epsilon();
  for (int64_t i = 0; i < size.m; ++i) {
    for (int64_t j = 0; j < c.view.stride; ++j) {
      double sum = into == Into::kAccumulate ? before(i, j) : 0, terms = std::abs(sum);
      if (j >= size.n) {
        ASSERT_EQ(c(i, j), before(i, j)) << "behind row " << i;
        continue;
      }
      for (int64_t l = 0; l < size.k; ++l) {
        sum += a(i, l) * b(l, j);
        terms += std::abs(a(i, l) * b(l, j));
      }
      ASSERT_NEAR(c(i, j), sum, epsilon * (size.k + 1) * terms) << i << ", " << j;
    }
  }
}

class MatMulTest : public testing::TestWithParam<int> {};

TEST_P(MatMulTest, EqualsNaive) {
  ScopedThreadPool pool(GetParam());
  for (const Size& size : {Size{1, 1, 1},
                           {3, 5, 7},
                           {64, 1, 33},
                           {1, 70, 5},
                           {160, 65, 160},
                           {65, 160, 130},
                           {4, 4, 0},
                           {0, 3, 2},
                           {1, 90, 300},
                           {300, 40, 70},
                           {98, 33, 257},
                           {30, 800, 20},
                           {2100, 3, 260}}) {
    for (const bool transpose_a : {false, true}) {
      for (const bool transpose_b : {false, true}) {
        for (const Into into : {Into::kAssign, Into::kAccumulate}) {
          SCOPED_TRACE(testing::Message() << size.m << " x " << size.n << " x " << size.k << ", "
                                          << transpose_a << transpose_b << static_cast<int>(into));
          ExpectNaive<float>(size, transpose_a, transpose_b, into);
          ExpectNaive<double>(size, transpose_a, transpose_b, into);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Threads, MatMulTest, testing::Values(1, 2, 3));

// A float's error grows with a tile's depth and the number of tiles, not with k. A plain loop over
// k equal products misses the tolerance. Tiles are at least 128 deep.
TEST(MatMulErrorTest, GrowsSlowlyWithTheDepth) {
  constexpr int64_t kSize = 8, kProducts = 1 << 17, kTileDepth = 128;
  const Tensor a = Tensor::Empty({kSize, kProducts}, DType::kFloat32);
  const Tensor b = Tensor::Empty({kProducts, kSize}, DType::kFloat32);
  const Tensor c = Tensor::Empty({kSize, kSize}, DType::kFloat32);
  a.Fill(0.1);
  b.Fill(0.3);
  MatMul(AsMatrix<float>(a, kProducts), AsMatrix<float>(b, kSize), AsMatrix<float>(c, kSize),
         Into::kAssign);
  const double expected = kProducts * static_cast<double>(0.1f) * static_cast<double>(0.3f);
  const double roundings = kTileDepth + kProducts / kTileDepth;
  const double half_ulp = std::numeric_limits<float>::epsilon() / 2;
  for (const double value : c.ToVector<double>()) {
    EXPECT_NEAR(value, expected, roundings * half_ulp * expected);
  }
}

// The sizes are around the tiles and panels of a product, and those of models.
template <typename T>
void ExpectSameBitsForAnyNumberOfThreads() {
  uint64_t seed = 10;
  for (const Size size : {Size{1, 50257, 64},
                          {2500, 800, 30},
                          {4000, 1, 77},
                          {97, 96, 95},
                          {96, 144, 513},
                          {145, 191, 1},
                          {192, 512, 1024},
                          {1000, 320, 192},
                          {1023, 73, 192},
                          {77, 2305, 64},
                          {2305, 77, 300},
                          {333, 777, 2100},
                          {2000, 50, 9}}) {
    for (const bool transpose_a : {false, true}) {
      for (const bool transpose_b : {false, true}) {
        const auto random = [&](int64_t rows, int64_t cols) {
          return RandomTensor({rows, cols}, ++seed, 1, DTypeOf<T>::value);
        };
        const Tensor a = transpose_a ? random(size.k, size.m) : random(size.m, size.k);
        const Tensor b = transpose_b ? random(size.n, size.k) : random(size.k, size.n);
        const Tensor before = random(size.m, size.n);
        MatrixView<T> view_a = AsMatrix<T>(a, a.dim(1)), view_b = AsMatrix<T>(b, b.dim(1));
        if (transpose_a) view_a = view_a.Transposed();
        if (transpose_b) view_b = view_b.Transposed();
        const auto product = [&](int threads) {
          const ScopedThreadPool pool(threads);
          const Tensor c = Tensor::EmptyLike(before);
          c.CopyFrom(before);
          MatMul(view_a, view_b, AsMatrix<T>(c, size.n), Into::kAccumulate);
          return c.ToVector<T>();
        };
        const std::vector<T> one = product(1);
        for (const int threads : {2, 3, 5, 8, 13}) {
          ASSERT_EQ(product(threads), one)
              << size.m << " x " << size.n << " x " << size.k << (transpose_a ? " a'" : "")
              << (transpose_b ? " b'" : "") << ", " << threads << " threads";
        }
      }
    }
  }
}

TEST(MatMulThreadsTest, SameBitsForAnyNumberInFloat) {
  ExpectSameBitsForAnyNumberOfThreads<float>();
}
TEST(MatMulThreadsTest, SameBitsForAnyNumberInDouble) {
  ExpectSameBitsForAnyNumberOfThreads<double>();
}

}  // namespace
}  // namespace burst
