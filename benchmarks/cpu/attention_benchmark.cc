// Compares the CPU attention kernels with the machine's matmul.
//
// GFLOP_s counts 4 * head_dim operations for a visible (query, key) pair and head forward, and 2.5
// times as many backward, as the literature does. The counter vs_sgemm divides it by the best
// SgemmRate() so far, measured on the same threads before and after every case. Rates are from the
// fastest repetition, so other load on the machine counts little. For figures, leave it idle.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <thread>
#include <vector>

#include "benchmark/benchmark.h"
#include "benchmarks/cpu/sgemm_rate.h"
#include "benchmarks/harness/harness.h"
#include "burst/base/parallel.h"
#include "burst/device/memory.h"
#include "burst/kernels/flash_attention.h"
#include "burst/tensor/tensor.h"

namespace burst {
namespace {

Tensor RandomNormal(const Shape& shape, uint64_t stream) {
  return RandomForTiming(shape, DType::kFloat32, DeviceType::kCpu, stream);
}

// Computes self-attention of one sequence. A query sees itself and at most window - 1 keys before
// it; with window = 0 it sees all keys.
class Attention {
 public:
  Attention(int64_t tokens, int64_t heads, int64_t d, int64_t window)
      : q_(RandomNormal({1, tokens, heads, d}, 0)),
        k_(RandomNormal({1, tokens, heads, d}, 1)),
        v_(RandomNormal({1, tokens, heads, d}, 2)),
        dout_(RandomNormal({1, tokens, heads, d}, 3)),
        out_(Tensor::EmptyLike(q_)),
        dq_(Tensor::ZerosLike(q_)),
        dk_(Tensor::ZerosLike(q_)),
        dv_(Tensor::ZerosLike(q_)),
        lse_(Tensor::Empty({1, heads, tokens}, DType::kFloat32)),
        delta_(Tensor::EmptyLike(lse_)) {
    shape_.batch = 1;
    shape_.q_len = shape_.k_len = tokens;
    shape_.num_heads = shape_.num_kv_heads = heads;
    shape_.head_dim = shape_.value_dim = d;
    shape_.softmax_scale = 1 / std::sqrt(static_cast<double>(d));
    pairs_ = static_cast<double>(tokens) * tokens;
    if (window == 0) return;
    pairs_ = 0;
    for (int64_t i = 0; i < tokens; ++i) {
      begin_.push_back(static_cast<int32_t>(std::max<int64_t>(0, i + 1 - window)));
      end_.push_back(static_cast<int32_t>(i + 1));
      pairs_ += end_[i] - begin_[i];
    }
    shape_.visible = {begin_.data(), end_.data(), 0};
  }

  double ForwardFlops() const { return 4 * pairs_ * shape_.head_dim * shape_.num_heads; }

  void Forward() const {
    kernels_.Forward({shape_, Operand(q_), Operand(k_), Operand(v_), Operand(out_), lse_.raw_data(),
                      /*merge=*/false});
  }

  void Backward() const {
    kernels_.Delta({shape_, Operand(out_), Operand(dout_), nullptr, delta_.raw_data()});
    kernels_.Backward({shape_, Operand(q_), Operand(k_), Operand(v_), Operand(dout_),
                       lse_.raw_data(), delta_.raw_data(), AddsTo(Operand(dq_)),
                       AddsTo(Operand(dk_)), AddsTo(Operand(dv_))});
  }

 private:
  const AttentionKernels& kernels_ = KernelsOf(DeviceType::kCpu);
  Tensor q_, k_, v_, dout_, out_, dq_, dk_, dv_;  // [1, tokens, heads, head_dim]
  Tensor lse_, delta_;                            // [1, heads, tokens]
  std::vector<int32_t> begin_, end_;              // [tokens]
  FlashAttentionShape shape_;
  double pairs_;
};

// Runs `step`, which takes `flops` operations, once an iteration.
template <typename Step>
void Measure(benchmark::State& state, double flops, Step step) {
  static double sgemm = 0;
  sgemm = std::max(sgemm, SgemmRate());
  double best = 0;
  for (auto _ : state) {
    const Stopwatch stopwatch;
    step();
    best = std::max(best, flops / stopwatch.Seconds());
  }
  sgemm = std::max(sgemm, SgemmRate());
  state.counters["threads"] = NumThreads();
  state.counters["GFLOP_s"] = best / 1e9;
  state.counters["vs_sgemm"] = best / sgemm;
}

constexpr int64_t kHeads = 4;

void BM_Forward(benchmark::State& state) {
  const ScopedThreadPool pool(NumCores());
  const int64_t tokens = state.range(0);
  const Attention attention(tokens, kHeads, state.range(1), state.range(2) ? tokens : 0);
  Measure(state, attention.ForwardFlops(), [&] { attention.Forward(); });
}

void BM_ForwardBackward(benchmark::State& state) {
  const ScopedThreadPool pool(NumCores());
  const int64_t tokens = state.range(0);
  const Attention attention(tokens, kHeads, state.range(1), state.range(2) ? tokens : 0);
  Measure(state, 3.5 * attention.ForwardFlops(), [&] {
    attention.Forward();
    attention.Backward();
  });
}

void Cases(benchmark::internal::Benchmark* benchmark) {
  benchmark->ArgNames({"tokens", "d", "causal"});
  for (int64_t tokens : {1024, 8192}) {
    for (int64_t d : {64, 128}) {
      for (int64_t causal : {0, 1}) benchmark->Args({tokens, d, causal});
    }
  }
  benchmark->Unit(benchmark::kMillisecond)->UseRealTime()->MinTime(2);
}
BENCHMARK(BM_Forward)->Apply(Cases);
BENCHMARK(BM_ForwardBackward)->Apply(Cases);

// Measures the bytes that the kernels take beyond their inputs and outputs, for 65,536 tokens,
// forward and backward. Scratch does not depend on the mask; a window makes the run a matter of
// seconds. With three heads, some are shared between threads and some are not. The threads are new,
// so they have no scratch yet.
void BM_ScratchMemory(benchmark::State& state) {
  constexpr int64_t kTokens = 65536, kWindow = 1024;
  const Attention attention(kTokens, 3, state.range(0), kWindow);
  std::thread([&] {
    const ScopedThreadPool pool(NumCores());
    const int64_t before = GetMemoryStats(DeviceType::kCpu).bytes_in_use;
    ResetPeakMemory(DeviceType::kCpu);
    for (auto _ : state) {
      attention.Forward();
      attention.Backward();
    }
    const int64_t bytes = GetMemoryStats(DeviceType::kCpu).peak_bytes - before;
    state.counters["scratch_MiB"] = static_cast<double>(bytes) / (1 << 20);
  }).join();
}
BENCHMARK(BM_ScratchMemory)
    ->ArgName("d")
    ->Arg(64)
    ->Arg(128)
    ->Iterations(1)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();

}  // namespace
}  // namespace burst
