// Devices: where tensors live and kernels run.
//
// Host code names a device by its type alone; the calling thread decides which GPU `kCuda` means. A
// rank's thread binds itself to one GPU with ScopedCudaDevice. Everything that the thread
// allocates, copies and launches goes to that GPU, in order, on one stream. A thread that is not
// bound uses GPU 0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>

namespace burst {

enum class DeviceType { kCpu, kCuda };

const char* Name(DeviceType device);  // "cpu", "cuda"

// GPUs that this process can use; 0 without a driver, and in a build without CUDA.
int CudaDeviceCount();

// "NVIDIA H200"; CudaDeviceCount() > index.
std::string CudaDeviceName(int index);
// 90 for compute capability 9.0; CudaDeviceCount() > index.
int CudaComputeCapability(int index);

// Returns the bytes of the calling thread's GPU that nobody has allocated.
int64_t CudaFreeMemory();

// A GPU with a stream that belongs to another program, for a library inside that program. One
// thread at a time is bound to it.
class CallersGpu {
 public:
  // CudaDeviceCount() > index. `rank` appears in error messages only.
  explicit CallersGpu(int index, int rank = 0);
  ~CallersGpu();  // queued work must be done, or its memory not be used again
  CallersGpu(const CallersGpu&) = delete;
  CallersGpu& operator=(const CallersGpu&) = delete;

  // Sets the stream (a cudaStream_t) for the work that is queued from now on. It starts after all
  // earlier work of this object on other streams. Before the first call it is CUDA's default
  // stream.
  void SetStream(void* stream);
  // Marks the end of work on the stream. A later SetStream with another stream waits for it.
  void EndWork();

 private:
  friend class ScopedCudaDevice;
  void* context_;
  void* end_ = nullptr;  // an event
};

// Binds the calling thread to a GPU for as long as the object lives. `rank` appears in error
// messages only.
class ScopedCudaDevice {
 public:
  explicit ScopedCudaDevice(int index, int rank = 0);
  explicit ScopedCudaDevice(CallersGpu* gpu);
  ~ScopedCudaDevice();
  ScopedCudaDevice(const ScopedCudaDevice&) = delete;
  ScopedCudaDevice& operator=(const ScopedCudaDevice&) = delete;

 private:
  void* outer_;
  bool pooled_ = true;     // other threads may take over the context afterwards
  int outer_device_ = -1;  // CUDA's current device, if the thread was not bound
};

// Returns when all work that the calling thread has queued on the device is done.
void SynchronizeDevice(DeviceType device);

// Copies bytes between any two devices. On return `from` may be changed. A copy to the host is done
// by then; a copy to a GPU is queued.
void CopyMemory(void* to, DeviceType to_device, const void* from, DeviceType from_device,
                size_t bytes);

// A copy of a few bytes from a device to the host that does not block: the host queues more work
// and looks at the bytes later. Belongs to one thread.
class Readback {
 public:
  static constexpr size_t kMaxBytes = 64;

  explicit Readback(DeviceType device);
  ~Readback();
  Readback(const Readback&) = delete;
  Readback& operator=(const Readback&) = delete;

  // Queues the copy of the bytes at `from` on the thread's stream.
  void Post(const void* from, size_t bytes);
  // The bytes of the last Post, valid until the next one. Waits for that copy only, not for work
  // queued later.
  const void* Wait() const;

 private:
  void* page_locked_ = nullptr;        // the destination for a GPU
  alignas(16) char bytes_[kMaxBytes];  // the destination for the CPU
};

// Host memory for large copies from a device. For a GPU it is page-locked if the system has such
// memory left, else ordinary. Make and free it while no rank waits for another rank's kernels,
// because page-locking may wait for all GPUs of the process. For a simulated GPU it has addresses
// without memory.
class HostBuffer {
 public:
  HostBuffer(DeviceType device, size_t bytes);
  ~HostBuffer();
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;

  void* data() const;
  bool has_memory() const { return !simulated_; }

 private:
  // One of them.
  void* page_locked_ = nullptr;
  std::unique_ptr<char[]> ordinary_;
  void* reserved_ = nullptr;  // [bytes_]; null also where there are no addresses to give
  size_t bytes_ = 0;
  bool simulated_ = false;
};

}  // namespace burst

// BURST_CUDA_CALL(cuda::Foo(x)) is the call in a build with CUDA. In other builds the function does
// not exist, and no tensor on a GPU can reach the call.
#ifdef BURST_WITH_CUDA
#define BURST_CUDA_CALL(call) call
#else
#define BURST_CUDA_CALL(call) ::burst::CudaUnavailable()
namespace burst {
struct Anything {
  template <typename T>
  operator T() const {
    std::abort();  // not reached: CudaUnavailable does not return
  }
};
[[noreturn]] Anything CudaUnavailable();
}  // namespace burst
#endif
