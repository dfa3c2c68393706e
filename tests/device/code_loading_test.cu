// Tests that no call on this GPU waits inside the driver for a kernel that waits for another rank.
// Otherwise that rank, a thread of this process, could not launch the kernel that would end the
// wait. One kernel here stands for NCCL's: it runs until the host lets it end.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>

#include "burst/device/code_loading.h"
#include "burst/device/cuda.h"
#include "burst/tensor/tensor.h"
#include "model/ops/cuda/kernels.h"
#include "model/ops/cuda/matmul.h"

namespace burst {
namespace {

constexpr DeviceType kCuda = DeviceType::kCuda;
constexpr std::chrono::seconds kPatience{10};

struct Flags {
  volatile int started, may_end;
};

__global__ void WaitingKernel(Flags* flags) {
  flags->started = 1;
  __threadfence_system();
  while (flags->may_end == 0) __nanosleep(1000);
}

__global__ void OtherRanksKernel(float* x) { x[0] += 1; }

// Runs a kernel on its own stream until End.
class RunningKernel {
 public:
  RunningKernel() {
    BURST_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    BURST_CUDA_CHECK(cudaHostAlloc(&flags_, sizeof(Flags), cudaHostAllocPortable));
    flags_->started = flags_->may_end = 0;
    WaitingKernel<<<1, 32, 0, stream_>>>(flags_);
    BURST_CUDA_CHECK_LAUNCH("WaitingKernel");
    while (flags_->started == 0) std::this_thread::yield();
  }
  ~RunningKernel() {
    End();
    BURST_CUDA_CHECK(cudaStreamSynchronize(stream_));
    BURST_CUDA_CHECK(cudaStreamDestroy(stream_));
  }
  void End() { flags_->may_end = 1; }
  bool runs() const { return flags_->may_end == 0; }
  cudaStream_t stream() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
  Flags* flags_ = nullptr;
};

// Ends the kernel when `patience` is over, unless the test has ended it.
class Timer {
 public:
  Timer(RunningKernel* kernel, std::chrono::milliseconds patience)
      : thread_([this, kernel, patience] {
          const auto end = std::chrono::steady_clock::now() + patience;
          while (!done_ && std::chrono::steady_clock::now() < end) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          }
          kernel->End();
        }) {}
  ~Timer() {
    done_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> done_{false};
  std::thread thread_;
};

TEST(CodeLoading, NoKernelOfTheProgramIsLoadedAtItsFirstLaunch) {
  const Tensor x = Tensor::Zeros({64, 64}, DType::kFloat32, kCuda);
  SynchronizeDevice(kCuda);
  RunningKernel kernel;
  const Timer timer(&kernel, kPatience);
  // These are first launches, one from each of several modules, with large kernels among them.
  const Tensor y = Tensor::Empty({64, 64}, DType::kBFloat16, kCuda);
  y.ConvertFrom(x);
  x.Add(x);
  const Tensor ids = Tensor::Zeros({64}, DType::kInt32, kCuda);
  cuda::EmbeddingBackward(ids, y, x);
  const Tensor losses = Tensor::Empty({64}, DType::kFloat32, kCuda);
  cuda::SoftmaxCrossEntropy(y, 64, 64, 64, static_cast<const int32_t*>(ids.raw_data()), 1.0, true,
                            losses.raw_data());
  EXPECT_TRUE(kernel.runs()) << "a launch waited for the kernel that runs";
}

TEST(CodeLoading, AFirstGemmLetsOtherRanksLaunchMeanwhile) {
  const Tensor a = Tensor::Zeros({333, 77}, DType::kFloat32, kCuda);
  const Tensor b = Tensor::Zeros({77, 55}, DType::kFloat32, kCuda);
  const Tensor c = Tensor::Empty({333, 55}, DType::kFloat32, kCuda);
  const int other_gpu = CudaDeviceCount() > 1 ? 1 : 0;
  {
    const ScopedCudaDevice device(other_gpu);  // ranks make contexts before messages
    SynchronizeDevice(kCuda);
  }
  SynchronizeDevice(kCuda);
  RunningKernel kernel;
  const Timer timer(&kernel, kPatience);
  cuda::AddMessageStream(kernel.stream());
  std::atomic<bool> launched{false};
  std::thread other_rank([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // the GEMM is being called now
    const ScopedCudaDevice device(other_gpu);
    const Tensor memory = Tensor::Zeros({1}, DType::kFloat32, kCuda);
    OtherRanksKernel<<<1, 1, 0, cuda::CurrentStream()>>>(static_cast<float*>(memory.raw_data()));
    BURST_CUDA_CHECK_LAUNCH("OtherRanksKernel");
    launched = kernel.runs();
    kernel.End();
  });
  cuda::MatMul({cuda::AsMatrix(a, 77), cuda::AsMatrix(b, 55), cuda::AsMatrix(c, 55)});
  other_rank.join();
  cuda::RemoveMessageStream(kernel.stream());
  EXPECT_TRUE(launched) << "the other rank's launch waited for the GEMM's kernel to be loaded";
}

TEST(CodeLoading, AFirstGemmDoesNotWaitForOtherGpus) {
  if (CudaDeviceCount() < 2) GTEST_SKIP() << "needs two GPUs";
  const Tensor a = Tensor::Zeros({1234, 99}, DType::kFloat32, kCuda);
  const Tensor b = Tensor::Zeros({99, 77}, DType::kFloat32, kCuda);
  const Tensor c = Tensor::Empty({1234, 77}, DType::kFloat32, kCuda);
  SynchronizeDevice(kCuda);
  auto other = std::make_unique<ScopedCudaDevice>(1);
  RunningKernel kernel;
  other.reset();
  const Timer timer(&kernel, kPatience);
  cuda::MatMul({cuda::AsMatrix(a, 99), cuda::AsMatrix(b, 77), cuda::AsMatrix(c, 77)});
  EXPECT_TRUE(kernel.runs()) << "the GEMM's kernel is loaded when no GPU runs anything";
  kernel.End();
}

TEST(CodeLoading, TheDriverLoadsLazily) {
  EXPECT_STREQ(std::getenv("CUDA_MODULE_LOADING"), "LAZY");
}

}  // namespace
}  // namespace burst
