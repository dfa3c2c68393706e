// Compares linear attention over ranks (examples/linear_attention.h) with its definition, sums over
// all pairs of tokens in another order. Gradients are compared with central differences.
#include "examples/linear_attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "burst/base/philox.h"
#include "burst/base/status.h"
#include "burst/comm/thread/thread_communicator.h"
#include "burst/sequence/token_shard.h"

namespace burst {
namespace {

constexpr int64_t kHeadDim = 6;

Matrix RandomMatrix(int64_t rows, uint64_t stream) {
  Matrix matrix(rows, kHeadDim);
  for (size_t i = 0; i < matrix.data.size(); ++i) {
    const PhiloxCounter bits = Philox(/*key=*/3, stream, i);
    matrix.data[i] = NormalFromBits(bits[0], bits[1])[0];
  }
  return matrix;
}

struct Problem {
  explicit Problem(int64_t seqlen)
      : q(RandomMatrix(seqlen, 0)),
        k(RandomMatrix(seqlen, 1)),
        v(RandomMatrix(seqlen, 2)),
        dout(RandomMatrix(seqlen, 3)) {}
  Matrix q, k, v, dout;
};

struct Results {
  Matrix out, dq, dk, dv;
};

// O_i = sum_{j <= i} w_ij V_j / sum_{j <= i} w_ij with w_ij = phi(Q_i) . phi(K_j).
Matrix Naive(const Problem& p) {
  const auto phi = [](double x) { return x > 0 ? x + 1 : std::exp(x); };
  Matrix out(p.q.rows, kHeadDim);
  for (int64_t i = 0; i < p.q.rows; ++i) {
    double denominator = 0;
    for (int64_t j = 0; j <= i; ++j) {
      double weight = 0;
      for (int64_t a = 0; a < kHeadDim; ++a) weight += phi(p.q[i][a]) * phi(p.k[j][a]);
      denominator += weight;
      for (int64_t c = 0; c < kHeadDim; ++c) out[i][c] += weight * p.v[j][c];
    }
    for (int64_t c = 0; c < kHeadDim; ++c) out[i][c] /= denominator;
  }
  return out;
}

Results OverRanks(const Problem& p, int ranks, std::vector<int64_t>* bytes = nullptr) {
  const int64_t seqlen = p.q.rows;
  Results all = {Matrix(seqlen, kHeadDim), Matrix(seqlen, kHeadDim), Matrix(seqlen, kHeadDim),
                 Matrix(seqlen, kHeadDim)};
  if (bytes != nullptr) bytes->assign(ranks, 0);
  const absl::Status status = RunRanks(ranks, [&](Communicator& comm) -> absl::Status {
    const std::vector<int32_t> own =
        LocalPositions(Layout::kContiguous, seqlen, comm.rank(), ranks);
    const auto take = [&](const Matrix& whole) {
      Matrix part(static_cast<int64_t>(own.size()), kHeadDim);
      for (int64_t i = 0; i < part.rows; ++i) std::copy_n(whole[own[i]], kHeadDim, part[i]);
      return part;
    };
    const auto put = [&](const Matrix& part, Matrix* whole) {
      for (int64_t i = 0; i < part.rows; ++i) std::copy_n(part[i], kHeadDim, (*whole)[own[i]]);
    };
    const Matrix q = take(p.q), k = take(p.k), v = take(p.v), dout = take(p.dout);
    Results local;
    LinearAttentionState state;
    BURST_RETURN_IF_ERROR(LinearAttentionForward(q, k, v, comm, &local.out, &state));
    BURST_RETURN_IF_ERROR(LinearAttentionBackward(q, k, v, local.out, state, dout, comm, &local.dq,
                                                  &local.dk, &local.dv));
    put(local.out, &all.out);
    put(local.dq, &all.dq);
    put(local.dk, &all.dk);
    put(local.dv, &all.dv);
    if (bytes != nullptr) {
      (*bytes)[comm.rank()] = comm.stats().bytes_sent[static_cast<int>(Channel::kRead)];
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  return all;
}

double LargestDifference(const Matrix& a, const Matrix& b) {
  double difference = 0;
  for (size_t i = 0; i < a.data.size(); ++i) {
    difference = std::max(difference, std::fabs(a.data[i] - b.data[i]));
  }
  return difference;
}

// Outputs are means of V. Each takes some hundred additions of positive terms, with a relative
// error of 2^-53.
TEST(LinearAttentionTest, TheDefinition) {
  for (int64_t seqlen : {1, 5, 61, 200}) {
    const Problem problem(seqlen);
    const Matrix expected = Naive(problem);
    for (int ranks : {1, 2, 3, 4, 8}) {  // some of 8 ranks have none of 5 tokens
      EXPECT_LT(LargestDifference(OverRanks(problem, ranks).out, expected), 1e-12)
          << seqlen << " tokens, " << ranks << " ranks";
    }
  }
}

// The loss is sum(O * dO). The tolerance is the error of differences over 2e-5: 1e-10 relative to
// the curvature, and rounding, 1e-16 / 1e-5.
TEST(LinearAttentionTest, GradientsAreCentralDifferences) {
  constexpr double kStep = 1e-5;
  const int64_t seqlen = 23;
  const Problem problem(seqlen);
  const auto loss = [&](const Problem& p) {
    const Matrix out = Naive(p);
    return std::inner_product(out.data.begin(), out.data.end(), p.dout.data.begin(), 0.0);
  };
  for (int ranks : {1, 3, 8}) {
    const Results results = OverRanks(problem, ranks);
    const struct {
      Matrix Problem::*input;
      const Matrix& gradient;
      const char* name;
    } gradients[] = {{&Problem::q, results.dq, "dq"},
                     {&Problem::k, results.dk, "dk"},
                     {&Problem::v, results.dv, "dv"}};
    for (const auto& g : gradients) {
      for (size_t i = 0; i < g.gradient.data.size(); ++i) {
        Problem above = problem, below = problem;
        (above.*g.input).data[i] += kStep;
        (below.*g.input).data[i] -= kStep;
        EXPECT_NEAR(g.gradient.data[i], (loss(above) - loss(below)) / (2 * kStep), 1e-8)
            << g.name << " " << i << ", " << ranks << " ranks";
      }
    }
  }
}

// Each rank sends one message in each direction, except the last rank forward and the first rank
// back.
TEST(LinearAttentionTest, MessagesDoNotGrowWithTheSequence) {
  constexpr int kRanks = 4;
  constexpr int64_t kState = kHeadDim * (kHeadDim + 1) * sizeof(double);
  for (int64_t seqlen : {8, 200}) {
    std::vector<int64_t> bytes;
    OverRanks(Problem(seqlen), kRanks, &bytes);
    EXPECT_EQ(bytes, (std::vector<int64_t>{kState, 2 * kState, 2 * kState, kState}));
  }
}

}  // namespace
}  // namespace burst
