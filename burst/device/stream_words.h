// Words of 32 bits that streams write and wait for, without a kernel: the driver's memory
// operations on streams. In memory that other GPUs and the host see, too.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace burst {
namespace cuda {

// The driver's functions, which a thread finds when it makes the object.
class StreamWords {
 public:
  StreamWords();

  // Whether the driver has the functions. A GPU may still refuse them.
  bool found() const { return write_ != nullptr && wait_ != nullptr; }
  // Writes `value` after the stream's earlier work. Whoever sees the value, on any GPU, sees what
  // that work has written. Returns whether the write was queued.
  bool Write(cudaStream_t stream, const volatile uint32_t* word, uint32_t value) const;
  // Makes the stream wait until word - value, as a signed number, is at least 0. Returns whether
  // the wait was queued.
  bool Wait(cudaStream_t stream, const volatile uint32_t* word, uint32_t value) const;

 private:
  using Function = CUresult(CUstream, CUdeviceptr, cuuint32_t, unsigned);
  static Function* Find(const char* name);

  Function* const write_;
  Function* const wait_;
};

}  // namespace cuda
}  // namespace burst
