// Tests AdamW and the norm of a gradient, on the CPU and, compiled once more, on a GPU.
#include "train/optimizer/adamw.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "burst/base/parallel.h"
#include "burst/base/philox.h"
#include "tests/testing/test_device.h"

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
                            {static_cast<int64_t>(values.size())}, kTestDevice);
}

Tensor LossAndNorm(double loss, double norm) { return ToTensor<double>({loss, norm}); }

double NormOf(const Tensor& tensor) {
  const Tensor norm = Tensor::Empty({1}, DType::kFloat64, tensor.device());
  L2Norm(tensor, norm);
  return norm.ToVector<double>()[0];
}

// The textbook's update, one element at a time, in long double.
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

// Returns the tolerance. Each update makes a few roundings of a result of size O(1 + lr).
template <typename T>
void ExpectMatchesReference(int threads) {
  const ScopedThreadPool pool(threads);
  const int64_t n = 70001;
  const AdamWOptions options{0.9, 0.95, 1e-8, 0.1};
  const std::vector<DecayRange> decay = {{0, 100}, {250, 40000}, {69999, 70001}};
  const std::vector<double> initial = Random(n, 0);
  const Tensor p = ToTensor<T>(initial);
  const Tensor compute = Tensor::Zeros({n}, DType::kBFloat16, kTestDevice);
  std::vector<Reference> references;
  for (const T value : p.template ToVector<T>()) references.push_back({options, value});

  AdamW optimizer(options, n, DTypeOf<T>::value, decay, kTestDevice);
  const int kSteps = 10;
  const double grad_scale = 0.7;  // clipped to 0.7 of a norm of 2
  for (int step = 0; step < kSteps; ++step) {
    const double lr = 1e-2 / (step + 1);
    const Tensor g = ToTensor<T>(Random(n, step + 1));
    EXPECT_EQ(optimizer.updates(), step);
    EXPECT_TRUE(optimizer.Step(p, compute, g, LossAndNorm(1, 2), 2 * grad_scale, lr).ok());
    const std::vector<T> gradient = g.template ToVector<T>();
    for (int64_t i = 0; i < n; ++i) {
      bool decays = false;
      for (const DecayRange& range : decay) decays |= range.begin <= i && i < range.end;
      references[i].Step(double{gradient[i]} * grad_scale, decays, lr);
    }
  }
  EXPECT_EQ(optimizer.updates(), kSteps);
  const double eps = std::numeric_limits<T>::epsilon();
  const std::vector<T> actual = p.template ToVector<T>();
  for (int64_t i = 0; i < n; ++i) {
    const double expected = static_cast<double>(references[i].p);
    ASSERT_NEAR(actual[i], expected, 2 * kSteps * eps * (1 + std::fabs(expected))) << i;
  }
  EXPECT_EQ(compute.ToVector<float>(), p.To(DType::kBFloat16).template ToVector<float>());
}

TEST(AdamW, TenStepsMatchTheTextbookInDouble) { ExpectMatchesReference<double>(1); }
TEST(AdamW, TenStepsMatchTheTextbookInFloat) { ExpectMatchesReference<float>(1); }
TEST(AdamW, TenStepsMatchTheTextbookOnThreads) { ExpectMatchesReference<float>(3); }

TEST(AdamW, SameBitsForAnyNumberOfThreads) {
  const int64_t n = 100003;
  const auto update = [&](int threads) {
    const ScopedThreadPool pool(threads);
    const Tensor p = ToTensor<float>(Random(n, 0)), g = ToTensor<float>(Random(n, 1));
    AdamW optimizer({0.9, 0.95, 1e-8, 0.1}, n, DType::kFloat32,
                    {{0, 77}, {77, 16385}, {20001, 50003}, {99999, n}}, kTestDevice);
    for (int step = 0; step < 2; ++step) {
      EXPECT_TRUE(optimizer.Step(p, Tensor(), g, LossAndNorm(1, NormOf(g)), 1, 1e-2).ok());
    }
    return p.ToVector<float>();
  };
  for (const int threads : {2, 3, 5, 8}) EXPECT_EQ(update(threads), update(1)) << threads;
}

// Parts have any sizes, each with another decay, and bounds across them.
TEST(AdamW, PartsAreUpdatedAsTheWhole) {
  const int64_t n = 40000;
  const std::vector<DecayRange> decay = {{0, 77}, {77, 16385}, {20001, 35003}, {39999, n}};
  const auto update = [&](const std::vector<int64_t>& ends) {
    const Tensor p = ToTensor<float>(Random(n, 0)), g = ToTensor<float>(Random(n, 1));
    const Tensor compute = Tensor::Zeros({n}, DType::kBFloat16, kTestDevice);
    AdamW optimizer({0.9, 0.95, 1e-8, 0.1}, n, DType::kFloat32, decay, kTestDevice);
    std::vector<AdamW::Part> parts;
    int64_t begin = 0;
    for (const int64_t end : ends) {
      const auto part = [&](const Tensor& all) { return all.Slice(0, begin, end - begin); };
      parts.push_back({part(p), part(compute), part(g)});
      begin = end;
    }
    for (int step = 0; step < 2; ++step)
      EXPECT_TRUE(optimizer.Step(parts, LossAndNorm(1, 2), 1, 1e-2).ok());
    EXPECT_EQ(optimizer.updates(), 2);
    return std::vector<std::vector<float>>{p.ToVector<float>(), compute.ToVector<float>(),
                                           optimizer.first_moment().ToVector<float>(),
                                           optimizer.second_moment().ToVector<float>()};
  };
  const auto whole = update({n});
  EXPECT_TRUE(update({64, 64, 16384, 20032, n}) == whole);
  EXPECT_TRUE(update({1, 78, 20000, 20003, n}) == whole) << "not aligned";
}

// Pieces are shorter and longer than parts. A part has one piece or many. None, some or all of them
// stay on the device.
TEST(AdamW, StateInTheHostsMemoryTakesTheSameSteps) {
  const int64_t n = 40000;
  const std::vector<DecayRange> decay = {{0, 77}, {77, 16385}, {20001, 35003}, {39999, n}};
  for (const bool rounds : {true, false}) {
    const auto update = [&](const std::vector<int64_t>& ends, const StreamedState& streamed) {
      const bool on_host = streamed.piece > 0 && rounds;
      const Tensor p = on_host ? Tensor::ZerosOnHost({n}, DType::kFloat32, kTestDevice)
                               : Tensor::Zeros({n}, DType::kFloat32, kTestDevice);
      p.CopyFrom(ToTensor<float>(Random(n, 0)));
      const Tensor compute = rounds ? Tensor::Zeros({n}, DType::kBFloat16, kTestDevice) : Tensor();
      AdamW optimizer({0.9, 0.95, 1e-8, 0.1}, n, DType::kFloat32, decay, kTestDevice, streamed);
      EXPECT_EQ(optimizer.first_moment().device(),
                streamed.piece > 0 ? DeviceType::kCpu : kTestDevice);
      // The second changes nothing.
      const double steps[][2] = {{1, 2}, {std::nan(""), 2}, {1, 0.5}};
      std::vector<std::vector<float>> results;
      for (int step = 0; step < 3; ++step) {
        const Tensor g = ToTensor<float>(Random(n, step + 1));
        std::vector<AdamW::Part> parts;
        int64_t begin = 0;
        for (const int64_t end : ends) {
          const auto part = [&](const Tensor& all) {
            return all.null() ? all : all.Slice(0, begin, end - begin);
          };
          parts.push_back({part(p), part(compute), part(g)});
          begin = end;
        }
        EXPECT_TRUE(
            optimizer.Step(parts, LossAndNorm(steps[step][0], steps[step][1]), 1, 1e-2).ok());
        optimizer.WriteBack();
        SynchronizeDevice(kTestDevice);
        results.push_back(p.ToVector<float>());
        if (rounds) results.push_back(compute.ToVector<float>());
        results.push_back(optimizer.first_moment().ToVector<float>());
        results.push_back(optimizer.second_moment().ToVector<float>());
      }
      EXPECT_EQ(optimizer.updates(), 2);
      return results;
    };
    for (const std::vector<int64_t>& ends :
         {std::vector<int64_t>{n}, {64, 64, 16384, 20032, n}, {1, 78, 20000, 20003, n}}) {
      const auto here = update(ends, {});
      for (const int64_t piece : {64, 4096, 20032, 1 << 20}) {
        for (const int64_t resident : {0, 64, 30000, 1 << 20}) {
          EXPECT_TRUE(update(ends, {piece, resident}) == here)
              << piece << ", " << resident << ", " << ends.size() << " parts";
        }
      }
    }
  }
}

// The resident pieces are the first ones. Until WriteBack, the host's memory has their old values.
TEST(AdamW, ResidentPiecesAreWrittenBackAfterManyUpdates) {
  const int64_t n = 1000;
  const auto update = [&](const StreamedState& streamed, const auto& after) {
    const Tensor p = ToTensor<float>(Random(n, 0));
    AdamW optimizer({}, n, DType::kFloat32, {}, kTestDevice, streamed);
    for (int step = 1; step <= 5; ++step) {
      const Tensor g = ToTensor<float>(Random(n, step));
      EXPECT_TRUE(optimizer.Step(p, Tensor(), g, LossAndNorm(1, 2), 1, 1e-2).ok());
    }
    SynchronizeDevice(kTestDevice);
    after(optimizer.first_moment().ToVector<float>());
    optimizer.WriteBack();
    SynchronizeDevice(kTestDevice);
    return std::vector<std::vector<float>>{p.ToVector<float>(),
                                           optimizer.first_moment().ToVector<float>(),
                                           optimizer.second_moment().ToVector<float>()};
  };
  const auto here = update({}, [](const std::vector<float>&) {});
  // Three pieces of 128 elements, of two tensors each.
  const auto streamed = update({128, 3 * 128 * 2 + 64}, [&](const std::vector<float>& m) {
    EXPECT_EQ(std::count(m.begin(), m.begin() + 384, 0), 384);
    EXPECT_EQ(std::vector<float>(m.begin() + 384, m.end()),
              std::vector<float>(here[1].begin() + 384, here[1].end()));
  });
  EXPECT_TRUE(streamed == here);
}

TEST(AdamW, ZeroGradientOnlyDecays) {
  const Tensor p = ToTensor<double>({1, 1});
  AdamW optimizer({0.9, 0.95, 1e-8, 0.5}, 2, DType::kFloat64, {{1, 2}}, kTestDevice);
  EXPECT_TRUE(
      optimizer.Step(p, Tensor(), ToTensor<double>({0, 0}), LossAndNorm(1, 0), 1, 0.1).ok());
  const std::vector<double> values = p.ToVector<double>();
  EXPECT_EQ(values[0], 1);
  EXPECT_DOUBLE_EQ(values[1], 0.95);
}

// Gradients below the limit are left alone, and a limit of 0 does not clip. Scaling by the clip
// factor equals clipping. The test takes every size, with and without the alignment that a GPU's
// fast path needs.
TEST(AdamW, Clipping) {
  for (const int64_t n : {1, 3, 4, 2047, 5000}) {
    for (const int64_t offset : {0, 1}) {
      const std::vector<double> initial = Random(n + offset, 0);
      std::vector<double> gradient = Random(n + offset, 1);
      const auto step = [&](double clip) {
        const Tensor p = ToTensor<float>(initial).Slice(0, offset, n);
        const Tensor g = ToTensor<float>(gradient).Slice(0, offset, n);
        AdamW optimizer(AdamWOptions(), n, DType::kFloat32, {{n / 3, n / 2}}, kTestDevice);
        EXPECT_TRUE(optimizer.Step(p, Tensor(), g, LossAndNorm(1, 8), clip, 0.1).ok());
        const Tensor m = optimizer.first_moment();
        return std::vector<std::vector<float>>{p.ToVector<float>(), m.ToVector<float>()};
      };
      const auto without = step(0), clipped = step(2);
      EXPECT_EQ(step(8), without);
      EXPECT_EQ(step(100), without);
      EXPECT_NE(clipped[1], without[1]);
      for (double& g : gradient) g /= 4;
      EXPECT_EQ(step(0), clipped);
    }
  }
}

TEST(AdamW, NothingChangesNorCountsWhenLossOrNormIsNotFinite) {
  const double inf = std::numeric_limits<double>::infinity(), nan = std::nan("");
  const std::vector<double> initial = Random(1000, 0);
  const Tensor p = ToTensor<float>(initial), g = ToTensor<float>(Random(1000, 1));
  const Tensor compute = p.To(DType::kBFloat16);
  const std::vector<float> masters = p.ToVector<float>(), rounded = compute.ToVector<float>();
  AdamW optimizer(AdamWOptions(), 1000, DType::kFloat32, {{0, 1000}}, kTestDevice);
  for (const auto& [loss, norm] :
       std::vector<std::pair<double, double>>{{1, inf}, {1, nan}, {inf, 1}, {-inf, 1}, {nan, 1}}) {
    EXPECT_TRUE(optimizer.Step(p, compute, g, LossAndNorm(loss, norm), 1, 0.1).ok());
    EXPECT_EQ(p.ToVector<float>(), masters);
    EXPECT_EQ(compute.ToVector<float>(), rounded);
    EXPECT_EQ(optimizer.first_moment().ToVector<float>(), std::vector<float>(1000, 0));
    EXPECT_EQ(optimizer.second_moment().ToVector<float>(), std::vector<float>(1000, 0));
  }
  EXPECT_EQ(optimizer.updates(), 0);

  // The next update counts as the first. It equals the update of an optimizer that skipped none.
  const Tensor expected = p.Clone(), expected_compute = compute.Clone();
  AdamW fresh(AdamWOptions(), 1000, DType::kFloat32, {{0, 1000}}, kTestDevice);
  EXPECT_TRUE(optimizer.Step(p, compute, g, LossAndNorm(1, 2), 1, 0.1).ok());
  EXPECT_TRUE(fresh.Step(expected, expected_compute, g, LossAndNorm(1, 2), 1, 0.1).ok());
  EXPECT_EQ(optimizer.updates(), 1);
  EXPECT_EQ(p.ToVector<float>(), expected.ToVector<float>());
  EXPECT_NE(p.ToVector<float>(), masters);
}

// The weights are on either side of every bound of many small ranges. Some ranges are empty or
// adjacent.
TEST(AdamW, DecayRangesAreExact) {
  const int64_t n = 10007;
  std::vector<DecayRange> decay;
  std::vector<double> expected(n, 1);
  for (int64_t begin = 0; begin < n;) {
    const int64_t r = Philox(1, 7, begin)[0], end = std::min(n, begin + r % 40);
    decay.push_back({begin, end});
    for (int64_t i = begin; i < end; ++i) expected[i] = 0.95;
    begin = end + (r >> 8) % 30 + (end == begin);
  }
  const Tensor p = ToTensor<double>(std::vector<double>(n, 1));
  AdamW optimizer({0.9, 0.95, 1e-8, 0.5}, n, DType::kFloat64, decay, kTestDevice);
  EXPECT_TRUE(
      optimizer
          .Step(p, Tensor(), ToTensor<double>(std::vector<double>(n, 0)), LossAndNorm(1, 0), 0, 0.1)
          .ok());
  const std::vector<double> actual = p.ToVector<double>();
  for (int64_t i = 0; i < n; ++i) ASSERT_DOUBLE_EQ(actual[i], expected[i]) << i;
}

TEST(L2Norm, MatchesPlainSumAndDoesNotDependOnThreads) {
  for (int64_t n : {1, 7, 8, 16384, 16385, 100003}) {
    const std::vector<double> values = Random(n, 5);
    const Tensor tensor = ToTensor<float>(values);
    long double sum = 0;
    for (float x : tensor.ToVector<float>()) sum += static_cast<long double>(x) * x;
    const double one = NormOf(tensor);
    EXPECT_NEAR(one, static_cast<double>(std::sqrt(sum)), 1e-14 * n * one);
    const ScopedThreadPool pool(3);
    EXPECT_EQ(NormOf(tensor), one);
  }
}

TEST(L2Norm, OfASliceAndOfDoubles) {
  const std::vector<double> values = Random(5001, 6);
  long double sum = 0;
  for (int64_t i = 1; i <= 5000; ++i) sum += static_cast<long double>(values[i]) * values[i];
  const double expected = static_cast<double>(std::sqrt(sum));
  EXPECT_NEAR(NormOf(ToTensor<double>(values).Slice(0, 1, 5000)), expected, 1e-12 * expected);
  EXPECT_EQ(NormOf(Tensor::Zeros({0}, DType::kFloat32, kTestDevice)), 0);
}

TEST(L2Norm, SeesWhatIsNotFinite) {
  std::vector<double> values(20000, 0);
  values.back() = std::numeric_limits<double>::infinity();
  EXPECT_FALSE(std::isfinite(NormOf(ToTensor<float>(values))));
  // Squares beyond float's range do not overflow.
  values.back() = 1e30f;
  EXPECT_FLOAT_EQ(NormOf(ToTensor<float>(values)), 1e30);
}

}  // namespace
}  // namespace burst
