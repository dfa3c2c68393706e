// CUDA graphs: whether a stream's work is captured, and so not done now.
#pragma once

namespace burst {

// Whether work queued on `stream` (a cudaStream_t) would be captured, or cannot be queued because
// another stream's is. False without CUDA. Leaves the capture as it is.
bool IsCaptured(void* stream);
// Asks the same of the stream of the GPU that the calling thread is bound to.
bool IsCurrentStreamCaptured();

}  // namespace burst
