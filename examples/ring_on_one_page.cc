#include "examples/ring_on_one_page.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "burst/base/status.h"

namespace burst {
namespace {

double Dot(const double* x, const double* y, int64_t n) {
  double sum = 0;
  for (int64_t c = 0; c < n; ++c) sum += x[c] * y[c];
  return sum;
}

// y += a x
void AddScaled(double a, const double* x, int64_t n, double* y) {
  for (int64_t c = 0; c < n; ++c) y[c] += a * x[c];
}

// ---- The ring.

// In round t a rank has the block that belongs to rank - t: blocks move on by one rank a round.
int Owner(const Communicator& comm, int t) {
  return (comm.rank() - t + comm.world_size()) % comm.world_size();
}

// Starts two transfers: `block` to the next rank, and the block of the previous rank, of `rows`
// rows, to *received. Neither may be touched until comm.Wait(channel).
absl::Status StartTransfers(const std::vector<Matrix>& block, int64_t rows, Channel channel,
                            Communicator& comm, std::vector<Matrix>* received) {
  const int next = (comm.rank() + 1) % comm.world_size();
  const int previous = (comm.rank() - 1 + comm.world_size()) % comm.world_size();
  std::vector<SendBuffer> sends;
  std::vector<ReceiveBuffer> receives;
  received->clear();
  for (const Matrix& matrix : block) {
    received->emplace_back(rows, matrix.cols);
    sends.push_back({matrix.data.data(), matrix.bytes(), next});
  }
  for (Matrix& matrix : *received) {
    receives.push_back({matrix.data.data(), matrix.bytes(), previous});
  }
  return comm.Post(channel, sends, receives);
}

// ---- The work of one round, on one block of queries and one block of keys.

// The forward, key by key. The attention over one key alone is (V_j, S_ij): its softmax is 1. Two
// attentions of a query over different keys, (O, lse) and (O', lse'), merge into
//
//   lse'' = log(e^lse + e^lse')       O'' = e^(lse - lse'') O + e^(lse' - lse'') O'
//
// That is why the blocks of keys may come one at a time, and in any order.
void Attend(const RingTokens& tokens, int query_rank, int key_rank, const Matrix& q,
            const Matrix& k, const Matrix& v, Matrix* out, Matrix* lse) {
  const int64_t d = q.cols;
  for (int64_t i = 0; i < q.rows; ++i) {
    for (int64_t j = 0; j < k.rows; ++j) {
      if (!tokens.sees(tokens.positions[query_rank][i], tokens.positions[key_rank][j])) continue;
      const double s = Dot(q[i], k[j], d) / std::sqrt(d);  // S_ij
      double& so_far = (*lse)[i][0];                       // lse_i; -inf: no key yet
      const double largest = std::max(so_far, s);          // subtracted, so that no e^x overflows
      const double merged = largest + std::log(std::exp(so_far - largest) + std::exp(s - largest));
      for (int64_t c = 0; c < d; ++c) {
        (*out)[i][c] = std::exp(so_far - merged) * (*out)[i][c] + std::exp(s - merged) * v[j][c];
      }
      so_far = merged;
    }
  }
}

// The backward. With P_ij = e^(S_ij - lse_i) and delta_i = dO_i . O_i:
//
//   dV_j += P_ij dO_i                  dS_ij = P_ij (dO_i . V_j - delta_i)
//   dQ_i += dS_ij K_j / sqrt(d)        dK_j += dS_ij Q_i / sqrt(d)
//
// lse_i covers all keys, so each pair (i, j) needs nothing of the others: these are plain sums.
void Differentiate(const RingTokens& tokens, int query_rank, int key_rank, const Matrix& q,
                   const Matrix& dout, const Matrix& lse, const Matrix& delta, const Matrix& k,
                   const Matrix& v, Matrix* dq, Matrix* dk, Matrix* dv) {
  const int64_t d = q.cols;
  const double scale = 1 / std::sqrt(d);
  for (int64_t i = 0; i < q.rows; ++i) {
    for (int64_t j = 0; j < k.rows; ++j) {
      if (!tokens.sees(tokens.positions[query_rank][i], tokens.positions[key_rank][j])) continue;
      const double p = std::exp(scale * Dot(q[i], k[j], d) - lse[i][0]);  // P_ij
      const double ds = p * (Dot(dout[i], v[j], d) - delta[i][0]);        // dS_ij
      AddScaled(p, dout[i], d, (*dv)[j]);
      AddScaled(scale * ds, k[j], d, (*dq)[i]);
      AddScaled(scale * ds, q[i], d, (*dk)[j]);
    }
  }
}

}  // namespace

// In the forward Q, O and lse stay, and K and V visit every rank.
absl::Status RingForward(const RingTokens& tokens, const Matrix& q, const Matrix& k,
                         const Matrix& v, Communicator& comm, Matrix* out, Matrix* lse) {
  *out = Matrix(q.rows, q.cols);
  *lse = Matrix(q.rows, 1, -std::numeric_limits<double>::infinity());
  std::vector<Matrix> block = {k, v}, next_block;
  for (int t = 0; t < comm.world_size(); ++t) {
    const bool last = t + 1 == comm.world_size();
    const int64_t next_rows = tokens.positions[Owner(comm, t + 1)].size();
    // The next block arrives while this one is computed.
    if (!last) {
      BURST_RETURN_IF_ERROR(StartTransfers(block, next_rows, Channel::kRead, comm, &next_block));
    }
    Attend(tokens, comm.rank(), Owner(comm, t), q, block[0], block[1], out, lse);
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
    std::swap(block, next_block);
  }
  return absl::OkStatus();
}

// In the backward K, V, dK and dV stay. Q, dO, lse and delta visit every rank, and dQ follows them.
// RingAttention (Liu et al., arXiv 2310.01889) sends K, V, dK and dV instead: 4 d numbers a token,
// not 3 d + 2.
absl::Status RingBackward(const RingTokens& tokens, const Matrix& q, const Matrix& k,
                          const Matrix& v, const Matrix& out, const Matrix& lse, const Matrix& dout,
                          Communicator& comm, Matrix* dq, Matrix* dk, Matrix* dv) {
  *dk = *dv = Matrix(k.rows, k.cols);
  Matrix delta(q.rows, 1);  // sent in place of O, which has d columns
  for (int64_t i = 0; i < q.rows; ++i) delta[i][0] = Dot(dout[i], out[i], q.cols);

  std::vector<Matrix> block = {q, dout, lse, delta}, next_block;
  std::vector<Matrix> block_dq = {Matrix(q.rows, q.cols)}, next_dq;
  for (int t = 0; t < comm.world_size(); ++t) {
    const bool last = t + 1 == comm.world_size();
    const int64_t next_rows = tokens.positions[Owner(comm, t + 1)].size();
    if (!last) {
      BURST_RETURN_IF_ERROR(StartTransfers(block, next_rows, Channel::kRead, comm, &next_block));
    }
    Differentiate(tokens, Owner(comm, t), comm.rank(), block[0], block[1], block[2], block[3], k, v,
                  &block_dq[0], dk, dv);
    // dQ now has this rank's part, too. Its last transfer returns it to its owner.
    BURST_RETURN_IF_ERROR(StartTransfers(block_dq, next_rows, Channel::kGradient, comm, &next_dq));
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kGradient));
    std::swap(block_dq, next_dq);
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
    std::swap(block, next_block);
  }
  *dq = block_dq[0];
  return absl::OkStatus();
}

}  // namespace burst
