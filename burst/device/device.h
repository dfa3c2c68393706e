// Devices: where tensors live and kernels run.
//
// Host code names a device by its type alone; the calling thread decides which GPU `kCuda` means. A
// rank's thread binds itself to one GPU with ScopedCudaDevice. Everything that the thread
// allocates, copies and launches goes to that GPU, in order, on one stream. A thread that is not
// bound uses GPU 0.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <string>

namespace burst {

enum class DeviceType { kCpu, kCuda };

const char* Name(DeviceType device);  // "cpu", "cuda"

// GPUs that this process can use; 0 without a driver, and in a build without CUDA.
int CudaDeviceCount();

// "NVIDIA H200"; CudaDeviceCount() > index.
std::string CudaDeviceName(int index);

// Binds the calling thread to a GPU for as long as the object lives. `rank` appears in error
// messages only.
class ScopedCudaDevice {
 public:
  explicit ScopedCudaDevice(int index, int rank = 0);
  ~ScopedCudaDevice();
  ScopedCudaDevice(const ScopedCudaDevice&) = delete;
  ScopedCudaDevice& operator=(const ScopedCudaDevice&) = delete;

 private:
  void* outer_;
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

}  // namespace burst

// BURST_CUDA_CALL(cuda::Foo(x)): the call, in a build with CUDA. In other builds the function does
// not exist, and no tensor on a GPU can lead here.
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
