// Times the dense layers of GPT-2 124M (64 x 1,024 tokens) and of a 1.07B Llama (16,384 tokens) on
// a GPU in bfloat16, forward and backward. The peer in the same run is cuBLAS alone: the same GEMMs
// by cublasGemmEx with nothing around them.
//
//   gemm       ours without a bias, GELU or residual: the same work as the peer's
//   layer      with bias, GELU, residual and the bias's gradient, as the model runs it
//   float8     the layers of Llama 3.1 8B's shape with 16,384 tokens (--precision=fp8): conversions
//              included; the peer is cuBLAS in bfloat16
//
// Counters: TFLOP/s of the GEMMs; of_cublas is that rate divided by the peer's.
#include <benchmark/benchmark.h>
#include <cublas_v2.h>

#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <utility>

#include "benchmarks/gpu/gpu_timing.h"
#include "benchmarks/harness/harness.h"
#include "burst/autograd/tape.h"
#include "burst/base/check.h"
#include "burst/device/cuda.h"
#include "burst/tensor/tensor.h"
#include "model/ops/ops.h"

namespace burst {
namespace {

constexpr DType kBf16 = DType::kBFloat16, kF32 = DType::kFloat32;

Tensor Numbers(const Shape& shape, double deviation) {
  return RandomForTiming(shape, kBf16, DeviceType::kCuda, /*stream=*/0, deviation);
}

Variable Parameter(const Shape& shape) {
  return Variable(Numbers(shape, 0.02), Tensor::Zeros(shape, kF32, DeviceType::kCuda));
}

cublasHandle_t Handle() {
  static const cublasHandle_t handle = [] {
    cublasHandle_t made = nullptr;
    BURST_CHECK(cublasCreate(&made) == CUBLAS_STATUS_SUCCESS);
    BURST_CHECK(cublasSetStream(made, cuda::CurrentStream()) == CUBLAS_STATUS_SUCCESS);
    return made;
  }();
  return handle;
}

// Computes c [m, n] = a b, row-major. A transposed matrix is the transpose of the tensor in memory.
void Gemm(const Tensor& a, bool a_transposed, const Tensor& b, bool b_transposed, int64_t m,
          int64_t n, int64_t k, const Tensor& c) {
  const float one = 1, zero = 0;
  const auto op = [](bool transposed) { return transposed ? CUBLAS_OP_T : CUBLAS_OP_N; };
  const cublasStatus_t status = cublasGemmEx(
      Handle(), op(b_transposed), op(a_transposed), static_cast<int>(n), static_cast<int>(m),
      static_cast<int>(k), &one, b.raw_data(), CUDA_R_16BF, static_cast<int>(b_transposed ? k : n),
      a.raw_data(), CUDA_R_16BF, static_cast<int>(a_transposed ? m : k), &zero, c.raw_data(),
      c.dtype() == kBf16 ? CUDA_R_16BF : CUDA_R_32F, static_cast<int>(n), CUBLAS_COMPUTE_32F,
      CUBLAS_GEMM_DEFAULT);
  BURST_CHECK(status == CUBLAS_STATUS_SUCCESS) << cublasGetStatusString(status);
}

// Computes y = x W^T, dx = dy W and dW = dy^T x by cuBLAS.
struct PeerLayer {
  PeerLayer(const Tensor& x, int64_t out)
      : tokens(x.dim(0)),
        in(x.dim(1)),
        out(out),
        x(x),
        weight(Numbers({out, in}, 0.02)),
        y(Numbers({tokens, out}, 1)),
        dx(Tensor::EmptyLike(x)),
        dweight(Tensor::Zeros({out, in}, kF32, DeviceType::kCuda)) {}
  void Forward() { Gemm(x, false, weight, true, tokens, out, in, y); }
  void Backward(const Tensor& dy) {
    Gemm(dy, false, weight, false, tokens, in, out, dx);
    Gemm(dy, true, x, false, out, in, tokens, dweight);
  }
  int64_t tokens, in, out;
  Tensor x, weight, y, dx, dweight;
};

// Times ours and the peer's calls in turns, a few at a time, so both have the same GPU clock.
void Compare(benchmark::State& state, double flops, const std::function<void()>& ours,
             const std::function<void()>& peer) {
  constexpr int kCalls = 10;
  const auto repeat = [](const std::function<void()>& body) {
    for (int i = 0; i < kCalls; ++i) body();
  };
  repeat(ours);
  repeat(peer);
  EventTimer timer;
  double our_seconds = 0, peer_seconds = 0;
  for (auto _ : state) {
    const double seconds = timer.Time([&] { repeat(ours); }) / kCalls;
    state.SetIterationTime(seconds);
    our_seconds += seconds;
    peer_seconds += timer.Time([&] { repeat(peer); }) / kCalls;
  }
  state.counters["TFLOP/s"] = 1e-12 * flops * static_cast<double>(state.iterations()) / our_seconds;
  state.counters["of_cublas"] = peer_seconds / our_seconds;
}

void LinearLayer(benchmark::State& state, int64_t tokens, int64_t in, int64_t out, bool bias,
                 bool residual, LinearPrecision precision = LinearPrecision::kTensors) {
  const Tensor dy = Numbers({tokens, out}, 1), value = Numbers({tokens, in}, 1);
  const Variable weight = Parameter({out, in});
  const Variable b = bias ? Parameter({out}) : Variable();
  const Tensor skip = residual ? Numbers({tokens, out}, 1) : Tensor();
  PeerLayer peer(value, out);
  Compare(
      state, 6.0 * tokens * in * out,
      [&] {
        weight.ZeroGrad();
        Tape tape;
        const Variable x(value, /*requires_grad=*/true);
        const Variable r = residual ? Variable(skip, /*requires_grad=*/true) : Variable();
        const Variable y = Linear(tape, x, weight, b, r, nullptr, ResultUse::kRead, precision);
        BURST_CHECK(tape.Backward({y}, {dy}).ok());
      },
      [&] {
        peer.Forward();
        peer.Backward(dy);
      });
}

void GeluMlpLayer(benchmark::State& state, int64_t tokens, int64_t width, int64_t ffn) {
  const Tensor dy = Numbers({tokens, width}, 1), value = Numbers({tokens, width}, 1);
  const Tensor skip = Numbers({tokens, width}, 1);
  const Variable up = Parameter({ffn, width}), up_bias = Parameter({ffn});
  const Variable down = Parameter({width, ffn}), down_bias = Parameter({width});
  PeerLayer peer_up(value, ffn), peer_down(peer_up.y, width);
  Compare(
      state, 12.0 * tokens * width * ffn,
      [&] {
        up.ZeroGrad();
        down.ZeroGrad();
        Tape tape;
        const Variable x(value, /*requires_grad=*/true), r(skip, /*requires_grad=*/true);
        const Variable y = GeluMlp(tape, x, up, up_bias, down, down_bias, r);
        BURST_CHECK(tape.Backward({y}, {dy}).ok());
      },
      [&] {
        peer_up.Forward();
        peer_down.Forward();
        peer_down.Backward(dy);
        peer_up.Backward(peer_down.dx);
      });
}

void Register(const std::string& name, const std::function<void(benchmark::State&)>& run) {
  benchmark::RegisterBenchmark(name.c_str(), run)
      ->UseManualTime()
      ->Iterations(5)
      ->Unit(benchmark::kMicrosecond);
}

void RegisterAll() {
  const auto linear = [](const std::string& name, int64_t tokens, int64_t in, int64_t out,
                         bool bias, bool residual) {
    Register("gemm/" + name,
             [=](benchmark::State& state) { LinearLayer(state, tokens, in, out, false, false); });
    if (!bias && !residual) return;
    Register("layer/" + name,
             [=](benchmark::State& state) { LinearLayer(state, tokens, in, out, bias, residual); });
  };
  linear("d12_qkv", 65536, 768, 2304, true, false);
  linear("d12_out", 65536, 768, 768, true, true);
  linear("d12_up", 65536, 768, 3072, true, false);
  linear("d12_down", 65536, 3072, 768, true, true);
  Register("layer/d12_mlp", [](benchmark::State& state) { GeluMlpLayer(state, 65536, 768, 3072); });
  linear("llama_1b_qkv", 16384, 2048, 4096, false, false);
  linear("llama_1b_out", 16384, 2048, 2048, false, true);
  linear("llama_1b_gate_up", 16384, 2048, 16384, false, false);
  linear("llama_1b_down", 16384, 8192, 2048, false, true);
  const auto float8 = [](const std::string& name, int64_t in, int64_t out, bool residual) {
    for (const auto& [kind, precision] : {std::pair("layer/", LinearPrecision::kTensors),
                                          std::pair("float8/", LinearPrecision::kFloat8)}) {
      Register(kind + name, [=, precision = precision](benchmark::State& state) {
        LinearLayer(state, 16384, in, out, false, residual, precision);
      });
    }
  };
  float8("llama_8b_qkv", 4096, 6144, false);
  float8("llama_8b_out", 4096, 4096, true);
  float8("llama_8b_gate_up", 4096, 28672, false);
  float8("llama_8b_down", 14336, 4096, true);
}

}  // namespace
}  // namespace burst

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  if (burst::CudaDeviceCount() == 0) {
    std::fprintf(stderr, "error: no GPU\n");
    return 1;
  }
  burst::RegisterAll();
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
