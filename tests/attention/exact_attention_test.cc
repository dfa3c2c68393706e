// Tests ExactAttention on ranks, on the device. It equals naive attention in double precision, and
// has the same bits on any number of ranks, in every layout.
#include "burst/attention/exact_attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "burst/attention/burst_attention.h"
#include "burst/base/status.h"
#include "burst/comm/communicator.h"
#include "tests/attention/sequence_problem.h"
#include "tests/testing/attention_reference.h"
#include "tests/testing/test_device.h"

namespace burst {
namespace {

constexpr int64_t kBatch = 2, kSeqlen = 192, kChunk = 16, kHeads = 4, kKvHeads = 2;

Inputs InputsOf(int64_t batch, int64_t head_dim, DType dtype, uint64_t seed) {
  const Inputs drawn = RandomInputs(batch, kSeqlen, kHeads, kKvHeads, head_dim,
                                    Is16Bit(dtype) ? DType::kFloat32 : dtype, seed);
  return {drawn.q.To(dtype), drawn.k.To(dtype), drawn.v.To(dtype), drawn.dout.To(dtype),
          drawn.dlse};
}

// The inputs' gradients are sums of numbers near 1. dK and dV are sums of about a hundred of them.
ExactAttentionOptions Options(int64_t chunk, int64_t seqlen) {
  ExactAttentionOptions options;
  options.chunk = chunk;
  options.grid = ExactGrid::For(0x1p-34, seqlen / chunk);
  return options;
}

AttentionResults Attend(const Inputs& inputs, ExactAttentionOptions options, Layout layout,
                        int ranks, const IntervalMask& mask) {
  options.layout = layout;
  // 16-bit tensors are compared in float32.
  const DType results_dtype = SumDType(inputs.q.dtype());
  const auto widened = [=](const Tensor& tensor) { return tensor.To(results_dtype); };
  const AttentionResults results =
      EmptyResults({widened(inputs.q), widened(inputs.k), widened(inputs.v), widened(inputs.dout),
                    widened(inputs.dlse)});
  const absl::Status status = RunTestRanks(ranks, [&](Communicator& comm) -> absl::Status {
    BURST_ASSIGN_OR_RETURN(const auto attention, ExactAttention::Create(options, &comm));
    BURST_ASSIGN_OR_RETURN(const AttentionSchedule schedule,
                           attention->Schedule(inputs.q.dim(1), MaskOf(mask)));
    return AttendOnRank(*attention, schedule, inputs, results);
  });
  EXPECT_TRUE(status.ok()) << status;
  return results;
}

// Packed masks have two rows with different documents.
IntervalMask TwoRows(const NamedMask& named, int64_t seqlen) {
  IntervalMask mask = named.Of(seqlen);
  if (named.packed) mask.documents.push_back({0, 1, static_cast<int32_t>(seqlen / 2)});
  return mask;
}

class ExactAttentionTest : public testing::TestWithParam<NamedMask> {};
INSTANTIATE_TEST_SUITE_P(Masks, ExactAttentionTest, testing::ValuesIn(kMasks),
                         [](const auto& info) { return std::string(info.param.name); });

// Heads are grouped. Each of 12 chunks rounds its part of dK and dV by 2^-35, where gradients are
// near 1.
TEST_P(ExactAttentionTest, IsAttentionInDouble) {
  const int64_t head_dim = 8;
  const Inputs inputs = InputsOf(kBatch, head_dim, DType::kFloat64, 1);
  const IntervalMask mask = TwoRows(GetParam(), kSeqlen);
  const AttentionResults expected =
      Reference(inputs, mask, 1 / std::sqrt(static_cast<double>(head_dim)));
  for (const int ranks : {1, 3}) {
    const AttentionResults actual =
        Attend(inputs, Options(kChunk, kSeqlen), Layout::kZigzag, ranks, mask);
    ExpectClose({actual.out, actual.lse, actual.dq, expected.dk, expected.dv}, expected, 1e-12);
    ExpectClose(actual, expected, kSeqlen / kChunk * 0x1p-35);
  }
}

// Some cases have more ranks than chunks.
TEST_P(ExactAttentionTest, HasTheSameBitsOnAnyRanks) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const int64_t head_dim = kTestDevice == DeviceType::kCuda ? 64 : 20;
    const Inputs inputs = InputsOf(kBatch, head_dim, dtype, 2);
    const IntervalMask mask = TwoRows(GetParam(), kSeqlen);
    const ExactAttentionOptions options = Options(kChunk, kSeqlen);
    const AttentionResults one = Attend(inputs, options, Layout::kContiguous, 1, mask);
    for (const int ranks : {2, 3, 4, 8, 13}) {
      for (const Layout layout : kLayouts) {
        SCOPED_TRACE(absl::StrCat(Name(dtype), ", ", ranks, " ranks, ", Name(layout)));
        ExpectBitwiseEqual(Attend(inputs, options, layout, ranks, mask), one);
      }
    }
  }
}

// A row's results do not depend on the other rows, which data parallel ranks need.
TEST_P(ExactAttentionTest, HasTheSameBitsInAnyBatch) {
  const DType dtype = kTestDevice == DeviceType::kCuda ? DType::kBFloat16 : DType::kFloat32;
  const int64_t head_dim = kTestDevice == DeviceType::kCuda ? 128 : 20;
  const Inputs inputs = InputsOf(kBatch, head_dim, dtype, 3);
  const IntervalMask mask = TwoRows(GetParam(), kSeqlen);
  const ExactAttentionOptions options = Options(kChunk, kSeqlen);
  const AttentionResults both = Attend(inputs, options, Layout::kZigzag, 2, mask);
  for (int64_t row = 0; row < kBatch; ++row) {
    const auto of_row = [row](const Tensor& all) { return all.Slice(0, row, 1).Contiguous(); };
    const Inputs alone = {of_row(inputs.q), of_row(inputs.k), of_row(inputs.v), of_row(inputs.dout),
                          of_row(inputs.dlse)};
    IntervalMask own = mask;
    if (!mask.documents.empty()) own.documents = {mask.documents[row]};
    ExpectBitwiseEqual(
        Attend(alone, options, Layout::kStriped, 3, own),
        {of_row(both.out), of_row(both.lse), of_row(both.dq), of_row(both.dk), of_row(both.dv)});
  }
}

// The document of NaN begins and ends within chunks. On a GPU in 16 bits the kernels compute rows
// near NaN in another way, so P and dS round otherwise: by u relative to sums of magnitudes.
TEST(ExactAttentionDocuments, NaNStaysInItsDocument) {
  constexpr int64_t kBegin = 70, kEnd = 121;
  const bool gpu = kTestDevice == DeviceType::kCuda;
  const double tolerance = gpu ? 8 * 0x1p-9 : 0;
  const Inputs clean = InputsOf(1, gpu ? 64 : 20, gpu ? DType::kBFloat16 : DType::kFloat32, 6);
  const IntervalMask mask = {/*causal=*/true, 0, {{0, kBegin, kEnd}}};
  const ExactAttentionOptions options = Options(kChunk, kSeqlen);
  const AttentionResults expected = Attend(clean, options, Layout::kZigzag, 2, mask);
  const auto expect_near = [&](const Tensor& actual, const Tensor& expected, int axis) {
    for (const auto& [begin, end] : {std::pair(int64_t{0}, kBegin), std::pair(kEnd, kSeqlen)}) {
      const auto values = [&](const Tensor& t) {
        return t.Slice(axis, begin, end - begin)
            .Contiguous()
            .To(DType::kFloat64)
            .ToVector<double>();
      };
      const std::vector<double> a = values(actual), e = values(expected);
      for (size_t i = 0; i < a.size(); ++i) {
        ASSERT_LE(std::abs(a[i] - e[i]), tolerance * std::max(1.0, std::abs(e[i]))) << i;
      }
    }
  };
  for (Tensor Inputs::*which : {&Inputs::q, &Inputs::k, &Inputs::v, &Inputs::dout}) {
    Inputs inputs = clean;
    inputs.*which = (clean.*which).Clone();
    const Tensor bad = (inputs.*which).Slice(1, kBegin, kEnd - kBegin);
    const Tensor nan = Tensor::Empty(bad.shape(), DType::kFloat32);
    nan.Fill(std::nan(""));
    bad.CopyFrom(nan.To(clean.q.dtype()));
    const AttentionResults actual = Attend(inputs, options, Layout::kZigzag, 2, mask);
    expect_near(actual.out, expected.out, 1);
    expect_near(actual.lse, expected.lse, 2);
    expect_near(actual.dq, expected.dq, 1);
    expect_near(actual.dk, expected.dk, 1);
    expect_near(actual.dv, expected.dv, 1);
  }
}

// Chunks hold whole sequences: two of three, and one.
TEST_P(ExactAttentionTest, TakesSeveralSequencesAtATime) {
  const Inputs inputs = InputsOf(3, 8, DType::kFloat64, 5);
  IntervalMask mask = TwoRows(GetParam(), kSeqlen);
  if (GetParam().packed) mask.documents.push_back({0, 100});
  ExactAttentionOptions options = Options(kSeqlen, kSeqlen);
  const AttentionResults expected = Reference(inputs, mask, 1 / std::sqrt(8.0));
  const AttentionResults one = Attend(inputs, options, Layout::kZigzag, 1, mask);
  ExpectClose(one, expected, 1e-10);
  options.rows = 2;
  ExpectClose(Attend(inputs, options, Layout::kZigzag, 1, mask), expected, 1e-10);
  // One rank has all tokens, and the others have none.
  ExpectBitwiseEqual(Attend(inputs, options, Layout::kZigzag, 3, mask),
                     Attend(inputs, options, Layout::kZigzag, 1, mask));
}

TEST(ExactAttentionErrors, AreClear) {
  const auto contains = [](const absl::Status& status, const char* text) {
    return absl::StrContains(status.message(), text);
  };
  ExactAttentionOptions options = Options(16, 64);
  options.chunk = 0;
  EXPECT_TRUE(contains(ExactAttention::Create(options, nullptr).status(), "chunk of 0"));
  options.chunk = 16;
  const auto attention = *ExactAttention::Create(options, nullptr);
  EXPECT_TRUE(contains(attention->Schedule(40, Mask::Causal()).status(),
                       "chunks of 16 tokens do not divide 40"));
  const std::vector<std::vector<int32_t>> eight = {{0, 1, 2, 3, 4, 5, 6, 7}};
  EXPECT_TRUE(contains(attention->Schedule(eight, Mask::Causal()).status(), "whole chunks"));
  EXPECT_EQ(attention->Schedule(64, Mask::Slices({{}})).status().code(),
            absl::StatusCode::kUnimplemented);
  EXPECT_EQ(attention->Schedule(Sequences::Cross(64, 32), Mask::Full()).status().code(),
            absl::StatusCode::kUnimplemented);
  // A schedule of one kind of attention is not for the other.
  const auto ring = *BurstAttention::Create({}, nullptr);
  const Inputs inputs = RandomInputs(1, 32, 2, 2, 8, DType::kFloat32, 4);
  const auto forward = [&](SequenceParallelAttention& of, const AttentionSchedule& schedule) {
    AttentionResult result;
    const auto on_device = [](const Tensor& t) { return t.To(kTestDevice); };
    return of.Forward({&schedule, on_device(inputs.q), on_device(inputs.k), on_device(inputs.v)},
                      &result);
  };
  EXPECT_TRUE(
      contains(forward(*attention, *ring->Schedule(32, Mask::Causal())), "another attention"));
  EXPECT_TRUE(
      contains(forward(*ring, *attention->Schedule(32, Mask::Causal())), "must be of a ring"));
  EXPECT_TRUE(contains(forward(*attention, *attention->Schedule(48, Mask::Causal())), "48 tokens"));
  const Tensor wide_v = RandomInputs(1, 32, 2, 2, {8, 12}, DType::kFloat32, 4).v;
  AttentionResult result;
  const AttentionSchedule schedule = *attention->Schedule(32, Mask::Causal());
  EXPECT_TRUE(contains(attention->Forward({&schedule, inputs.q.To(kTestDevice),
                                           inputs.k.To(kTestDevice), wide_v.To(kTestDevice)},
                                          &result),
                       "v: must have the head_dim of q in exact attention, 8; got 12"));
  options.rows = 2;
  const auto two = *ExactAttention::Create(options, nullptr);
  EXPECT_TRUE(
      contains(forward(*two, *two->Schedule(32, Mask::Causal())), "2 sequences of 16 tokens"));
}

}  // namespace
}  // namespace burst
