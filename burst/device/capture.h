// Tells whether a stream's work is captured into a CUDA graph, and so not done now.
#pragma once

namespace burst {

// Returns whether work queued on `stream` (a cudaStream_t) would be captured, or cannot be queued
// because another stream is being captured. False without CUDA. The capture is not changed.
bool IsCaptured(void* stream);
// Asks the same of the stream of the GPU that the calling thread is bound to.
bool IsCurrentStreamCaptured();

}  // namespace burst
