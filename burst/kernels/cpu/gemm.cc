#include "burst/kernels/cpu/gemm.h"

#include "burst/kernels/cpu/vector.h"

namespace burst {
namespace cpu {
namespace {

// Computes a block of C, [kRows, kVectors vectors]. Every element of A is broadcast against a row
// of B.
template <Layout layout, int kRows, int kVectors, typename T>
inline void Block(int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb, T* c, int64_t ldc,
                  Update update) {
  Vec<T> sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      sum[i][v] = update == Update::kContinue ? Load(c + i * ldc + v * kLanes<T>) : Vec<T>{};
    }
  }
  if (update == Update::kAdd) {  // C may lie far away
    for (int i = 0; i < kRows; ++i) {
      for (int v = 0; v < kVectors; ++v) __builtin_prefetch(c + i * ldc + v * kLanes<T>, /*rw=*/1);
    }
  }
  for (int64_t l = 0; l < k; ++l) {
    Vec<T> row[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) row[v] = Load(b + l * ldb + v * kLanes<T>);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const T element = layout == Layout::kRows ? a[i * lda + l] : a[l * lda + i];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[i][v] += element * row[v];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      T* const element = c + i * ldc + v * kLanes<T>;
      Store(element, update == Update::kAdd ? Load(element) + sum[i][v] : sum[i][v]);
    }
  }
}

// Computes the last rows of a panel, fewer than kBlockRows.
template <Layout layout, int kRows, int kVectors, typename T>
void LastBlock(int64_t rows, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb, T* c,
               int64_t ldc, Update update) {
  if constexpr (kRows > 0) {
    if (rows == kRows) {
      Block<layout, kRows, kVectors>(k, a, lda, b, ldb, c, ldc, update);
    } else {
      LastBlock<layout, kRows - 1, kVectors>(rows, k, a, lda, b, ldb, c, ldc, update);
    }
  }
}

// Computes a panel of C, kVectors vectors wide. The panel of B stays in the first-level cache.
template <Layout layout, int kVectors, typename T>
void Panel(int64_t m, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb, T* c,
           int64_t ldc, Update update) {
  const int64_t a_step = layout == Layout::kRows ? lda : 1;
  int64_t i = 0;
  for (; i + kBlockRows <= m; i += kBlockRows) {
    Block<layout, kBlockRows, kVectors>(k, a + i * a_step, lda, b, ldb, c + i * ldc, ldc, update);
  }
  LastBlock<layout, kBlockRows - 1, kVectors>(m - i, k, a + i * a_step, lda, b, ldb, c + i * ldc,
                                              ldc, update);
}

// Computes the last columns, fewer than kBlockVectors vectors.
template <Layout layout, int kVectors, typename T>
void LastPanel(int64_t vectors, int64_t m, int64_t k, const T* a, int64_t lda, const T* b,
               int64_t ldb, T* c, int64_t ldc, Update update) {
  if constexpr (kVectors > 0) {
    if (vectors == kVectors) {
      Panel<layout, kVectors>(m, k, a, lda, b, ldb, c, ldc, update);
    } else {
      LastPanel<layout, kVectors - 1>(vectors, m, k, a, lda, b, ldb, c, ldc, update);
    }
  }
}

}  // namespace

template <Layout layout, typename T>
void Gemm(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb, T* c,
          int64_t ldc, Update update) {
  constexpr int64_t kWidth = kPanelCols<T>;
  int64_t j = 0;
  for (; j + kWidth <= n; j += kWidth) {
    Panel<layout, kBlockVectors>(m, k, a, lda, b + j, ldb, c + j, ldc, update);
  }
  LastPanel<layout, kBlockVectors - 1>((n - j) / kLanes<T>, m, k, a, lda, b + j, ldb, c + j, ldc,
                                       update);
}

template void Gemm<Layout::kRows, float>(int64_t, int64_t, int64_t, const float*, int64_t,
                                         const float*, int64_t, float*, int64_t, Update);
template void Gemm<Layout::kTransposed, float>(int64_t, int64_t, int64_t, const float*, int64_t,
                                               const float*, int64_t, float*, int64_t, Update);
template void Gemm<Layout::kRows, double>(int64_t, int64_t, int64_t, const double*, int64_t,
                                          const double*, int64_t, double*, int64_t, Update);
template void Gemm<Layout::kTransposed, double>(int64_t, int64_t, int64_t, const double*, int64_t,
                                                const double*, int64_t, double*, int64_t, Update);

}  // namespace cpu
}  // namespace burst
