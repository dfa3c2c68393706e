// Tests the backward under a gap of queries. A rank of a ring holds the end of one document and the
// begin of another, next to one another. The queries in between see keys of another rank only. The
// kernels must leave them out. Gradients are compared with naive attention in double precision.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "burst/device/device.h"
#include "burst/kernels/flash_attention.h"
#include "burst/kernels/gpu/flash_attention_gpu.h"
#include "burst/tensor/tensor.h"
#include "tests/kernels/attention_problem.h"
#include "tests/kernels/no_worse.h"
#include "tests/testing/attention_reference.h"
#include "tests/testing/test_device.h"

namespace burst {
namespace {

// ---- Two calls, as in a ring of two ranks.

// A document's queries, and its keys in each call. Each query sees all keys of its document.
struct Document {
  int64_t queries;
  int64_t keys[2];
};
using Documents = std::vector<Document>;  // of a batch row

// Rows [begin, end) of a batch row's queries.
struct Rows {
  int64_t begin, end;
  int64_t length() const { return end - begin; }
};

// Returns the queries of each document without keys in the first call.
std::vector<Rows> Gaps(const Documents& documents) {
  std::vector<Rows> gaps;
  int64_t query = 0;
  for (const Document& document : documents) {
    if (document.keys[0] == 0) gaps.push_back({query, query + document.queries});
    query += document.queries;
  }
  return gaps;
}

// Returns the rows of the longest gap that belong to whole tiles inside of it, wherever tiles
// begin.
Rows UnreadRows(const Documents& documents) {
  constexpr int64_t kMostRows = 128;  // of a tile
  Rows longest = {0, 0};
  for (const Rows& gap : Gaps(documents)) {
    if (gap.length() > longest.length()) longest = gap;
  }
  return {longest.begin + kMostRows - 1, longest.end - kMostRows + 1};
}

// What the backward reads about queries.
struct QueryInputs {
  Tensor q, dout, lse, delta;
};

struct Gradients {
  Tensor dq, dk, dv;
};

// How a call differs from a plain one.
enum class Kind { kPlain, kDocuments, kSoftcap };
constexpr double kSoftcap = 1.5;

// Attention to the keys of both calls, one after the other, and its backward in two calls.
class TwoCalls {
 public:
  TwoCalls(const std::vector<Documents>& batch, const Heads& heads, const HeadWidths& widths,
           DType dtype, Kind kind)
      : kind_(kind), problem_(MakeProblem(batch, heads, widths, dtype)) {
    k_lens_ = LengthsOf(batch).k_lens;
    for (int call = 0; call < 2; ++call) {
      masks_[call].batch_stride = problem_.q.dim(1);
      for (const Documents& documents : batch) {
        int32_t key = 0;
        for (const Document& document : documents) {
          const auto end = static_cast<int32_t>(key + document.keys[call]);
          masks_[call].begin.insert(masks_[call].begin.end(), document.queries, key);
          masks_[call].end.insert(masks_[call].end.end(), document.queries, end);
          key = end;
        }
      }
    }
    problem_.mask.visible = [this](int64_t b, int64_t i, int64_t j) {
      const int call = j < k_lens_[0] ? 0 : 1;
      const int64_t key = j - call * k_lens_[0], row = b * problem_.q.dim(1) + i;
      return masks_[call].begin[row] <= key && key < masks_[call].end[row];
    };
  }
  TwoCalls(const TwoCalls&) = delete;

  AttentionResults Reference(DType rounded_to) const {
    NaiveScores scores;
    if (kind_ == Kind::kSoftcap) scores.softcap = kSoftcap;
    return problem_.Reference(rounded_to, scores);
  }

  // Returns inputs with the reference's lse and delta.
  QueryInputs InputsOf(const AttentionResults& reference) const {
    const std::vector<double> out = reference.out.ToVector<double>(),
                              dout = problem_.dout.ToVector<double>();
    std::vector<double> delta = problem_.dlse.ToVector<double>();  // [batch, heads, q_len]
    const int64_t q_len = problem_.dout.dim(1), heads = problem_.dout.dim(2);
    const int64_t columns = problem_.dout.dim(3);
    for (int64_t n = 0; n < static_cast<int64_t>(delta.size()); ++n) {
      const int64_t b = n / heads / q_len, h = n / q_len % heads, i = n % q_len;
      const int64_t row = ((b * q_len + i) * heads + h) * columns;
      double sum = 0;
      for (int64_t c = row; c < row + columns; ++c) sum += dout[c] * out[c];
      delta[n] = sum - delta[n];
    }
    const auto statistic = [&](const Tensor& values) {
      return values.To(problem_.dlse.dtype()).To(kTestDevice);
    };
    return {problem_.q, problem_.dout, statistic(reference.lse),
            statistic(Tensor::FromVector(delta, problem_.dlse.shape(), DeviceType::kCpu))};
  }

  // Returns inputs for tests that compare bits. No P and dS exceed float16, because few scores
  // exceed lse.
  QueryInputs AnyInputs() const {
    const Tensor lse = Tensor::EmptyLike(problem_.dlse);
    lse.Fill(10);
    return {problem_.q, problem_.dout, lse, problem_.dlse};
  }

  // Returns gradients that a first call overwrites.
  Gradients NewSums() const {
    const auto poisoned = [](const Tensor& like) {
      const Tensor sum = Tensor::Empty(like.shape(), SumDType(like.dtype()), kTestDevice);
      sum.Fill(kNaN);
      return sum;
    };
    return {poisoned(problem_.q), poisoned(problem_.k), poisoned(problem_.v)};
  }

  // Runs one of the calls. It adds to dq, or overwrites it. No other call has its keys.
  void Run(int call, bool overwrites_dq, const AttentionKernels& kernels, const QueryInputs& in,
           bool deterministic, const Gradients& sums) const {
    const auto keys = [&](const Tensor& t) {
      return Operand(t.Slice(1, call * k_lens_[0], k_lens_[call]));
    };
    FlashBackwardParams params =
        BackwardParams(problem_, {Tensor(), in.lse, sums.dq, sums.dk, sums.dv}, in.delta);
    params.shape.k_len = k_lens_[call];
    params.shape.visible = masks_[call].ranges();
    params.shape.visible.documents = kind_ == Kind::kDocuments;
    if (kind_ == Kind::kSoftcap) params.shape.scores.softcap = kSoftcap;
    params.q = Operand(in.q);
    params.k = keys(problem_.k);
    params.v = keys(problem_.v);
    params.dout = Operand(in.dout);
    const int64_t heads = problem_.q.dim(2), kv_heads = problem_.k.dim(2);
    if (overwrites_dq) params.dq.first = {0, heads};
    params.dk = AddsTo(keys(sums.dk), {0, kv_heads});
    params.dv = AddsTo(keys(sums.dv), {0, kv_heads});
    SetOrder(deterministic, &params);
    kernels.Backward(params);
  }

 private:
  struct CallLengths {
    int64_t q_len;
    std::array<int64_t, 2> k_lens;  // the longest of the batch
  };
  static CallLengths LengthsOf(const std::vector<Documents>& batch) {
    CallLengths lengths = {};
    for (const Documents& documents : batch) {
      CallLengths own = {};
      for (const Document& document : documents) {
        own.q_len += document.queries;
        for (int call = 0; call < 2; ++call) own.k_lens[call] += document.keys[call];
      }
      lengths.q_len = own.q_len;
      for (int call = 0; call < 2; ++call) {
        lengths.k_lens[call] = std::max(lengths.k_lens[call], own.k_lens[call]);
      }
    }
    return lengths;
  }
  static Problem MakeProblem(const std::vector<Documents>& batch, const Heads& heads,
                             const HeadWidths& widths, DType dtype) {
    const CallLengths lengths = LengthsOf(batch);
    return Problem(static_cast<int64_t>(batch.size()), lengths.q_len,
                   lengths.k_lens[0] + lengths.k_lens[1], heads.heads, heads.kv_heads, widths,
                   MaskKind::kFull, dtype, /*magnitude=*/Is16Bit(dtype) ? 1.5 : 1);
  }

  const Kind kind_;
  Problem problem_;
  std::array<int64_t, 2> k_lens_;
  TestMask masks_[2];
};

// Fills rows of a batch row with NaN.
void Poison(const Tensor& tensor, int64_t b, int64_t axis, const Rows& rows) {
  const Tensor part = tensor.Slice(0, b, 1).Slice(axis, rows.begin, rows.length());
  const Tensor values = Tensor::Empty(part.shape(), part.dtype(), kTestDevice);
  values.Fill(kNaN);
  part.CopyFrom(values);
}

// Returns the inputs with NaN where the first call must not read them.
QueryInputs Poisoned(const QueryInputs& in, const std::vector<Documents>& batch) {
  const QueryInputs out = {in.q.Clone(), in.dout.Clone(), in.lse.Clone(), in.delta.Clone()};
  for (size_t b = 0; b < batch.size(); ++b) {
    const Rows rows = UnreadRows(batch[b]);
    EXPECT_GT(rows.length(), 0);
    for (const Tensor& tensor : {out.q, out.dout}) Poison(tensor, b, /*axis=*/1, rows);
    for (const Tensor& tensor : {out.lse, out.delta}) Poison(tensor, b, /*axis=*/2, rows);
  }
  return out;
}

void ExpectBitwiseEqual(const Gradients& a, const Gradients& b) {
  EXPECT_EQ(a.dq.ToVector<double>(), b.dq.ToVector<double>()) << "dq";
  EXPECT_EQ(a.dk.ToVector<double>(), b.dk.ToVector<double>()) << "dk";
  EXPECT_EQ(a.dv.ToVector<double>(), b.dv.ToVector<double>()) << "dv";
}

// ---- The cases.

// Batch rows of 900 queries, a number that no tile's length divides. Documents' keys end inside of
// tiles of 16 keys or more. Gaps begin and end inside of tiles of queries.
constexpr int64_t kQueries = 900;
struct Batch {
  const char* name;
  std::vector<Documents> rows;
};
const Batch kBatches[] = {
    // The longer of two gaps is the last one.
    {"OneAndTwoGaps",
     {{{100, {70, 0}}, {600, {0, 40}}, {200, {161, 0}}},
      {{60, {33, 0}}, {290, {0, 20}}, {50, {9, 0}}, {430, {0, 30}}, {70, {90, 0}}}}},
    // The longer of two gaps is the first one. In the second row, gaps are the first and the last
    // queries. Keys around them are of documents without queries.
    {"FirstAndOuterGaps",
     {{{60, {33, 0}}, {430, {0, 30}}, {50, {9, 0}}, {290, {0, 20}}, {70, {90, 0}}},
      {{0, {30, 0}}, {290, {0, 20}}, {110, {20, 0}}, {500, {0, 20}}, {0, {50, 0}}}}},
    {"NothingSeen", {{{0, {30, 0}}, {kQueries, {0, 40}}, {0, {50, 0}}}}},
};

struct Kernels {
  const char* name;
  const AttentionKernels& (*get)();
};
constexpr Kernels kChosen = {"Chosen",
                             []() -> const AttentionKernels& { return KernelsOf(kTestDevice); }};

using Case = std::tuple<Kernels, DType, HeadWidths, Kind, int /*index of kBatches*/>;

std::string CaseName(const testing::TestParamInfo<Case>& info) {
  const auto& [kernels, dtype, widths, kind, batch] = info.param;
  constexpr const char* kKinds[] = {"Plain", "Documents", "Softcap"};
  std::ostringstream name;
  name << kernels.name << "_" << Name(dtype) << "_d" << widths.head_dim << "_"
       << kKinds[static_cast<int>(kind)] << "_" << kBatches[batch].name;
  return name.str();
}

class QueryGapTest : public testing::TestWithParam<Case> {
 protected:
  QueryGapTest()
      : batch_(kBatches[std::get<int>(GetParam())].rows),
        dtype_(std::get<DType>(GetParam())),
        kernels_(std::get<Kernels>(GetParam()).get()),
        calls_(batch_, Heads{2, 1}, std::get<HeadWidths>(GetParam()), dtype_,
               std::get<Kind>(GetParam())) {}

  void SetUp() override {
    const absl::Status status =
        kernels_.Check(kTestDevice, dtype_, std::get<HeadWidths>(GetParam()));
    if (!status.ok()) GTEST_SKIP() << status;
  }

  // Runs both calls. The first of them reads `first`, the other one `second`.
  Gradients Run(const QueryInputs& first, const QueryInputs& second,
                bool deterministic = true) const {
    const Gradients sums = calls_.NewSums();
    calls_.Run(0, /*overwrites_dq=*/true, kernels_, first, deterministic, sums);
    calls_.Run(1, /*overwrites_dq=*/false, kernels_, second, deterministic, sums);
    return sums;
  }

  const std::vector<Documents>& batch_;
  const DType dtype_;
  const AttentionKernels& kernels_;
  const TwoCalls calls_;
};

TEST_P(QueryGapTest, GradientsEqualDoublePrecision) {
  const AttentionResults expected = calls_.Reference(DType::kFloat64);
  const QueryInputs in = calls_.InputsOf(expected);
  const auto check = [&](const char* name, const Tensor& sum, const Tensor& exact,
                         const Tensor& naive) {
    if (Is16Bit(dtype_)) return ExpectNoWorse(name, sum.To(dtype_), naive, exact);
    EXPECT_LE(RelativeError(sum, exact), Tolerance(dtype_)) << name;
  };
  const AttentionResults naive = Is16Bit(dtype_) ? calls_.Reference(dtype_) : expected;
  for (bool deterministic : {true, false}) {
    SCOPED_TRACE(deterministic ? "deterministic" : "in any order");
    const Gradients sums = Run(in, in, deterministic);
    check("dq", sums.dq, expected.dq, naive.dq);
    check("dk", sums.dk, expected.dk, naive.dk);
    check("dv", sums.dv, expected.dv, naive.dv);
  }
}

TEST_P(QueryGapTest, TwoRunsGiveTheSameBits) {
  const QueryInputs in = calls_.AnyInputs();
  ExpectBitwiseEqual(Run(in, in), Run(in, in));
}

// The first call overwrites dq of a gap's queries with zeros, or adds nothing to it.
TEST_P(QueryGapTest, DqOfGapsStays) {
  const QueryInputs in = calls_.AnyInputs();
  const Gradients alone = calls_.NewSums(), sums = calls_.NewSums();
  calls_.Run(0, /*overwrites_dq=*/true, kernels_, in, /*deterministic=*/true, alone);
  calls_.Run(1, /*overwrites_dq=*/true, kernels_, in, /*deterministic=*/true, sums);
  const Tensor before = sums.dq.Clone();
  calls_.Run(0, /*overwrites_dq=*/false, kernels_, in, /*deterministic=*/true, sums);
  for (size_t b = 0; b < batch_.size(); ++b) {
    for (const Rows& gap : Gaps(batch_[b])) {
      SCOPED_TRACE(testing::Message() << "batch row " << b << ", queries from " << gap.begin);
      const auto rows = [&](const Tensor& dq) {
        return dq.Slice(0, b, 1).Slice(1, gap.begin, gap.length()).ToVector<double>();
      };
      EXPECT_EQ(rows(alone.dq), std::vector<double>(rows(alone.dq).size(), 0));
      EXPECT_EQ(rows(sums.dq), rows(before));
    }
  }
}

// The first call has NaN where it must not read. Kernels for tensor cores multiply whole tiles: a
// hidden query adds 0 x NaN to dK and dV of each key of a tile that reads it. SIMT and CPU kernels
// keep NaN of hidden queries away in any case.
TEST_P(QueryGapTest, WholeTilesOfTheLongestGapAreNotRead) {
  const QueryInputs in = calls_.AnyInputs(), poisoned = Poisoned(in, batch_);
  ExpectBitwiseEqual(Run(poisoned, in), Run(in, in));
}

const auto kBatchIndices = testing::Range(0, 3);
constexpr DType kBf16 = DType::kBFloat16;

INSTANTIATE_TEST_SUITE_P(Wide, QueryGapTest,
                         testing::Combine(testing::Values(kChosen),
                                          testing::Values(DType::kFloat32, DType::kFloat64),
                                          testing::Values(20, 128, 256),
                                          testing::Values(Kind::kPlain, Kind::kSoftcap),
                                          kBatchIndices),
                         CaseName);
#ifndef BURST_TEST_CUDA
INSTANTIATE_TEST_SUITE_P(Narrow, QueryGapTest,
                         testing::Combine(testing::Values(kChosen), testing::Values(kBf16),
                                          testing::Values(20), testing::Values(Kind::kPlain),
                                          kBatchIndices),
                         CaseName);
#else
constexpr Kernels kSm80 = {"Sm80", []() -> const AttentionKernels& {
                             return *cuda::GpuKernels(cuda::KernelFamily::kSm80);
                           }};
INSTANTIATE_TEST_SUITE_P(
    Sm80, QueryGapTest,
    testing::Combine(testing::Values(kSm80), testing::Values(kBf16, DType::kFloat16),
                     testing::Values(64, 128, 256),
                     testing::Values(Kind::kPlain, Kind::kDocuments, Kind::kSoftcap),
                     kBatchIndices),
    CaseName);
INSTANTIATE_TEST_SUITE_P(Narrow, QueryGapTest,
                         testing::Combine(testing::Values(kChosen),
                                          testing::Values(kBf16, DType::kFloat16),
                                          testing::Values(64, 96, 128, 192, 256),
                                          testing::Values(Kind::kPlain, Kind::kDocuments),
                                          kBatchIndices),
                         CaseName);
#endif

}  // namespace
}  // namespace burst
