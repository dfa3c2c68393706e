// Times the attention kernels of the GPU for attention_gpu.py, which asks for one measurement a
// line on stdin:
//
//   forward|backward chosen|sm80 batch seqlen num_heads num_kv_heads head_dim causal milliseconds
//
// and reads the mean time in ms: bfloat16, as many runs as fit the given milliseconds. "backward"
// goes from (out, dout) to gradients in bfloat16.
#include <algorithm>
#include <cmath>
#include <iostream>
#include <string>
#include <vector>

#include "burst/base/philox.h"
#include "burst/device/cuda.h"
#include "burst/kernels/flash_attention.h"
#include "burst/kernels/gpu/flash_attention_gpu.h"
#include "burst/tensor/tensor.h"

namespace burst {
namespace {

constexpr DeviceType kCuda = DeviceType::kCuda;

// Standard normals, a million of them again and again.
Tensor Normals(const Shape& shape, uint64_t stream) {
  static const int64_t kDrawn = 1 << 20;
  std::vector<float> drawn(kDrawn);
  for (int64_t i = 0; i < kDrawn; ++i) {
    const PhiloxCounter bits = Philox(/*key=*/1, stream, i);
    drawn[i] = static_cast<float>(NormalFromBits(bits[0], bits[1])[0]);
  }
  const Tensor source = Tensor::FromVector(drawn, {kDrawn}, kCuda).To(DType::kBFloat16);
  const Tensor tensor = Tensor::Empty(shape, DType::kBFloat16, kCuda);
  const Tensor flat = tensor.View({-1});
  for (int64_t i = 0; i < flat.numel(); i += kDrawn) {
    const int64_t n = std::min(kDrawn, flat.numel() - i);
    flat.Slice(0, i, n).CopyFrom(source.Slice(0, 0, n));
  }
  return tensor;
}

struct Request {
  std::string direction, kernels;
  int64_t batch, seqlen, num_heads, num_kv_heads, head_dim, causal;
  double milliseconds;
};

std::istream& operator>>(std::istream& in, Request& r) {
  return in >> r.direction >> r.kernels >> r.batch >> r.seqlen >> r.num_heads >> r.num_kv_heads >>
         r.head_dim >> r.causal >> r.milliseconds;
}

class Problem {
 public:
  explicit Problem(const Request& r)
      : kernels_(*(r.kernels == "sm80" ? cuda::GpuKernels(cuda::KernelFamily::kSm80)
                                       : cuda::GpuKernels())) {
    const Shape like_q = {r.batch, r.seqlen, r.num_heads, r.head_dim};
    const Shape like_k = {r.batch, r.seqlen, r.num_kv_heads, r.head_dim};
    const Shape rows = {r.batch, r.num_heads, r.seqlen};
    tensors_ = {Normals(like_q, 0), Normals(like_k, 1), Normals(like_k, 2), Normals(like_q, 3)};
    for (int i : {0, 0, 1, 2}) tensors_.push_back(Tensor::EmptyLike(tensors_[i]));
    for (int i = 0; i < 2; ++i) tensors_.push_back(Tensor::Empty(rows, DType::kFloat32, kCuda));
    FlashAttentionShape shape = {r.batch,
                                 r.seqlen,
                                 r.seqlen,
                                 r.num_heads,
                                 r.num_kv_heads,
                                 r.head_dim,
                                 1 / std::sqrt(static_cast<double>(r.head_dim)),
                                 DType::kBFloat16,
                                 {}};
    if (r.causal != 0) {
      std::vector<int32_t> ranges(2 * r.seqlen);
      for (int64_t i = 0; i < r.seqlen; ++i) ranges[r.seqlen + i] = static_cast<int32_t>(i + 1);
      tensors_.push_back(Tensor::FromVector(ranges, {2 * r.seqlen}, kCuda));
      shape.visible.begin = static_cast<const int32_t*>(tensors_.back().raw_data());
      shape.visible.end = shape.visible.begin + r.seqlen;
    }
    const auto operand = [&](int i) { return Operand(tensors_[i]); };
    void *lse = tensors_[8].raw_data(), *delta = tensors_[9].raw_data();
    forward_ = {shape,      operand(0), operand(1), operand(2),
                operand(4), lse,        false,      DType::kBFloat16};
    delta_ = {shape, operand(4), operand(3), nullptr, delta};
    backward_ = {shape, operand(0), operand(1), operand(2), operand(3),      lse,
                 delta, operand(5), operand(6), operand(7), /*assign=*/true, false};
    Forward();
  }

  void Forward() const { kernels_.Forward(forward_); }
  void Backward() const {
    kernels_.Delta(delta_);
    kernels_.Backward(backward_);
  }

 private:
  const AttentionKernels& kernels_;
  std::vector<Tensor> tensors_;  // q, k, v, dout, out, dq, dk, dv, lse, delta, ranges
  FlashForwardParams forward_;
  FlashDeltaParams delta_;
  FlashBackwardParams backward_;
};

double MeanMs(const Request& request) {
  const Problem problem(request);
  cudaEvent_t begin, end;
  BURST_CUDA_CHECK(cudaEventCreate(&begin));
  BURST_CUDA_CHECK(cudaEventCreate(&end));
  const auto time = [&](int64_t runs) {
    BURST_CUDA_CHECK(cudaEventRecord(begin, cuda::CurrentStream()));
    for (int64_t i = 0; i < runs; ++i) {
      request.direction == "forward" ? problem.Forward() : problem.Backward();
    }
    BURST_CUDA_CHECK(cudaEventRecord(end, cuda::CurrentStream()));
    BURST_CUDA_CHECK(cudaEventSynchronize(end));
    float ms = 0;
    BURST_CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    return static_cast<double>(ms) / runs;
  };
  time(1);
  const int64_t runs = std::max<int64_t>(1, static_cast<int64_t>(request.milliseconds / time(2)));
  const double ms = time(runs);
  BURST_CUDA_CHECK(cudaEventDestroy(begin));
  BURST_CUDA_CHECK(cudaEventDestroy(end));
  return ms;
}

}  // namespace
}  // namespace burst

int main() {
  burst::Request request;
  while (std::cin >> request) std::cout << burst::MeanMs(request) << std::endl;
  return 0;
}
