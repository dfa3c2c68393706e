// Runs the page for one sequence over four ranks (threads of this process), and over one rank.
//
//   bazel run //examples:ring_on_one_page

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "burst/base/status.h"
#include "burst/comm/thread/thread_communicator.h"
#include "burst/sequence/token_shard.h"
#include "examples/random_rows.h"
#include "examples/ring_on_one_page.h"

namespace {

using namespace burst;  // NOLINT: an example reads better without prefixes

constexpr int64_t kSeqlen = 256, kHeadDim = 16;

// Computes attention over `ranks` ranks. *dq holds all tokens, and each rank writes its rows.
absl::Status Run(int ranks, Matrix* dq) {
  *dq = Matrix(kSeqlen, kHeadDim);
  RingTokens tokens;
  for (int rank = 0; rank < ranks; ++rank) {
    tokens.positions.push_back(LocalPositions(Layout::kZigzag, kSeqlen, rank, ranks));
  }
  tokens.sees = [](int32_t q, int32_t k) { return k <= q; };  // causal
  return RunRanks(ranks, [&](Communicator& comm) -> absl::Status {
    const std::vector<int32_t>& own = tokens.positions[comm.rank()];
    const Matrix q = RandomRows(0, own, kHeadDim), k = RandomRows(1, own, kHeadDim),
                 v = RandomRows(2, own, kHeadDim);
    Matrix out, lse, own_dq, dk, dv;
    BURST_RETURN_IF_ERROR(RingForward(tokens, q, k, v, comm, &out, &lse));
    BURST_RETURN_IF_ERROR(  // the loss is sum(out^2) / 2
        RingBackward(tokens, q, k, v, out, lse, /*dout=*/out, comm, &own_dq, &dk, &dv));
    for (int64_t i = 0; i < own_dq.rows; ++i) std::copy_n(own_dq[i], kHeadDim, (*dq)[own[i]]);
    return absl::OkStatus();
  });
}

absl::Status Compare() {
  Matrix one, four;
  BURST_RETURN_IF_ERROR(Run(1, &one));
  BURST_RETURN_IF_ERROR(Run(4, &four));
  double difference = 0;
  for (size_t i = 0; i < one.data.size(); ++i) {
    difference = std::max(difference, std::fabs(one.data[i] - four.data[i]));
  }
  std::printf("dQ of %lld tokens, four ranks against one: largest difference %.1e\n",
              static_cast<long long>(kSeqlen), difference);
  return absl::OkStatus();
}

}  // namespace

int main() {
  const absl::Status status = Compare();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
