#include "burst/device/device.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "burst/base/check.h"
#include "burst/device/cuda_backend.h"
#include "burst/device/simulated_gpu.h"

namespace burst {

const char* Name(DeviceType device) { return device == DeviceType::kCpu ? "cpu" : "cuda"; }

void SynchronizeDevice(DeviceType device) {
  if (device == DeviceType::kCuda && SimulatedGpu::Current() == nullptr) cuda::Synchronize();
}

namespace {

// Copies memory that the host can read and write; a copy takes no time.
void SimulateCopy(void* to, const void* from, size_t bytes) {
  const bool readable = SimulatedGpu::IsBacked(from), writable = SimulatedGpu::IsBacked(to);
  if (readable && writable) std::memcpy(to, from, bytes);
  if (!readable && writable) std::memset(to, 0, bytes);
}

}  // namespace

void CopyMemory(void* to, DeviceType to_device, const void* from, DeviceType from_device,
                size_t bytes) {
  if (bytes == 0) return;
  if (to_device == DeviceType::kCpu && from_device == DeviceType::kCpu) {
    std::memcpy(to, from, bytes);
  } else if (SimulatedGpu::Current() != nullptr) {
    SimulateCopy(to, from, bytes);
  } else {
    cuda::Copy(to, to_device, from, from_device, bytes);
  }
}

Readback::Readback(DeviceType device) {
  if (device == DeviceType::kCuda && SimulatedGpu::Current() == nullptr) {
    page_locked_ = cuda::TakeReadback();
  }
}

Readback::~Readback() {
  if (page_locked_ != nullptr) cuda::GiveReadbackBack(page_locked_);
}

void Readback::Post(const void* from, size_t bytes) {
  BURST_CHECK(bytes <= kMaxBytes);
  if (page_locked_ != nullptr) {
    cuda::PostReadback(page_locked_, from, bytes);
  } else if (SimulatedGpu::Current() != nullptr) {
    std::memset(bytes_, 0, bytes);  // the simulation does not compute this content
  } else {
    std::memcpy(bytes_, from, bytes);
  }
}

const void* Readback::Wait() const {
  return page_locked_ != nullptr ? cuda::WaitForReadback(page_locked_) : bytes_;
}

HostBuffer::HostBuffer(DeviceType device, size_t bytes) : bytes_(bytes) {
  if (device == DeviceType::kCuda && SimulatedGpu::Current() != nullptr) {
    simulated_ = true;
    bytes_ = std::max<size_t>(bytes, 1);
    void* const addresses =
        mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (addresses != MAP_FAILED) reserved_ = addresses;
    return;
  }
  if (device == DeviceType::kCuda && bytes > 0) page_locked_ = cuda::AllocatePageLocked(bytes);
  if (page_locked_ == nullptr) ordinary_.reset(new char[bytes]);
}

HostBuffer::~HostBuffer() {
  if (page_locked_ != nullptr) cuda::FreePageLocked(page_locked_, bytes_);
  if (reserved_ != nullptr) munmap(reserved_, bytes_);
}

void* HostBuffer::data() const {
  if (page_locked_ != nullptr) return page_locked_;
  return reserved_ != nullptr ? reserved_ : ordinary_.get();
}

}  // namespace burst
