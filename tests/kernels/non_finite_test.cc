// Tests that NaN and infinity in one document, as in uninitialized padding, do not reach rows of
// another document. These rows have the bits that they have with finite padding. On a GPU in 16
// bits the kernels compute such rows in another way, so there they have the values. In the document
// itself, NaN reaches every row that depends on it.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "burst/kernels/flash_attention.h"
#include "burst/kernels/gpu/flash_attention_gpu.h"
#include "burst/tensor/tensor.h"
#include "gtest/gtest.h"
#include "tests/kernels/attention_problem.h"
#include "tests/testing/attention_reference.h"
#include "tests/testing/test_device.h"

namespace burst {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kHeads = 2;  // query heads of one KV head

// Kernels of the test's device, and what they are called with.
struct Case {
  const AttentionKernels* kernels;
  DType dtype;
  HeadWidths widths;
  double softcap = 0;
  bool fp8 = false;

  // By how much a row may differ from the one of finite inputs, in units of the largest result.
  // A GPU's kernels for 16 bits round P and dS to their type, u each, relative to the sum of
  // magnitudes. A CPU's loops over seen pairs may fuse other products with their sums than its
  // matmuls, u each. Attention in fp8 differs by more; that a row is finite is all that is asked.
  double Tolerance() const {
    if (fp8) return kInfinity;
    if (!Is16Bit(dtype) && kTestDevice == DeviceType::kCuda) return 0;
    const double u = dtype == DType::kBFloat16  ? 0x1p-9
                     : dtype == DType::kFloat16 ? 0x1p-12
                     : dtype == DType::kFloat32 ? 0x1p-24
                                                : 0x1p-53;
    return 8 * u;
  }
};

std::vector<Case> Cases() {
  const AttentionKernels* const kernels = &KernelsOf(kTestDevice);
  std::vector<Case> cases;
  for (DType dtype : {DType::kFloat32, DType::kFloat64}) {
    for (int64_t head_dim : {20, 64, 128}) cases.push_back({kernels, dtype, head_dim});
    cases.push_back({kernels, dtype, {24, 40}});
  }
  constexpr DType kBf16 = DType::kBFloat16;
#ifndef BURST_TEST_CUDA
  cases.push_back({kernels, kBf16, 20});
#else
  const AttentionKernels* const ampere = cuda::GpuKernels(cuda::KernelFamily::kSm80);
  for (DType dtype : {kBf16, DType::kFloat16}) {
    for (int64_t head_dim : {64, 96, 128, 192, 256}) {
      cases.push_back({kernels, dtype, head_dim});
      cases.push_back({ampere, dtype, head_dim});
    }
  }
  for (int64_t head_dim : {64, 128, 256}) cases.push_back({kernels, kBf16, head_dim, 30});
  if (kernels->Check(kTestDevice, kBf16, {192, 128}).ok()) {
    cases.push_back({kernels, kBf16, {192, 128}});
  }
  if (kernels->CheckFp8(kTestDevice, kBf16, 128).ok()) {
    cases.push_back({kernels, kBf16, 128, 0, /*fp8=*/true});
  }
#endif
  return cases;
}

// Documents of queries and keys. A query sees all keys of its document, or those up to its own
// place. With a window it sees the last ones of them.
struct Documents {
  std::vector<int64_t> q_starts, k_starts;  // and the lengths at the end
  bool causal = false;
  int64_t window = 0;

  int64_t q_len() const { return q_starts.back(); }
  int64_t k_len() const { return k_starts.back(); }
  static int64_t Of(const std::vector<int64_t>& starts, int64_t i) {
    return std::upper_bound(starts.begin(), starts.end(), i) - starts.begin() - 1;
  }
  TestMask Mask() const {
    TestMask mask;
    for (int64_t i = 0; i < q_len(); ++i) {
      const int64_t document = Of(q_starts, i);
      int64_t begin = k_starts[document], end = k_starts[document + 1];
      if (causal) end = std::min(end, begin + i - q_starts[document] + 1);
      if (window > 0) begin = std::max(begin, end - window);
      mask.begin.push_back(static_cast<int32_t>(begin));
      mask.end.push_back(static_cast<int32_t>(end));
    }
    return mask;
  }
};

struct Inputs {
  Tensor q, k, v, dout, dlse;
  Inputs Clone() const { return {q.Clone(), k.Clone(), v.Clone(), dout.Clone(), dlse}; }
  const Tensor& operator[](int which) const {
    return which == 0 ? q : which == 1 ? k : which == 2 ? v : dout;
  }
};

Tensor Zeros(const Tensor& like, DType dtype) {
  return Tensor::Zeros(like.shape(), dtype, kTestDevice);
}

FlashAttentionShape ShapeOf(const Inputs& in) {
  return {in.q.dim(0),  in.q.dim(1), in.k.dim(1), in.q.dim(2),
          in.k.dim(2),  in.q.dim(3), in.v.dim(3), 1 / std::sqrt(static_cast<double>(in.q.dim(3))),
          in.q.dtype(), {}};
}

// Runs the forward, and the backward if the kernels have one. Each range of keys between two
// `parts` is a call, as in a ring, and the calls are merged and added up. Without parts it is one
// call.
AttentionResults Run(const Case& c, const Inputs& in, const TestMask& mask,
                     const std::vector<int64_t>& parts) {
  const DType sum_dtype = SumDType(c.dtype);
  const Tensor lse = Poisoned(in.dlse), delta = Poisoned(in.dlse);
  const Tensor out = Poisoned(in.dout);
  const bool one = parts.empty(), narrow = sum_dtype != c.dtype;
  const DType grad_dtype = one ? c.dtype : sum_dtype;
  const AttentionResults result = {out, lse, Zeros(in.q, grad_dtype), Zeros(in.k, grad_dtype),
                                   Zeros(in.v, grad_dtype)};
  FlashAttentionShape shape = ShapeOf(in);
  shape.scores.softcap = c.softcap;
  const std::vector<int64_t> bounds = one ? std::vector<int64_t>{0, in.k.dim(1)} : parts;
  const Tensor sum = narrow && !one ? Zeros(in.dout, sum_dtype) : out;
  const auto calls = [&](auto call) {
    for (size_t n = 0; n + 1 < bounds.size(); ++n) {
      const int64_t begin = bounds[n], length = bounds[n + 1] - begin;
      TestMask part;
      for (size_t i = 0; i < mask.begin.size(); ++i) {
        part.begin.push_back(std::clamp<int64_t>(mask.begin[i] - begin, 0, length));
        part.end.push_back(std::clamp<int64_t>(mask.end[i] - begin, 0, length));
      }
      shape.visible = part.ranges();
      shape.visible.documents = shape.visible.begin != nullptr;
      shape.k_len = length;
      call(n, [&](const Tensor& t) { return Operand(t.Slice(1, begin, length)); });
    }
  };
  calls([&](size_t n, auto of) {
    const bool last = n + 2 == bounds.size();
    FlashForwardParams params;
    params.shape = shape;
    params.q = Operand(in.q);
    params.k = of(in.k);
    params.v = of(in.v);
    params.merge = n > 0;
    params.out = Operand(last ? out : sum);
    params.out_dtype = last ? c.dtype : sum_dtype;
    if (last && narrow && n > 0) params.sum = Operand(sum);
    params.lse = lse.raw_data();
    params.fp8 = c.fp8;
    c.kernels->Forward(params);
  });
  c.kernels->Delta(
      {ShapeOf(in), Operand(out), Operand(in.dout), in.dlse.raw_data(), delta.raw_data()});
  calls([&](size_t, auto of) {
    FlashBackwardParams params;
    params.shape = shape;
    params.q = Operand(in.q);
    params.k = of(in.k);
    params.v = of(in.v);
    params.dout = Operand(in.dout);
    params.lse = lse.raw_data();
    params.delta = delta.raw_data();
    const auto target = [one](const AttentionOperand& to) {
      return one ? Assigns(to) : AddsTo(to);
    };
    params.dq = target(Operand(result.dq));
    params.dk = target(of(result.dk));
    params.dv = target(of(result.dv));
    c.kernels->Backward(params);
  });
  return result;
}

// The rows of the results that depend on NaN tokens: out and dq by query, dk and dv by key.
struct Reached {
  std::vector<bool> out, lse, dq, dk, dv;
};

Reached ReachedBy(const TestMask& mask, int64_t k_len, int which, int64_t first, int64_t last) {
  const auto q_len = static_cast<int64_t>(mask.begin.size());
  const auto bad = [=](int tensor, int64_t i) { return tensor == which && first <= i && i < last; };
  Reached r = {std::vector<bool>(q_len), std::vector<bool>(q_len), std::vector<bool>(q_len),
               std::vector<bool>(k_len), std::vector<bool>(k_len)};
  for (int64_t i = 0; i < q_len; ++i) {
    for (int64_t j = mask.begin[i]; j < mask.end[i]; ++j) {
      if (bad(0, i) || bad(1, j)) r.lse[i] = true;
      if (bad(2, j)) r.out[i] = true;
    }
    if (r.lse[i]) r.out[i] = true;
    for (int64_t j = mask.begin[i]; j < mask.end[i]; ++j) {
      const bool p = r.lse[i], ds = p || r.out[i] || bad(2, j) || bad(3, i);
      if (ds || bad(1, j)) r.dq[i] = true;
      if (ds || bad(0, i)) r.dk[j] = true;
      if (p || bad(3, i)) r.dv[j] = true;
    }
  }
  return r;
}

// Compares the rows of a result with those of the run without NaN. Rows in `may` need not be equal.
// Rows in `must` have to be NaN, none if it is null. tolerance: Case::Tolerance.
void ExpectRows(const char* name, const Tensor& got, const Tensor& clean, bool rows_last,
                double tolerance, const std::vector<bool>& may, const std::vector<bool>* must) {
  const std::vector<double> x = got.ToVector<double>(), y = clean.ToVector<double>();
  double largest = 1;
  for (double value : y) largest = std::max(largest, std::fabs(value));
  const auto rows = static_cast<int64_t>(may.size());
  const auto size = static_cast<int64_t>(x.size()), row_size = size / std::max<int64_t>(1, rows);
  std::vector<bool> same(rows, true), finite(rows, true);
  for (int64_t n = 0; n < size; ++n) {
    const int64_t row = rows_last ? n % rows : n / row_size;
    const bool equal = x[n] == y[n] || std::fabs(x[n] - y[n]) <= tolerance * largest;
    if (!equal) same[row] = false;
    if (std::isnan(x[n])) finite[row] = false;
  }
  int64_t changed = 0, missed = 0, first = -1;
  for (int64_t row = 0; row < rows; ++row) {
    if (!may[row] && !same[row]) {
      ++changed;
      if (first < 0) first = row;
    }
    if (must != nullptr && (*must)[row] && finite[row]) ++missed;
  }
  EXPECT_EQ(changed, 0) << name << " of rows that see nothing of it changed, the first: " << first;
  EXPECT_EQ(missed, 0) << name << " of rows that see NaN have none";
}

// Poisons tokens [first, last) of a document in one input after the other.
void Check(const Case& c, const Documents& documents, int64_t document, bool all_tokens,
           const std::vector<int64_t>& parts) {
  const int64_t q_len = documents.q_len(), k_len = documents.k_len();
  const Problem problem(1, q_len, k_len, kHeads, 1, c.widths, MaskKind::kFull, c.dtype);
  const Inputs clean_in = {problem.q, problem.k, problem.v, problem.dout, problem.dlse};
  const TestMask mask = documents.Mask();
  const AttentionResults clean = Run(c, clean_in, mask, parts);
  for (int which = 0; which < 4; ++which) {
    for (double value : {kNaN, kInfinity, -kInfinity}) {
      SCOPED_TRACE(testing::Message() << "qkvd"[which] << " " << value);
      const Inputs in = clean_in.Clone();
      const bool keys = which == 1 || which == 2;
      const std::vector<int64_t>& starts = keys ? documents.k_starts : documents.q_starts;
      int64_t first = starts[document], last = starts[document + 1];
      if (first == last) continue;  // the document has no tokens
      if (!all_tokens) first = (first + last) / 2, last = first + 1;
      Tensor part = in[which].Slice(1, first, last - first);
      if (!all_tokens) part = part.Slice(3, part.dim(3) / 3, 1);  // one element of a head
      const Tensor values = Tensor::Empty(part.shape(), c.dtype, kTestDevice);
      values.Fill(value);
      part.CopyFrom(values);
      const AttentionResults got = Run(c, in, mask, parts);
      const bool is_nan = std::isnan(value);
      const Reached reached = ReachedBy(mask, k_len, which, first, last);
      Reached may = reached;
      if (!is_nan) {  // infinity may change anything in the document
        for (int64_t i = 0; i < q_len; ++i) {
          may.out[i] = may.lse[i] = may.dq[i] = Documents::Of(documents.q_starts, i) == document;
        }
        for (int64_t j = 0; j < k_len; ++j) {
          may.dk[j] = may.dv[j] = Documents::Of(documents.k_starts, j) == document;
        }
      }
      const auto must = [&](const std::vector<bool>& rows) { return is_nan ? &rows : nullptr; };
      ExpectRows("out", got.out, clean.out, false, c.Tolerance(), may.out, must(reached.out));
      ExpectRows("lse", got.lse, clean.lse, true, c.Tolerance(), may.lse, must(reached.lse));
      ExpectRows("dq", got.dq, clean.dq, false, c.Tolerance(), may.dq, must(reached.dq));
      ExpectRows("dk", got.dk, clean.dk, false, c.Tolerance(), may.dk, must(reached.dk));
      ExpectRows("dv", got.dv, clean.dv, false, c.Tolerance(), may.dv, must(reached.dv));
    }
  }
}

void CheckAll(const Documents& documents, const std::vector<int64_t>& bad,
              const std::vector<int64_t>& parts) {
  for (const Case& c : Cases()) {
    for (bool causal : {false, true}) {
      for (int64_t document : bad) {
        for (bool all_tokens : {true, false}) {
          SCOPED_TRACE(testing::Message()
                       << Name(c.dtype) << " " << ToString(c.widths)
                       << (c.kernels == &KernelsOf(kTestDevice) ? "" : " Ampere")
                       << (c.softcap > 0 ? " softcap" : "") << (c.fp8 ? " fp8" : "")
                       << (causal ? " causal" : "") << ", document " << document
                       << (all_tokens ? "" : ", one element"));
          Documents these = documents;
          these.causal = causal;
          Check(c, these, document, all_tokens, parts);
        }
      }
    }
  }
}

const std::vector<int64_t> kStarts = {0, 90, 201, 333, 400};

TEST(NonFiniteTest, StaysInItsDocument) { CheckAll({kStarts, kStarts}, {2, 3}, {}); }

// A tile holds many documents, some of one token.
TEST(NonFiniteTest, StaysInAShortDocument) {
  const std::vector<int64_t> starts = {0, 1, 2, 9, 30, 31, 77, 80, 81, 140};
  CheckAll({starts, starts}, {1, 4, 6}, {});
}

TEST(NonFiniteTest, StaysInItsWindow) { CheckAll({kStarts, kStarts, false, 37}, {1, 3}, {}); }

// In a ring's calls, keys begin and end within documents and between them. Queries whose document
// has no keys there see nothing.
TEST(NonFiniteTest, StaysInItsDocumentInARing) {
  CheckAll({kStarts, kStarts}, {2, 3}, {0, 150, 333, 400});
}

// Documents have other lengths in the keys than in the queries, and the last one has no query.
TEST(NonFiniteTest, StaysInItsDocumentOfKeys) {
  CheckAll({{0, 50, 190, 210, 210}, {0, 180, 181, 400, 460}}, {1, 2, 3}, {});
}

// Few queries see many keys.
TEST(NonFiniteTest, StaysInItsDocumentWithFewQueries) {
  CheckAll({{0, 1, 3, 8, 9}, {0, 700, 733, 1400, 1410}}, {0, 1, 2}, {});
}

}  // namespace
}  // namespace burst
