#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "burst/base/check.h"
#include "burst/base/host_memory.h"
#include "burst/base/parallel.h"
#include "burst/device/code_loading.h"
#include "burst/device/cuda.h"
#include "burst/device/cuda_backend.h"
#include "burst/device/device.h"

namespace burst {
namespace cuda {
namespace {

thread_local Context* current = nullptr;

// All contexts that were made, and those that no thread is bound to.
struct Contexts {
  std::mutex mutex;
  std::vector<std::unique_ptr<Context>> all;
  std::vector<Context*> idle;
};

Contexts& GetContexts() {
  static Contexts* contexts = new Contexts;
  return *contexts;
}

// Makes a context without a stream.
std::unique_ptr<Context> MakeContext(int device) {
  auto context = std::make_unique<Context>();
  context->device = device;
  const struct Naming {  // so that an error names the device
    Context* const outer = current;
    ~Naming() { current = outer; }
  } naming;
  current = context.get();
  BURST_CUDA_CHECK(cudaSetDevice(device));
  BURST_CUDA_CHECK(cudaEventCreateWithFlags(&context->event, cudaEventDisableTiming));
  int major = 0, minor = 0;
  BURST_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  BURST_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  context->compute_capability = 10 * major + minor;
  BURST_CUDA_CHECK(
      cudaDeviceGetAttribute(&context->multiprocessors, cudaDevAttrMultiProcessorCount, device));
  // Freed memory stays in the pool: no step after the first asks the system for any.
  cudaMemPool_t pool = nullptr;
  BURST_CUDA_CHECK(cudaDeviceGetDefaultMemPool(&pool, device));
  uint64_t everything = ~uint64_t{0};
  BURST_CUDA_CHECK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &everything));
  LoadKernels();
  return context;
}

// Lets the GPU `reader` access the memory of the GPU `owner`. Copies between them need it, and
// NCCL, which writes directly into buffers of the same process.
void OpenMemory(int owner, int reader) {
  int can_access = 0;
  BURST_CUDA_CHECK(cudaDeviceCanAccessPeer(&can_access, reader, owner));
  if (!can_access) return;
  cudaMemPool_t pool = nullptr;
  BURST_CUDA_CHECK(cudaDeviceGetDefaultMemPool(&pool, owner));
  cudaMemAccessDesc access = {};
  access.location.type = cudaMemLocationTypeDevice;
  access.location.id = reader;
  access.flags = cudaMemAccessFlagsProtReadWrite;
  BURST_CUDA_CHECK(cudaMemPoolSetAccess(pool, &access, 1));
}

Context* AcquireContext(int device) {
  Contexts& contexts = GetContexts();
  std::lock_guard<std::mutex> lock(contexts.mutex);
  for (Context*& idle : contexts.idle) {
    if (idle->device != device) continue;
    Context* context = idle;
    idle = contexts.idle.back();
    contexts.idle.pop_back();
    return context;
  }
  std::unique_ptr<Context> context = MakeContext(device);
  BURST_CUDA_CHECK(cudaStreamCreateWithFlags(&context->stream, cudaStreamNonBlocking));
  for (const auto& other : contexts.all) {
    if (other->device == device) continue;
    OpenMemory(device, other->device);
    OpenMemory(other->device, device);
  }
  contexts.all.push_back(std::move(context));
  return contexts.all.back().get();
}

void ReleaseContext(Context* context) {
  Contexts& contexts = GetContexts();
  std::lock_guard<std::mutex> lock(contexts.mutex);
  contexts.idle.push_back(context);
}

// Page-locked memory for uploads. Host memory is copied here first, so that the host does not wait
// for the work queued on the GPU. The two halves are filled in turn. Before a half is filled again,
// the host waits until its previous contents have been sent. One per context.
class Staging {
 public:
  static constexpr size_t kBytes = size_t{8} << 20;  // bytes of a half, and of the longest upload

  Staging() {
    BURST_CUDA_CHECK(cudaMallocHost(&memory_, 2 * kBytes));
    for (cudaEvent_t& event : sent_) {
      BURST_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    }
  }

  void Upload(void* to, const void* from, size_t bytes, cudaStream_t stream) {
    if (used_ + bytes > kBytes) {
      BURST_CUDA_CHECK(cudaEventRecord(sent_[half_], stream));
      half_ = 1 - half_;
      used_ = 0;
      BURST_CUDA_CHECK(cudaEventSynchronize(sent_[half_]));
    }
    char* const at = static_cast<char*>(memory_) + half_ * kBytes + used_;
    std::memcpy(at, from, bytes);
    used_ += (bytes + 255) / 256 * 256;
    BURST_CUDA_CHECK(cudaMemcpyAsync(to, at, bytes, cudaMemcpyHostToDevice, stream));
  }

 private:
  void* memory_ = nullptr;
  cudaEvent_t sent_[2];
  int half_ = 0;
  size_t used_ = 0;  // bytes of the current half
};

struct PageLocked {
  void* bytes = nullptr;
  cudaEvent_t there = nullptr;
};

// The page-locked buffers of a context that no Readback uses.
struct IdleReadbacks {
  std::vector<PageLocked*> buffers;
};

cudaMemPool_t CurrentPool() {
  cudaMemPool_t pool = nullptr;
  BURST_CUDA_CHECK(cudaDeviceGetDefaultMemPool(&pool, CurrentContext().device));
  return pool;
}

int64_t PoolAttribute(cudaMemPoolAttr attribute) {
  uint64_t value = 0;
  BURST_CUDA_CHECK(cudaMemPoolGetAttribute(CurrentPool(), attribute, &value));
  return static_cast<int64_t>(value);
}

}  // namespace

Context& CurrentContext() {
  // This thread has not bound itself to a GPU. Its context is kept while the thread lives.
  if (current == nullptr) {
    thread_local std::unique_ptr<ScopedCudaDevice> unbound;
    unbound = std::make_unique<ScopedCudaDevice>(0);
  }
  return *current;
}

void Fail(const char* call, const std::string& error) {
  std::string message = std::string(call) + ": " + error;
  if (current != nullptr) {
    message = "rank " + std::to_string(current->rank) +
              ", cuda:" + std::to_string(current->device) + ": " + message;
  }
  if (ScopedFatalErrors::active()) throw FatalError(message, error.rfind("no memory", 0) == 0);
  std::fflush(stdout);
  std::fprintf(stderr, "error: %s\n", message.c_str());
  std::fflush(stderr);
  std::_Exit(1);
}

// Clears the error that is reported. Otherwise CUDA keeps it for the next cudaGetLastError of
// another call or of the caller. Later calls return errors after which CUDA cannot be used any
// more.
void Check(const char* call, cudaError_t error) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  if (error == cudaErrorMemoryAllocation) Fail(call, "no memory is left on the GPU");
  Fail(call, cudaGetErrorString(error));
}

void CheckAtEnd(const char* call, cudaError_t error) {
  if (!ScopedFatalErrors::active()) return Check(call, error);
  if (error != cudaSuccess) (void)cudaGetLastError();
}

Allocation Allocate(size_t bytes) {
  Context& context = CurrentContext();
  Allocation allocation{nullptr, bytes, DeviceType::kCuda, &context, nullptr};
  const cudaError_t error =
      cudaMallocAsync(&allocation.data, bytes == 0 ? 1 : bytes, context.stream);
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    Fail("cudaMallocAsync", std::string("no memory for ") + std::to_string(bytes) +
                                " more bytes on top of " +
                                std::to_string(PoolAttribute(cudaMemPoolAttrUsedMemCurrent)) +
                                " in use; a smaller batch or sequence, or more ranks, need less");
  }
  Check("cudaMallocAsync", error);
  return allocation;
}

void Free(const Allocation& allocation) {
  const auto* context = static_cast<const Context*>(allocation.context);
  CheckAtEnd("cudaFreeAsync", cudaFreeAsync(allocation.data, context->stream));
}

MemoryStats GetMemoryStats() {
  return {PoolAttribute(cudaMemPoolAttrUsedMemCurrent), PoolAttribute(cudaMemPoolAttrUsedMemHigh),
          PoolAttribute(cudaMemPoolAttrReservedMemCurrent)};
}

void ResetPeakMemory() {
  uint64_t zero = 0;
  BURST_CUDA_CHECK(cudaMemPoolSetAttribute(CurrentPool(), cudaMemPoolAttrUsedMemHigh, &zero));
}

void Synchronize() { BURST_CUDA_CHECK(cudaStreamSynchronize(CurrentStream())); }

void Copy(void* to, DeviceType to_device, const void* from, DeviceType from_device, size_t bytes) {
  Context& context = CurrentContext();
  if (to_device == DeviceType::kCuda && from_device == DeviceType::kCpu &&
      bytes <= Staging::kBytes) {
    context.Get<Staging>().Upload(to, from, bytes, context.stream);
    return;
  }
  BURST_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, context.stream));
  if (to_device != from_device) Synchronize();
}

// A buffer is kept for the context's next Readback, because freeing it would wait for all queued
// work. If nobody waited for its last copy, that copy still comes before the next one, on the same
// stream.
void* TakeReadback() {
  std::vector<PageLocked*>& idle = CurrentContext().Get<IdleReadbacks>().buffers;
  if (!idle.empty()) {
    PageLocked* const readback = idle.back();
    idle.pop_back();
    return readback;
  }
  auto* made = new PageLocked;
  BURST_CUDA_CHECK(cudaMallocHost(&made->bytes, Readback::kMaxBytes));
  BURST_CUDA_CHECK(cudaEventCreateWithFlags(&made->there, cudaEventDisableTiming));
  return made;
}

void GiveReadbackBack(void* readback) {
  CurrentContext().Get<IdleReadbacks>().buffers.push_back(static_cast<PageLocked*>(readback));
}

void PostReadback(void* readback, const void* from, size_t bytes) {
  const auto* to = static_cast<const PageLocked*>(readback);
  BURST_CUDA_CHECK(
      cudaMemcpyAsync(to->bytes, from, bytes, cudaMemcpyDeviceToHost, CurrentStream()));
  BURST_CUDA_CHECK(cudaEventRecord(to->there, CurrentStream()));
}

const void* WaitForReadback(void* readback) {
  const auto* from = static_cast<const PageLocked*>(readback);
  BURST_CUDA_CHECK(cudaEventSynchronize(from->there));
  return from->bytes;
}

namespace {

// From this size on, several threads touch the pages before they are locked. cudaHostAlloc makes
// them one by one, at 1.4 GiB a second on an H200's host. Sixteen threads reach 16.8.
constexpr size_t kTouchedInParallel = size_t{64} << 20;
constexpr int kMostTouchers = 16;

// Returns new memory whose pages exist, large ones where the system has them; null if it has none.
void* TouchedPages(size_t bytes) {
  if (static_cast<int64_t>(bytes) > FreeHostMemory()) return nullptr;
  void* const memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  (void)madvise(memory, bytes, MADV_HUGEPAGE);  // an advice: small pages serve as well
  const ScopedThreadPool pool(std::min(kMostTouchers, NumCores()));
  constexpr int64_t kPage = 4096, kGrain = int64_t{16} << 20;
  ParallelFor((static_cast<int64_t>(bytes) + kPage - 1) / kPage, kGrain / kPage,
              [memory](int64_t begin, int64_t end) {
                for (int64_t i = begin; i < end; ++i) {
                  static_cast<volatile char*>(memory)[i * kPage] = 0;
                }
              });
  return memory;
}

}  // namespace

void* AllocatePageLocked(size_t bytes) {
  void* memory = nullptr;
  if (bytes < kTouchedInParallel) {
    if (cudaHostAlloc(&memory, bytes, cudaHostAllocPortable) == cudaSuccess) return memory;
  } else if ((memory = TouchedPages(bytes)) != nullptr) {
    if (cudaHostRegister(memory, bytes, cudaHostRegisterPortable) == cudaSuccess) return memory;
    munmap(memory, bytes);
  }
  (void)cudaGetLastError();
  return nullptr;
}

void FreePageLocked(void* memory, size_t bytes) {
  if (bytes < kTouchedInParallel) {
    BURST_CUDA_CHECK(cudaFreeHost(memory));
    return;
  }
  BURST_CUDA_CHECK(cudaHostUnregister(memory));
  munmap(memory, bytes);
}

}  // namespace cuda

int CudaDeviceCount() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    (void)cudaGetLastError();  // a missing driver or device is not an error here
    return 0;
  }
  return count;
}

std::string CudaDeviceName(int index) {
  cudaDeviceProp properties;
  BURST_CUDA_CHECK(cudaGetDeviceProperties(&properties, index));
  return properties.name;
}

int CudaComputeCapability(int index) {
  cudaDeviceProp properties;
  BURST_CUDA_CHECK(cudaGetDeviceProperties(&properties, index));
  return 10 * properties.major + properties.minor;
}

int64_t CudaFreeMemory() {
  (void)cuda::CurrentContext();
  size_t free = 0, total = 0;
  BURST_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return static_cast<int64_t>(free);
}

ScopedCudaDevice::ScopedCudaDevice(int index, int rank) : outer_(cuda::current) {
  cuda::Context* context = cuda::AcquireContext(index);
  cuda::current = context;
  context->rank = rank;
  BURST_CUDA_CHECK(cudaSetDevice(index));
}

ScopedCudaDevice::ScopedCudaDevice(CallersGpu* gpu) : outer_(cuda::current), pooled_(false) {
  if (outer_ == nullptr) (void)cudaGetDevice(&outer_device_);
  cuda::current = static_cast<cuda::Context*>(gpu->context_);
  (void)cudaSetDevice(cuda::current->device);
  (void)cudaGetLastError();  // clears errors that the caller's own calls left
}

ScopedCudaDevice::~ScopedCudaDevice() {
  if (pooled_) cuda::ReleaseContext(cuda::current);
  cuda::current = static_cast<cuda::Context*>(outer_);
  if (cuda::current != nullptr) outer_device_ = cuda::current->device;
  if (outer_device_ >= 0) (void)cudaSetDevice(outer_device_);
}

CallersGpu::CallersGpu(int index, int rank) : context_(nullptr) {
  int outer = -1;
  (void)cudaGetDevice(&outer);
  auto context = cuda::MakeContext(index);
  context->rank = rank;
  cudaEvent_t end = nullptr;
  BURST_CUDA_CHECK(cudaEventCreateWithFlags(&end, cudaEventDisableTiming));
  context_ = context.release();
  end_ = end;
  if (outer >= 0) (void)cudaSetDevice(outer);
}

CallersGpu::~CallersGpu() {
  const auto* context = static_cast<cuda::Context*>(context_);
  (void)cudaEventDestroy(static_cast<cudaEvent_t>(end_));
  (void)cudaEventDestroy(context->event);
  delete context;
}

void CallersGpu::SetStream(void* stream) {
  auto* context = static_cast<cuda::Context*>(context_);
  const auto next = static_cast<cudaStream_t>(stream);
  if (next == context->stream) return;
  BURST_CUDA_CHECK(cudaStreamWaitEvent(next, static_cast<cudaEvent_t>(end_), 0));
  context->stream = next;
}

void CallersGpu::EndWork() {
  const auto* context = static_cast<cuda::Context*>(context_);
  BURST_CUDA_CHECK(cudaEventRecord(static_cast<cudaEvent_t>(end_), context->stream));
}

}  // namespace burst
