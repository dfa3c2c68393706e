#include "train/optimizer/muon.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "burst/base/check.h"
#include "burst/base/parallel.h"
#include "burst/base/status.h"
#include "burst/tensor/gpu_kernel.h"
#include "model/ops/cuda/matmul.h"
#include "train/optimizer/muon_cuda.h"

namespace burst {
namespace {

constexpr int64_t kBlock = 1 << 14;  // elements that one call of a loop takes

// Calls body(begin, end) for blocks of n elements.
template <typename Body>
void ForBlocks(int64_t n, const Body& body) {
  ParallelFor((n + kBlock - 1) / kBlock, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) body(i * kBlock, std::min(n, (i + 1) * kBlock));
  });
}

// The coefficients of a step of Newton and Schulz.
constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;

template <typename T>
MatrixView<T> View(std::vector<T>* data, int64_t rows, int64_t cols) {
  return {data->data(), rows, cols, cols, false};
}

}  // namespace

template <typename T>
void Orthogonalize(const MatrixView<T>& x) {
  const int64_t n = x.rows * x.cols, side = std::min(x.rows, x.cols), longer = n / side;
  double squares = 0;
  for (int64_t i = 0; i < n; ++i) squares += double{x.data[i]} * double{x.data[i]};
  if (squares == 0) return;
  const T scale = static_cast<T>(1 / std::sqrt(squares));
  ForBlocks(n, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) x.data[i] *= scale;
  });
  // wide: [side, longer], of which gram has the products of rows
  std::vector<T> gram_data(side * side), square_data(side * side), product_data(n);
  const MatrixView<T> gram = View(&gram_data, side, side), square = View(&square_data, side, side);
  for (int step = 0; step < 5; ++step) {
    const MatrixView<T> wide = x.rows <= x.cols ? x : x.Transposed();
    MatMul(wide, wide.Transposed(), gram, Into::kAssign);
    MatMul(gram, gram, square, Into::kAssign);
    ForBlocks(side * side, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        gram_data[i] = static_cast<T>(kB) * gram_data[i] + static_cast<T>(kC) * square_data[i];
      }
    });
    // In x's own layout the product is gram x, or x gram (gram is symmetric).
    const MatrixView<T> product = View(&product_data, x.rows, x.cols);
    if (x.rows <= x.cols) {
      MatMul(gram, x, product, Into::kAssign);
    } else {
      MatMul(x, gram, product, Into::kAssign);
    }
    ForBlocks(side * longer, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        x.data[i] = static_cast<T>(kA) * x.data[i] + product_data[i];
      }
    });
  }
}

namespace {

// Orthogonalize for x: [rows cols], divided by its norm, on a GPU.
void OrthogonalizeOnGpu(const MuonMatrix& matrix, const Tensor& x) {
  const int64_t side = std::min(matrix.rows, matrix.cols);
  const auto empty = [&](int64_t n) { return Tensor::Empty({n}, x.dtype(), DeviceType::kCuda); };
  const Tensor gram = empty(side * side), square = empty(side * side), product = empty(x.numel());
  const cuda::Matrix all = cuda::AsMatrix(x, matrix.cols), g = cuda::AsMatrix(gram, side);
  const cuda::Matrix wide = matrix.rows <= matrix.cols ? all : all.Transposed();
  const cuda::Matrix out = cuda::AsMatrix(product, matrix.cols);
  const auto multiply = [](const cuda::Matrix& a, const cuda::Matrix& b, const cuda::Matrix& c) {
    BURST_GPU_KERNEL(MatMul, cuda::MatMulParams{a, b, c});
  };
  for (int step = 0; step < 5; ++step) {
    multiply(wide, wide.Transposed(), g);
    multiply(g, g, cuda::AsMatrix(square, side));
    BURST_GPU_KERNEL(AddScaled, kB, gram, kC, square);
    if (matrix.rows <= matrix.cols) {
      multiply(g, all, out);
    } else {
      multiply(all, g, out);
    }
    BURST_GPU_KERNEL(AddScaled, kA, x, 1.0, product);
  }
}

// Updates the momentum m of elements of a matrix by their gradients g, and sets their u. All [n].
void SetDirection(const MuonUpdate& update, double momentum, const Tensor& g, const Tensor& m,
                  const Tensor& u) {
  if (u.device() == DeviceType::kCuda) {
    BURST_GPU_KERNEL(MuonDirection, momentum, update.gpu_grad_scale, update.loss_and_norm, g, m, u);
    return;
  }
  DispatchFloat(u.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const T keep = static_cast<T>(momentum), rest = static_cast<T>(1 - momentum);
    const T grad_scale = static_cast<T>(update.grad_scale);
    const T* const gradients = g.data<T>();
    T *const moments = m.data<T>(), *const direction = u.data<T>();
    ForBlocks(u.numel(), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T gradient = rest * (gradients[i] * grad_scale);
        moments[i] = std::fma(keep, moments[i], gradient);
        direction[i] = std::fma(keep, moments[i], gradient);
      }
    });
  });
}

// Copies a matrix, [rows cols], from its blocks of columns to rows, or from rows to its blocks.
Tensor Arranged(const MuonMatrix& matrix, const Tensor& from, bool to_rows) {
  if (matrix.blocks == 1) return from;
  const Tensor to = Tensor::EmptyLike(from);
  const int64_t cols = matrix.cols / matrix.blocks, n = matrix.rows * cols;
  for (int64_t b = 0; b < matrix.blocks; ++b) {
    const Tensor block = (to_rows ? from : to).Slice(0, b * n, n).View({matrix.rows, cols});
    const Tensor columns =
        (to_rows ? to : from).View({matrix.rows, matrix.cols}).Slice(1, b * cols, cols);
    to_rows ? columns.CopyFrom(block) : block.CopyFrom(columns);
  }
  return to;
}

// Returns Orthogonalize(u) in the steps' dtype, in u's order of elements; it may change u.
Tensor Orthogonalized(const MuonUpdate& update, const MuonMatrix& matrix, const Tensor& u) {
  Tensor x = Arranged(matrix, u, /*to_rows=*/true);
  if (u.device() == DeviceType::kCuda) {
    const Tensor norm = Tensor::Empty({1}, DType::kFloat64, DeviceType::kCuda), rows = x;
    x = Tensor::Empty({u.numel()}, update.dtype, DeviceType::kCuda);
    BURST_GPU_KERNEL(L2Norm, rows, norm);
    BURST_GPU_KERNEL(DivideByNorm, rows, norm, x);
    OrthogonalizeOnGpu(matrix, x);
  } else {
    DispatchFloat(x.dtype(),
                  [&](auto zero) { Orthogonalize(AsMatrix<decltype(zero)>(x, matrix.cols)); });
  }
  return Arranged(matrix, x, /*to_rows=*/false);
}

// Updates masters of a matrix by their elements x of the direction, and rounds them into compute,
// unless that is null. All [n].
void Apply(const MuonUpdate& update, const MuonMatrix& matrix, const Tensor& x,
           const Tensor& masters, const Tensor& compute) {
  const double longer = static_cast<double>(std::max(matrix.rows, matrix.cols));
  const double step_size = 0.2 * std::sqrt(longer) * update.lr;
  if (x.device() == DeviceType::kCuda) {
    BURST_GPU_KERNEL(ApplyMuon, update.keep, step_size, update.loss_and_norm, x, masters, compute);
    return;
  }
  DispatchFloat(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const T keep = static_cast<T>(update.keep), step = static_cast<T>(step_size);
    const T* const direction = x.data<T>();
    T* const p = masters.data<T>();
    ForBlocks(x.numel(), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) p[i] = std::fma(keep, p[i], -(step * direction[i]));
    });
  });
  if (!compute.null()) compute.CopyFrom(masters.To(DType::kBFloat16));
}

// Orders matrices of equal work so that each round has some from everywhere in the model. Ranks
// that divide a state into consecutive parts then have as many elements in every round, many of
// them of the matrix that they orthogonalize.
void SpreadRounds(absl::Span<MuonMatrix> equal, size_t ranks) {
  const size_t rounds = (equal.size() + ranks - 1) / ranks;
  std::vector<MuonMatrix> spread;
  for (size_t round = 0; round < rounds; ++round) {
    for (size_t i = round; i < equal.size(); i += rounds) spread.push_back(std::move(equal[i]));
  }
  std::move(spread.begin(), spread.end(), equal.begin());
}

}  // namespace

Muon::Muon(std::vector<MuonMatrix> matrices, double momentum, Communicator* ranks)
    : matrices_(std::move(matrices)),
      momentum_(momentum),
      ranks_(ranks),
      rank_(ranks == nullptr ? 0 : ranks->rank()) {
  std::stable_sort(matrices_.begin(), matrices_.end(),
                   [](const auto& a, const auto& b) { return a.work() > b.work(); });
  const absl::Span<MuonMatrix> all = absl::MakeSpan(matrices_);
  for (size_t first = 0, end = 0; first < all.size(); first = end) {
    while (end < all.size() && all[end].work() == all[first].work()) ++end;
    SpreadRounds(all.subspan(first, end - first), ranks == nullptr ? 1 : ranks->world_size());
  }
  for (const MuonMatrix& matrix : matrices_) {
    BURST_CHECK_EQ(static_cast<int>(matrix.pieces.size()),
                   ranks == nullptr ? 1 : ranks->world_size());
    if (matrix.pieces[rank_].length > 0) own_.push_back(matrix.pieces[rank_]);
  }
  std::sort(own_.begin(), own_.end(), [](const auto& a, const auto& b) { return a.at < b.at; });
  int64_t numel = 0;
  for (const MuonPiece& piece : own_) {
    numel_before_.push_back(numel);
    numel += piece.length;
  }
}

int64_t Muon::NumelBefore(int64_t at) const {
  const auto next = std::partition_point(own_.begin(), own_.end(),
                                         [&](const MuonPiece& piece) { return piece.at < at; });
  if (next == own_.begin()) return 0;
  const MuonPiece& last = next[-1];
  return numel_before_[next - own_.begin() - 1] + std::min(at - last.at, last.length);
}

// The update of matrices of which rank r orthogonalizes matrix r.
struct Muon::Round {
  MuonUpdate update;
  absl::Span<const MuonMatrix> matrices;
  std::vector<cuda::AdamWPart> parts;  // this rank's elements of each matrix
  // These elements' u, and then their directions. Empty before the round and after it.
  std::vector<Tensor> directions;

  // Calls add(i, cut) for the pieces of each part i; cut(tensor) is a tensor's elements of a piece.
  template <typename Add>
  void ForEachPiece(int64_t piece, const Add& add) const {
    for (size_t i = 0; i < parts.size(); ++i) {
      ForPieces(0, parts[i].m.numel(), piece, [&](int64_t begin, int64_t end) {
        add(i,
            [=](const Tensor& all) { return all.null() ? all : all.Slice(0, begin, end - begin); });
      });
    }
  }
};

std::vector<UpdateStep> Muon::Steps(const MuonUpdate& update, const PartOf& part_of,
                                    int64_t piece) const {
  const absl::Span<const MuonMatrix> all = matrices_;
  const size_t ranks = ranks_ == nullptr ? 1 : ranks_->world_size();
  std::vector<UpdateStep> steps;
  for (size_t first = 0; first < all.size(); first += ranks) {
    const auto round = std::make_shared<Round>();
    round->update = update;
    round->matrices = all.subspan(first, ranks);
    for (const MuonMatrix& matrix : round->matrices) {
      const MuonPiece& own = matrix.pieces[rank_];
      round->parts.push_back(part_of(own.at, own.at + own.length));
    }
    AddSteps(round, piece, &steps);
  }
  return steps;
}

void Muon::AddSteps(const std::shared_ptr<Round>& round, int64_t piece,
                    std::vector<UpdateStep>* steps) const {
  const auto add = [&](std::vector<Tensor> state, const auto& run) {
    steps->push_back({std::move(state), [run](absl::Span<const Tensor> here) {
                        run(here);
                        return absl::OkStatus();
                      }});
  };
  using Tensors = absl::Span<const Tensor>;
  add({}, [round](Tensors) {
    for (const cuda::AdamWPart& part : round->parts) {
      round->directions.push_back(
          Tensor::Empty(part.m.shape(), part.m.dtype(), part.grads.device()));
    }
  });
  round->ForEachPiece(piece, [&](size_t i, const auto& cut) {
    add({cut(round->parts[i].m)}, [=](Tensors here) {
      SetDirection(round->update, momentum_, cut(round->parts[i].grads), here[0],
                   cut(round->directions[i]));
    });
  });
  steps->push_back({{}, [=](Tensors) { return OrthogonalizeRound(round.get()); }});
  round->ForEachPiece(piece, [&](size_t i, const auto& cut) {
    const Tensor masters = cut(round->parts[i].masters), compute = cut(round->parts[i].compute);
    const bool rounds = !compute.null();
    add(rounds ? std::vector<Tensor>{masters} : std::vector<Tensor>(), [=](Tensors here) {
      Apply(round->update, round->matrices[i], cut(round->directions[i]),
            rounds ? here[0] : masters, compute);
    });
  });
  add({}, [round](Tensors) { round->directions.clear(); });
}

// Replaces the directions' u.
absl::Status Muon::OrthogonalizeRound(Round* round) const {
  std::vector<Tensor>& pieces = round->directions;
  const bool works = static_cast<size_t>(rank_) < round->matrices.size();
  const auto orthogonalize = [&](const Tensor& u) {
    return Orthogonalized(round->update, round->matrices[rank_], u);
  };
  if (ranks_ == nullptr) {
    pieces[0] = orthogonalize(pieces[0]);
    return absl::OkStatus();
  }
  Tensor whole;
  if (works) {
    const int64_t numel = round->matrices[rank_].numel();
    whole = Tensor::Empty({numel}, pieces[0].dtype(), pieces[0].device());
  }
  BURST_RETURN_IF_ERROR(Exchange(round->matrices, pieces, whole, /*back=*/false));
  if (works) whole = orthogonalize(whole);
  for (Tensor& piece : pieces) {
    piece = Tensor::Empty({piece.numel()}, round->update.dtype, piece.device());
  }
  return Exchange(round->matrices, pieces, whole, /*back=*/true);
}

// Sends pieces to the ranks that have the whole matrices, or gets them back from there.
absl::Status Muon::Exchange(absl::Span<const MuonMatrix> round, absl::Span<const Tensor> pieces,
                            const Tensor& whole, bool back) const {
  std::vector<ReceiveBuffer> in_pieces, in_whole;
  const auto add = [&](const MuonPiece& piece, const Tensor& elements, size_t peer,
                       std::vector<ReceiveBuffer>* to) {
    if (piece.copy && !back) return;
    to->push_back(
        {elements.raw_data(), elements.size_bytes(), static_cast<int>(peer), elements.device()});
  };
  for (size_t i = 0; i < round.size(); ++i) {
    add(round[i].pieces[rank_], pieces[i], i, &in_pieces);
    if (i != static_cast<size_t>(rank_)) continue;
    for (size_t r = 0; r < round[i].pieces.size(); ++r) {
      const MuonPiece& piece = round[i].pieces[r];
      add(piece, whole.Slice(0, piece.begin, piece.length), r, &in_whole);
    }
  }
  const std::vector<ReceiveBuffer>& from = back ? in_whole : in_pieces;
  std::vector<SendBuffer> sends;
  for (const ReceiveBuffer& b : from) sends.push_back({b.data, b.bytes, b.peer, b.device});
  BURST_RETURN_IF_ERROR(ranks_->Post(Channel::kCollective, sends, back ? in_pieces : in_whole));
  return ranks_->Wait(Channel::kCollective);
}

template void Orthogonalize(const MatrixView<float>& x);
template void Orthogonalize(const MatrixView<double>& x);

}  // namespace burst
