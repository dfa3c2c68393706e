// Replaces cuda_device.cc in a build without CUDA.
#include "burst/base/check.h"
#include "burst/device/cuda_backend.h"
#include "burst/device/device.h"

namespace burst {

int CudaDeviceCount() { return 0; }

Anything CudaUnavailable() {
  FatalMessage(__FILE__, __LINE__, "CUDA").stream() << "this program was built without CUDA";
}

std::string CudaDeviceName(int) { CudaUnavailable(); }
int CudaComputeCapability(int) { CudaUnavailable(); }
int64_t CudaFreeMemory() { CudaUnavailable(); }
ScopedCudaDevice::ScopedCudaDevice(int, int) { CudaUnavailable(); }
ScopedCudaDevice::ScopedCudaDevice(CallersGpu*) { CudaUnavailable(); }
ScopedCudaDevice::~ScopedCudaDevice() = default;
CallersGpu::CallersGpu(int, int) : context_(nullptr) { CudaUnavailable(); }
CallersGpu::~CallersGpu() = default;
void CallersGpu::SetStream(void*) { CudaUnavailable(); }
void CallersGpu::EndWork() { CudaUnavailable(); }

namespace cuda {

Allocation Allocate(size_t) { CudaUnavailable(); }
void Free(const Allocation&) { CudaUnavailable(); }
MemoryStats GetMemoryStats() { CudaUnavailable(); }
void ResetPeakMemory() { CudaUnavailable(); }
void Synchronize() { CudaUnavailable(); }
void Copy(void*, DeviceType, const void*, DeviceType, size_t) { CudaUnavailable(); }
void* TakeReadback() { CudaUnavailable(); }
void GiveReadbackBack(void*) { CudaUnavailable(); }
void PostReadback(void*, const void*, size_t) { CudaUnavailable(); }
const void* WaitForReadback(void*) { CudaUnavailable(); }
void* AllocatePageLocked(size_t) { CudaUnavailable(); }
void FreePageLocked(void*, size_t) { CudaUnavailable(); }

}  // namespace cuda
}  // namespace burst
