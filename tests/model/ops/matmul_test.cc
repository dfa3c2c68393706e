// Compares GEMMs on the CPU with a naive loop, in every orientation.
#include "model/ops/matmul.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "burst/base/parallel.h"
#include "burst/tensor/tensor.h"
#include "tests/testing/gradient_check.h"

namespace burst {
namespace {

class MatMulTest : public testing::TestWithParam<int> {};

TEST_P(MatMulTest, EqualsNaive) {
  ScopedThreadPool pool(GetParam());
  struct Size {
    int64_t m, n, k;
  };
  for (const Size size : {Size{1, 1, 1},
                          {3, 5, 7},
                          {64, 1, 33},
                          {1, 70, 5},
                          {160, 65, 160},
                          {65, 160, 130},
                          {4, 4, 0},
                          {0, 3, 2},
                          {300, 40, 70}}) {
    for (const bool transpose_a : {false, true}) {
      for (const bool transpose_b : {false, true}) {
        for (const Into into : {Into::kAssign, Into::kAccumulate}) {
          const int64_t pad = 3;  // elements between rows
          const int64_t a_rows = transpose_a ? size.k : size.m;
          const int64_t a_cols = transpose_a ? size.m : size.k;
          const int64_t b_rows = transpose_b ? size.n : size.k;
          const int64_t b_cols = transpose_b ? size.k : size.n;
          const Tensor a = RandomTensor({a_rows, a_cols + pad}, 1);
          const Tensor b = RandomTensor({b_rows, b_cols + pad}, 2);
          const Tensor c = RandomTensor({size.m, size.n + pad}, 3);
          std::vector<double> expected = c.ToVector<double>();
          for (int64_t i = 0; i < size.m; ++i) {
            for (int64_t j = 0; j < size.n; ++j) {
              double sum = 0;
              for (int64_t p = 0; p < size.k; ++p) {
                sum +=
                    a.data<double>()[transpose_a ? p * (a_cols + pad) + i
                                                 : i * (a_cols + pad) + p] *
                    b.data<double>()[transpose_b ? j * (b_cols + pad) + p : p * (b_cols + pad) + j];
              }
              double& element = expected[i * (size.n + pad) + j];
              element = into == Into::kAccumulate ? element + sum : sum;
            }
          }
          MatrixView<double> view_a{a.data<double>(), a_rows, a_cols, a_cols + pad};
          MatrixView<double> view_b{b.data<double>(), b_rows, b_cols, b_cols + pad};
          if (transpose_a) view_a = view_a.Transposed();
          if (transpose_b) view_b = view_b.Transposed();
          const MatrixView<double> view_c{c.data<double>(), size.m, size.n, size.n + pad};
          MatMul(view_a, view_b, view_c, into);
          const double tolerance = std::numeric_limits<double>::epsilon() * (size.k + 1);
          double scale = 1;
          for (double value : expected) scale = std::max(scale, std::abs(value));
          const std::vector<double> actual = c.ToVector<double>();
          for (size_t i = 0; i < expected.size(); ++i) {
            ASSERT_NEAR(actual[i], expected[i], tolerance * scale) << "element " << i;
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Threads, MatMulTest, testing::Values(1, 2, 3));

// The sizes are around the panels of Eigen's kernel, and those of models.
template <typename T>
void ExpectSameBitsForAnyNumberOfThreads() {
  struct Size {
    int64_t m, n, k;
  };
  uint64_t seed = 10;
  for (const Size size : {Size{1, 50257, 64},
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
