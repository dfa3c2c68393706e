#include "tests/testing/attention_reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "burst/base/philox.h"

namespace burst {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

using Visible = std::function<bool(int64_t b, int64_t i, int64_t j)>;

// A head of a [batch, seqlen, heads, columns] tensor. row(i) is [columns].
struct Head {
  Head(const Tensor& tensor, int64_t b, int64_t h)
      : data(tensor.data<double>() + (b * tensor.dim(1) * tensor.dim(2) + h) * tensor.dim(3)),
        stride(tensor.dim(2) * tensor.dim(3)) {}
  double* row(int64_t i) const { return data + i * stride; }

  double* data;
  int64_t stride;
};

double Dot(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t c = 0; c < n; ++c) sum += a[c] * b[c];
  return sum;
}

// y += factor x.
void AddScaled(double factor, const double* x, int64_t n, double* y) {
  for (int64_t c = 0; c < n; ++c) y[c] += factor * x[c];
}

double ToBFloat16(double x) {
  float value = static_cast<float>(x);
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  bits += 0x7fff + (bits >> 16 & 1);
  bits &= 0xffff0000;
  std::memcpy(&value, &bits, sizeof(bits));
  return value;
}

double ToFloat16(double x) {
  if (x == 0 || !std::isfinite(x)) return x;
  const int exponent = std::max(std::ilogb(x), -14);  // -14 for subnormal numbers
  const double place = std::ldexp(1.0, exponent - 10);
  return std::nearbyint(x / place) * place;
}

}  // namespace

AttentionResults NaiveAttention(const Tensor& q_in, const Tensor& k_in, const Tensor& v_in,
                                const Tensor& dout_in, const Tensor& dlse_in, double softmax_scale,
                                const Visible& visible, DType dtype, const NaiveScores& scores) {
  const auto rounded = [=](double x) {
    return dtype == DType::kBFloat16 ? ToBFloat16(x) : dtype == DType::kFloat16 ? ToFloat16(x) : x;
  };
  const auto on_cpu = [](const Tensor& x) { return x.To(DeviceType::kCpu).To(DType::kFloat64); };
  const Tensor q = on_cpu(q_in), k = on_cpu(k_in), v = on_cpu(v_in);
  const Tensor dout = on_cpu(dout_in), dlse = on_cpu(dlse_in);
  const int64_t batch = q.dim(0), q_len = q.dim(1), heads = q.dim(2), d = q.dim(3);
  const int64_t k_len = k.dim(1), value_d = v.dim(3), group = heads / k.dim(2);
  AttentionResults result = {Tensor::ZerosLike(dout), Tensor::ZerosLike(dlse), Tensor::ZerosLike(q),
                             Tensor::ZerosLike(k), Tensor::ZerosLike(v)};
  std::vector<double> p(k_len), slope(k_len, 1);
  const auto weight = [&](int64_t b, int64_t h, int64_t i, int64_t j) {
    return scores.weight == nullptr ? 1 : scores.weight(b, h, i, j);
  };
  const bool has_sinks = !scores.sinks.empty();
  for (std::vector<double>* sums : {scores.dsinks, scores.dsinks_terms}) {
    if (sums != nullptr) sums->assign(heads, 0);
  }
  if (scores.max_logits != nullptr) scores.max_logits->assign(batch * heads, -kInfinity);
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      const Head Q(q, b, h), K(k, b, h / group), V(v, b, h / group), dO(dout, b, h);
      const Head O(result.out, b, h), dQ(result.dq, b, h);
      const Head dK(result.dk, b, h / group), dV(result.dv, b, h / group);
      for (int64_t i = 0; i < q_len; ++i) {
        double largest = -kInfinity;
        for (int64_t j = 0; j < k_len; ++j) {
          p[j] =
              visible(b, i, j) ? rounded(softmax_scale * Dot(Q.row(i), K.row(j), d)) : -kInfinity;
          if (scores.softcap != 0 && visible(b, i, j)) {
            const double tanh = std::tanh(p[j] / scores.softcap);
            p[j] = scores.softcap * tanh;
            slope[j] = 1 - tanh * tanh;
          }
          if (scores.bias != nullptr) p[j] += scores.bias(h, i, j);
          largest = std::max(largest, p[j]);
        }
        if (scores.max_logits != nullptr) {
          double& max = (*scores.max_logits)[b * heads + h];
          max = std::max(max, largest);
        }
        double& lse = result.lse.data<double>()[(b * heads + h) * q_len + i];
        lse = -kInfinity;
        const double sink = has_sinks ? scores.sinks[h] : -kInfinity;
        largest = std::max(largest, sink);
        if (largest == -kInfinity) continue;
        double sum = std::exp(sink - largest);
        for (int64_t j = 0; j < k_len; ++j) sum += p[j] = std::exp(p[j] - largest);
        lse = largest + std::log(sum);
        for (int64_t j = 0; j < k_len; ++j) {
          p[j] = rounded(p[j] / sum);
          if (p[j] != 0) AddScaled(weight(b, h, i, j) * p[j], V.row(j), value_d, O.row(i));
        }
        for (int64_t c = 0; c < value_d; ++c) O.row(i)[c] = rounded(O.row(i)[c]);
        const double lse_gradient = dlse.data<double>()[(b * heads + h) * q_len + i];
        const double delta = Dot(dO.row(i), O.row(i), value_d) - lse_gradient;
        if (scores.dsinks != nullptr) {
          double terms = std::abs(lse_gradient);
          for (int64_t c = 0; c < value_d; ++c) terms += std::abs(dO.row(i)[c] * O.row(i)[c]);
          const double sink_weight = std::exp(sink - lse);
          (*scores.dsinks)[h] -= sink_weight * delta;
          if (scores.dsinks_terms != nullptr) (*scores.dsinks_terms)[h] += sink_weight * terms;
        }
        for (int64_t j = 0; j < k_len; ++j) {
          if (p[j] == 0) continue;
          const double m = weight(b, h, i, j);
          const double dp = m * rounded(Dot(dO.row(i), V.row(j), value_d));
          const double ds = rounded(p[j] * (dp - delta) * slope[j]);
          AddScaled(m * p[j], dO.row(i), value_d, dV.row(j));
          AddScaled(softmax_scale * ds, K.row(j), d, dQ.row(i));
          AddScaled(softmax_scale * ds, Q.row(i), d, dK.row(j));
        }
      }
    }
  }
  for (const Tensor& gradient : {result.dq, result.dk, result.dv}) {
    double* data = gradient.data<double>();
    for (int64_t i = 0; i < gradient.numel(); ++i) data[i] = rounded(data[i]);
  }
  return result;
}

Tensor RandomNormal(const Shape& shape, DType dtype, uint64_t seed, uint64_t stream, double scale) {
  const Tensor tensor = Tensor::Empty(shape, dtype);
  DispatchFloat(dtype, [&](auto zero) {
    using T = decltype(zero);
    T* data = tensor.data<T>();
    for (int64_t i = 0; i < tensor.numel(); i += 2) {
      const PhiloxCounter bits = Philox(seed, stream, i);
      const auto pair = NormalFromBits(bits[0], bits[1]);
      data[i] = static_cast<T>(scale * pair[0]);
      if (i + 1 < tensor.numel()) data[i + 1] = static_cast<T>(scale * pair[1]);
    }
  });
  return tensor;
}

double RelativeError(const Tensor& actual, const Tensor& expected) {
  BURST_CHECK(actual.shape() == expected.shape())
      << ToString(actual.shape()) << " against " << ToString(expected.shape());
  const std::vector<double> a = actual.ToVector<double>(), e = expected.ToVector<double>();
  double error = 0, largest = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] == e[i]) {  // equal infinities, too
      if (std::isfinite(e[i])) largest = std::max(largest, std::abs(e[i]));
      continue;
    }
    if (!std::isfinite(a[i]) || !std::isfinite(e[i])) return kInfinity;
    largest = std::max(largest, std::abs(e[i]));
    error = std::max(error, std::abs(a[i] - e[i]));
  }
  return largest > 0 ? error / largest : error;
}

void ExpectClose(const AttentionResults& actual, const AttentionResults& expected,
                 double tolerance) {
  EXPECT_LE(RelativeError(actual.out, expected.out), tolerance) << "out";
  EXPECT_LE(RelativeError(actual.lse, expected.lse), tolerance) << "lse";
  EXPECT_LE(RelativeError(actual.dq, expected.dq), tolerance) << "dq";
  EXPECT_LE(RelativeError(actual.dk, expected.dk), tolerance) << "dk";
  EXPECT_LE(RelativeError(actual.dv, expected.dv), tolerance) << "dv";
}

void ExpectBitwiseEqual(const AttentionResults& a, const AttentionResults& b) {
  // Every dtype converts to double exactly.
  EXPECT_EQ(a.out.ToVector<double>(), b.out.ToVector<double>());
  EXPECT_EQ(a.lse.ToVector<double>(), b.lse.ToVector<double>());
  EXPECT_EQ(a.dq.ToVector<double>(), b.dq.ToVector<double>());
  EXPECT_EQ(a.dk.ToVector<double>(), b.dk.ToVector<double>());
  EXPECT_EQ(a.dv.ToVector<double>(), b.dv.ToVector<double>());
}

}  // namespace burst
