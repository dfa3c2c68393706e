// Compares BurstAttention with the page that explains it (examples/ring_on_one_page.h). out, lse,
// dq, dk and dv of every head are equal to rounding in float64.

#include "examples/ring_on_one_page.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "burst/attention/burst_attention.h"
#include "burst/base/status.h"
#include "tests/attention/sequence_problem.h"
#include "tests/testing/attention_reference.h"

namespace burst {
namespace {

constexpr int64_t kHeads = 4, kKvHeads = 2, kHeadDim = 8;
constexpr NamedMask kPageMasks[] = {{"full", false, 0, false},
                                    {"causal", true, 0, false},
                                    {"window", true, 9, false},
                                    {"two-sided window", false, 9, false},
                                    {"packed", true, 0, true}};

// TakeHead returns the rows `positions` of one head in a global tensor [1, seqlen, heads,
// head_dim]. The next function adds such rows to it.
Matrix TakeHead(const Tensor& global, const std::vector<int32_t>& positions, int64_t head) {
  Matrix matrix(static_cast<int64_t>(positions.size()), global.dim(3));
  for (int64_t i = 0; i < matrix.rows; ++i) {
    const double* row = global.data<double>() + (positions[i] * global.dim(2) + head) * matrix.cols;
    std::copy_n(row, matrix.cols, matrix[i]);
  }
  return matrix;
}

void AddHead(const Matrix& matrix, const std::vector<int32_t>& positions, int64_t head,
             const Tensor& global) {
  for (int64_t i = 0; i < matrix.rows; ++i) {
    double* row = global.data<double>() + (positions[i] * global.dim(2) + head) * matrix.cols;
    for (int64_t c = 0; c < matrix.cols; ++c) row[c] += matrix[i][c];
  }
}

AttentionResults RunThePage(int ranks, Layout layout, const IntervalMask& mask,
                            const Inputs& inputs) {
  const int64_t seqlen = inputs.q.dim(1);
  const AttentionResults results = EmptyResults(inputs);
  for (const Tensor& tensor : {results.out, results.dq, results.dk, results.dv}) tensor.Fill(0);
  RingTokens tokens;
  for (int rank = 0; rank < ranks; ++rank) {
    tokens.positions.push_back(LocalPositions(layout, seqlen, rank, ranks));
  }
  tokens.sees = [&](int32_t q, int32_t k) { return Visible(mask, /*row=*/0, q, k); };
  const absl::Status status = RunRanks(ranks, [&](Communicator& comm) -> absl::Status {
    const std::vector<int32_t>& own = tokens.positions[comm.rank()];
    for (int64_t h = 0; h < kHeads; ++h) {
      const int64_t kv_head = h / (kHeads / kKvHeads);
      const Matrix q = TakeHead(inputs.q, own, h), dout = TakeHead(inputs.dout, own, h);
      const Matrix k = TakeHead(inputs.k, own, kv_head), v = TakeHead(inputs.v, own, kv_head);
      Matrix out, lse, dq, dk, dv;
      BURST_RETURN_IF_ERROR(RingForward(tokens, q, k, v, comm, &out, &lse));
      BURST_RETURN_IF_ERROR(RingBackward(tokens, q, k, v, out, lse, dout, comm, &dq, &dk, &dv));
      AddHead(out, own, h, results.out);
      AddHead(dq, own, h, results.dq);
      AddHead(dk, own, kv_head, results.dk);
      AddHead(dv, own, kv_head, results.dv);
      for (int64_t i = 0; i < lse.rows; ++i) {
        results.lse.data<double>()[h * seqlen + own[i]] = lse[i][0];
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  return results;
}

AttentionResults RunBurstAttention(int ranks, const BurstAttentionOptions& options,
                                   const IntervalMask& mask, const Inputs& inputs) {
  const AttentionResults results = EmptyResults(inputs);
  const absl::Status status = RunRanks(ranks, [&](Communicator& comm) -> absl::Status {
    BURST_ASSIGN_OR_RETURN(const auto attention, BurstAttention::Create(options, &comm));
    BURST_ASSIGN_OR_RETURN(const AttentionSchedule schedule,
                           attention->Schedule(inputs.q.dim(1), MaskOf(mask)));
    const std::vector<int32_t>& own = schedule.shard().local_positions();
    const AttentionCall call = {&schedule, TakeRows(inputs.q, own), TakeRows(inputs.k, own),
                                TakeRows(inputs.v, own)};
    AttentionResult result;
    BURST_RETURN_IF_ERROR(attention->Forward(call, &result));
    AttentionGradients gradients = {TakeRows(inputs.dout, own)};
    BURST_RETURN_IF_ERROR(attention->Backward(call, result, &gradients));
    PutRows(result.out, own, results.out);
    PutColumns(result.lse, own, results.lse);
    PutRows(gradients.dq, own, results.dq);
    PutRows(gradients.dk, own, results.dk);
    PutRows(gradients.dv, own, results.dv);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  return results;
}

TEST(RingOnOnePageTest, BurstAttentionComputesTheSame) {
  for (int64_t seqlen : {5, 61}) {
    const Inputs inputs =
        RandomInputs(/*batch=*/1, seqlen, kHeads, kKvHeads, kHeadDim, DType::kFloat64, seqlen);
    for (const NamedMask& named : kPageMasks) {
      const IntervalMask mask = named.Of(seqlen);
      for (int ranks : {1, 2, 3, 4, 8}) {
        for (Layout layout : kLayouts) {
          const AttentionResults page = RunThePage(ranks, layout, mask, inputs);
          for (BackwardDirection direction :
               {BackwardDirection::kBurst, BackwardDirection::kRing}) {
            SCOPED_TRACE(testing::Message()
                         << "seqlen " << seqlen << " " << named.name << " ranks " << ranks << " "
                         << Name(layout) << " " << Name(direction));
            BurstAttentionOptions options;
            options.layout = layout;
            options.backward = direction;
            ExpectClose(RunBurstAttention(ranks, options, mask, inputs), page, 1e-13);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace burst
