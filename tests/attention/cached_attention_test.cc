// Tests attention to cached keys and values, which ranks may share, against naive attention in
// double precision. The model's use of it is in tests/model/decode_test.cc.

#include "burst/attention/cached_attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "burst/base/status.h"
#include "burst/comm/communicator.h"
#include "burst/tensor/tensor.h"
#include "tests/attention/sequence_problem.h"
#include "tests/testing/attention_reference.h"
#include "tests/testing/test_device.h"

namespace burst {
namespace {

constexpr int64_t kTokens = 23, kNewest = 3, kOlder = kTokens - kNewest, kWindow = 7;

// Every rank has the older keys of its positions, and the last rank also has the newest ones.
absl::Status Attend(const Inputs& inputs, int64_t window, const Tensor& expected,
                    Communicator& comm) {
  const bool has_newest = comm.rank() + 1 == comm.world_size();
  std::vector<int32_t> older, own;
  for (int32_t position = 0; position < kTokens; ++position) {
    const bool is_newest = position >= kOlder;
    if (is_newest ? !has_newest : position % comm.world_size() != comm.rank()) continue;
    if (!is_newest) older.push_back(position);
    own.push_back(position);
  }
  const CachedAttention attention(older, has_newest, kOlder, kNewest, window, /*softcap=*/0,
                                  kTestDevice, &comm);
  const Tensor q = inputs.q.Slice(1, kOlder, kNewest).Contiguous().To(kTestDevice);
  BURST_ASSIGN_OR_RETURN(const Tensor out,
                         attention.Forward(q, TakeRows(inputs.k, own), TakeRows(inputs.v, own)));
  EXPECT_EQ(out.shape(), expected.shape());
  EXPECT_LE(RelativeError(out, expected), 1e-13) << "rank " << comm.rank();
  return absl::OkStatus();
}

// Values have the width of queries and keys, or another.
TEST(CachedAttentionTest, EqualsNaiveAttention) {
  for (const HeadWidths& widths : {HeadWidths(16), HeadWidths(24, 16), HeadWidths(8, 20)}) {
    const Inputs inputs = RandomInputs(2, kTokens, 4, 2, widths, DType::kFloat64, 3);
    for (const int64_t window : {int64_t{0}, kWindow}) {
      const IntervalMask mask = {/*causal=*/true, window};
      const Tensor expected =
          Reference(inputs, mask, 1 / std::sqrt(static_cast<double>(widths.head_dim)))
              .out.Slice(1, kOlder, kNewest)
              .Contiguous();
      for (const int ranks : {1, 2, 3}) {
        SCOPED_TRACE(testing::Message()
                     << ToString(widths) << " window " << window << " ranks " << ranks);
        const absl::Status status = RunTestRanks(
            ranks, [&](Communicator& comm) { return Attend(inputs, window, expected, comm); });
        EXPECT_TRUE(status.ok()) << status;
      }
    }
  }
}

TEST(CachedAttentionTest, RefusesWhatNoKernelServes) {
  const CachedAttention attention({}, true, 0, 1, 0, 0, kTestDevice, nullptr);
  const Tensor q = Tensor::Zeros({1, 1, 1, 8}, DType::kFloat32, kTestDevice);
  const Tensor v = Tensor::Zeros({1, 1, 1, 0}, DType::kFloat32, kTestDevice);
  const absl::Status status = attention.Forward(q, q, v).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("head_dim 8 and value_dim 0"), std::string::npos) << status;
}

}  // namespace
}  // namespace burst
