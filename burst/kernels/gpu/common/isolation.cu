// Implements the repair of isolation.h. A warp computes one row, for 32 keys or queries at a time.
// First each lane computes one dot product with the row. Then each lane sums every 32nd channel.
// Sums are float32 and in a fixed order.
#include <algorithm>
#include <cmath>

#include "burst/device/cuda.h"
#include "burst/kernels/gpu/common/isolation.h"
#include "burst/kernels/gpu/common/operand.cuh"
#include "burst/kernels/gpu/common/probability.cuh"
#include "burst/kernels/limits.h"
#include "burst/kernels/merge.h"
#include "burst/tensor/dispatch.cuh"

namespace burst {
namespace cuda {
namespace {

constexpr int kWarps = 8, kLanes = 32, kThreads = kWarps * kLanes;
constexpr int kMaxHeadDim = k16BitHeadDims.most, kOwn = kMaxHeadDim / kLanes;  // channels of a lane

// Holds the channels of a row that a lane owns: lane, lane + 32, ...
struct Channels {
  float x[kOwn] = {};

  template <typename Function>  // f(channel, x)
  __device__ void ForEach(int columns, Function f) {
#pragma unroll
    for (int c = 0; c < kOwn; ++c) {
      const int channel = static_cast<int>(threadIdx.x) % kLanes + c * kLanes;
      if (channel < columns) f(channel, x[c]);
    }
  }
  template <typename T>
  __device__ void Add(float factor, const T* row, int columns) {
    ForEach(columns, [&](int channel, float& sum) {
      sum = fmaf(factor, ConvertTo<float>(row[channel]), sum);
    });
  }
};

template <typename T>
__device__ void CopyRow(const T* row, int columns, float* to) {
  for (int c = threadIdx.x % kLanes; c < columns; c += kLanes) to[c] = ConvertTo<float>(row[c]);
}

template <typename T>
__device__ float Dot(const float* a, const T* b, int columns) {
  using Vec8 = Vec<T, 8>;  // columns is a multiple of 8
  float sum = 0;
  for (int c = 0; c < columns; c += 8) {
    const Vec8 eight = *reinterpret_cast<const Vec8*>(b + c);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(a[c + i], ConvertTo<float>(eight[i]), sum);
  }
  return sum;
}

__device__ float WarpMax(float x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, distance));
  }
  return x;
}
__device__ float WarpSum(float x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(0xffffffff, x, distance);
  }
  return x;
}

// Computes to = keep * from + factor * x of T or float32; `from` is not read if keep is 0.
template <typename T>
__device__ void StoreRow(Channels& x, float factor, float keep, const float* from, T* to,
                         int columns) {
  x.ForEach(columns, [&](int channel, float& value) {
    const float old = keep == 0 ? 0.f : keep * from[channel];
    to[channel] = ConvertTo<T>(fmaf(factor, value, old));
  });
}

// Waits for the end of the kernel before this one, during which this one may have started.
__device__ __forceinline__ void WaitForKernelBefore() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// Computes O = softmax(S) V and lse of one query, merged with earlier calls.
template <typename T, bool kChanged>
__device__ void RepairQuery(const FlashForwardParams& params, int64_t b, int64_t h, int64_t i,
                            float* query) {
  const FlashAttentionShape& shape = params.shape;
  const int head_dim = static_cast<int>(shape.head_dim), lane = threadIdx.x % kLanes;
  const int value_dim = static_cast<int>(shape.value_dim);
  const int64_t kv_head = h / (shape.num_heads / shape.num_kv_heads);
  const float scale = static_cast<float>(shape.softmax_scale);
  const Visible visible(shape, b);
  const ChangedScores<float> changed(shape, b, h);
  const Head<const T> k(params.k, b, kv_head), v(params.v, b, kv_head);
  CopyRow(Head<const T>(params.q, b, h).row(i), head_dim, query);
  __syncwarp();
  float max = -INFINITY, sum = 0;
  Channels o;
  const int end = visible.end(i);
  for (int first = visible.begin(i); first < end; first += kLanes) {
    const int j = first + lane;
    float s = -INFINITY;
    if (j < end) {
      s = scale * Dot(query, k.row(j), head_dim);
      float slope;
      if constexpr (kChanged) s = changed.Score(i, j, s, &slope);
    }
    const float top = fmaxf(max, WarpMax(s));
    const float shift = top == -INFINITY ? 0.f : top;
    const float rescale = expf(max - shift);
    float p = j < end ? expf(s - shift) : 0.f;
    sum = fmaf(sum, rescale, WarpSum(p));
    max = top;
    if constexpr (kChanged) {
      if (p != 0) p *= changed.Weight(i, j);
    }
    o.ForEach(value_dim, [&](int, float& value) { value *= rescale; });
    for (int n = 0; n < min(kLanes, end - first); ++n) {
      o.Add(__shfl_sync(0xffffffff, p, n), v.row(first + n), value_dim);
    }
  }
  float factor = 1, keep = 0;
  if (params.sinks != nullptr) {
    factor = AddSink(static_cast<const float*>(params.sinks)[h], &max, &sum);
  }
  float* const lse_place =
      static_cast<float*>(params.lse) + (b * shape.num_heads + h) * shape.q_len;
  float lse = sum == 0 ? -INFINITY : max + logf(sum);
  factor = sum == 0 ? 0.f : factor / sum;
  if (params.merge) {
    const MergeWeights<float> weights = Merge(lse_place[i], lse);
    lse = weights.lse;
    factor *= weights.b;
    keep = weights.a;
  }
  __syncwarp();  // all lanes have read lse
  if (lane == 0) lse_place[i] = lse;
  const AttentionOperand& so_far = params.sum.data == nullptr ? params.out : params.sum;
  float* const old = Head<float>(so_far, b, h).row(i);
  const float* const from = keep == 0 ? nullptr : old;
  if (params.rows.Left(b, i) > 0) {
    StoreRow(o, factor, keep, from, old, value_dim);
  } else if (params.out_dtype == DType::kFloat32) {
    StoreRow(o, factor, keep, from, Head<float>(params.out, b, h).row(i), value_dim);
  } else {
    StoreRow(o, factor, keep, from, Head<T>(params.out, b, h).row(i), value_dim);
  }
}

template <typename T, bool kChanged>
__global__ __launch_bounds__(kThreads) void RepairForwardKernel(
    const __grid_constant__ FlashForwardParams params, const int32_t* marks) {
  WaitForKernelBefore();
  if (marks[0] == 0) return;
  __shared__ float queries[kWarps][kMaxHeadDim];
  const FlashAttentionShape& shape = params.shape;
  const int warp = threadIdx.x / kLanes;
  const int64_t rows = shape.batch * shape.num_heads * shape.q_len;
  for (int64_t row = int64_t{blockIdx.x} * kWarps + warp; row < rows; row += gridDim.x * kWarps) {
    const int64_t i = row % shape.q_len, head = row / shape.q_len;
    const int32_t mark = marks[1 + head * MarkGroups(shape.q_len) + i / kMarkRows];
    if ((mark >> (i % kMarkRows) & 1) == 0) continue;
    RepairQuery<T, kChanged>(params, head / shape.num_heads, head % shape.num_heads, i,
                             queries[warp]);
    __syncwarp();  // before the next query takes this one's place
  }
}

// Holds the inputs of a backward for one head, and computes P and dS for a query and a key.
template <typename T, bool kChanged>
struct BackwardHead {
  __device__ BackwardHead(const FlashBackwardParams& params, int64_t b, int64_t h)
      : shape(params.shape),
        kv_head(h / (shape.num_heads / shape.num_kv_heads)),
        changed(shape, b, h),
        q(params.q, b, h),
        dout(params.dout, b, h),
        k(params.k, b, kv_head),
        v(params.v, b, kv_head),
        lse(static_cast<const float*>(params.lse) + (b * shape.num_heads + h) * shape.q_len),
        delta(static_cast<const float*>(params.delta) + (b * shape.num_heads + h) * shape.q_len) {}

  // s is the product of rows of q and k, dp the product of rows of dout and v.
  __device__ Probability<float, kChanged> At(int64_t i, int64_t j, float s, float dp) const {
    return {s, dp, static_cast<float>(shape.softmax_scale), lse[i], delta[i], true, changed, i, j};
  }

  const FlashAttentionShape& shape;
  const int64_t kv_head;
  const ChangedScores<float> changed;
  const Head<const T> q, dout, k, v;
  const float *lse, *delta;
};

// Adds scale dS K to dQ of one query, over the keys whose marks say that dQ misses them.
template <typename T, bool kChanged>
__device__ void RepairDq(const FlashBackwardParams& params, const int32_t* marks, int64_t splits,
                         int64_t b, int64_t h, int64_t i, float (*rows)[kMaxHeadDim]) {
  const FlashAttentionShape& shape = params.shape;
  const int head_dim = static_cast<int>(shape.head_dim), lane = threadIdx.x % kLanes;
  const int value_dim = static_cast<int>(shape.value_dim);
  const Visible visible(shape, b);
  const int begin = visible.begin(i), end = visible.end(i);
  if (begin >= end) return;
  const int64_t heads_per_split = shape.num_heads / shape.num_kv_heads / splits;
  const int32_t* const own =
      marks + 1 + (b * shape.num_heads + h) / heads_per_split * MarkGroups(shape.k_len);
  const BackwardHead<T, kChanged> head(params, b, h);
  Channels dq;
  bool any = false;
  for (int group = begin / kMarkRows; group <= (end - 1) / kMarkRows; ++group) {
    if ((own[group] & kMissingDq) == 0) continue;
    if (!any) {
      CopyRow(head.q.row(i), head_dim, rows[0]);
      CopyRow(head.dout.row(i), value_dim, rows[1]);
      __syncwarp();
      any = true;
    }
    const int first = max(begin, group * kMarkRows), last = min(end, (group + 1) * kMarkRows);
    float ds = 0;
    if (first + lane < last) {
      const int j = first + lane;
      ds = head.At(i, j, Dot(rows[0], head.k.row(j), head_dim),
                   Dot(rows[1], head.v.row(j), value_dim))
               .ds;
    }
    for (int n = 0; n < last - first; ++n) {
      dq.Add(__shfl_sync(0xffffffff, ds, n), head.k.row(first + n), head_dim);
    }
  }
  if (!any) return;
  float* const to = Head<float>(params.dq.sum, b, h).row(i);
  StoreRow(dq, static_cast<float>(shape.softmax_scale), 1, to, to, head_dim);
  __syncwarp();  // before the next row takes this one's place
}

// Adds dS^T Q to dk and P^T dO to dv: one key, the queries of one head. The caller scales dk.
template <typename T, bool kChanged>
__device__ void AddKeyGradients(const BackwardHead<T, kChanged>& head, int64_t first_query,
                                int64_t last_query, int j, const float (*rows)[kMaxHeadDim],
                                bool add_dk, bool add_dv, Channels& dk, Channels& dv) {
  const int head_dim = static_cast<int>(head.shape.head_dim), lane = threadIdx.x % kLanes;
  const int value_dim = static_cast<int>(head.shape.value_dim);
  for (int64_t first = first_query; first < last_query; first += kLanes) {
    const int64_t i = first + lane;
    float p = 0, ds = 0;
    if (i < last_query) {
      const auto at = head.At(i, j, Dot(rows[0], head.q.row(i), head_dim),
                              Dot(rows[1], head.dout.row(i), value_dim));
      p = at.p;
      ds = at.ds;
    }
    for (int n = 0; n < min(int64_t{kLanes}, last_query - first); ++n) {
      const float this_ds = __shfl_sync(0xffffffff, ds, n);
      const float this_p = __shfl_sync(0xffffffff, p, n);
      if (add_dk) dk.Add(this_ds, head.q.row(first + n), head_dim);
      if (add_dv) dv.Add(this_p, head.dout.row(first + n), value_dim);
    }
  }
}

// Repairs dK and dV of one key, for the splits whose marks say that they are missing.
template <typename T, bool kChanged>
__device__ void RepairKey(const FlashBackwardParams& params, const int32_t* marks, int64_t splits,
                          int64_t b, int64_t kv_head, int j, float (*rows)[kMaxHeadDim]) {
  const FlashAttentionShape& shape = params.shape;
  const int head_dim = static_cast<int>(shape.head_dim);
  const int value_dim = static_cast<int>(shape.value_dim);
  const int64_t first_split = (b * shape.num_kv_heads + kv_head) * splits;
  const auto missing_of = [&](int64_t split) {
    return marks[1 + (first_split + split) * MarkGroups(shape.k_len) + j / kMarkRows];
  };
  int missing = 0;
  for (int64_t split = 0; split < splits; ++split) missing |= missing_of(split);
  if ((missing & (kMissingDk | kMissingDv)) == 0) return;
  CopyRow(Head<const T>(params.k, b, kv_head).row(j), head_dim, rows[0]);
  CopyRow(Head<const T>(params.v, b, kv_head).row(j), value_dim, rows[1]);
  __syncwarp();
  const Visible visible(shape, b);
  const int64_t first_query = visible.FirstEndingAfter(shape.q_len, j);
  const int64_t last_query = visible.FirstBeginningAfter(shape.q_len, j);
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  Channels dk, dv;
  for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
    const int of_split = missing_of((h - kv_head * group) / (group / splits));
    const bool add_dk = (of_split & kMissingDk) != 0, add_dv = (of_split & kMissingDv) != 0;
    if (!add_dk && !add_dv) continue;
    AddKeyGradients(BackwardHead<T, kChanged>(params, b, h), first_query, last_query, j, rows,
                    add_dk, add_dv, dk, dv);
  }
  __syncwarp();  // before the next row takes this one's place
  const auto add = [&](Channels& d, float factor, const GradientTarget& target, int columns) {
    if (!target.Ends(kv_head)) {
      float* const to = Head<float>(target.sum, b, kv_head).row(j);
      return StoreRow(d, factor, 1, to, to, columns);
    }
    T* const to = Head<T>(target.result, b, kv_head).row(j);
    d.ForEach(columns, [&](int channel, float& value) {
      to[channel] = ConvertTo<T>(fmaf(factor, value, ConvertTo<float>(to[channel])));
    });
  };
  if (missing & kMissingDk) add(dk, static_cast<float>(shape.softmax_scale), params.dk, head_dim);
  if (missing & kMissingDv) add(dv, 1, params.dv, value_dim);
}

// Repairs with a warp for every query, then with a warp for every key.
template <typename T, bool kChanged>
__global__ __launch_bounds__(kThreads) void RepairBackwardKernel(
    const __grid_constant__ FlashBackwardParams params, const int32_t* marks, int64_t splits) {
  WaitForKernelBefore();
  if (marks[0] == 0) return;
  __shared__ float rows[kWarps][2][kMaxHeadDim];
  const FlashAttentionShape& shape = params.shape;
  const int warp = threadIdx.x / kLanes;
  const int64_t queries = shape.batch * shape.num_heads * shape.q_len;
  const int64_t keys = shape.batch * shape.num_kv_heads * shape.k_len;
  for (int64_t row = int64_t{blockIdx.x} * kWarps + warp; row < queries + keys;
       row += gridDim.x * kWarps) {
    if (row < queries) {
      const int64_t head = row / shape.q_len;
      RepairDq<T, kChanged>(params, marks, splits, head / shape.num_heads, head % shape.num_heads,
                            row % shape.q_len, rows[warp]);
    } else {
      const int64_t head = (row - queries) / shape.k_len;
      RepairKey<T, kChanged>(params, marks, splits, head / shape.num_kv_heads,
                             head % shape.num_kv_heads,
                             static_cast<int>((row - queries) % shape.k_len), rows[warp]);
    }
  }
}

// Starts kernel(params, marks, rest...) with a warp for each row, as far as the GPU holds them.
// From Hopper on it starts while the kernel before it still runs, because it mostly has nothing to
// repair.
template <typename Params, typename... Rest>
void Launch(void (*kernel)(Params, const int32_t*, Rest...), int64_t rows, const Params& params,
            const int32_t* marks, Rest... rest) {
  constexpr int64_t kBlocksPerMultiprocessor = 2;
  const int64_t most = CurrentContext().multiprocessors * kBlocksPerMultiprocessor;
  const int64_t blocks = std::min((rows + kWarps - 1) / kWarps, most);
  if (blocks == 0) return;
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = CurrentStream();
  config.attrs = &early;
  config.numAttrs = CurrentContext().compute_capability >= 90 ? 1 : 0;
  BURST_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, params, marks, rest...));
}

}  // namespace

void RepairForward(const FlashForwardParams& params, const int32_t* marks) {
  if (marks == nullptr) return;
  const FlashAttentionShape& shape = params.shape;
  const int64_t rows = shape.batch * shape.num_heads * shape.q_len;
  const auto launch = [&](auto zero) {
    using T = decltype(zero);
    Launch(shape.scores.any() ? RepairForwardKernel<T, true> : RepairForwardKernel<T, false>, rows,
           params, marks);
  };
  shape.dtype == DType::kFloat16 ? launch(fp16{}) : launch(bf16{});
}

void RepairBackward(const FlashBackwardParams& params, const int32_t* marks, int64_t splits) {
  if (marks == nullptr) return;
  const FlashAttentionShape& shape = params.shape;
  const int64_t rows =
      shape.batch * (shape.num_heads * shape.q_len + shape.num_kv_heads * shape.k_len);
  const auto launch = [&](auto zero) {
    using T = decltype(zero);
    Launch(shape.scores.any() ? RepairBackwardKernel<T, true> : RepairBackwardKernel<T, false>,
           rows, params, marks, splits);
  };
  shape.dtype == DType::kFloat16 ? launch(fp16{}) : launch(bf16{});
}

}  // namespace cuda
}  // namespace burst
