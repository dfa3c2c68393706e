// Muon (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024): the update
// of a matrix is its momentum with all singular values near 1.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "burst/comm/communicator.h"
#include "burst/tensor/tensor.h"
#include "model/ops/matmul.h"
#include "train/optimizer/adamw_cuda.h"
#include "train/optimizer/update_step.h"

namespace burst {

// The elements [begin, begin + length) of a matrix that a rank has, from element `at` of its state
// on.
struct MuonPiece {
  int64_t begin = 0;
  int64_t length = 0;
  int64_t at = 0;
  bool copy = false;  // an earlier rank's piece has the elements, too
};

// A matrix [rows, cols] of the model, and the elements of each rank. They are counted block by
// block, in a block row by row. Tensor parallelism divides columns into blocks.
struct MuonMatrix {
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t blocks = 1;             // blocks of cols / blocks columns
  std::vector<MuonPiece> pieces;  // by rank

  int64_t numel() const { return rows * cols; }
  // Returns the work of a step of Newton and Schulz, to a factor.
  int64_t work() const { return numel() * (rows < cols ? rows : cols); }
};

struct MuonUpdate {
  double lr = 0;
  double keep = 1;                // 1 - lr weight_decay
  DType dtype = DType::kFloat32;  // the steps' type: the weights', or on a GPU bfloat16
  double grad_scale = 1;          // from clipping; on the CPU
  // On a GPU: the factor, [1], of the weights' dtype; [2] float64, finite or nothing changes.
  Tensor gpu_grad_scale, loss_and_norm;
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

// Updates matrices of parameters p from their gradients g; m is their momentum. All [rows, cols]:
//
//   m <- momentum m + (1 - momentum) g,   u = momentum m + (1 - momentum) g
//   p <- keep p - 0.2 sqrt(max(rows, cols)) lr Orthogonalize(u)
//
// The factor gives elements of AdamW's typical size, so that its learning rate and weight decay fit
// (Liu et al., arXiv 2502.16982).
//
// Ranks may divide a matrix. Each rank has the momentum of its elements. One rank gathers u,
// orthogonalizes it and sends the elements back, so the bits do not depend on the division. The
// matrices are sorted by falling work and dealt out to the ranks in turn, those of equal work from
// everywhere in the model. All ranks work on one matrix each at a time, which takes memory for
// about six more.
class Muon {
 public:
  // `ranks` has a rank for each of a matrix's pieces, or is null for one; it must outlive the
  // object.
  Muon(std::vector<MuonMatrix> matrices, double momentum, Communicator* ranks);

  // Returns this rank's elements of all matrices, increasing, none of them empty.
  const std::vector<MuonPiece>& own() const { return own_; }
  // Returns how many of this rank's elements [0, at) are of matrices.
  int64_t NumelBefore(int64_t at) const;
  // Returns the matrices as they are dealt out: matrix i to rank i modulo the number of ranks.
  const std::vector<MuonMatrix>& matrices() const { return matrices_; }

  // Returns the elements [begin, end) of a rank's state.
  using PartOf = std::function<cuda::AdamWPart(int64_t begin, int64_t end)>;
  // Returns the steps of an update of masters and m of this rank's elements, to be run in order,
  // once. Each has at most `piece` elements of the state. Between the pieces, matrices are whole on
  // the device. On a GPU the steps are queued. They round the masters into bfloat16 values.
  // Collective in `ranks`.
  std::vector<UpdateStep> Steps(const MuonUpdate& update, const PartOf& part_of,
                                int64_t piece) const;

 private:
  struct Round;
  void AddSteps(const std::shared_ptr<Round>& round, int64_t piece,
                std::vector<UpdateStep>* steps) const;
  absl::Status OrthogonalizeRound(Round* round) const;
  absl::Status Exchange(absl::Span<const MuonMatrix> round, absl::Span<const Tensor> pieces,
                        const Tensor& whole, bool back) const;

  std::vector<MuonMatrix> matrices_;
  const double momentum_;
  Communicator* const ranks_;
  const int rank_;
  std::vector<MuonPiece> own_;
  std::vector<int64_t> numel_before_;  // elements of the pieces before each of own_
};

}  // namespace burst
