#include "examples/linear_attention.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "burst/base/status.h"

namespace burst {
namespace {

// phi and its derivative.
double Feature(double x) { return x > 0 ? x + 1 : std::exp(x); }
double FeatureSlope(double x) { return x > 0 ? 1 : std::exp(x); }

Matrix Features(const Matrix& x) {
  Matrix features = x;
  for (double& value : features.data) value = Feature(value);
  return features;
}

// [V, 1]
Matrix WithOnes(const Matrix& v) {
  Matrix wider(v.rows, v.cols + 1, 1);
  for (int64_t i = 0; i < v.rows; ++i) {
    for (int64_t c = 0; c < v.cols; ++c) wider[i][c] = v[i][c];
  }
  return wider;
}

// AddOuter computes S += x_i^T y_i, RowTimes x_i S. Row i of a matrix stands for a token.
void AddOuter(const double* x, const double* y, Matrix* s) {
  for (int64_t a = 0; a < s->rows; ++a) {
    for (int64_t c = 0; c < s->cols; ++c) (*s)[a][c] += x[a] * y[c];
  }
}

std::vector<double> RowTimes(const double* x, const Matrix& s) {
  std::vector<double> product(s.cols);
  for (int64_t a = 0; a < s.rows; ++a) {
    for (int64_t c = 0; c < s.cols; ++c) product[c] += x[a] * s[a][c];
  }
  return product;
}

std::vector<double> TimesColumn(const Matrix& s, const double* y) {
  std::vector<double> product(s.rows);
  for (int64_t a = 0; a < s.rows; ++a) {
    for (int64_t c = 0; c < s.cols; ++c) product[a] += s[a][c] * y[c];
  }
  return product;
}

Matrix SumOfOuters(const Matrix& x, const Matrix& y) {
  Matrix sum(x.cols, y.cols);
  for (int64_t i = 0; i < x.rows; ++i) AddOuter(x[i], y[i], &sum);
  return sum;
}

// ---- The ring of states.

// Returns the sum of `own` over all ranks before this one (step = 1) or after it (step = -1). Only
// the additions wait for each other: every rank has its own sum already.
absl::StatusOr<Matrix> SumOfRanksBefore(const Matrix& own, int step, Communicator& comm) {
  const int from = comm.rank() - step, to = comm.rank() + step;
  const auto is_rank = [&](int rank) { return rank >= 0 && rank < comm.world_size(); };
  Matrix before(own.rows, own.cols);
  if (is_rank(from)) {
    const ReceiveBuffer receive = {before.data.data(), before.bytes(), from};
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {}, {receive}));
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
  }
  if (is_rank(to)) {
    Matrix sum = before;
    for (size_t i = 0; i < sum.data.size(); ++i) sum.data[i] += own.data[i];
    const SendBuffer send = {sum.data.data(), sum.bytes(), to};
    BURST_RETURN_IF_ERROR(comm.Post(Channel::kRead, {send}, {}));
    BURST_RETURN_IF_ERROR(comm.Wait(Channel::kRead));
  }
  return before;
}

}  // namespace

absl::Status LinearAttentionForward(const Matrix& q, const Matrix& k, const Matrix& v,
                                    Communicator& comm, Matrix* out, LinearAttentionState* state) {
  const Matrix phi_q = Features(q), phi_k = Features(k), v1 = WithOnes(v);
  BURST_ASSIGN_OR_RETURN(state->before, SumOfRanksBefore(SumOfOuters(phi_k, v1), 1, comm));

  *out = Matrix(v.rows, v.cols);
  state->denominator = Matrix(v.rows, 1);
  Matrix s = state->before;  // S_i
  for (int64_t i = 0; i < q.rows; ++i) {
    AddOuter(phi_k[i], v1[i], &s);
    const std::vector<double> sums = RowTimes(phi_q[i], s);  // [N_i, D_i]
    for (int64_t c = 0; c < v.cols; ++c) (*out)[i][c] = sums[c] / sums[v.cols];
    state->denominator[i][0] = sums[v.cols];
  }
  return absl::OkStatus();
}

// With A_i = [N_i, D_i]:
//
//   dA_i = [dO_i, -dO_i . O_i] / D_i              dS_j = sum_{i >= j} phi(Q_i)^T dA_i
//   dphi(Q_i) = S_i dA_i^T                        dphi(K_j) = dS_j [V_j, 1]^T
//                                                 dV_j = phi(K_j) dS_j, without its last column
absl::Status LinearAttentionBackward(const Matrix& q, const Matrix& k, const Matrix& v,
                                     const Matrix& out, const LinearAttentionState& state,
                                     const Matrix& dout, Communicator& comm, Matrix* dq, Matrix* dk,
                                     Matrix* dv) {
  const Matrix phi_q = Features(q), phi_k = Features(k), v1 = WithOnes(v);
  Matrix da(v.rows, v.cols + 1);
  for (int64_t i = 0; i < v.rows; ++i) {
    for (int64_t c = 0; c < v.cols; ++c) {
      da[i][c] = dout[i][c] / state.denominator[i][0];
      da[i][v.cols] -= dout[i][c] * out[i][c] / state.denominator[i][0];
    }
  }
  BURST_ASSIGN_OR_RETURN(Matrix ds, SumOfRanksBefore(SumOfOuters(phi_q, da), -1, comm));

  *dq = Matrix(q.rows, q.cols);
  Matrix s = state.before;
  for (int64_t i = 0; i < q.rows; ++i) {
    AddOuter(phi_k[i], v1[i], &s);
    const std::vector<double> dphi = TimesColumn(s, da[i]);
    for (int64_t a = 0; a < q.cols; ++a) (*dq)[i][a] = dphi[a] * FeatureSlope(q[i][a]);
  }
  *dk = Matrix(k.rows, k.cols);
  *dv = Matrix(v.rows, v.cols);
  for (int64_t j = k.rows - 1; j >= 0; --j) {
    AddOuter(phi_q[j], da[j], &ds);
    const std::vector<double> dphi = TimesColumn(ds, v1[j]), dv1 = RowTimes(phi_k[j], ds);
    for (int64_t a = 0; a < k.cols; ++a) (*dk)[j][a] = dphi[a] * FeatureSlope(k[j][a]);
    for (int64_t c = 0; c < v.cols; ++c) (*dv)[j][c] = dv1[c];
  }
  return absl::OkStatus();
}

}  // namespace burst
