// Matmuls of tiles that lie in cache: where attention and the model's GEMMs spend their time.
#pragma once

#include <cstdint>

#include "burst/kernels/cpu/vector.h"

namespace burst {
namespace cpu {

// The registers hold a block of C: kBlockRows rows of kBlockVectors vectors. With a row of B and an
// element of A it fills 6 x 4 + 4 + 1 of 32 registers, or 6 x 2 + 2 + 1 of 16.
inline constexpr int kBlockRows = 6;
inline constexpr int kBlockVectors = kVectorRegisters == 32 ? 4 : 2;

// Columns of a panel of B, which stays in the first-level cache while rows of A pass.
template <typename T>
inline constexpr int64_t kPanelCols = int64_t{kLanes<T>} * kBlockVectors;

// How A of C = A B lies in memory.
enum class Layout { kRows, kTransposed };

// Says what becomes of C, and in which order an element is summed.
enum class Update {
  kAssign,    // C = A B: from zero, product by product
  kContinue,  // from C, product by product: a masked product of zero changes no bit
  kAdd,       // C + (A B): the rounding error of n calls grows with k + n, not with k n
};

// Multiplies tiles A and B.
//
// A: [m, k]. In layout kRows, A(i, l) = a[i * lda + l]; in layout kTransposed, A(i, l) = a[l * lda
// + i]. B: [k, n], rows ldb apart. C: [m, n], rows ldc apart. n must be a whole number of vectors
// (RoundUpToLanes). a, b and c may have any alignment.
template <Layout layout, typename T>
void Gemm(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb, T* c,
          int64_t ldc, Update update);

}  // namespace cpu
}  // namespace burst
