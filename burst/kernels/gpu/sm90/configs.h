// The instantiations of the kernels, one a file.
#pragma once

#include "burst/kernels/gpu/sm90/flash_attention_sm90.h"

namespace burst {
namespace sm90 {

cudaError_t ForwardD64Full(const ForwardParams& params, cudaStream_t stream);
cudaError_t ForwardD64Ranges(const ForwardParams& params, cudaStream_t stream);
cudaError_t ForwardD128Full(const ForwardParams& params, cudaStream_t stream);
cudaError_t ForwardD128Short(const ForwardParams& params, cudaStream_t stream);
cudaError_t ForwardD128Ranges(const ForwardParams& params, cudaStream_t stream);

cudaError_t BackwardD64Full(const BackwardParams& params, cudaStream_t stream);
cudaError_t BackwardD64Ranges(const BackwardParams& params, cudaStream_t stream);
cudaError_t BackwardD128Full(const BackwardParams& params, cudaStream_t stream);
cudaError_t BackwardD128Ranges(const BackwardParams& params, cudaStream_t stream);

}  // namespace sm90
}  // namespace burst
