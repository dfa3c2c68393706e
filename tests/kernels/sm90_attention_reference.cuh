// Attention in double precision, one thread a row: the truth for tests of the Hopper kernels. With
// kRounding, the code rounds where any bf16 implementation must: P, dS and the results. The error
// of such a run is the yardstick for the kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "burst/kernels/flash_attention.h"

namespace burst {
namespace sm90 {

using bf16 = __nv_bfloat16;

template <bool kRounding>
__device__ double Round(double x) {
  return kRounding ? static_cast<double>(__bfloat162float(__double2bfloat16(x))) : x;
}

__device__ inline const bf16* RowOf(const AttentionOperand& tensor, int64_t batch, int64_t row,
                                    int64_t head) {
  return static_cast<const bf16*>(tensor.data) + batch * tensor.batch_stride +
         row * tensor.seq_stride + head * tensor.head_stride;
}

__device__ inline double Dot(const bf16* a, const bf16* b, int64_t size) {
  double sum = 0;
  for (int64_t c = 0; c < size; ++c) {
    sum +=
        static_cast<double>(__bfloat162float(a[c])) * static_cast<double>(__bfloat162float(b[c]));
  }
  return sum;
}

struct Range {
  int64_t begin, end;
};

__device__ inline Range VisibleKeys(const FlashAttentionShape& shape, int64_t batch, int64_t row) {
  if (shape.visible.begin == nullptr) return {0, shape.k_len};
  const int64_t index = batch * shape.visible.batch_stride + row;
  return {max(shape.visible.begin[index], 0),
          min(static_cast<int64_t>(shape.visible.end[index]), shape.k_len)};
}

// Rows first, first + step, ... of each head. Results are packed: [batch, num_heads, rows,
// head_dim].
struct RowSet {
  int64_t first, step, count;
};

constexpr int kMaxDim = 256;

template <bool kRounding>
__global__ void ReferenceForward(FlashAttentionShape shape, AttentionOperand q, AttentionOperand k,
                                 AttentionOperand v, RowSet rows, double* out, double* lse) {
  const int64_t item = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (item >= shape.batch * shape.num_heads * rows.count) return;
  const int64_t row = rows.first + item % rows.count * rows.step;
  const int64_t head = item / rows.count % shape.num_heads;
  const int64_t batch = item / rows.count / shape.num_heads;
  const int64_t kv_head = head / (shape.num_heads / shape.num_kv_heads);
  const bf16* q_row = RowOf(q, batch, row, head);
  const Range range = VisibleKeys(shape, batch, row);
  double top = -INFINITY, sum = 0;
  for (int64_t j = range.begin; j < range.end; ++j) {
    top = fmax(top, Dot(q_row, RowOf(k, batch, j, kv_head), shape.head_dim));
  }
  double o[kMaxDim] = {};
  for (int64_t j = range.begin; j < range.end; ++j) {
    const double s = Dot(q_row, RowOf(k, batch, j, kv_head), shape.head_dim);
    const double p = exp(shape.softmax_scale * (s - top));
    sum += p;
    const bf16* v_row = RowOf(v, batch, j, kv_head);
    for (int64_t c = 0; c < shape.head_dim; ++c) {
      o[c] += Round<kRounding>(p) * static_cast<double>(__bfloat162float(v_row[c]));
    }
  }
  for (int64_t c = 0; c < shape.head_dim; ++c) {
    out[item * shape.head_dim + c] = sum > 0 ? Round<kRounding>(o[c] / sum) : 0;
  }
  lse[item] = sum > 0 ? shape.softmax_scale * top + log(sum) : -INFINITY;
}

// lse and delta have every row, in double.
template <bool kRounding>
__global__ void ReferenceDq(FlashAttentionShape shape, AttentionOperand q, AttentionOperand k,
                            AttentionOperand v, AttentionOperand dout, const double* lse,
                            const double* delta, RowSet rows, double* dq) {
  const int64_t item = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (item >= shape.batch * shape.num_heads * rows.count) return;
  const int64_t row = rows.first + item % rows.count * rows.step;
  const int64_t head = item / rows.count % shape.num_heads;
  const int64_t batch = item / rows.count / shape.num_heads;
  const int64_t kv_head = head / (shape.num_heads / shape.num_kv_heads);
  const bf16* q_row = RowOf(q, batch, row, head);
  const bf16* dout_row = RowOf(dout, batch, row, head);
  const Range range = VisibleKeys(shape, batch, row);
  double sum[kMaxDim] = {};
  for (int64_t j = range.begin; j < range.end; ++j) {
    const bf16* k_row = RowOf(k, batch, j, kv_head);
    const double p = exp(shape.softmax_scale * Dot(q_row, k_row, shape.head_dim) - lse[item]);
    const double dp = Dot(dout_row, RowOf(v, batch, j, kv_head), shape.head_dim);
    const double ds = Round<kRounding>(p * (dp - delta[item]));
    for (int64_t c = 0; c < shape.head_dim; ++c) {
      sum[c] += ds * static_cast<double>(__bfloat162float(k_row[c]));
    }
  }
  for (int64_t c = 0; c < shape.head_dim; ++c) {
    dq[item * shape.head_dim + c] = Round<kRounding>(shape.softmax_scale * sum[c]);
  }
}

// keys: rows of k; lse, delta: [batch, num_heads, q_len]. Queries outside [q_begin, q_end) must not
// see any of the keys.
template <bool kRounding>
__global__ void ReferenceDkDv(FlashAttentionShape shape, AttentionOperand q, AttentionOperand k,
                              AttentionOperand v, AttentionOperand dout, const double* lse,
                              const double* delta, RowSet keys, int64_t q_begin, int64_t q_end,
                              double* dk, double* dv) {
  const int64_t item = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (item >= shape.batch * shape.num_kv_heads * keys.count) return;
  const int64_t key = keys.first + item % keys.count * keys.step;
  const int64_t kv_head = item / keys.count % shape.num_kv_heads;
  const int64_t batch = item / keys.count / shape.num_kv_heads;
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  const bf16* k_row = RowOf(k, batch, key, kv_head);
  const bf16* v_row = RowOf(v, batch, key, kv_head);
  double dk_sum[kMaxDim] = {}, dv_sum[kMaxDim] = {};
  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    for (int64_t i = q_begin; i < q_end; ++i) {
      const Range range = VisibleKeys(shape, batch, i);
      if (key < range.begin || key >= range.end) continue;
      const bf16* q_row = RowOf(q, batch, i, head);
      const bf16* dout_row = RowOf(dout, batch, i, head);
      const int64_t index = (batch * shape.num_heads + head) * (q_end - q_begin) + i - q_begin;
      const double p = exp(shape.softmax_scale * Dot(q_row, k_row, shape.head_dim) - lse[index]);
      const double dp = Dot(dout_row, v_row, shape.head_dim);
      const double ds = Round<kRounding>(p * (dp - delta[index]));
      for (int64_t c = 0; c < shape.head_dim; ++c) {
        dv_sum[c] += Round<kRounding>(p) * static_cast<double>(__bfloat162float(dout_row[c]));
        dk_sum[c] += ds * static_cast<double>(__bfloat162float(q_row[c]));
      }
    }
  }
  for (int64_t c = 0; c < shape.head_dim; ++c) {
    dk[item * shape.head_dim + c] = Round<kRounding>(shape.softmax_scale * dk_sum[c]);
    dv[item * shape.head_dim + c] = Round<kRounding>(dv_sum[c]);
  }
}

// Computes delta = rowsum(dout * out) - dlse for the rows of a RowSet. `out` is in double, from
// ReferenceForward.
__global__ void ReferenceDelta(FlashAttentionShape shape, AttentionOperand dout, const double* out,
                               const float* dlse, RowSet rows, double* delta) {
  const int64_t item = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (item >= shape.batch * shape.num_heads * rows.count) return;
  const int64_t row = rows.first + item % rows.count * rows.step;
  const int64_t batch_head = item / rows.count;
  const bf16* dout_row =
      RowOf(dout, batch_head / shape.num_heads, row, batch_head % shape.num_heads);
  double sum = 0;
  for (int64_t c = 0; c < shape.head_dim; ++c) {
    sum += out[item * shape.head_dim + c] * static_cast<double>(__bfloat162float(dout_row[c]));
  }
  delta[item] =
      sum - (dlse == nullptr ? 0.0 : static_cast<double>(dlse[batch_head * shape.q_len + row]));
}

// Fills data with magnitude * randn, from a hash of (seed, index).
__global__ void FillRandn(bf16* data, int64_t size, float magnitude, uint32_t seed) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < size;
       i += stride) {
    uint64_t x = (static_cast<uint64_t>(seed) << 40) ^ static_cast<uint64_t>(i);
    const auto next = [&x] {  // SplitMix64
      uint64_t z = (x += 0x9E3779B97F4A7C15ull);
      z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
      z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
      return static_cast<uint32_t>((z ^ (z >> 31)) >> 32);
    };
    const float u = (next() + 1.0f) * 2.3283064e-10f, angle = next() * 2.3283064e-10f;
    data[i] = __float2bfloat16(magnitude * sqrtf(-2 * logf(fminf(u, 1.0f))) * cospif(2 * angle));
  }
}

}  // namespace sm90
}  // namespace burst
