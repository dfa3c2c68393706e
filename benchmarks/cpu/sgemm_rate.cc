#include "benchmarks/cpu/sgemm_rate.h"

#include <algorithm>
#include <vector>

#include "benchmarks/harness/harness.h"
#include "burst/base/parallel.h"
#include "burst/base/philox.h"
#include "burst/tensor/tensor.h"
#include "model/ops/matmul.h"

namespace burst {

double SgemmRate() {
  constexpr int64_t kSize = 1024;
  constexpr int kTries = 10;
  const int64_t threads = NumThreads();
  std::vector<Tensor> matrices;
  for (int64_t i = 0; i < 3 * threads; ++i) {
    const Tensor matrix = Tensor::Empty({kSize, kSize}, DType::kFloat32);
    for (int64_t j = 0; j < matrix.numel(); ++j) {
      matrix.data<float>()[j] = static_cast<float>(UniformFromBits(Philox(1, i, j)[0]) - 0.5);
    }
    matrices.push_back(matrix);
  }
  double seconds = 1e30;
  for (int attempt = 0; attempt < kTries; ++attempt) {
    const Stopwatch stopwatch;
    ParallelFor(threads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {  // a GEMM within a task runs inline
        MatMul(AsMatrix<float>(matrices[3 * i], kSize), AsMatrix<float>(matrices[3 * i + 1], kSize),
               AsMatrix<float>(matrices[3 * i + 2], kSize), Into::kAssign);
      }
    });
    seconds = std::min(seconds, stopwatch.Seconds());
  }
  return 2.0 * kSize * kSize * kSize * static_cast<double>(threads) / seconds;
}

}  // namespace burst
