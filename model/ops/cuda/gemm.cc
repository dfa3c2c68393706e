// Describes a GEMM; matmul.cc runs it.
#include <atomic>

#include "burst/base/check.h"
#include "model/ops/cuda/matmul.h"

namespace burst {
namespace cuda {
namespace {

std::atomic<bool> allow_tf32{false};

double Bytes(const Matrix& m) { return static_cast<double>(m.rows * m.cols * SizeOf(m.dtype)); }

}  // namespace

Matrix Matrix::Rows(int64_t begin, int64_t end) const {
  Matrix part = *this;
  part.data = static_cast<char*>(data) + begin * (transposed ? 1 : stride) * SizeOf(dtype);
  part.rows = end - begin;
  return part;
}

Matrix AsMatrix(const Tensor& tensor, int64_t cols) {
  BURST_CHECK(tensor.is_contiguous() && cols > 0 && tensor.numel() % cols == 0)
      << ToString(tensor.shape()) << " as rows of " << cols;
  return {tensor.raw_data(), tensor.dtype(), tensor.numel() / cols, cols, cols, false};
}

void AllowTf32(bool allow) { allow_tf32 = allow; }
bool Tf32IsAllowed() { return allow_tf32; }

KernelWork WorkOf(const MatMulParams& p) {
  const GpuModel& gpu = SimulatedGpu::Current()->model();
  // Columns of a whose products take as long as to begin and end a tile of c (d12 compared with
  // llama_1b in benchmarks/results/dense_h200.json).
  constexpr int kEnds = 64;
  const double flops = 2.0 * p.c.rows * p.c.cols * (p.a.cols + kEnds);
  double rate = allow_tf32 ? gpu.tf32 : gpu.fp32;
  if (p.a.dtype == DType::kBFloat16) rate = gpu.bf16;
  if (Is8Bit(p.a.dtype)) rate = gpu.fp8;
  const int more = (p.addend != nullptr) + (p.pre != nullptr);  // matrices like c
  return {Bytes(p.a) + Bytes(p.b) + (1 + more) * Bytes(p.c), flops / rate};
}

}  // namespace cuda
}  // namespace burst
