// Measures the rate of GEMMs through model/ops/matmul.h for the shapes of GPT-2 124M with 1,024
// tokens, forward and backward. Compares it with the rate of 1024^3 squares. Argument: threads.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <string>

#include "burst/base/parallel.h"
#include "burst/tensor/tensor.h"
#include "model/ops/matmul.h"

namespace burst {
namespace {

enum class Pass { kForward, kInputGradient, kWeightGradient };

// Times y [tokens, out] = x [tokens, in] weight [out, in]^T or one of its two gradients. Each takes
// 2 * tokens * in * out FLOPs.
void Product(benchmark::State& state, Pass pass, int64_t tokens, int64_t in, int64_t out) {
  ScopedThreadPool pool(static_cast<int>(state.range(0)));
  const auto random = [](int64_t rows, int64_t cols) {
    const Tensor tensor = Tensor::Empty({rows, cols}, DType::kFloat32);
    for (int64_t i = 0; i < rows * cols; ++i) tensor.data<float>()[i] = (i % 17) * 0.1f - 0.8f;
    return tensor;
  };
  const Tensor x_memory = random(tokens, in), y_memory = random(tokens, out);
  const Tensor weight_memory = random(out, in);
  const auto x = AsMatrix<float>(x_memory, in), y = AsMatrix<float>(y_memory, out);
  const auto weight = AsMatrix<float>(weight_memory, in);
  for (auto _ : state) {
    switch (pass) {
      case Pass::kForward:
        MatMul(x, weight.Transposed(), y, Into::kAssign);
        break;
      case Pass::kInputGradient:
        MatMul(y, weight, x, Into::kAssign);
        break;
      case Pass::kWeightGradient:
        MatMul(y.Transposed(), x, weight, Into::kAssign);
        break;
    }
    benchmark::ClobberMemory();
  }
  state.counters["FLOP/s"] =
      benchmark::Counter(2.0 * tokens * in * out, benchmark::Counter::kIsIterationInvariantRate);
}

void Register() {
  struct Layer {
    const char* name;
    int64_t tokens, in, out;
  };
  for (const Layer& layer : {Layer{"square_1024", 1024, 1024, 1024},
                             {"attention_768x768", 1024, 768, 768},
                             {"ffn_up_768x3072", 1024, 768, 3072},
                             {"ffn_down_3072x768", 1024, 3072, 768},
                             {"head_768x50257", 256, 768, 50257},
                             {"small_128x512", 768, 128, 512}}) {
    for (const Pass pass : {Pass::kForward, Pass::kInputGradient, Pass::kWeightGradient}) {
      const char* suffix = pass == Pass::kForward         ? "/forward"
                           : pass == Pass::kInputGradient ? "/input_gradient"
                                                          : "/weight_gradient";
      benchmark::RegisterBenchmark(
          (std::string(layer.name) + suffix).c_str(),
          [=](benchmark::State& state) { Product(state, pass, layer.tokens, layer.in, layer.out); })
          ->Arg(1)
          ->Arg(2)
          ->UseRealTime()
          ->MinTime(0.2);
    }
  }
}

}  // namespace
}  // namespace burst

int main(int argc, char** argv) {
  burst::Register();
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
