#include "burst/kernels/gpu/sm90/tensor_map.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <limits>

namespace burst {
namespace sm90 {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// Through the runtime, so that nothing links against the driver library.
Encode FindEncode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &found);
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<Encode>(function);
}

}  // namespace

cudaError_t MakeTensorMap(const Operand& tensor, bool is_float, int64_t batch, int64_t seqlen,
                          int64_t num_heads, int64_t head_dim, int box_rows, CUtensorMap* map) {
  static const Encode encode = FindEncode();
  if (encode == nullptr) return cudaErrorNotSupported;
  const int64_t element_bytes = is_float ? 4 : 2;
  // The stride of a dimension of one element is never used, but must be valid.
  const auto stride_bytes = [&](int64_t extent, int64_t stride) {
    return static_cast<cuuint64_t>(extent == 1 ? 16 : stride * element_bytes);
  };
  const cuuint64_t extents[4] = {static_cast<cuuint64_t>(head_dim), static_cast<cuuint64_t>(seqlen),
                                 static_cast<cuuint64_t>(num_heads),
                                 static_cast<cuuint64_t>(batch)};
  const cuuint64_t strides[3] = {stride_bytes(seqlen, tensor.seq_stride),
                                 stride_bytes(num_heads, tensor.head_stride),
                                 stride_bytes(batch, tensor.batch_stride)};
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(128 / element_bytes),
                             static_cast<cuuint32_t>(box_rows), 1, 1};
  const cuuint32_t element_strides[4] = {1, 1, 1, 1};
  const CUresult result =
      encode(map, is_float ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
             tensor.data, extents, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

bool IsServed(const Shape& shape) {
  constexpr int64_t kMaxLength = std::numeric_limits<int32_t>::max() - 1024;
  return shape.batch >= 0 && shape.q_len >= 0 && shape.k_len >= 0 && shape.q_len <= kMaxLength &&
         shape.k_len <= kMaxLength && shape.num_kv_heads > 0 &&
         shape.num_heads % shape.num_kv_heads == 0 && shape.head_dim > 0 && shape.head_dim <= 128 &&
         shape.head_dim % 8 == 0 && shape.softmax_scale > 0 &&
         (shape.begin == nullptr) == (shape.end == nullptr);
}

int MultiprocessorCount() {
  int device = 0, count = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

}  // namespace sm90
}  // namespace burst
