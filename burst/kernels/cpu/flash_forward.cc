// Forward: one task a tile of queries; keys stream by.

#include <cmath>

#include "burst/base/check.h"
#include "burst/base/parallel.h"
#include "burst/kernels/cpu/scratch.h"
#include "burst/kernels/cpu/tile.h"
#include "burst/kernels/cpu/vector.h"
#include "burst/kernels/flash_attention.h"
#include "burst/kernels/merge.h"

namespace burst {
namespace cpu {
namespace {

// The running softmax of a tile of queries.
template <typename T>
struct RunningSoftmax {
  T max[kBlockM];  // of the scores so far; -inf before the first visible one
  T sum[kBlockM];  // of exp(score - max)
};

// The running softmax takes in one row of scores, already masked with -inf, and turns it into
// exp(score - max). Returns what the row of the output must be scaled by.
//
//   max' = max(max, rowmax S);  P = exp(S - max');  sum' = sum e^(max - max') + rowsum P
//
// `columns` is a multiple of the vector's lanes.
template <typename T>
T UpdateRow(T* scores, int64_t columns, T* max, T* sum) {
  Vec<T> largest = Load(scores);
  for (int64_t j = kLanes<T>; j < columns; j += kLanes<T>) {
    largest = Max(largest, Load(scores + j));
  }
  const T new_max = std::max(*max, HorizontalMax<T>(largest));
  if (new_max == -std::numeric_limits<T>::infinity()) {
    std::fill(scores, scores + columns, T{0});
    return 1;
  }
  const Vec<T> shift = Broadcast(new_max);
  Vec<T> row_sum = {};
  for (int64_t j = 0; j < columns; j += kLanes<T>) {
    const Vec<T> p = Exp(Load(scores + j) - shift);
    Store(scores + j, p);
    row_sum += p;
  }
  const T rescale = std::exp(*max - new_max);
  *max = new_max;
  *sum = *sum * rescale + HorizontalSum<T>(row_sum);
  return rescale;
}

template <typename T>
class ForwardTask {
 public:
  explicit ForwardTask(const FlashForwardParams& params)
      : params_(params),
        shape_(params.shape),
        tiles_((shape_.q_len + kBlockM - 1) / kBlockM) {}

  int64_t num_tasks() const { return shape_.batch * shape_.num_heads * tiles_; }

  void Run(int64_t task) const {
    // The last tiles first: under a causal mask they have the most work.
    const int64_t tile = tiles_ - 1 - task % tiles_;
    const int64_t h = task / tiles_ % shape_.num_heads;
    const int64_t b = task / tiles_ / shape_.num_heads;
    const int64_t d = shape_.head_dim;
    const int64_t i0 = tile * kBlockM, rows = std::min(kBlockM, shape_.q_len - i0);
    const int64_t kv_head = h / (shape_.num_heads / shape_.num_kv_heads);
    const Mask mask(shape_, b);

    ScratchSpace& scratch = ThreadScratch();
    T* q_data = scratch.Get<T>(0, kBlockM * d);
    T* s_data = scratch.Get<T>(1, kBlockM * kBlockN);
    T* o_data = scratch.Get<T>(2, kBlockM * d);
    RunningSoftmax<T> running;
    std::fill_n(running.max, kBlockM, -std::numeric_limits<T>::infinity());
    std::fill_n(running.sum, kBlockM, T{0});
    auto q = Scratch(q_data, rows, d);
    auto o = Scratch(o_data, rows, d);
    q = Rows<T>(params_.q, b, h, i0, rows, d) * static_cast<T>(shape_.softmax_scale);
    o.setZero();

    const int64_t j_end = mask.end(i0 + rows - 1);
    for (int64_t j0 = mask.begin(i0); j0 < j_end; j0 += kBlockN) {
      const int64_t columns = std::min(kBlockN, j_end - j0);
      // Whole vectors: the padding holds -inf.
      const int64_t padded = (columns + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
      const auto k = Rows<T>(params_.k, b, kv_head, j0, columns, d);
      const auto v = Rows<T>(params_.v, b, kv_head, j0, columns, d);
      MatrixView<T> s(s_data, rows, columns, Eigen::OuterStride<>(kBlockN));
      s.noalias() = q * k.transpose();
      const bool full = mask.Full(i0, i0 + rows, j0, j0 + columns);
      for (int64_t i = 0; i < rows; ++i) {
        T* row = s_data + i * kBlockN;
        int64_t first = 0, last = columns;
        if (!full) mask.Columns(i0 + i, j0, columns, &first, &last);
        std::fill(row, row + first, -std::numeric_limits<T>::infinity());
        std::fill(row + last, row + padded, -std::numeric_limits<T>::infinity());
        const T rescale = UpdateRow(row, padded, &running.max[i], &running.sum[i]);
        if (rescale != 1) o.row(i) *= rescale;
      }
      o.noalias() += s * v;
    }
    Finish(running, o, b, h, i0, rows);
  }

 private:
  // O = O / sum, lse = max + log sum; merged with what is there.
  void Finish(const RunningSoftmax<T>& running, const MatrixView<T>& o, int64_t b, int64_t h,
              int64_t i0, int64_t rows) const {
    auto out = Rows<T>(params_.out, b, h, i0, rows, shape_.head_dim);
    T* lse = static_cast<T*>(params_.lse) + (b * shape_.num_heads + h) * shape_.q_len + i0;
    for (int64_t i = 0; i < rows; ++i) {
      const bool seen = running.sum[i] > 0;
      const T row_lse = seen ? running.max[i] + std::log(running.sum[i])
                             : -std::numeric_limits<T>::infinity();
      const T inverse = seen ? 1 / running.sum[i] : 0;
      if (params_.merge) {
        const MergeWeights<T> weights = Merge(lse[i], row_lse);
        out.row(i) = out.row(i) * weights.a + o.row(i) * (inverse * weights.b);
        lse[i] = weights.lse;
      } else {
        out.row(i) = o.row(i) * inverse;
        lse[i] = row_lse;
      }
    }
  }

  const FlashForwardParams& params_;
  const FlashAttentionShape& shape_;
  const int64_t tiles_;
};

}  // namespace
}  // namespace cpu

void FlashForwardCpu(const FlashForwardParams& params) {
  BURST_CHECK_GT(params.shape.num_kv_heads, 0);
  BURST_CHECK_EQ(params.shape.num_heads % params.shape.num_kv_heads, 0);
  DispatchFloat(params.shape.dtype, [&](auto zero) {
    const cpu::ForwardTask<decltype(zero)> task(params);
    ParallelTasks(task.num_tasks(), [&](int64_t index) { task.Run(index); });
  });
}

}  // namespace burst
