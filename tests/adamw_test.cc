#include "train/adamw.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "burst/base/parallel.h"
#include "burst/base/philox.h"

namespace burst {
namespace {

std::vector<double> Random(int64_t n, uint64_t stream) {
  std::vector<double> values(n);
  for (int64_t i = 0; i < n; ++i) {
    const PhiloxCounter bits = Philox(1, stream, i);
    values[i] = NormalFromBits(bits[0], bits[1])[0];
  }
  return values;
}

template <typename T>
Tensor ToTensor(const std::vector<double>& values) {
  return Tensor::FromVector(std::vector<T>(values.begin(), values.end()),
                            {static_cast<int64_t>(values.size())});
}

// The textbook, one element at a time, in long double.
struct Reference {
  AdamWOptions options;
  long double p, m = 0, v = 0;
  int t = 0;

  void Step(double g, bool decay, double lr) {
    ++t;
    m = options.beta1 * m + (1 - options.beta1) * g;
    v = options.beta2 * v + (1 - options.beta2) * g * g;
    const long double m_hat = m / (1 - std::pow((long double){options.beta1}, t));
    const long double v_hat = v / (1 - std::pow((long double){options.beta2}, t));
    const long double decayed = decay ? options.weight_decay * p : 0;
    p -= lr * (m_hat / (std::sqrt(v_hat) + options.eps) + decayed);
  }
};

// Each update makes a few roundings of a result of size O(1 + lr).
template <typename T>
void ExpectMatchesReference(int threads) {
  const ScopedThreadPool pool(threads);
  const int64_t n = 70001;
  const AdamWOptions options{0.9, 0.95, 1e-8, 0.1};
  const std::vector<DecayRange> decay = {{0, 100}, {250, 40000}, {69999, 70001}};
  const std::vector<double> initial = Random(n, 0);
  const Tensor p = ToTensor<T>(initial);
  std::vector<Reference> references;
  for (int64_t i = 0; i < n; ++i) references.push_back({options, p.data<T>()[i]});

  AdamW optimizer(options, n, DTypeOf<T>::value, decay);
  const int kSteps = 10;
  const double grad_scale = 0.7;
  for (int step = 0; step < kSteps; ++step) {
    const double lr = 1e-2 / (step + 1);
    const Tensor g = ToTensor<T>(Random(n, step + 1));
    optimizer.Step(p, g, grad_scale, lr);
    for (int64_t i = 0; i < n; ++i) {
      bool decays = false;
      for (const DecayRange& range : decay) decays |= range.begin <= i && i < range.end;
      references[i].Step(double{g.data<T>()[i]} * grad_scale, decays, lr);
    }
  }
  EXPECT_EQ(optimizer.updates(), kSteps);
  const double eps = std::numeric_limits<T>::epsilon();
  for (int64_t i = 0; i < n; ++i) {
    const double expected = static_cast<double>(references[i].p);
    ASSERT_NEAR(p.data<T>()[i], expected, 2 * kSteps * eps * (1 + std::fabs(expected))) << i;
  }
}

TEST(AdamW, TenStepsMatchTheTextbookInDouble) { ExpectMatchesReference<double>(1); }
TEST(AdamW, TenStepsMatchTheTextbookInFloat) { ExpectMatchesReference<float>(1); }
TEST(AdamW, TenStepsMatchTheTextbookOnThreads) { ExpectMatchesReference<float>(3); }

TEST(AdamW, ZeroGradientOnlyDecays) {
  const Tensor p = ToTensor<double>({1, 1});
  AdamW optimizer({0.9, 0.95, 1e-8, 0.5}, 2, DType::kFloat64, {{1, 2}});
  optimizer.Step(p, Tensor::Zeros({2}, DType::kFloat64), 1, 0.1);
  EXPECT_EQ(p.data<double>()[0], 1);
  EXPECT_DOUBLE_EQ(p.data<double>()[1], 0.95);
}

TEST(L2Norm, MatchesPlainSumAndDoesNotDependOnThreads) {
  for (int64_t n : {1, 7, 8, 16384, 16385, 100003}) {
    const std::vector<double> values = Random(n, 5);
    const Tensor tensor = ToTensor<float>(values);
    long double sum = 0;
    for (float x : tensor.ToVector<float>()) sum += static_cast<long double>(x) * x;
    const double one = L2Norm(tensor);
    EXPECT_NEAR(one, static_cast<double>(std::sqrt(sum)), 1e-14 * n * one);
    const ScopedThreadPool pool(3);
    EXPECT_EQ(L2Norm(tensor), one);
  }
}

TEST(L2Norm, SeesWhatIsNotFinite) {
  Tensor tensor = Tensor::Zeros({20000}, DType::kFloat32);
  tensor.data<float>()[19999] = std::numeric_limits<float>::infinity();
  EXPECT_FALSE(std::isfinite(L2Norm(tensor)));
  // Squares beyond float's range are no overflow.
  tensor.data<float>()[19999] = 1e30f;
  EXPECT_FLOAT_EQ(L2Norm(tensor), 1e30);
}

}  // namespace
}  // namespace burst
