// Muon (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024): the update
// of a matrix is its momentum with all singular values near 1.
#pragma once

#include <cstdint>
#include <vector>

#include "model/ops/matmul.h"
#include "train/optimizer/adamw_cuda.h"

namespace burst {

// A matrix [rows, cols] of the flat buffer of parameters.
struct MuonMatrix {
  int64_t begin = 0;
  int64_t rows = 0;
  int64_t cols = 0;

  int64_t end() const { return begin + rows * cols; }
};

struct MuonUpdate {
  double lr = 0;
  double momentum = 0;
  double keep = 1;        // 1 - lr weight_decay
  double grad_scale = 1;  // from clipping
};

// Moves the singular values of x near 1, by five steps of Newton and Schulz in x's dtype:
//
//   x <- x / |x|,   x <- a x + (b x x^T + c (x x^T)^2) x
//
// with a, b, c = 3.4445, -4.7750, 2.0315. Singular values of at least 1 % of |x| end between 0.68
// and 1.14. Any number of threads gives the same bits. A matrix of zeros stays one. T: float,
// double.
template <typename T>
void Orthogonalize(const MatrixView<T>& x);

// Updates a matrix of parameters p from its gradient g; m is its momentum. All [rows, cols]:
//
//   m <- momentum m + (1 - momentum) g,   u = momentum m + (1 - momentum) g
//   p <- keep p - 0.2 sqrt(max(rows, cols)) lr Orthogonalize(u)
//
// The factor gives elements of AdamW's typical size, so that its learning rate and weight decay fit
// (Liu et al., arXiv 2502.16982).
template <typename T>
void UpdateByMuon(const MuonUpdate& update, const MuonMatrix& matrix, const T* g, T* p, T* m);

// Updates a matrix as UpdateByMuon does, on a GPU, queued. `part` has its elements. The
// coefficients of BeginAdamWStep have the factor of the gradient. With part.compute the five steps
// are in bfloat16, as by their authors, else in the weights' type. Takes memory for an element of
// the weights' type and four of the steps' type, for each of the matrix.
void UpdateByMuonOnGpu(const MuonUpdate& update, const MuonMatrix& matrix,
                       const Tensor& coefficients, const Tensor& loss_and_norm,
                       const cuda::AdamWPart& part);

}  // namespace burst
