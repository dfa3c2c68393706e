// Runs the Hopper attention kernels on a Problem and compares their results with double precision.
// Everything else here uses the default stream, for which the kernels' stream does not wait. Hence
// the synchronizations.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "burst/kernels/flash_attention.h"
#include "burst/kernels/gpu/flash_attention_gpu.h"
#include "tests/kernels/order.h"
#include "tests/kernels/sm90_attention_problem.cuh"
#include "tests/kernels/sm90_attention_reference.cuh"

namespace burst {
namespace sm90 {

inline const AttentionKernels& Kernels() { return *cuda::GpuKernels(cuda::KernelFamily::kSm90); }

template <class T>
std::vector<double> ToDouble(const Buffer<T>& buffer) {
  std::vector<double> values;
  values.reserve(buffer.size());
  for (T x : buffer.ToHost()) values.push_back(static_cast<double>(static_cast<float>(x)));
  return values;
}

// Transposes [batch, length, heads, dim] to [batch, heads, length, dim], as in the reference.
inline std::vector<double> HeadsFirst(const std::vector<double>& x,
                                      const FlashAttentionShape& shape, int64_t length,
                                      int64_t heads) {
  std::vector<double> y(x.size());
  for (int64_t b = 0; b < shape.batch; ++b) {
    for (int64_t i = 0; i < length; ++i) {
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t c = 0; c < shape.head_dim; ++c) {
          y[((b * heads + h) * length + i) * shape.head_dim + c] =
              x[((b * length + i) * heads + h) * shape.head_dim + c];
        }
      }
    }
  }
  return y;
}

inline double MaxAbs(const std::vector<double>& x) {
  double top = 0;
  for (double value : x) {
    if (std::isfinite(value)) top = std::max(top, std::abs(value));
  }
  return top;
}

inline double MaxError(const std::vector<double>& x, const std::vector<double>& truth) {
  double error = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    if (x[i] == truth[i]) continue;  // also both -inf
    const double e = std::abs(x[i] - truth[i]);
    if (!(e < std::numeric_limits<double>::infinity())) return e;  // inf or nan
    error = std::max(error, e);
  }
  return error;
}

// Allows at most twice the error of the naive run with the same roundings, plus a rounding of the
// largest value. Where the naive run happens to be exact, the kernel may still round. With a single
// key, dS is the difference of two equal dot products of about 9, of 128 terms or head_dim. The
// last term is their remainder in fp32, times a key of at most 12 and the scale.
inline void ExpectClose(const char* name, int64_t head_dim, const std::vector<double>& ours,
                        const std::vector<double>& naive, const std::vector<double>& truth) {
  ASSERT_EQ(ours.size(), truth.size());
  const double terms = static_cast<double>(std::max<int64_t>(head_dim, 128));
  const double bound =
      2 * MaxError(naive, truth) + MaxAbs(truth) * 0x1p-8 + terms * 0x1p-24 * 9 * 12;
  EXPECT_LE(MaxError(ours, truth), bound) << name;
  EXPECT_TRUE(std::isfinite(MaxError(ours, truth))) << name;
}

// Statistics are fp32, of exact products of bf16: a few roundings of the largest exponent.
inline void ExpectLseClose(const std::vector<double>& ours, const std::vector<double>& truth) {
  EXPECT_LE(MaxError(ours, truth), 1e-6 * MaxAbs(truth) + 1e-5);
}

struct Results {
  std::vector<double> out, lse, dq, dk, dv;
};

template <bool kRounding>
Results Reference(const Problem& p, const float* dlse) {
  const FlashAttentionShape& shape = p.shape;
  const int64_t rows = shape.batch * shape.num_heads * shape.q_len;
  const int64_t keys = shape.batch * shape.num_kv_heads * shape.k_len;
  Buffer<double> out(p.QSize()), lse(rows), delta(rows), dq(p.QSize()), dk(p.KSize()),
      dv(p.KSize());
  const RowSet all_rows{0, 1, shape.q_len}, all_keys{0, 1, shape.k_len};
  ReferenceForward<kRounding>
      <<<Grid(rows), 64>>>(shape, p.q, p.k, p.v, all_rows, out.data(), lse.data());
  ReferenceDelta<<<Grid(rows), 64>>>(shape, p.dout, out.data(), dlse, all_rows, delta.data());
  ReferenceDq<kRounding><<<Grid(rows), 64>>>(shape, p.q, p.k, p.v, p.dout, lse.data(), delta.data(),
                                             all_rows, dq.data());
  ReferenceDkDv<kRounding><<<Grid(keys), 64>>>(shape, p.q, p.k, p.v, p.dout, lse.data(),
                                               delta.data(), all_keys, 0, shape.q_len, dk.data(),
                                               dv.data());
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  return {out.ToHost(), lse.ToHost(), dq.ToHost(), dk.ToHost(), dv.ToHost()};
}

inline FlashForwardParams ForwardParams(const Problem& p, void* out) {
  FlashForwardParams params;
  params.shape = p.shape;
  params.q = p.q;
  params.k = p.k;
  params.v = p.v;
  params.out = p.LikeQ(out);
  params.lse = p.lse.data();
  params.out_dtype = DType::kBFloat16;
  return params;
}

inline FlashBackwardParams BackwardParams(const Problem& p, void* dq, void* dk, void* dv) {
  FlashBackwardParams params;
  params.shape = p.shape;
  params.q = p.q;
  params.k = p.k;
  params.v = p.v;
  params.dout = p.dout;
  params.lse = p.lse.data();
  params.delta = p.delta.data();
  params.dq = Assigns(p.LikeQ(dq));
  params.dk = Assigns(p.LikeK(dk));
  params.dv = Assigns(p.LikeK(dv));
  return params;
}

// Runs forward, delta and backward; every output is poisoned before.
inline Results RunBf16(Problem& p, const float* dlse, bool deterministic) {
  Buffer<bf16> out(p.QSize()), dq(p.QSize()), dk(p.KSize()), dv(p.KSize());
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const FlashAttentionShape& shape = p.shape;
  Kernels().Forward(ForwardParams(p, out.data()));
  Kernels().Delta({shape, p.LikeQ(out.data()), p.dout, dlse, p.delta.data()});
  FlashBackwardParams backward = BackwardParams(p, dq.data(), dk.data(), dv.data());
  SetOrder(deterministic, &backward);
  Kernels().Backward(backward);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  return {HeadsFirst(ToDouble(out), shape, shape.q_len, shape.num_heads), ToDouble(p.lse),
          HeadsFirst(ToDouble(dq), shape, shape.q_len, shape.num_heads),
          HeadsFirst(ToDouble(dk), shape, shape.k_len, shape.num_kv_heads),
          HeadsFirst(ToDouble(dv), shape, shape.k_len, shape.num_kv_heads)};
}

inline void ExpectAllClose(int64_t head_dim, const Results& ours, const Results& naive,
                           const Results& truth) {
  ExpectClose("out", head_dim, ours.out, naive.out, truth.out);
  ExpectLseClose(ours.lse, truth.lse);
  ExpectClose("dq", head_dim, ours.dq, naive.dq, truth.dq);
  ExpectClose("dk", head_dim, ours.dk, naive.dk, truth.dk);
  ExpectClose("dv", head_dim, ours.dv, naive.dv, truth.dv);
}

inline void Check(Problem p, bool deterministic = false) {
  const FlashAttentionShape& s = p.shape;
  SCOPED_TRACE("batch " + std::to_string(s.batch) + " q " + std::to_string(s.q_len) + " k " +
               std::to_string(s.k_len) + " heads " + std::to_string(s.num_heads) + "/" +
               std::to_string(s.num_kv_heads) + " dim " + std::to_string(s.head_dim));
  ExpectAllClose(s.head_dim, RunBf16(p, nullptr, deterministic), Reference<true>(p, nullptr),
                 Reference<false>(p, nullptr));
}

}  // namespace sm90
}  // namespace burst
