// Backward: keys stay, queries stream by, so dK and dV of a tile of keys are finished in one go and
// dQ is added to along the way.

#include <cmath>

#include "burst/base/check.h"
#include "burst/base/parallel.h"
#include "burst/kernels/cpu/scratch.h"
#include "burst/kernels/cpu/tile.h"
#include "burst/kernels/cpu/vector.h"
#include "burst/kernels/flash_attention.h"

namespace burst {
namespace cpu {
namespace {

// Private dQ buffers of threads that share a head stay below this.
constexpr int64_t kMaxPrivateBytes = 48 << 20;

template <typename T>
const T* StatisticsRow(const void* statistics, const FlashAttentionShape& shape, int64_t b,
                       int64_t h) {
  return static_cast<const T*>(statistics) + (b * shape.num_heads + h) * shape.q_len;
}

// One row of a tile, for the visible columns; zero elsewhere:
//   P = exp(S - lse);  dS = P * (dP - delta)
// `s` becomes P and `dp` becomes dS.
template <typename T>
void SoftmaxBackwardRow(T* s, T* dp, int64_t first, int64_t last, int64_t columns, int64_t padded,
                        T lse, T delta) {
  if (lse == -std::numeric_limits<T>::infinity()) last = first;  // the query saw nothing
  if (first == last) {
    std::fill(s, s + columns, T{0});
    std::fill(dp, dp + columns, T{0});
    return;
  }
  std::fill(s, s + first, -std::numeric_limits<T>::infinity());
  std::fill(s + last, s + padded, -std::numeric_limits<T>::infinity());
  const Vec<T> row_lse = Broadcast(lse), row_delta = Broadcast(delta);
  for (int64_t j = 0; j < padded; j += kLanes<T>) {
    const Vec<T> p = Exp(Load(s + j) - row_lse);
    Store(s + j, p);
    Store(dp + j, p * (Load(dp + j) - row_delta));
  }
}

template <typename T>
class BackwardTask {
 public:
  explicit BackwardTask(const FlashBackwardParams& params)
      : params_(params),
        shape_(params.shape),
        group_(shape_.num_heads / shape_.num_kv_heads),
        tiles_((shape_.k_len + kBlockN - 1) / kBlockN) {}

  int64_t tiles() const { return tiles_; }

  // Query head h and the key tiles first, first + step, ...; dq is that of the head.
  void RunHead(int64_t b, int64_t h, int64_t first, int64_t step, const AttentionOperand& dq,
               int64_t dq_b, int64_t dq_h) const {
    for (int64_t tile = first; tile < tiles_; tile += step) RunTile(b, h, tile, dq, dq_b, dq_h);
  }

 private:
  void RunTile(int64_t b, int64_t h, int64_t tile, const AttentionOperand& dq, int64_t dq_b,
               int64_t dq_h) const {
    const int64_t d = shape_.head_dim;
    const int64_t j0 = tile * kBlockN, columns = std::min(kBlockN, shape_.k_len - j0);
    const int64_t padded = (columns + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
    const Mask mask(shape_, b);
    // The queries [i_begin, i_end) see some of these keys: those whose end is beyond j0 and whose
    // begin is before the tile's end. Both only grow.
    const auto first_query = [&](auto&& predicate) {
      int64_t low = 0, high = shape_.q_len;
      while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (predicate(middle)) {
          high = middle;
        } else {
          low = middle + 1;
        }
      }
      return low;
    };
    const int64_t i_begin = first_query([&](int64_t i) { return mask.end(i) > j0; });
    const int64_t i_end = first_query([&](int64_t i) { return mask.begin(i) >= j0 + columns; });
    if (i_begin >= i_end) return;

    ScratchSpace& scratch = ThreadScratch();
    T* s_data = scratch.Get<T>(0, kBlockM * kBlockN);
    T* dp_data = scratch.Get<T>(1, kBlockM * kBlockN);
    const int64_t kv_head = h / group_;
    const T scale = static_cast<T>(shape_.softmax_scale);
    // Scaled keys serve both S = Q (scale K)^T and dQ += dS (scale K).
    auto k = Scratch(scratch.Get<T>(2, kBlockN * d), columns, d);
    auto dk = Scratch(scratch.Get<T>(3, kBlockN * d), columns, d);
    auto dv = Scratch(scratch.Get<T>(4, kBlockN * d), columns, d);
    k = Rows<T>(params_.k, b, kv_head, j0, columns, d) * scale;
    dk.setZero();
    dv.setZero();
    const auto v = Rows<T>(params_.v, b, kv_head, j0, columns, d);
    const T* lse = StatisticsRow<T>(params_.lse, shape_, b, h);
    const T* delta = StatisticsRow<T>(params_.delta, shape_, b, h);

    for (int64_t i0 = i_begin; i0 < i_end; i0 += kBlockM) {
      const int64_t rows = std::min(kBlockM, i_end - i0);
      const auto q = Rows<T>(params_.q, b, h, i0, rows, d);
      const auto dout = Rows<T>(params_.dout, b, h, i0, rows, d);
      MatrixView<T> p(s_data, rows, columns, Eigen::OuterStride<>(kBlockN));
      MatrixView<T> ds(dp_data, rows, columns, Eigen::OuterStride<>(kBlockN));
      p.noalias() = q * k.transpose();      // S
      ds.noalias() = dout * v.transpose();  // dP
      const bool full = mask.Full(i0, i0 + rows, j0, j0 + columns);
      for (int64_t i = 0; i < rows; ++i) {
        int64_t first = 0, last = columns;
        if (!full) mask.Columns(i0 + i, j0, columns, &first, &last);
        SoftmaxBackwardRow(s_data + i * kBlockN, dp_data + i * kBlockN, first, last, columns,
                           padded, lse[i0 + i], delta[i0 + i]);
      }
      dv.noalias() += p.transpose() * dout;
      dk.noalias() += ds.transpose() * q;
      Rows<T>(dq, dq_b, dq_h, i0, rows, d).noalias() += ds * k;
    }
    Rows<T>(params_.dk, b, kv_head, j0, columns, d) += dk * scale;
    Rows<T>(params_.dv, b, kv_head, j0, columns, d) += dv;
  }

  const FlashBackwardParams& params_;
  const FlashAttentionShape& shape_;
  const int64_t group_;
  const int64_t tiles_;
};

// Key heads are independent: a thread takes one with all of its query heads. Those left over when the
// threads are dealt out evenly (all of them, if there are few) are shared: every thread takes each
// n-th tile of keys, with a dQ of its own, and these are summed in order.
template <typename T>
void Backward(const FlashBackwardParams& params) {
  const FlashAttentionShape& shape = params.shape;
  const BackwardTask<T> task(params);
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  const int64_t heads = shape.batch * shape.num_kv_heads, d = shape.head_dim;
  const int64_t private_bytes = std::max<int64_t>(1, shape.q_len * d * sizeof(T));
  const int64_t threads = std::min<int64_t>(
      {NumThreads(), task.tiles(), 1 + kMaxPrivateBytes / private_bytes});
  const int64_t whole = threads <= 1 ? heads : heads / NumThreads() * NumThreads();
  ParallelTasks(whole, [&](int64_t index) {
    const int64_t b = index / shape.num_kv_heads, kv_head = index % shape.num_kv_heads;
    for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
      task.RunHead(b, h, 0, 1, params.dq, b, h);
    }
  });
  if (whole == heads) return;

  const Tensor partial = Tensor::Empty({threads - 1, shape.q_len, 1, d}, shape.dtype);
  for (int64_t index = whole * group; index < heads * group; ++index) {
    const int64_t b = index / shape.num_heads, h = index % shape.num_heads;
    ParallelTasks(threads, [&](int64_t thread) {
      if (thread == 0) return task.RunHead(b, h, 0, threads, params.dq, b, h);
      const Tensor own = partial.Slice(0, thread - 1, 1);
      std::fill_n(own.data<T>(), own.numel(), T{0});
      task.RunHead(b, h, thread, threads, Operand(own), 0, 0);
    });
    ParallelFor(shape.q_len, kBlockM, [&](int64_t begin, int64_t end) {
      auto dq = Rows<T>(params.dq, b, h, begin, end - begin, d);
      for (int64_t thread = 1; thread < threads; ++thread) {
        dq += Rows<T>(Operand(partial), thread - 1, 0, begin, end - begin, d);
      }
    });
  }
}

// delta = rowsum(dO * O) - dlse
template <typename T>
void Delta(const FlashDeltaParams& params) {
  const FlashAttentionShape& shape = params.shape;
  ParallelFor(shape.batch * shape.num_heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const int64_t b = index / shape.num_heads, h = index % shape.num_heads;
      const auto out = Rows<T>(params.out, b, h, 0, shape.q_len, shape.head_dim);
      const auto dout = Rows<T>(params.dout, b, h, 0, shape.q_len, shape.head_dim);
      const T* dlse = static_cast<const T*>(params.dlse);
      T* delta = static_cast<T*>(params.delta) + index * shape.q_len;
      for (int64_t i = 0; i < shape.q_len; ++i) {
        delta[i] = out.row(i).dot(dout.row(i)) -
                   (dlse == nullptr ? T{0} : dlse[index * shape.q_len + i]);
      }
    }
  });
}

}  // namespace
}  // namespace cpu

void FlashBackwardCpu(const FlashBackwardParams& params) {
  BURST_CHECK_GT(params.shape.num_kv_heads, 0);
  BURST_CHECK_EQ(params.shape.num_heads % params.shape.num_kv_heads, 0);
  DispatchFloat(params.shape.dtype, [&](auto zero) { cpu::Backward<decltype(zero)>(params); });
}

void FlashDeltaCpu(const FlashDeltaParams& params) {
  DispatchFloat(params.shape.dtype, [&](auto zero) { cpu::Delta<decltype(zero)>(params); });
}

}  // namespace burst
