// Computes linear attention over one rank and over four (threads of this process). Prints that the
// results agree, and the bytes that ranks send compared with a ring of keys.
//
//   bazel run //examples:linear_attention

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "burst/base/status.h"
#include "burst/comm/thread/thread_communicator.h"
#include "burst/sequence/token_shard.h"
#include "examples/linear_attention.h"
#include "examples/random_rows.h"

namespace {

using namespace burst;  // NOLINT: an example reads better without prefixes

constexpr int64_t kHeadDim = 16;

// *dk holds all tokens, and each rank writes its rows. *bytes is the most that a rank sent in
// forward and backward.
absl::Status Run(int ranks, int64_t seqlen, Matrix* dk, int64_t* bytes) {
  *dk = Matrix(seqlen, kHeadDim);
  std::vector<int64_t> sent(ranks);
  BURST_RETURN_IF_ERROR(RunRanks(ranks, [&](Communicator& comm) -> absl::Status {
    const std::vector<int32_t> own =
        LocalPositions(Layout::kContiguous, seqlen, comm.rank(), ranks);
    const Matrix q = RandomRows(0, own, kHeadDim), k = RandomRows(1, own, kHeadDim),
                 v = RandomRows(2, own, kHeadDim);
    Matrix out, dq, own_dk, dv;
    LinearAttentionState state;
    BURST_RETURN_IF_ERROR(LinearAttentionForward(q, k, v, comm, &out, &state));
    BURST_RETURN_IF_ERROR(  // the loss is sum(out^2) / 2
        LinearAttentionBackward(q, k, v, out, state, /*dout=*/out, comm, &dq, &own_dk, &dv));
    for (int64_t i = 0; i < own_dk.rows; ++i) std::copy_n(own_dk[i], kHeadDim, (*dk)[own[i]]);
    sent[comm.rank()] = comm.stats().bytes_sent[static_cast<int>(Channel::kRead)];
    return absl::OkStatus();
  }));
  *bytes = *std::max_element(sent.begin(), sent.end());
  return absl::OkStatus();
}

absl::Status Compare() {
  constexpr int kRanks = 4;
  std::printf("%8s %22s %16s %22s\n", "tokens", "dK, four against one", "bytes a rank",
              "a ring of keys sends");
  for (int64_t seqlen : {256, 1024, 4096}) {
    Matrix one, four;
    int64_t none = 0, bytes = 0;
    BURST_RETURN_IF_ERROR(Run(1, seqlen, &one, &none));
    BURST_RETURN_IF_ERROR(Run(kRanks, seqlen, &four, &bytes));
    double difference = 0;
    for (size_t i = 0; i < one.data.size(); ++i) {
      difference = std::max(difference, std::fabs(one.data[i] - four.data[i]));
    }
    // A ring of keys sends K and V forward, and Q, dO, lse, delta and dQ backward
    // (examples/ring_on_one_page.h).
    const int64_t ring =
        seqlen / kRanks * sizeof(double) * ((kRanks - 1) * (4 * kHeadDim + 2) + kRanks * kHeadDim);
    std::printf("%8lld %22.1e %16lld %22lld\n", static_cast<long long>(seqlen), difference,
                static_cast<long long>(bytes), static_cast<long long>(ring));
  }
  return absl::OkStatus();
}

}  // namespace

int main() {
  const absl::Status status = Compare();
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
