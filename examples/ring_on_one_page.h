// BurstAttention on one page: what burst/attention computes, in plain loops. Start reading here.
//
// The method is from Sun et al., "BurstAttention" (arXiv 2403.09347). G ranks share n tokens. Each
// rank has the rows of Q, K, V of its own tokens and computes the same rows of
//
//   S = Q K^T / sqrt(d), masked
//   lse_i = log sum_j exp(S_ij)
//   O_i = sum_j exp(S_ij - lse_i) V_j
//
// although it never has all of K and V. The ranks form a ring: each sends to the next one
// and receives from the one before it. After G rounds every block has visited every rank.
//
// The code is for one sequence and one head in float64 on the CPU.
// //tests/attention:ring_on_one_page_test compares burst/attention with it.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "burst/comm/communicator.h"

namespace burst {

// A matrix of doubles, stored by rows. matrix[i] is row i.
struct Matrix {
  Matrix() = default;
  Matrix(int64_t rows, int64_t cols, double value = 0)
      : rows(rows), cols(cols), data(rows * cols, value) {}
  double* operator[](int64_t row) { return data.data() + row * cols; }
  const double* operator[](int64_t row) const { return data.data() + row * cols; }
  int64_t bytes() const { return rows * cols * static_cast<int64_t>(sizeof(double)); }

  int64_t rows = 0, cols = 0;
  std::vector<double> data;
};

// Says where the tokens are and which of them see each other. It is equal on all ranks.
struct RingTokens {
  std::vector<std::vector<int32_t>> positions;     // by rank: global positions of its tokens
  std::function<bool(int32_t q, int32_t k)> sees;  // causal: k <= q
};

// Computes attention of this rank's n tokens: q, k, v and out are [n, d], lse is [n, 1]. Assigns
// out and lse.
absl::Status RingForward(const RingTokens& tokens, const Matrix& q, const Matrix& k,
                         const Matrix& v, Communicator& comm, Matrix* out, Matrix* lse);

// Computes the gradients of a loss from dout = d loss / d out, shaped like out. Assigns dq, dk and
// dv, shaped like q, k and v.
absl::Status RingBackward(const RingTokens& tokens, const Matrix& q, const Matrix& k,
                          const Matrix& v, const Matrix& out, const Matrix& lse, const Matrix& dout,
                          Communicator& comm, Matrix* dq, Matrix* dk, Matrix* dv);

}  // namespace burst
