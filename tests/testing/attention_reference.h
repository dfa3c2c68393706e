// Computes naive attention in double precision, with which every attention test compares. It shares
// nothing with the kernels: no tiles, no online softmax, the scores of a whole row at once.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "burst/tensor/tensor.h"

namespace burst {

// The changes of scores and weights (burst/kernels/scores.h), written in another way.
struct NaiveScores {
  double softcap = 0;
  // The number added to the score of query i and key j of head h, and the factor of its weight.
  std::function<double(int64_t h, int64_t i, int64_t j)> bias = nullptr;
  std::function<double(int64_t b, int64_t h, int64_t i, int64_t j)> weight = nullptr;
  // The logit of each head's sink: a key whose value is zero, which every query sees. Empty: no
  // sinks.
  std::vector<double> sinks = {};
  // If not null, dsinks becomes the gradient of each head's sink. If it is given, dsinks_terms
  // becomes the sum of the gradient's terms by absolute value: dlse, and products of dout and out.
  std::vector<double>* dsinks = nullptr;
  std::vector<double>* dsinks_terms = nullptr;
  // If not null, it becomes the largest score of every batch row and head.
  std::vector<double>* max_logits = nullptr;
};

// The results of an attention's forward and backward.
struct AttentionResults {
  Tensor out;         // like dout
  Tensor lse;         // [batch, heads, q_len]; -inf where a query sees nothing
  Tensor dq, dk, dv;  // like q, k, v
};

// Shapes: q [batch, q_len, heads, head_dim], k [batch, k_len, kv_heads, head_dim]. v and dout are
// like k and q with value_dim columns. The gradient dlse is [batch, heads, q_len]. Any floating
// dtype and device.
// visible(b, i, j): query i of batch row b sees key j.
//
//    S = softmax_scale Q K^T;  lse = log sum exp S;  P = exp(S - lse);  O = P V
//    dS = P * (dO V^T - rowsum(dO * O) + dlse);  dQ = softmax_scale dS K
//    dK = softmax_scale dS^T Q;  dV = P^T dO
//
// Results are float64 and on the CPU. With dtype = bfloat16 or float16 each value (S, P, O, dP, dS,
// dQ, dK, dV) is rounded, but sums stay exact. Its error bounds a kernel's error.
AttentionResults NaiveAttention(const Tensor& q, const Tensor& k, const Tensor& v,
                                const Tensor& dout, const Tensor& dlse, double softmax_scale,
                                const std::function<bool(int64_t b, int64_t i, int64_t j)>& visible,
                                DType dtype = DType::kFloat64, const NaiveScores& scores = {});

// Returns scale * standard normal numbers, drawn by Philox from (seed, stream, element).
Tensor RandomNormal(const Shape& shape, DType dtype, uint64_t seed, uint64_t stream,
                    double scale = 1);

// Returns max |actual - expected| / max |expected|, absolute where expected is all zero. Infinity
// where one is not finite and the other differs (NaN never matches). Empty tensors give 0.
double RelativeError(const Tensor& actual, const Tensor& expected);

// Fails the test unless the RelativeError of every result is at most `tolerance`.
void ExpectClose(const AttentionResults& actual, const AttentionResults& expected,
                 double tolerance);

void ExpectBitwiseEqual(const AttentionResults& a, const AttentionResults& b);

}  // namespace burst
