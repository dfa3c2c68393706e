// Computes attention with whole matrices. S, P and dS of all heads are in memory at once. It uses
// Eigen's matmuls and one exponential for each score.

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "benchmarks/study/study.h"
#include "burst/base/parallel.h"
#include "burst/kernels/cpu/flash_attention_cpu.h"
#include "burst/kernels/merge.h"

namespace burst {
namespace {

template <typename T>
using Matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
template <typename T>
using Map = Eigen::Map<Matrix<T>, 0, Eigen::OuterStride<>>;

// Returns one head as a matrix [rows, d].
template <typename T>
Map<T> Head(const AttentionOperand& operand, int64_t b, int64_t h, int64_t rows, int64_t d) {
  T* data = static_cast<T*>(operand.data) + b * operand.batch_stride + h * operand.head_stride;
  return {data, rows, d, Eigen::OuterStride<>(operand.seq_stride)};
}

// Returns one head's scores in a [batch, heads, q_len, k_len] tensor.
template <typename T>
Map<T> Scores(const Tensor& scores, int64_t head) {
  const int64_t q_len = scores.dim(2), k_len = scores.dim(3);
  return {scores.data<T>() + head * q_len * k_len, q_len, k_len, Eigen::OuterStride<>(k_len)};
}

Tensor AllScores(const FlashAttentionShape& shape) {
  return Tensor::Empty({shape.batch, shape.num_heads, shape.q_len, shape.k_len}, shape.dtype);
}

// The keys that query i sees.
struct Range {
  int64_t begin, end;
};
Range Visible(const FlashAttentionShape& shape, int64_t b, int64_t i) {
  if (shape.visible.begin == nullptr) return {0, shape.k_len};
  const int64_t begin = shape.visible.begin[b * shape.visible.batch_stride + i];
  return {begin, std::max<int64_t>(begin, shape.visible.end[b * shape.visible.batch_stride + i])};
}

// Returns a range that holds all queries of a batch row that see a key. A ring's backward gives the
// queries of its own block in two parts.
Range Seeing(const FlashAttentionShape& shape, int64_t b) {
  const auto sees = [&](int64_t i) {
    const Range visible = Visible(shape, b, i);
    return visible.begin < visible.end;
  };
  Range queries = {0, shape.q_len};
  while (queries.begin < queries.end && !sees(queries.begin)) ++queries.begin;
  while (queries.begin < queries.end && !sees(queries.end - 1)) --queries.end;
  return queries;
}

// Sets row to exp(row - lse) where the query sees a key, and to 0 elsewhere.
template <typename Row, typename T>
void Exponentials(const Range& visible, T lse, Row row) {
  auto seen = row.segment(visible.begin, visible.end - visible.begin);
  seen = (seen.array() - lse).exp().matrix();
  row.head(visible.begin).setZero();
  row.tail(row.size() - visible.end).setZero();
}

template <typename T>
void ForwardOf(const FlashForwardParams& params) {
  const FlashAttentionShape& shape = params.shape;
  const int64_t d = shape.head_dim, value_d = shape.value_dim;
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  const Tensor scores = AllScores(shape);
  ParallelTasks(shape.batch * shape.num_heads, [&](int64_t task) {
    const int64_t b = task / shape.num_heads, h = task % shape.num_heads;
    const auto q = Head<T>(params.q, b, h, shape.q_len, d);
    const auto k = Head<T>(params.k, b, h / group, shape.k_len, d);
    const auto v = Head<T>(params.v, b, h / group, shape.k_len, value_d);
    auto out = Head<T>(params.out, b, h, shape.q_len, value_d);
    T* lse = static_cast<T*>(params.lse) + task * shape.q_len;

    auto p = Scores<T>(scores, task);
    p.noalias() = q * k.transpose();
    p *= static_cast<T>(shape.softmax_scale);
    Eigen::Matrix<T, Eigen::Dynamic, 1> row_lse(shape.q_len);
    for (int64_t i = 0; i < shape.q_len; ++i) {
      const Range visible = Visible(shape, b, i);
      const int64_t n = visible.end - visible.begin;
      row_lse[i] = -std::numeric_limits<T>::infinity();
      if (n > 0) {
        const auto seen = p.row(i).segment(visible.begin, n).array();
        const T largest = seen.maxCoeff();
        row_lse[i] = largest + std::log((seen - largest).exp().sum());
      }
      if (params.sinks != nullptr) {
        row_lse[i] = Merge(row_lse[i], static_cast<const T*>(params.sinks)[h]).lse;
      }
      Exponentials(visible, row_lse[i], p.row(i));
    }
    const Matrix<T> partial = p * v;
    for (int64_t i = 0; i < shape.q_len; ++i) {
      if (!params.merge) {
        lse[i] = row_lse[i];
        out.row(i) = partial.row(i);
        continue;
      }
      const MergeWeights<T> weights = Merge(lse[i], row_lse[i]);
      lse[i] = weights.lse;
      out.row(i) = weights.a * out.row(i) + weights.b * partial.row(i);
    }
  });
}

template <typename T>
void BackwardOf(const FlashBackwardParams& params) {
  const FlashAttentionShape& shape = params.shape;
  const int64_t d = shape.head_dim, value_d = shape.value_dim;
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  const T scale = static_cast<T>(shape.softmax_scale);
  const Tensor all_p = AllScores(shape), all_ds = AllScores(shape);
  ParallelTasks(shape.batch * shape.num_kv_heads, [&](int64_t task) {
    const int64_t b = task / shape.num_kv_heads, kv_head = task % shape.num_kv_heads;
    const auto k = Head<T>(params.k, b, kv_head, shape.k_len, d);
    const auto v = Head<T>(params.v, b, kv_head, shape.k_len, value_d);
    auto dk = Head<T>(params.dk.Of(kv_head), b, kv_head, shape.k_len, d);
    auto dv = Head<T>(params.dv.Of(kv_head), b, kv_head, shape.k_len, value_d);
    if (params.dk.Begins(kv_head)) dk.setZero(), dv.setZero();
    const Range queries = Seeing(shape, b);
    const int64_t first = queries.begin, rows = queries.end - queries.begin;
    for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
      const int64_t head = b * shape.num_heads + h;
      auto all_dq = Head<T>(params.dq.Of(h), b, h, shape.q_len, d);
      if (params.dq.Begins(h)) all_dq.setZero();
      const auto q = Head<T>(params.q, b, h, shape.q_len, d).middleRows(first, rows);
      const auto dout = Head<T>(params.dout, b, h, shape.q_len, value_d).middleRows(first, rows);
      auto dq = all_dq.middleRows(first, rows);
      const T* lse = static_cast<const T*>(params.lse) + head * shape.q_len + first;
      const T* delta = static_cast<const T*>(params.delta) + head * shape.q_len + first;

      auto whole_p = Scores<T>(all_p, head), whole_ds = Scores<T>(all_ds, head);
      auto p = whole_p.middleRows(first, rows), ds = whole_ds.middleRows(first, rows);
      p.noalias() = q * k.transpose();
      p *= scale;
      for (int64_t i = 0; i < rows; ++i) {
        Exponentials(Visible(shape, b, first + i), lse[i], p.row(i));
      }
      ds.noalias() = dout * v.transpose();
      for (int64_t i = 0; i < rows; ++i) {
        ds.row(i) = (p.row(i).array() * (ds.row(i).array() - delta[i])).matrix();
      }
      dv.noalias() += p.transpose() * dout;
      dq.noalias() += scale * (ds * k);
      dk.noalias() += scale * (ds.transpose() * q);
    }
  });
}

class Naive : public AttentionKernels {
 public:
  absl::Status Check(DeviceType device, DType dtype, const HeadWidths& widths) const override {
    if (device != DeviceType::kCpu) {
      return absl::InvalidArgumentError("attention without tiles is there on the CPU only");
    }
    if (Is16Bit(dtype)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "attention without tiles computes in float32 or float64, not ", Name(dtype)));
    }
    return KernelsOf(device).Check(device, dtype, widths);
  }
  bool TakesBlocks(DType, const HeadWidths&) const override { return false; }
  void Forward(const FlashForwardParams& params) const override {
    DispatchFloat(params.shape.dtype, [&](auto zero) { ForwardOf<decltype(zero)>(params); });
  }
  void Delta(const FlashDeltaParams& params) const override { cpu::Delta(params); }
  void Backward(const FlashBackwardParams& params) const override {
    DispatchFloat(params.shape.dtype, [&](auto zero) { BackwardOf<decltype(zero)>(params); });
  }
};

}  // namespace

const AttentionKernels& NaiveKernels() {
  static const Naive kernels;
  return kernels;
}

}  // namespace burst
