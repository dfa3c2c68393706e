// Compares Muon with singular value decompositions in double (Eigen's).
#include "train/optimizer/muon.h"

#include <gtest/gtest.h>

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "burst/base/parallel.h"
#include "burst/tensor/tensor.h"
#include "tests/testing/gradient_check.h"
#include "tests/testing/test_device.h"
#include "train/optimizer/adamw.h"

namespace burst {
namespace {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

std::vector<double> Random(int64_t n, int seed) {
  return RandomTensor({n}, seed).ToVector<double>();
}

Matrix AsEigen(const std::vector<double>& values, int64_t rows, int64_t cols) {
  return Eigen::Map<const Matrix>(values.data(), rows, cols);
}

// Each step maps a singular value s to a s + b s^3 + c s^5, and keeps the singular vectors.
Matrix Expected(const Matrix& x) {
  const Eigen::JacobiSVD<Matrix> svd(x, Eigen::ComputeThinU | Eigen::ComputeThinV);
  Eigen::VectorXd s = svd.singularValues() / x.norm();
  for (int step = 0; step < 5; ++step) {
    s = s.unaryExpr(
        [](double v) { return 3.4445 * v - 4.7750 * std::pow(v, 3) + 2.0315 * std::pow(v, 5); });
  }
  return svd.matrixU() * s.asDiagonal() * svd.matrixV().transpose();
}

template <typename T>
std::vector<T> Orthogonalized(const std::vector<double>& x, int64_t rows, int64_t cols) {
  std::vector<T> values(x.begin(), x.end());
  Orthogonalize(MatrixView<T>{values.data(), rows, cols, cols, false});
  return values;
}

TEST(Muon, MovesSingularValuesNearOne) {
  for (const auto& [rows, cols] : std::vector<std::pair<int64_t, int64_t>>{
           {24, 40}, {40, 24}, {32, 32}, {1, 17}, {17, 1}, {96, 200}}) {
    const std::vector<double> x = Random(rows * cols, static_cast<int>(rows));
    const Matrix expected = Expected(AsEigen(x, rows, cols));
    const std::vector<double> of_double = Orthogonalized<double>(x, rows, cols);
    const std::vector<float> of_float = Orthogonalized<float>(x, rows, cols);
    for (int64_t i = 0; i < rows * cols; ++i) {
      const double want = expected(i / cols, i % cols);
      EXPECT_NEAR(of_double[i], want, 1e-10);
      // Five steps amplify a rounding by at most 3.4445^5 = 485.
      EXPECT_NEAR(of_float[i], want, 485 * 0x1p-24 * static_cast<double>(rows + cols));
    }
    const Eigen::JacobiSVD<Matrix> before(AsEigen(x, rows, cols));
    const Eigen::VectorXd after =
        Eigen::JacobiSVD<Matrix>(AsEigen(of_double, rows, cols)).singularValues();
    EXPECT_LT(after.maxCoeff(), 1.14);
    if (before.singularValues().minCoeff() > 0.01 * before.singularValues().norm()) {
      EXPECT_GT(after.minCoeff(), 0.68);
    }
  }
}

TEST(Muon, ZerosStayAndThreadsKeepTheBits) {
  EXPECT_EQ(Orthogonalized<float>(std::vector<double>(12, 0.0), 3, 4), std::vector<float>(12, 0));
  const std::vector<double> x = Random(150 * 260, 3);
  std::vector<std::vector<float>> results;
  for (const int threads : {1, 2, 3}) {
    const ScopedThreadPool pool(threads);
    results.push_back(Orthogonalized<float>(x, 150, 260));
  }
  EXPECT_EQ(results[1], results[0]);
  EXPECT_EQ(results[2], results[0]);
}

std::unique_ptr<Muon> MuonOf(const MuonMatrix& matrix, double momentum) {
  return std::make_unique<Muon>(std::vector<MuonMatrix>{matrix}, momentum, /*ranks=*/nullptr);
}

Tensor LossAndNorm(double loss, double norm) {
  return Tensor::FromVector(std::vector<double>{loss, norm}, {2}, kTestDevice);
}

// With weights in bfloat16 a GPU takes the steps in bfloat16. Each of five steps rounds four
// results by 2^-9. Singular values near 1 do not amplify it.
TEST(Muon, StepsInBFloat16OnGpus) {
  if (kTestDevice == DeviceType::kCpu) GTEST_SKIP();
  AdamWOptions options;
  options.weight_decay = 0;
  for (const auto& [rows, cols] :
       std::vector<std::pair<int64_t, int64_t>>{{64, 96}, {96, 64}, {128, 128}, {25, 41}}) {
    const int64_t n = rows * cols;
    AdamW muon(options, n, DType::kFloat32, {{0, n}}, kTestDevice, /*streamed=*/{},
               MuonOf({rows, cols, /*blocks=*/1, {{0, n, 0}}}, /*momentum=*/0));
    const std::vector<double> g = Random(n, static_cast<int>(rows));
    const Tensor p = Tensor::Zeros({n}, DType::kFloat32, kTestDevice);
    const Tensor compute = Tensor::Zeros({n}, DType::kBFloat16, kTestDevice);
    const Tensor grads =
        Tensor::FromVector(std::vector<float>(g.begin(), g.end()), {n}, kTestDevice);
    const double lr = -1 / (0.2 * std::sqrt(static_cast<double>(std::max(rows, cols))));
    EXPECT_EQ(muon.Step(p, compute, grads, LossAndNorm(NAN, 1), /*clip=*/0, lr), absl::OkStatus());
    EXPECT_EQ(muon.updates(), 0);
    EXPECT_EQ(p.ToVector<float>(), std::vector<float>(n, 0)) << "a loss that is not finite";
    EXPECT_EQ(muon.first_moment().ToVector<float>(), std::vector<float>(n, 0));
    EXPECT_EQ(muon.Step(p, compute, grads, LossAndNorm(1, 1), /*clip=*/0, lr), absl::OkStatus());
    const Matrix expected = Expected(AsEigen(g, rows, cols));
    const std::vector<double> weights = p.To(DType::kFloat64).ToVector<double>();
    EXPECT_LE((AsEigen(weights, rows, cols) - expected).norm(), 20 * 0x1p-9 * expected.norm());
    EXPECT_EQ(compute.To(DType::kFloat64).ToVector<double>(),
              p.To(DType::kBFloat16).To(DType::kFloat64).ToVector<double>());
  }
}

// A buffer with a matrix of [rows, cols] between other parameters.
TEST(Muon, UpdatesItsMatricesAndAdamWTheRest) {
  constexpr int64_t kBefore = 70, kRows = 6, kCols = 9, kAfter = 30;
  constexpr int64_t kSize = kRows * kCols, kAll = kBefore + kSize + kAfter;
  constexpr double kLr = 0.02, kMomentum = 0.9, kDecay = 0.1, kClip = 2;
  AdamWOptions options;
  options.weight_decay = kDecay;
  const std::vector<DecayRange> decay = {{kBefore, kBefore + kSize}};
  AdamW plain(options, kAll, DType::kFloat64, decay, kTestDevice);
  AdamW muon(options, kAll, DType::kFloat64, decay, kTestDevice, /*streamed=*/{},
             MuonOf({kRows, kCols, /*blocks=*/1, {{0, kSize, kBefore}}}, kMomentum));
  const std::vector<double> initial = Random(kAll, 7);
  const Tensor p = Tensor::FromVector(initial, {kAll}, kTestDevice), q = p.Clone();
  Matrix weights = AsEigen({initial.begin() + kBefore, initial.end() - kAfter}, kRows, kCols);
  Matrix m = Matrix::Zero(kRows, kCols);
  for (int step = 1; step <= 3; ++step) {
    const std::vector<double> g = Random(kAll, 10 + step);
    const Tensor grads = Tensor::FromVector(g, {kAll}, kTestDevice);
    const double norm = AsEigen(g, kAll, 1).norm();
    const Tensor loss_and_norm = LossAndNorm(1, norm);
    EXPECT_EQ(plain.Step(p, Tensor(), grads, loss_and_norm, kClip, kLr), absl::OkStatus());
    EXPECT_EQ(muon.Step(q, Tensor(), grads, loss_and_norm, kClip, kLr), absl::OkStatus());
    const Matrix clipped =
        AsEigen({g.begin() + kBefore, g.end() - kAfter}, kRows, kCols) * (kClip / norm);
    m = kMomentum * m + (1 - kMomentum) * clipped;
    const Matrix direction = Expected(kMomentum * m + (1 - kMomentum) * clipped);
    weights = (1 - kLr * kDecay) * weights - 0.2 * std::sqrt(double{kCols}) * kLr * direction;
  }
  const std::vector<double> by_adamw = p.ToVector<double>(), by_muon = q.ToVector<double>();
  for (int64_t i = 0; i < kAll; ++i) {
    const int64_t at = i - kBefore;
    if (at >= 0 && at < kSize) {
      EXPECT_NEAR(by_muon[i], weights(at / kCols, at % kCols), 1e-10) << i;
    } else {
      EXPECT_EQ(by_muon[i], by_adamw[i]) << i;
    }
  }
  // The second moments are the ones of AdamW without the matrix's.
  std::vector<double> second = plain.second_moment().ToVector<double>();
  second.erase(second.begin() + kBefore, second.begin() + kBefore + kSize);
  EXPECT_EQ(muon.second_moment().ToVector<double>(), second);
}

}  // namespace
}  // namespace burst
