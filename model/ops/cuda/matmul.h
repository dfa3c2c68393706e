// GEMMs on a GPU, by cuBLASLt: float8 and bf16 with fp32 accumulation, fp32 (or TF32), double.
#pragma once

#include <cstdint>

#include "burst/tensor/gpu_kernel.h"
#include "burst/tensor/tensor.h"

namespace burst {
namespace cuda {

// A matrix in row-major memory, or the transpose of one.
struct Matrix {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;  // elements between the rows in memory (columns when transposed)
  bool transposed = false;

  Matrix Transposed() const { return {data, dtype, cols, rows, stride, !transposed}; }
  Matrix Rows(int64_t begin, int64_t end) const;
};

// A contiguous tensor as [numel / cols, cols].
Matrix AsMatrix(const Tensor& tensor, int64_t cols);

// An operation on a b + addend before it is stored. `vector` has an element for each column of c.
enum class Epilogue {
  kNone,
  kBias,          // c + vector
  kGelu,          // gelu(c + vector); `pre`, unless null, becomes c + vector
  kGeluBackward,  // c * gelu'(pre)
};

// What a scale of a float8 matrix is for. A row is one of a, or of b's transpose, and lies along
// the sum. Scales are float32.
enum class Scaling {
  kTensor,  // the matrix; [1]
  kRow,     // a row; [rows]
  kVector,  // 128 elements of a row; [ceil(k / 128), rows]
  kBlock,   // 128 elements of 128 rows; [ceil(rows / 128), ceil(k / 128) rounded up to 4]
};

// c = epilogue(a b + addend). a: [m, k], b: [k, n], c: [m, n], not transposed. Queued on the
// calling thread's stream. Only bf16 and float8 operands have epilogues.
//
//   a, b      c
//   float8    bf16 or float32; c = a_scale b_scale a b + addend
//   bf16      bf16 or float32
//   float32   float32
//   float64   float64
//
// With float8, a is not transposed and b is, so that both have k along their rows in memory; k and
// n are multiples of 16. Both have scales of kTensor, or both of kRow. Or a has kVector, and b
// kVector or kBlock; m is then a multiple of 4.
struct MatMulParams {
  Matrix a, b, c;
  // Null, or a matrix like c (c itself: c += a b).
  const void* addend = nullptr;
  Epilogue epilogue = Epilogue::kNone;
  const void* vector = nullptr;  // [columns of c], dtype of c; of kBias and kGelu
  void* pre = nullptr;           // [m, n] contiguous, dtype of c
  // Scales of float8 matrices, on the GPU; null for other dtypes.
  const float* a_scale = nullptr;
  const float* b_scale = nullptr;
  Scaling a_scaling = Scaling::kTensor;
  Scaling b_scaling = Scaling::kTensor;
};
void MatMul(const MatMulParams& params);

// Returns the work on the calling thread's simulated GPU.
KernelWork WorkOf(const MatMulParams& params);

// The first GEMM of a GPU takes this workspace for all GEMMs. cuBLAS recommends the size for
// Hopper.
constexpr size_t kMatMulWorkspaceBytes = size_t{32} << 20;

// Whether float32 GEMMs may round their operands to TF32 (10 bits of mantissa): faster, and off
// unless asked for. For the whole process.
void AllowTf32(bool allow);
bool Tf32IsAllowed();

}  // namespace cuda
}  // namespace burst
