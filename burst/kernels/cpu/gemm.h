// Matmuls of tiles that lie in cache: where attention spends its time.
#pragma once

#include <cstdint>

namespace burst {
namespace cpu {

// How A of C = A B lies in memory.
enum class Layout { kRows, kTransposed };

// Computes C = A B, or C += A B if accumulate.
//
// A: [m, k]. In layout kRows, A(i, l) = a[i * lda + l]; in layout kTransposed, A(i, l) = a[l * lda
// + i]. B: [k, n], rows ldb apart. C: [m, n], rows ldc apart. n must be a whole number of vectors
// (RoundUpToLanes). a, b and c may have any alignment.
template <Layout layout, typename T>
void Gemm(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb, T* c,
          int64_t ldc, bool accumulate);

}  // namespace cpu
}  // namespace burst
