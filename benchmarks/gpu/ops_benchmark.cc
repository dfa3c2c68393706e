// Times the memory-bound ops on a GPU, in bfloat16, at the sizes of a GPT-2 124M step (64 x 1,024
// tokens) and of a 1.07B Llama step (16,384 tokens). The rate counts the bytes that must move, and
// is compared with a device-to-device copy in the same run. Every input and output counts once; a
// kernel's scratch does not count. Sets of buffers take turns, so that the L2 cache does not help.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "benchmarks/gpu/gpu_timing.h"
#include "benchmarks/harness/harness.h"
#include "burst/base/check.h"
#include "burst/base/philox.h"
#include "burst/device/cuda.h"
#include "burst/tensor/tensor.h"
#include "model/ops/cuda/kernels.h"
#include "train/optimizer/adamw.h"

namespace burst {
namespace {

constexpr int kSets = 3;
constexpr DType kBf16 = DType::kBFloat16, kF32 = DType::kFloat32;

// Returns the seconds per call of run(set). Sets take turns.
double SecondsPerCall(EventTimer& timer, const std::function<void(int)>& run) {
  constexpr int kCalls = 8 * kSets;
  return timer.Time([&] {
    for (int i = 0; i < kCalls; ++i) run(i % kSets);
  }) / kCalls;
}

// Returns the bytes that copies of 256 MiB read and write per second.
double CopyRate() {
  static const double rate = [] {
    constexpr size_t kBytes = size_t{256} << 20;
    const Tensor memory = Tensor::Zeros({2 * kSets, kBytes / 4}, kF32, DeviceType::kCuda);
    char* base = static_cast<char*>(memory.raw_data());
    EventTimer timer;
    double best = 0;
    for (int i = 0; i < 6; ++i) {
      const double seconds = SecondsPerCall(timer, [&](int set) {
        CopyMemory(base + 2 * set * kBytes, DeviceType::kCuda, base + (2 * set + 1) * kBytes,
                   DeviceType::kCuda, kBytes);
      });
      best = std::max(best, 2 * kBytes / seconds);
    }
    return best;
  }();
  return rate;
}

Tensor Numbers(const Shape& shape, DType dtype = kBf16) {
  return RandomForTiming(shape, dtype, DeviceType::kCuda, /*stream=*/0);
}

Tensor Empty(const Shape& shape, DType dtype = kBf16) {
  return Tensor::Empty(shape, dtype, DeviceType::kCuda);
}

// Holds one set of a benchmark's buffers. Each benchmark makes its own.
struct Work {
  double bytes = 0;  // the bytes that must move
  std::function<void()> run;
};

void Register(const std::string& name, const std::function<Work()>& make) {
  benchmark::RegisterBenchmark(
      name.c_str(),
      [make](benchmark::State& state) {
        const double copy_rate = CopyRate();
        std::vector<Work> sets;
        for (int i = 0; i < kSets; ++i) sets.push_back(make());
        EventTimer timer;
        const auto run = [&](int set) { sets[set].run(); };
        SecondsPerCall(timer, run);
        double total = 0;
        for (auto _ : state) {
          const double seconds = SecondsPerCall(timer, run);
          state.SetIterationTime(seconds);
          total += seconds;
        }
        const double rate = sets[0].bytes * static_cast<double>(state.iterations()) / total;
        state.counters["GB/s"] = rate * 1e-9;
        state.counters["of_copy"] = rate / copy_rate;
      })
      ->UseManualTime()
      ->Iterations(10)
      ->Unit(benchmark::kMicrosecond);
}

double Bytes(std::initializer_list<Tensor> tensors) {
  double sum = 0;
  for (const Tensor& tensor : tensors) sum += static_cast<double>(tensor.size_bytes());
  return sum;
}

std::string Name(const char* op, int64_t rows, int64_t width) {
  return std::string(op) + "/" + std::to_string(rows) + "x" + std::to_string(width);
}

void RegisterNorms(int64_t rows, int64_t width) {
  Register(Name("rmsnorm_forward", rows, width), [=] {
    const Tensor x = Numbers({rows, width}), weight = Numbers({width}), y = Empty({rows, width});
    const Tensor rstd = Empty({rows}, kF32);
    return Work{Bytes({x, y, rstd}),
                [=] { cuda::RmsNormForward(x, weight, 0, 1e-5, y, Tensor(), rstd); }};
  });
  Register(Name("rmsnorm_backward", rows, width), [=] {
    const Tensor x = Numbers({rows, width}), weight = Numbers({width}),
                 rstd = Numbers({rows}, kF32);
    const Tensor dy = Numbers({rows, width}), before = Numbers({rows, width});
    const Tensor dx = Empty({rows, width}), dweight = Numbers({width}, kF32);
    return Work{Bytes({x, rstd, dy, before, dx}), [=] {
                  cuda::RmsNormBackward(x, weight, 0, rstd, dy, before, dx, Tensor(), {dweight});
                }};
  });
  Register(Name("layernorm_forward", rows, width), [=] {
    const Tensor x = Numbers({rows, width}), y = Empty({rows, width});
    const Tensor weight = Numbers({width}), bias = Numbers({width});
    const Tensor mean = Empty({rows}, kF32), rstd = Empty({rows}, kF32);
    return Work{Bytes({x, y, mean, rstd}),
                [=] { cuda::LayerNormForward(x, weight, bias, 1e-5, y, Tensor(), mean, rstd); }};
  });
  Register(Name("layernorm_backward", rows, width), [=] {
    const Tensor x = Numbers({rows, width}), weight = Numbers({width});
    const Tensor mean = Numbers({rows}, kF32), rstd = Numbers({rows}, kF32);
    const Tensor dy = Numbers({rows, width}), before = Numbers({rows, width});
    const Tensor dx = Empty({rows, width}), dweight = Numbers({width}, kF32);
    const Tensor dbias = Numbers({width}, kF32);
    return Work{Bytes({x, mean, rstd, dy, before, dx}), [=] {
                  cuda::LayerNormBackward(x, weight, mean, rstd, dy, before, dx, Tensor(),
                                          {dweight}, {dbias});
                }};
  });
}

void RegisterElementwise() {
  Register("add/65536x768", [] {
    const Tensor a = Numbers({65536, 768}), b = Numbers({65536, 768}), y = Empty({65536, 768});
    return Work{Bytes({a, b, y}), [=] { cuda::AddForward(a, b, y); }};
  });
  Register("gelu_forward/65536x3072", [] {
    const Tensor x = Numbers({65536, 3072}), y = Empty({65536, 3072});
    return Work{Bytes({x, y}), [=] { cuda::GeluForward(x, y); }};
  });
  Register("gelu_backward/65536x3072", [] {
    const Tensor x = Numbers({65536, 3072}), dy = Numbers({65536, 3072}), dx = Empty({65536, 3072});
    return Work{Bytes({x, dy, dx}), [=] { cuda::GeluBackward(x, dy, dx); }};
  });
  Register("swiglu_forward/16384x8192", [] {
    const Tensor gate_up = Numbers({16384, 16384}), y = Empty({16384, 8192});
    return Work{Bytes({gate_up, y}), [=] { cuda::SwiGluForward(gate_up, y); }};
  });
  Register("swiglu_backward/16384x8192", [] {
    const Tensor gate_up = Numbers({16384, 16384}), dy = Numbers({16384, 8192});
    const Tensor dgate_up = Empty({16384, 16384});
    return Work{Bytes({gate_up, dy, dgate_up}),
                [=] { cuda::SwiGluBackward(gate_up, dy, dgate_up); }};
  });
  // 16 query heads, 8 KV heads (keys, then values) of 128.
  Register("rope/16384x32x128", [] {
    const Tensor x = Numbers({1, 16384, 32, 128}), y = Empty({1, 16384, 32, 128});
    const Tensor cos = Numbers({16384, 64}, kF32), sin = Numbers({16384, 64}, kF32);
    return Work{Bytes({x, y, cos, sin}),
                [=] { cuda::RopeRotate(x, cos, sin, 24, 1, y, Tensor()); }};
  });
  Register("rope_angles/16384x64", [] {
    const Tensor positions =
        Tensor::FromVector(std::vector<int32_t>(16384, 9999), {1, 16384}, DeviceType::kCuda);
    const Tensor cos = Empty({16384, 64}, kF32), sin = Empty({16384, 64}, kF32);
    std::vector<double> frequencies(64);
    for (int i = 0; i < 64; ++i) frequencies[i] = std::pow(1e4, -i / 64.0);
    return Work{Bytes({positions, cos, sin}),
                [=] { cuda::RopeCosSin(positions, frequencies, 1, cos, sin); }};
  });
  for (const bool with_residual : {false, true}) {
    Register(std::string("dropout") + (with_residual ? "_residual" : "") + "/65536x768", [=] {
      const Shape shape = {64, 1024, 768};
      std::vector<int32_t> range(1024);
      for (int i = 0; i < 1024; ++i) range[i] = i;
      const Tensor positions = Tensor::FromVector(range, {1024}, DeviceType::kCuda);
      const Tensor x = Numbers(shape), y = Empty(shape);
      const Tensor residual = with_residual ? Numbers(shape) : Tensor();
      const DropoutMask mask{12345, 1u << 29, 8.0 / 7};
      return Work{Bytes({x, y}) + (with_residual ? Bytes({residual}) : 0),
                  [=] { cuda::DropoutApply(mask, positions, x, residual, y); }};
    });
  }
}

// Returns ids that are distributed as words are (Zipf): id k has a probability ~ 1 / k.
std::vector<int32_t> ZipfIds(int64_t n, int64_t vocab) {
  std::vector<int32_t> ids(n);
  for (int64_t i = 0; i < n; ++i) {
    ids[i] = static_cast<int32_t>(
                 std::pow(static_cast<double>(vocab), UniformFromBits(Philox(3, 4, i)[0]))) -
             1;
  }
  return ids;
}

void RegisterEmbedding() {
  constexpr int64_t kTokens = 65536, kWidth = 768, kVocab = 50257, kLength = 1024;
  const auto id_list = std::make_shared<const std::vector<int32_t>>(ZipfIds(kTokens, kVocab));
  std::vector<int32_t> position_list(kTokens);
  for (int64_t t = 0; t < kTokens; ++t) position_list[t] = static_cast<int32_t>(t % kLength);
  std::vector<char> seen(kVocab);
  double rows = 0;  // the rows of the table in use
  for (const int32_t id : *id_list) rows += seen[id] == 0, seen[id] = 1;

  Register("embedding_forward/65536x768", [=] {
    const Tensor ids = Tensor::FromVector(*id_list, {kTokens}, DeviceType::kCuda);
    const Tensor positions = Tensor::FromVector(position_list, {kTokens}, DeviceType::kCuda);
    const Tensor table = Numbers({kVocab, kWidth}), places = Numbers({kLength, kWidth});
    const Tensor y = Empty({kTokens, kWidth});
    return Work{Bytes({ids, positions, y, places}) + rows * kWidth * 2,
                [=] { cuda::EmbeddingForward(ids, table, positions, places, y); }};
  });
  Register("embedding_backward_tokens/65536x768", [=] {
    const Tensor ids = Tensor::FromVector(*id_list, {kTokens}, DeviceType::kCuda);
    const Tensor dy = Numbers({kTokens, kWidth}), dtable = Numbers({kVocab, kWidth}, kF32);
    return Work{Bytes({ids, dy}) + rows * kWidth * 8,
                [=] { cuda::EmbeddingBackward(ids, dy, dtable); }};
  });
  Register("embedding_backward_positions/65536x768", [=] {
    const Tensor positions = Tensor::FromVector(position_list, {kTokens}, DeviceType::kCuda);
    const Tensor dy = Numbers({kTokens, kWidth}), dtable = Numbers({kLength, kWidth}, kF32);
    return Work{Bytes({positions, dy}) + kLength * kWidth * 8,
                [=] { cuda::EmbeddingBackward(positions, dy, dtable); }};
  });
}

void RegisterOptimizer(int64_t n) {
  Register("adamw/" + std::to_string(n), [=] {
    std::vector<DecayRange> decay;
    for (int64_t begin = 0; begin + 3000000 < n; begin += 3000000) {
      decay.push_back({begin, begin + 2990000});
    }
    const auto optimizer =
        std::make_shared<AdamW>(AdamWOptions(), n, kF32, decay, DeviceType::kCuda);
    const Tensor masters = Numbers({n}, kF32), grads = Numbers({n}, kF32), compute = Empty({n});
    const Tensor loss_and_norm = Tensor::FromVector<double>({1, 2}, {2}, DeviceType::kCuda);
    return Work{30.0 * static_cast<double>(n), [=] {
                  const absl::Status status =
                      optimizer->Step(masters, compute, grads, loss_and_norm, 1, 1e-5);
                  BURST_CHECK(status.ok()) << status;
                }};
  });
  Register("l2norm/" + std::to_string(n), [=] {
    const Tensor grads = Numbers({n}, kF32);
    const Tensor norm = Tensor::Empty({1}, DType::kFloat64, DeviceType::kCuda);
    return Work{Bytes({grads}), [=] { L2Norm(grads, norm); }};
  });
}

}  // namespace
}  // namespace burst

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  benchmark::AddCustomContext("gpu", burst::CudaDeviceName(0));
  benchmark::AddCustomContext("copy GB/s", std::to_string(burst::CopyRate() * 1e-9));
  burst::RegisterNorms(65536, 768);
  burst::RegisterNorms(16384, 2048);
  burst::RegisterElementwise();
  burst::RegisterEmbedding();
  burst::RegisterOptimizer(124000000);
  benchmark::RunSpecifiedBenchmarks();
}
