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

}  // namespace

CUtensorMap MakeTensorMap(const AttentionOperand& tensor, DType dtype,
                          const FlashAttentionShape& shape, int64_t seqlen, int64_t num_heads,
                          int box_rows) {
  static const Encode encode = FindEncode();
  const int64_t element_bytes = SizeOf(dtype);
  // The stride of a dimension of one element is never used, but must be valid.
  const auto stride_bytes = [&](int64_t extent, int64_t stride) {
    return static_cast<cuuint64_t>(extent == 1 ? 16 : stride * element_bytes);
  };
  const cuuint64_t extents[4] = {
      static_cast<cuuint64_t>(shape.head_dim), static_cast<cuuint64_t>(seqlen),
      static_cast<cuuint64_t>(num_heads), static_cast<cuuint64_t>(shape.batch)};
  const cuuint64_t strides[3] = {stride_bytes(seqlen, tensor.seq_stride),
                                 stride_bytes(num_heads, tensor.head_stride),
                                 stride_bytes(shape.batch, tensor.batch_stride)};
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(128 / element_bytes),
                             static_cast<cuuint32_t>(box_rows), 1, 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  const CUtensorMapDataType type = dtype == DType::kFloat32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                   : dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                              : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  CUtensorMap map;
  const CUresult result =
      encode(&map, type, 4, tensor.data, extents, strides, box, element_strides,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  BURST_CHECK(result == CUDA_SUCCESS)
      << "cuTensorMapEncodeTiled refuses a tensor of length " << seqlen << ", " << num_heads
      << " heads and strides " << tensor.batch_stride << ", " << tensor.seq_stride << ", "
      << tensor.head_stride << ": error " << static_cast<int>(result);
  return map;
}

}  // namespace sm90
}  // namespace burst
