#include "model/ops/cuda/matmul.h"

#include <cublasLt.h>

#include <map>
#include <string>
#include <tuple>

#include "burst/base/check.h"
#include "burst/device/code_loading.h"
#include "burst/device/cuda.h"
#include "burst/device/memory.h"

namespace burst {
namespace cuda {
namespace {

void CheckCublas(const char* call, cublasStatus_t status) {
  if (status != CUBLAS_STATUS_SUCCESS) Fail(call, cublasLtGetStatusName(status));
}
#define BURST_CUBLAS_CHECK(call) CheckCublas(#call, call)

cudaDataType_t CudaType(DType dtype) {
  if (dtype == DType::kFloat8E4M3) return CUDA_R_8F_E4M3;
  if (dtype == DType::kFloat8E5M2) return CUDA_R_8F_E5M2;
  if (dtype == DType::kBFloat16) return CUDA_R_16BF;
  return dtype == DType::kFloat64 ? CUDA_R_64F : CUDA_R_32F;
}

int32_t CublasScaling(Scaling scaling) {
  switch (scaling) {
    case Scaling::kTensor:
      return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
    case Scaling::kRow:
      return CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    case Scaling::kVector:
      return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    case Scaling::kBlock:
      return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
  }
  return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
}

cublasLtEpilogue_t CublasEpilogue(const MatMulParams& params) {
  switch (params.epilogue) {
    case Epilogue::kNone:
      return CUBLASLT_EPILOGUE_DEFAULT;
    case Epilogue::kBias:
      return CUBLASLT_EPILOGUE_BIAS;
    case Epilogue::kGelu:
      return params.pre == nullptr ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    case Epilogue::kGeluBackward:
      return CUBLASLT_EPILOGUE_DGELU;
  }
  return CUBLASLT_EPILOGUE_DEFAULT;
}

// The key holds everything that the choice of an algorithm depends on.
using PlanKey = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, bool, DType,
                           DType, DType, Epilogue, bool, bool, bool, int, Scaling, Scaling>;

// log2 of the largest power of two, at most 256, that divides the address. Algorithms demand
// alignment.
int Alignment(const void* data) {
  return data == nullptr ? 8 : __builtin_ctzll(reinterpret_cast<uintptr_t>(data) | 256);
}

// A GEMM in cuBLASLt's terms, made once for each PlanKey. cuBLASLt is column-major. So the plan
// asks for c^T = b^T a^T, because cuBLASLt sees a row-major matrix as its transpose.
struct Plan {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;
  cublasLtMatmulAlgo_t algorithm;
};

cublasLtMatrixLayout_t MakeLayout(const Matrix& m) {
  cublasLtMatrixLayout_t layout = nullptr;
  const int64_t rows = m.transposed ? m.rows : m.cols, cols = m.transposed ? m.cols : m.rows;
  BURST_CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&layout, CudaType(m.dtype), rows, cols, m.stride));
  return layout;
}

template <typename T>
void SetAttribute(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute,
                  const T& value) {
  BURST_CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof(value)));
}

[[noreturn]] void FailGemm(const char* call, const MatMulParams& p, cublasStatus_t status) {
  Fail(call, "a GEMM of " + std::to_string(p.c.rows) + " x " + std::to_string(p.c.cols) + " x " +
                 std::to_string(p.a.cols) + " in " + Name(p.a.dtype) + ": " +
                 cublasLtGetStatusName(status));
}

// cuBLASLt with its workspace and plans, one for each GPU context.
class Cublas {
 public:
  Cublas() {
    AwaitOtherRanks();  // creating a handle already loads code
    BURST_CUBLAS_CHECK(cublasLtCreate(&handle_));
    workspace_ = AllocateMemory(DeviceType::kCuda, kMatMulWorkspaceBytes);
  }

  void Run(const MatMulParams& p) {
    Plan& plan = GetPlan(p);
    if (p.vector != nullptr) {
      SetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.vector);
    }
    if (p.pre != nullptr) {
      SetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p.pre);
    }
    if (p.a_scale != nullptr) {  // cuBLASLt's A is b
      SetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.b_scale);
      SetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.a_scale);
    }
    const bool is_double = p.c.dtype == DType::kFloat64;
    const float alpha = 1, beta = p.addend != nullptr ? 1 : 0;
    const double alpha64 = alpha, beta64 = beta;
    const void* addend = p.addend != nullptr ? p.addend : p.c.data;
    const cublasStatus_t status = cublasLtMatmul(
        handle_, plan.operation, is_double ? static_cast<const void*>(&alpha64) : &alpha, p.b.data,
        plan.b, p.a.data, plan.a, is_double ? static_cast<const void*>(&beta64) : &beta, addend,
        plan.c, p.c.data, plan.c, &plan.algorithm, workspace_.data, kMatMulWorkspaceBytes,
        CurrentStream());
    if (status != CUBLAS_STATUS_SUCCESS) FailGemm("cublasLtMatmul", p, status);
  }

 private:
  Plan& GetPlan(const MatMulParams& p) {
    int alignment = 8;
    for (const void* data :
         {const_cast<const void*>(p.a.data), const_cast<const void*>(p.b.data),
          const_cast<const void*>(p.c.data), p.addend, const_cast<const void*>(p.pre)}) {
      alignment = std::min(alignment, Alignment(data));
    }
    const bool tf32 = Tf32IsAllowed();
    const PlanKey key{p.c.rows,
                      p.c.cols,
                      p.a.cols,
                      p.a.stride,
                      p.b.stride,
                      p.c.stride,
                      p.a.transposed,
                      p.b.transposed,
                      p.a.dtype,
                      p.b.dtype,
                      p.c.dtype,
                      p.epilogue,
                      p.addend != nullptr,
                      p.pre != nullptr,
                      tf32,
                      alignment,
                      p.a_scaling,
                      p.b_scaling};
    const auto [it, made] = plans_.try_emplace(key);
    if (made) {
      AwaitOtherRanks();  // cuBLASLt loads the kernels of a new plan
      it->second = MakePlan(p, tf32, size_t{1} << alignment);
    }
    return it->second;
  }

  Plan MakePlan(const MatMulParams& p, bool tf32, size_t alignment) {
    Plan plan;
    const bool is_double = p.c.dtype == DType::kFloat64;
    cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
    if (is_double) compute = CUBLAS_COMPUTE_64F;
    if (p.a.dtype == DType::kFloat32 && tf32) compute = CUBLAS_COMPUTE_32F_FAST_TF32;
    BURST_CUBLAS_CHECK(
        cublasLtMatmulDescCreate(&plan.operation, compute, is_double ? CUDA_R_64F : CUDA_R_32F));
    SetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSA,
                 p.b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    SetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_TRANSB,
                 p.a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
    SetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE, CublasEpilogue(p));
    if (p.vector != nullptr) {
      SetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, CudaType(p.c.dtype));
    }
    if (Is8Bit(p.a.dtype)) {
      // Sums move to fp32 every few steps, because tensor cores' own registers have fewer bits.
      // Staying in those registers saves 1 % at most.
      SetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t{0});
      SetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CublasScaling(p.b_scaling));
      SetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, CublasScaling(p.a_scaling));
      // The heuristic looks at these pointers; each call sets its own.
      SetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.b_scale);
      SetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.a_scale);
    }
    if (p.pre != nullptr) {
      SetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.c.cols);
      SetAttribute(plan.operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE,
                   CudaType(p.c.dtype));
    }
    plan.a = MakeLayout(p.a);
    plan.b = MakeLayout(p.b);
    plan.c = MakeLayout(p.c);

    cublasLtMatmulPreference_t preference = nullptr;
    BURST_CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
      BURST_CUBLAS_CHECK(
          cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)));
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kMatMulWorkspaceBytes);
    // Partial results over parts of k stay in the accumulator's type. Rounding them to bf16 would
    // add a larger error than rounding the result does.
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    for (const auto attribute :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
      prefer(attribute, static_cast<uint32_t>(alignment));
    }
    cublasLtMatmulHeuristicResult_t result;
    int found = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        handle_, plan.operation, plan.b, plan.a, plan.c, plan.c, preference, 1, &result, &found);
    if (status != CUBLAS_STATUS_SUCCESS || found == 0) {
      FailGemm("cublasLtMatmulAlgoGetHeuristic", p, status);
    }
    plan.algorithm = result.algo;
    BURST_CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(preference));
    return plan;
  }

  cublasLtHandle_t handle_ = nullptr;
  Allocation workspace_;
  std::map<PlanKey, Plan> plans_;
};

// Handles k = 0. A rank may have no tokens; its part of the weights' gradients is then zero.
void EmptyGemm(const MatMulParams& p) {
  BURST_CHECK(p.epilogue == Epilogue::kNone);
  const size_t element = SizeOf(p.c.dtype), pitch = p.c.stride * element;
  if (p.addend == nullptr) {
    BURST_CUDA_CHECK(
        cudaMemset2DAsync(p.c.data, pitch, 0, p.c.cols * element, p.c.rows, CurrentStream()));
  } else if (p.addend != p.c.data) {
    BURST_CUDA_CHECK(cudaMemcpy2DAsync(p.c.data, pitch, p.addend, pitch, p.c.cols * element,
                                       p.c.rows, cudaMemcpyDeviceToDevice, CurrentStream()));
  }
}

}  // namespace

void MatMul(const MatMulParams& p) {
  BURST_CHECK(p.a.rows == p.c.rows && p.b.cols == p.c.cols && p.a.cols == p.b.rows &&
              !p.c.transposed)
      << "[" << p.a.rows << ", " << p.a.cols << "] x [" << p.b.rows << ", " << p.b.cols << "] -> ["
      << p.c.rows << ", " << p.c.cols << "]";
  // A rank without tokens multiplies nothing, also by weights in float8.
  if (p.c.rows == 0 || p.c.cols == 0) return;
  const bool is_float8 = Is8Bit(p.a.dtype);
  const bool to_16_bits = p.c.dtype == DType::kBFloat16 || p.c.dtype == DType::kFloat32;
  if (is_float8) {
    BURST_CHECK(Is8Bit(p.b.dtype) && to_16_bits && p.a_scale != nullptr && p.b_scale != nullptr);
    BURST_CHECK(!p.a.transposed && p.b.transposed && p.a.cols % 16 == 0 && p.c.cols % 16 == 0)
        << p.a.cols << " x " << p.c.cols << " in float8";
  } else {
    BURST_CHECK(p.a.dtype == p.b.dtype &&
                (p.c.dtype == p.a.dtype || (p.a.dtype == DType::kBFloat16 && to_16_bits)));
  }
  BURST_CHECK(p.epilogue == Epilogue::kNone || is_float8 || p.a.dtype == DType::kBFloat16);
  BURST_CHECK_EQ(p.epilogue == Epilogue::kNone || p.epilogue == Epilogue::kGeluBackward,
                 p.vector == nullptr);
  if (p.a.cols == 0) return EmptyGemm(p);
  CurrentContext().Get<Cublas>().Run(p);
}

}  // namespace cuda
}  // namespace burst
