// Tests attention on 8-bit operands (e4m3) on Hopper against double precision, in two steps. First,
// the quantization of Q, K and V: every element is within half a unit of its last place. Then, the
// forward on those 8 bits: P is rounded to e4m3, and the tensor cores' sums have few bits (see the
// bounds below).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "burst/kernels/flash_attention.h"
#include "burst/kernels/gpu/flash_attention_gpu.h"
#include "burst/kernels/gpu/sm90/quantize_fp8.h"
#include "tests/kernels/sm90_attention_problem.cuh"
#include "tests/kernels/sm90_attention_reference.cuh"

namespace burst {
namespace sm90 {
namespace {

const AttentionKernels& Kernels() { return *cuda::GpuKernels(cuda::KernelFamily::kSm90); }

constexpr int64_t kDim = kFp8HeadDim;

__host__ __device__ double Fp8Value(uint8_t bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return NAN;
  const double magnitude = exponent == 0 ? ldexp(mantissa, -9) : ldexp(8 + mantissa, exponent - 10);
  return bits & 0x80 ? -magnitude : magnitude;
}

// Returns the place of key 0 <= key < 16 of a group: the inverse of the order in quantize_fp8.h.
__host__ __device__ int PlaceOfKey(int key) {
  for (int p = 0; p < 16; ++p) {
    if (8 * (p % 4 / 2) + 2 * (p / 4) + p % 2 == key) return p;
  }
  return -1;
}

int64_t Blocks(int64_t tokens) { return (tokens + kFp8Block - 1) / kFp8Block; }

FlashForwardParams Params(const Problem& p, void* out, DType out_dtype = DType::kBFloat16) {
  FlashForwardParams params;
  params.shape = p.shape;
  params.q = p.q;
  params.k = p.k;
  params.v = p.v;
  params.out = p.LikeQ(out);
  params.lse = p.lse.data();
  params.out_dtype = out_dtype;
  params.fp8 = true;
  return params;
}

// The operands of a problem, on the GPU and on the host.
struct Operands {
  explicit Operands(const Problem& p)
      : shape(p.shape),
        memory(Fp8OperandBytes(p.shape)),
        on_gpu(Fp8OperandsIn(shape, memory.data())) {
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    QuantizeFp8(Params(p, nullptr), on_gpu);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    host = memory.ToHost();
    here = Fp8OperandsIn(shape, host.data());
  }

  FlashAttentionShape shape;
  Buffer<uint8_t> memory;
  Fp8Operands on_gpu;
  std::vector<uint8_t> host;
  Fp8Operands here;
};

// ---- Quantization.

// Returns H (signs * x) / sqrt(128), which the scales fit. The signs come from the kernel's own
// result on unit vectors, so the test does not know them.
std::vector<double> Hadamard(std::vector<double> x, const std::vector<double>& signs) {
  std::vector<double> y(kDim);
  for (int64_t i = 0; i < kDim; ++i) {
    for (int64_t c = 0; c < kDim; ++c) {
      const double entry = __builtin_parityll(i & c) != 0 ? -1 : 1;
      y[i] += entry * signs[c] * x[c] / std::sqrt(128.0);
    }
  }
  return y;
}

// Returns signs[c], the sign of the image of unit vector c.
std::vector<double> Signs() {
  Problem p(1, kDim, kDim, 1, 1, kDim);
  std::vector<bf16> unit(kDim * kDim, __float2bfloat16(0.f));
  for (int64_t c = 0; c < kDim; ++c) unit[c * kDim + c] = __float2bfloat16(1.f);
  cudaMemcpy(p.q_data.data(), unit.data(), unit.size() * sizeof(bf16), cudaMemcpyHostToDevice);
  const Operands operands(p);
  std::vector<double> signs(kDim);
  for (int64_t c = 0; c < kDim; ++c) {
    signs[c] = Fp8Value(operands.here.q[c * kDim]) > 0 ? 1 : -1;  // entry (0, c) of H is 1
  }
  return signs;
}

struct RowsOf {
  const std::vector<bf16> data;
  int64_t length, heads, row;
  double At(int64_t b, int64_t h, int64_t i, int64_t c, int64_t head_dim) const {
    if (i >= length || c >= head_dim) return 0;
    return static_cast<double>(__bfloat162float(data[((b * length + i) * heads + h) * row + c]));
  }
};

// Checks that `bits` is x / scale rounded to e4m3, within half a unit of the last place and the
// error of fp32 arithmetic before it.
void ExpectRounded(double x, double scale, uint8_t bits) {
  const double value = std::abs(x) / scale;
  const double unit = std::ldexp(1, std::max(-6, std::ilogb(std::max(value, 1e-30))) - 3);
  EXPECT_LE(std::abs(x / scale - Fp8Value(bits)), unit / 2 + 448 * 0x1p-20) << x << " " << scale;
}

void CheckQuantization(const Problem& p, const std::vector<double>& signs) {
  const FlashAttentionShape& s = p.shape;
  const Operands operands(p);
  const int64_t padding = p.q.head_stride;
  const auto check_rows = [&](const RowsOf& rows, const uint8_t* bits, const float* scales) {
    for (int64_t batch_head = 0; batch_head < s.batch * rows.heads; ++batch_head) {
      const int64_t b = batch_head / rows.heads, h = batch_head % rows.heads;
      for (int64_t block = 0; block < Blocks(rows.length); ++block) {
        const double scale = scales[batch_head * Blocks(rows.length) + block];
        double top = 0;
        for (int64_t i = block * kFp8Block; i < std::min((block + 1) * kFp8Block, rows.length);
             ++i) {
          std::vector<double> x(kDim);
          for (int64_t c = 0; c < kDim; ++c) x[c] = rows.At(b, h, i, c, s.head_dim);
          const std::vector<double> y = Hadamard(x, signs);
          for (int64_t c = 0; c < kDim; ++c) {
            top = std::max(top, std::abs(y[c]));
            ExpectRounded(y[c], scale, bits[(batch_head * rows.length + i) * kDim + c]);
          }
        }
        if (top > 0) EXPECT_NEAR(top / scale, 448, 448 * 1e-5);
      }
    }
  };
  check_rows({p.q_data.ToHost(), s.q_len, s.num_heads, padding}, operands.here.q,
             operands.here.q_scales);
  check_rows({p.k_data.ToHost(), s.k_len, s.num_kv_heads, padding}, operands.here.k,
             operands.here.k_scales);
  const RowsOf v = {p.v_data.ToHost(), s.k_len, s.num_kv_heads, padding};
  const int64_t padded = Blocks(s.k_len) * kFp8Block;
  for (int64_t batch_head = 0; batch_head < s.batch * s.num_kv_heads; ++batch_head) {
    for (int64_t i = 0; i < padded; ++i) {
      const double scale = operands.here.v_scales[batch_head * Blocks(s.k_len) + i / kFp8Block];
      for (int64_t c = 0; c < kDim; ++c) {
        const int64_t place = i / 16 * 16 + PlaceOfKey(static_cast<int>(i % 16));
        const uint8_t bits = operands.here.v[(batch_head * kDim + c) * padded + place];
        ExpectRounded(
            v.At(batch_head / s.num_kv_heads, batch_head % s.num_kv_heads, i, c, s.head_dim), scale,
            bits);
      }
    }
  }
}

TEST(Fp8Test, QuantizationRoundsToTheNearest) {
  const std::vector<double> signs = Signs();
  int minus = 0;
  for (double sign : signs) minus += sign < 0 ? 1 : 0;
  EXPECT_GT(minus, 32);
  EXPECT_LT(minus, 96);
  CheckQuantization(Problem(2, 200, 130, 2, 1, 128), signs);
  CheckQuantization(Problem(1, 1, 257, 1, 1, 128), signs);
  CheckQuantization(Problem(1, 127, 128, 2, 2, 96, {}, /*padding=*/8), signs);
  CheckQuantization(Problem(1, 5, 16, 1, 1, 72), signs);
}

// ---- The forward on such operands.

// Computes in double like the kernel: S of 8 bits, softmax, P V of 8 bits. It also sums P |V| and
// P^2 V^2 for each element, and finds each row's largest product of elements of q and k.
__global__ void ReferenceFp8(FlashAttentionShape shape, Fp8Operands x, double* out, double* lse,
                             double* absolute, double* squares, double* largest) {
  const int64_t item = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (item >= shape.batch * shape.num_heads * shape.q_len) return;
  const int64_t row = item % shape.q_len, batch_head = item / shape.q_len;
  const int64_t kv = batch_head / (shape.num_heads / shape.num_kv_heads);
  const int64_t k_blocks = (shape.k_len + kFp8Block - 1) / kFp8Block;
  const int64_t q_blocks = (shape.q_len + kFp8Block - 1) / kFp8Block;
  const uint8_t* q = x.q + item * kDim;
  const double q_scale = x.q_scales[batch_head * q_blocks + row / kFp8Block] * shape.softmax_scale;
  const Range range = VisibleKeys(shape, batch_head / shape.num_heads, row);
  double product = 0;
  const auto s_of = [&](int64_t j) {
    const uint8_t* k = x.k + (kv * shape.k_len + j) * kDim;
    const double scale = q_scale * x.k_scales[kv * k_blocks + j / kFp8Block];
    double s = 0;
    for (int64_t c = 0; c < kDim; ++c) {
      const double term = Fp8Value(q[c]) * Fp8Value(k[c]) * scale;
      product = fmax(product, fabs(term));
      s += term;
    }
    return s;
  };
  double top = -INFINITY, sum = 0;
  for (int64_t j = range.begin; j < range.end; ++j) top = fmax(top, s_of(j));
  double o[kDim] = {}, o_absolute[kDim] = {}, o_squares[kDim] = {};
  for (int64_t j = range.begin; j < range.end; ++j) {
    const double p = exp(s_of(j) - top), scale = x.v_scales[kv * k_blocks + j / kFp8Block];
    const double rounded = fmax(p, 0x1p-14);  // below it e4m3's unit no longer shrinks
    sum += p;
    const int64_t place = j / 16 * 16 + PlaceOfKey(static_cast<int>(j % 16));
    for (int64_t c = 0; c < kDim; ++c) {
      const double v = Fp8Value(x.v[(kv * kDim + c) * k_blocks * kFp8Block + place]) * scale;
      o[c] += p * v;
      o_absolute[c] += rounded * fabs(v);
      o_squares[c] += rounded * rounded * v * v;
    }
  }
  for (int64_t c = 0; c < shape.head_dim; ++c) {
    const int64_t i = item * shape.head_dim + c;
    out[i] = sum > 0 ? o[c] / sum : 0;
    absolute[i] = sum > 0 ? o_absolute[c] / sum : 0;
    squares[i] = sum > 0 ? o_squares[c] / sum / sum : 0;
  }
  lse[item] = sum > 0 ? top + log(sum) : -INFINITY;
  largest[item] = product;
}

struct Truth {
  std::vector<double> out, lse, absolute, squares, largest;
};

Truth ReferenceOf(const Problem& p) {
  const Operands operands(p);
  const int64_t rows = p.shape.batch * p.shape.num_heads * p.shape.q_len;
  Buffer<double> out(p.QSize()), lse(rows), absolute(p.QSize()), squares(p.QSize()), largest(rows);
  ReferenceFp8<<<Grid(rows), 64>>>(p.shape, operands.on_gpu, out.data(), lse.data(),
                                   absolute.data(), squares.data(), largest.data());
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  return {out.ToHost(), lse.ToHost(), absolute.ToHost(), squares.ToHost(), largest.ToHost()};
}

struct Result {
  std::vector<double> out, lse;  // [batch, heads, q_len, head_dim]
};

template <class T>
Result ResultOf(const Problem& p, const Buffer<T>& data) {
  const FlashAttentionShape& s = p.shape;
  const std::vector<T> packed = data.ToHost();
  Result result;
  result.out.resize(packed.size());
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t i = 0; i < s.q_len; ++i) {
      for (int64_t h = 0; h < s.num_heads; ++h) {
        for (int64_t c = 0; c < s.head_dim; ++c) {
          result.out[((b * s.num_heads + h) * s.q_len + i) * s.head_dim + c] = static_cast<double>(
              static_cast<float>(packed[((b * s.q_len + i) * s.num_heads + h) * s.head_dim + c]));
        }
      }
    }
  }
  for (float x : p.lse.ToHost()) result.lse.push_back(x);
  return result;
}

Result RunFp8(Problem& p) {
  Buffer<bf16> out(p.QSize());
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  Kernels().Forward(Params(p, out.data()));
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  return ResultOf(p, out);
}

// The tensor cores add 128 products of 8 bits in four steps of 32. They cut each term, and the sum
// so far, to at least 13 bits below the largest of its step.
constexpr double kStepTerms = 4 * 33, kCut = 0x1p-13;

// The error of one element is the sum of these errors:
//
//    - P's rounding to 4 significant bits (by 2^-4 of P, or of 2^-14 of the largest P, where e4m3's
//      smallest numbers are);
//    - S wrong by delta, which changes every P by a factor between exp(-delta) and exp(delta), and
//      the sum alike;
//    - the sums of P V, cut, too;
//    - rounding to bf16.
//
// Over all elements, roundings are independent of one another, each uniform within 2^-4 at most.
// They give a root mean square of 2^-4 / sqrt(3) times the root mean square of P V.
void ExpectClose(const FlashAttentionShape& s, const Result& ours, const Truth& truth) {
  double errors = 0, squares = 0, roundings = 0;
  for (size_t i = 0; i < ours.out.size(); ++i) {
    const size_t row = i / s.head_dim;
    const double delta = kStepTerms * kCut * truth.largest[row];
    const double error = std::abs(ours.out[i] - truth.out[i]);
    const double bound = truth.absolute[i] * (0x1p-4 + std::expm1(2 * delta) + kStepTerms * kCut) +
                         std::abs(truth.out[i]) * 0x1p-8 + 1e-30;
    ASSERT_LE(error, bound) << "element " << i << " of row " << row;
    errors += error * error;
    squares += truth.squares[i];
    roundings += truth.out[i] * truth.out[i];
  }
  EXPECT_LE(std::sqrt(errors),
            1.2 * (std::sqrt(squares / 3) * 0x1p-4 + std::sqrt(roundings / 3) * 0x1p-8));
  for (size_t row = 0; row < ours.lse.size(); ++row) {
    if (ours.lse[row] == truth.lse[row]) continue;  // also both -inf
    ASSERT_LE(std::abs(ours.lse[row] - truth.lse[row]),
              kStepTerms * kCut * truth.largest[row] + 1e-6 * std::abs(truth.lse[row]) + 1e-5)
        << "row " << row;
  }
}

void Check(Problem p) {
  const FlashAttentionShape& s = p.shape;
  SCOPED_TRACE("batch " + std::to_string(s.batch) + " q " + std::to_string(s.q_len) + " k " +
               std::to_string(s.k_len) + " heads " + std::to_string(s.num_heads) + "/" +
               std::to_string(s.num_kv_heads) + " dim " + std::to_string(s.head_dim));
  ExpectClose(s, RunFp8(p), ReferenceOf(p));
}

TEST(Fp8Test, Lengths1To300) {
  for (int length = 1; length <= 300; length += length < 40 ? 1 : 3) {
    Check(Problem(1, length, length, 1, 1, 128, Causal(length, length)));
    Check(Problem(1, length, 301 - length, 1, 1, 128));
    if (HasFailure()) break;
  }
}

TEST(Fp8Test, Masks) {
  for (int window : {1, 37, 128, 300})
    Check(Problem(1, 700, 700, 2, 2, 128, Window(700, 700, window)));
  Check(Problem(2, 650, 650, 2, 1, 128, Documents({1, 100, 28, 300, 127, 94})));
  for (uint32_t seed = 1; seed <= 6; ++seed) {
    Check(Problem(2, 500, 430, 2, 2, 128, RandomRanges(2, 500, 430, seed)));
  }
}

TEST(Fp8Test, HeadsGroupsAndDims) {
  for (int dim : {72, 80, 96, 120, 128})
    Check(Problem(2, 300, 260, 6, 2, dim, Causal(300, 260), 8));
  Check(Problem(3, 129, 1000, 8, 1, 128));
}

TEST(Fp8Test, LongRows) {
  Check(Problem(1, 130, 40000, 1, 1, 128));
  Check(Problem(1, 4000, 4000, 2, 1, 128, Causal(4000, 4000)));
}

// Tests magnitudes that differ by block, and blocks of zeros, so that the units of O change.
TEST(Fp8Test, BlocksOfOtherMagnitudes) {
  Problem p(1, 200, 900, 1, 1, 128);
  std::vector<bf16> v = p.v_data.ToHost();
  const float factors[] = {1, 1e-6f, 0, 1e3f, 1e-3f, 0, 1, 1e-2f};
  for (size_t i = 0; i < v.size(); ++i) {
    v[i] = __float2bfloat16(__bfloat162float(v[i]) * factors[i / 128 / 128]);
  }
  cudaMemcpy(p.v_data.data(), v.data(), v.size() * sizeof(bf16), cudaMemcpyHostToDevice);
  cudaMemset(p.k_data.data(), 0, 128 * 128 * sizeof(bf16));
  Check(std::move(p));
}

// A mask in two calls, merged in fp32, is the mask in one call. The keys of the second call begin a
// block, so that the 8 bits are the same. finishes_rows: the first call finishes the rows that see
// none of the second call's keys.
void CheckMergedCalls(bool finishes_rows) {
  for (const Mask& mask : {Mask(), Causal(300, 640), RandomRanges(1, 300, 640, 3)}) {
    if (mask.begin.empty() && finishes_rows) continue;
    Problem p(1, 300, 640, 2, 1, 128, mask);
    const Truth truth = ReferenceOf(p);
    constexpr int64_t kFirst = 256;
    Mask parts[2];
    for (size_t i = 0; i < mask.begin.size(); ++i) {
      parts[0].begin.push_back(mask.begin[i]);
      parts[0].end.push_back(mask.end[i]);
      parts[1].begin.push_back(std::max<int32_t>(0, mask.begin[i] - kFirst));
      parts[1].end.push_back(std::max<int32_t>(0, mask.end[i] - kFirst));
    }
    const Buffer<int32_t> begin[2] = {Buffer<int32_t>(parts[0].begin),
                                      Buffer<int32_t>(parts[1].begin)};
    const Buffer<int32_t> end[2] = {Buffer<int32_t>(parts[0].end), Buffer<int32_t>(parts[1].end)};
    std::vector<int32_t> last_calls((300 + kRowGroup - 1) / kRowGroup);
    for (size_t i = 0; i < mask.begin.size(); ++i) {
      if (parts[1].begin[i] < parts[1].end[i]) last_calls[i / kRowGroup] = 1;
    }
    const Buffer<int32_t> last(last_calls);
    Buffer<float> sum(p.QSize());
    Buffer<bf16> out(p.QSize());
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (int call = 0; call < 2; ++call) {
      FlashForwardParams params =
          call == 0 ? Params(p, sum.data(), DType::kFloat32) : Params(p, out.data());
      if (call == 1) {
        params.k.data = static_cast<bf16*>(p.k.data) + kFirst * p.k.seq_stride;
        params.v.data = static_cast<bf16*>(p.v.data) + kFirst * p.v.seq_stride;
        params.merge = true;
        params.sum = p.LikeQ(sum.data());
      }
      params.shape.k_len = call == 0 ? kFirst : 640 - kFirst;
      if (!mask.begin.empty()) {
        params.shape.visible.begin = begin[call].data();
        params.shape.visible.end = end[call].data();
      }
      params.non_persistent = call == 1;
      if (finishes_rows) {
        params.out = p.LikeQ(out.data());
        params.out_dtype = DType::kBFloat16;
        params.sum = p.LikeQ(sum.data());
        params.rows = {last.data(), 0, call, 0, 300};
      }
      Kernels().Forward(params);
    }
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ExpectClose(p.shape, ResultOf(p, out), truth);
  }
}

TEST(Fp8Test, CallsAreMerged) {
  CheckMergedCalls(/*finishes_rows=*/false);
  CheckMergedCalls(/*finishes_rows=*/true);
}

// Lists of blocks and ranges of the same mask walk the same blocks in the same order, so they give
// the same bits.
TEST(Fp8Test, ListsOfBlocks) {
  constexpr int64_t kQ = 500, kK = 600;
  Mask mask;
  std::vector<int32_t> key_begin = {0}, key_list, query_begin, query_list, place_list;
  for (int64_t i = 0; i < kQ; ++i) {
    const int64_t block = i / kListBlock;
    mask.begin.push_back(static_cast<int32_t>(block == 3 ? 256 : 0));
    mask.end.push_back(static_cast<int32_t>(std::min<int64_t>(kK, (block + 2) * kListBlock)));
  }
  for (int64_t block = 0; block < 4; ++block) {
    for (int64_t j = block == 3 ? 2 : 0; j < std::min<int64_t>(5, block + 2); ++j) {
      key_list.push_back(static_cast<int32_t>(j));
    }
    key_begin.push_back(static_cast<int32_t>(key_list.size()));
  }
  Problem p(1, kQ, kK, 4, 2, 128, mask);
  const Result by_ranges = RunFp8(p);
  const Buffer<int32_t> begins(key_begin), list(key_list);
  p.shape.visible = {};
  p.shape.blocks.key_begin = begins.data();
  p.shape.blocks.key_list = list.data();
  const Result by_lists = RunFp8(p);
  EXPECT_EQ(by_ranges.out, by_lists.out);
  EXPECT_EQ(by_ranges.lse, by_lists.lse);
}

TEST(Fp8Test, RunsGiveTheSameBits) {
  Problem p(2, 1000, 1000, 4, 2, 128, Causal(1000, 1000));
  const Result first = RunFp8(p);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(RunFp8(p).out, first.out);
}

TEST(Fp8Test, NotANumberStaysOne) {
  Problem p(1, 256, 256, 1, 1, 128, Causal(256, 256));
  const bf16 nan = __float2bfloat16(NAN);
  cudaMemcpy(p.v_data.data() + 10 * 128 + 5, &nan, sizeof(nan), cudaMemcpyHostToDevice);
  const Result result = RunFp8(p);
  for (int64_t i = 0; i < 256; ++i) {
    if (i >= 10) EXPECT_TRUE(std::isnan(result.out[i * 128 + 5])) << i;
    EXPECT_FALSE(std::isnan(result.out[i * 128 + 6])) << i;
  }
}

TEST(Fp8Test, WhatIsServed) {
  const auto check = [](DType dtype, int64_t head_dim) {
    return cuda::GpuKernels()->CheckFp8(DeviceType::kCuda, dtype, head_dim);
  };
  EXPECT_TRUE(check(DType::kBFloat16, 128).ok());
  EXPECT_TRUE(check(DType::kFloat16, 72).ok());
  for (const auto& [dtype, head_dim] : std::vector<std::pair<DType, int64_t>>{
           {DType::kBFloat16, 64}, {DType::kBFloat16, 136}, {DType::kFloat32, 128}}) {
    EXPECT_NE(check(dtype, head_dim).message().find("fp8"), std::string::npos) << head_dim;
  }
}

}  // namespace
}  // namespace sm90
}  // namespace burst
