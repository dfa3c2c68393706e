#include "train/peak_flops.h"

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "burst/tensor/tensor.h"
#include "model/ops/matmul.h"

namespace burst {

double MeasurePeakFlops() {
  using Clock = std::chrono::steady_clock;
  constexpr int64_t kSize = 768;  // three matrices fit in the caches, and the rate has levelled off
  constexpr double kSeconds = 0.2;
  const Tensor a = Tensor::Zeros({kSize, kSize}, DType::kFloat32), b = Tensor::ZerosLike(a),
               c = Tensor::ZerosLike(a);
  a.Fill(0.5);
  b.Fill(0.25);
  double best_seconds = 1e30;
  const Clock::time_point start = Clock::now();
  for (Clock::time_point before = start, after;
       std::chrono::duration<double>(before - start).count() < kSeconds; before = after) {
    MatMul(AsMatrix<float>(a, kSize), AsMatrix<float>(b, kSize), AsMatrix<float>(c, kSize),
           Into::kAssign);
    after = Clock::now();
    best_seconds = std::min(best_seconds, std::chrono::duration<double>(after - before).count());
  }
  return 2.0 * kSize * kSize * kSize / best_seconds;
}

}  // namespace burst
