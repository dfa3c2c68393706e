// Times the attention kernels of a GPU for attention_gpu.py, which writes one request a line to
// stdin:
//
//   forward|backward chosen|sm80 batch seqlen num_heads num_kv_heads head_dim value_dim causal
//   milliseconds
//
// The answer is the mean time in ms of the runs that fit into the given milliseconds, in bfloat16.
// "backward" goes from (out, dout) to gradients in bfloat16.
#include <algorithm>
#include <cmath>
#include <iostream>
#include <string>
#include <vector>

#include "benchmarks/gpu/gpu_timing.h"
#include "benchmarks/harness/harness.h"
#include "burst/kernels/flash_attention.h"
#include "burst/kernels/gpu/flash_attention_gpu.h"
#include "burst/tensor/tensor.h"

namespace burst {
namespace {

constexpr DeviceType kCuda = DeviceType::kCuda;

Tensor Normals(const Shape& shape, uint64_t stream) {
  return RandomForTiming(shape, DType::kBFloat16, kCuda, stream);
}

struct Request {
  std::string direction, kernels;
  int64_t batch, seqlen, num_heads, num_kv_heads, head_dim, value_dim, causal;
  double milliseconds;
};

std::istream& operator>>(std::istream& in, Request& r) {
  return in >> r.direction >> r.kernels >> r.batch >> r.seqlen >> r.num_heads >> r.num_kv_heads >>
         r.head_dim >> r.value_dim >> r.causal >> r.milliseconds;
}

class Problem {
 public:
  explicit Problem(const Request& r)
      : kernels_(*(r.kernels == "sm80" ? cuda::GpuKernels(cuda::KernelFamily::kSm80)
                                       : cuda::GpuKernels())) {
    const Shape like_q = {r.batch, r.seqlen, r.num_heads, r.head_dim};
    const Shape like_k = {r.batch, r.seqlen, r.num_kv_heads, r.head_dim};
    const Shape like_v = {r.batch, r.seqlen, r.num_kv_heads, r.value_dim};
    const Shape like_out = {r.batch, r.seqlen, r.num_heads, r.value_dim};
    const Shape rows = {r.batch, r.num_heads, r.seqlen};
    tensors_ = {Normals(like_q, 0), Normals(like_k, 1), Normals(like_v, 2), Normals(like_out, 3)};
    for (int i : {3, 0, 1, 2}) tensors_.push_back(Tensor::EmptyLike(tensors_[i]));
    for (int i = 0; i < 2; ++i) tensors_.push_back(Tensor::Empty(rows, DType::kFloat32, kCuda));
    FlashAttentionShape shape = {
        r.batch,          r.seqlen,   r.seqlen,    r.num_heads,
        r.num_kv_heads,   r.head_dim, r.value_dim, 1 / std::sqrt(static_cast<double>(r.head_dim)),
        DType::kBFloat16, {}};
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
    backward_ = {shape, operand(0), operand(1),          operand(2),          operand(3),
                 lse,   delta,      Assigns(operand(5)), Assigns(operand(6)), Assigns(operand(7)),
                 false};
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
  EventTimer timer;
  const auto time = [&](int64_t runs) {
    return 1e3 * timer.Time([&] {
      for (int64_t i = 0; i < runs; ++i) {
        request.direction == "forward" ? problem.Forward() : problem.Backward();
      }
    }) / runs;
  };
  time(1);
  return time(std::max<int64_t>(1, static_cast<int64_t>(request.milliseconds / time(2))));
}

}  // namespace
}  // namespace burst

int main() {
  burst::Request request;
  while (std::cin >> request) std::cout << burst::MeanMs(request) << std::endl;
  return 0;
}
