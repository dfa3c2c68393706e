#include "burst/kernels/gpu/sm90/tensor_map.h"

#include <cuda_runtime.h>

#include "burst/base/check.h"
#include "burst/device/cuda.h"

namespace burst {
namespace sm90 {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// Through the runtime, so that nothing links against the driver library.
Encode FindEncode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  BURST_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                    cudaEnableDefault, &found));
  BURST_CHECK(found == cudaDriverEntryPointSuccess)
      << "the GPU's driver has no cuTensorMapEncodeTiled: Hopper needs a driver of CUDA 12";
  return reinterpret_cast<Encode>(function);
}

CUtensorMap Make(const AttentionOperand& tensor, CUtensorMapDataType type, int64_t element_bytes,
                 const Extents& of, int box_rows) {
  static const Encode encode = FindEncode();
  // The stride of a dimension of one element is never used, but must be valid.
  const auto stride_bytes = [&](int64_t extent, int64_t stride) {
    return static_cast<cuuint64_t>(extent == 1 ? 16 : stride * element_bytes);
  };
  const cuuint64_t extents[4] = {
      static_cast<cuuint64_t>(of.columns), static_cast<cuuint64_t>(of.rows),
      static_cast<cuuint64_t>(of.heads), static_cast<cuuint64_t>(of.batch)};
  const cuuint64_t strides[3] = {stride_bytes(of.rows, tensor.seq_stride),
                                 stride_bytes(of.heads, tensor.head_stride),
                                 stride_bytes(of.batch, tensor.batch_stride)};
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(128 / element_bytes),
                             static_cast<cuuint32_t>(box_rows), 1, 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result =
      encode(&map, type, 4, tensor.data, extents, strides, box, element_strides,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  BURST_CHECK(result == CUDA_SUCCESS)
      << "cuTensorMapEncodeTiled refuses a tensor of length " << of.rows << ", " << of.heads
      << " heads and strides " << tensor.batch_stride << ", " << tensor.seq_stride << ", "
      << tensor.head_stride << ": error " << static_cast<int>(result);
  return map;
}

}  // namespace

CUtensorMap MakeTensorMap(const AttentionOperand& tensor, DType dtype, const Extents& extents,
                          int box_rows) {
  const CUtensorMapDataType type = dtype == DType::kFloat32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                   : dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                              : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return Make(tensor, type, SizeOf(dtype), extents, box_rows);
}

CUtensorMap MakeByteTensorMap(void* data, int64_t columns, int64_t rows, int64_t num_heads,
                              int64_t batch, int box_rows) {
  const AttentionOperand tensor = {data, num_heads * rows * columns, columns, rows * columns};
  return Make(tensor, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, {batch, rows, num_heads, columns},
              box_rows);
}

}  // namespace sm90
}  // namespace burst
