// Times a whole optimizer step (batch, forward, backward, all-reduce, clipping, AdamW). Compares it
// with this machine's sgemm rate on the same threads in the same process.
//
//   bazel run //benchmarks/train:train_step_benchmark
//
// Counters, from the median time of whole steps (StepMetrics::step_ms). On a GPU it is the time
// between the ends of two steps on the device:
//
//    step_ms, tokens/s
//    cpu_ms         the processor's time of a step, summed over the threads of this process
//    GFLOP/s        by the work that a causal model needs, 6N + 6 L d S a token
//    vs_peak        that rate over the rate of GEMMs alone, measured in the same process
//                   (model FLOP utilization with the measured peak)
//    vs_peak_full   vs_peak with the convention 6N + 12 L d S
//    GiB            on a GPU, the peak of tensor memory
//
// Names with cuda run on a GPU, and are absent without one. gpu_train_step.py compares them with
// PyTorch.
//
// On GPUs a step is deterministic by default. Names that end in _nondeterministic allow kernels
// that add in any order. Names with _exact have the same bits on any number of ranks (--exact); a
// number after it gives the tokens of a chunk. Names with _fp8 round the linear products of the
// layers to 8 bits (--precision=fp8), with one scale a tensor or as --fp8_recipe says.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <ctime>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "benchmarks/cpu/sgemm_rate.h"
#include "benchmarks/harness/harness.h"
#include "benchmarks/train/prepare_here.h"
#include "burst/base/parallel.h"
#include "burst/base/philox.h"
#include "burst/base/status.h"
#include "burst/comm/communicator.h"
#include "burst/device/memory.h"
#include "train/config/config.h"
#include "train/report/peak_flops.h"
#include "train/run/launch.h"
#include "train/run/setup.h"
#include "train/trainer/trainer.h"

namespace burst {
namespace {

// Writes an llm.c shard of random tokens.
void WriteShard(const std::string& path, int64_t tokens, uint32_t vocab) {
  std::vector<int32_t> header(256);
  header[0] = 20240520;
  header[1] = 1;
  header[2] = static_cast<int32_t>(tokens);
  std::vector<uint16_t> data(tokens);
  for (int64_t i = 0; i < tokens; ++i) data[i] = Philox(1, 0, i)[0] % vocab;
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(header.data()), header.size() * sizeof(int32_t));
  file.write(reinterpret_cast<const char*>(data.data()), data.size() * sizeof(uint16_t));
}

// Writes a text of 65 different characters, as many as tinyshakespeare has.
void WriteText(const std::string& path, int64_t characters) {
  std::string text(characters, ' ');
  for (int64_t i = 0; i < characters; ++i)
    text[i] = static_cast<char>('0' + Philox(1, 0, i)[0] % 65);
  std::ofstream(path, std::ios::binary) << text;
}

// The settings that differ from the defaults.
struct Settings {
  bool deterministic = true;
  bool exact = false;
  int64_t exact_chunk = 0;
  Precision precision = Precision::kAuto;
  LinearPrecision fp8_recipe = LinearPrecision::kFloat8;
};

// Four layers of Llama 3.1 8B's shape, with a small vocabulary.
constexpr char kFourLayersOf8B[] = R"({"family": "llama", "layers": 4, "width": 4096, "heads": 32,
  "kv_heads": 8, "ffn": 14336, "vocab": 32000, "rope_theta": 500000})";

absl::StatusOr<TrainingSetup> Prepare(const TemporaryFolder& folder, const std::string& model,
                                      int64_t batch, int64_t seqlen, int64_t ranks,
                                      DeviceChoice device, const Settings& settings) {
  TrainConfig options;
  options.device = device;
  options.deterministic = settings.deterministic;
  options.exact = settings.exact;
  options.exact_chunk = settings.exact_chunk;
  options.precision = settings.precision;
  options.fp8_recipe = settings.fp8_recipe;
  options.model = model;
  if (model == "llama_8b_layers") {
    options.model = folder / "model.json";
    std::ofstream(options.model) << kFourLayersOf8B;
  }
  if (model == "d12" || model == "llama_1b" || model == "llama_8b_layers") {
    options.data = folder / "tokens.bin";
    WriteShard(options.data, std::max<int64_t>(1 << 17, 4 * batch * seqlen),
               model == "d12" ? 50257 : 32000);
  } else {
    options.data = folder / "text.txt";
    WriteText(options.data, 1 << 18);
  }
  options.batch = batch;
  options.seqlen = seqlen;
  options.ranks = ranks;
  options.eval_every = 0;
  options.checkpoint_every = 0;
  options.out = folder / "run";
  return PrepareHere(options);
}

void TrainStep(benchmark::State& state, const std::string& model, int64_t batch, int64_t seqlen,
               int64_t ranks, DeviceChoice device = DeviceChoice::kCpu,
               const Settings& settings = {}) {
  const TemporaryFolder folder;
  const absl::StatusOr<TrainingSetup> setup =
      Prepare(folder, model, batch, seqlen, ranks, device, settings);
  if (!setup.ok()) return state.SkipWithError(setup.status().ToString().c_str());
  const bool cuda = device == DeviceChoice::kCuda;
  double peak = 0;
  {
    ScopedThreadPool pool(NumCores());
    peak = cuda ? ranks * MeasurePeakFlops(DeviceType::kCuda, setup->config.dtype) : SgemmRate();
  }
  const absl::Status status =
      RunRanksInProcess(setup->config, [&](Communicator& comm) -> absl::Status {
        BURST_ASSIGN_OR_RETURN(const auto trainer,
                               Trainer::Create(*setup, &comm, /*verbose=*/false));
        int64_t step = 0;
        // These steps touch all memory. A GPU also loads its kernels and settles.
        for (int i = 0; i < (cuda ? 5 : 1); ++i) {
          BURST_RETURN_IF_ERROR(trainer->Step(step++, /*enqueue_next=*/true).status());
        }
        if (comm.rank() != 0) {
          // The other ranks take part in every step.
          while (true) {
            BURST_ASSIGN_OR_RETURN(const std::vector<double> go, comm.AllGather(0));
            if (go[0] == 0) return absl::OkStatus();
            BURST_RETURN_IF_ERROR(trainer->Step(step++, /*enqueue_next=*/true).status());
          }
        }
        std::vector<double> step_ms, cpu_ms;
        for (auto _ : state) {
          BURST_RETURN_IF_ERROR(comm.AllGather(1).status());
          const std::clock_t begin = std::clock();
          BURST_ASSIGN_OR_RETURN(const StepMetrics metrics,
                                 trainer->Step(step++, /*enqueue_next=*/true));
          step_ms.push_back(metrics.step_ms);
          cpu_ms.push_back(1e3 * static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC);
        }
        BURST_RETURN_IF_ERROR(comm.AllGather(0).status());
        const Transformer::FlopsPerToken flops = trainer->model().TrainingFlopsPerToken(seqlen);
        const double median_ms = Median(std::move(step_ms));
        const double tokens_per_second = static_cast<double>(batch * seqlen) / (median_ms * 1e-3);
        state.counters["step_ms"] = median_ms;
        state.counters["cpu_ms"] = Median(std::move(cpu_ms));
        state.counters["tokens/s"] = tokens_per_second;
        state.counters["GFLOP/s"] = tokens_per_second * flops.causal * 1e-9;
        state.counters["peak_GFLOP/s"] = peak * 1e-9;
        state.counters["vs_peak"] = tokens_per_second * flops.causal / peak;
        state.counters["vs_peak_full"] = tokens_per_second * flops.full / peak;
        if (cuda) {
          state.counters["GiB"] =
              static_cast<double>(GetMemoryStats(DeviceType::kCuda).peak_bytes) / (1 << 30);
        }
        return absl::OkStatus();
      });
  if (!status.ok()) state.SkipWithError(status.ToString().c_str());
}

constexpr Settings kOnCpuInBf16 = {true, false, 0, Precision::kBf16};

// model, batch, seqlen, ranks
BENCHMARK_CAPTURE(TrainStep, gpt2_124M, "d12", 4, 256, 1)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime()
    ->Iterations(3);
BENCHMARK_CAPTURE(TrainStep, gpt2_124M_1x1024, "d12", 1, 1024, 1)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime()
    ->Iterations(3);
BENCHMARK_CAPTURE(TrainStep, gpt2_124M_bf16, "d12", 4, 256, 1, DeviceChoice::kCpu, kOnCpuInBf16)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime()
    ->Iterations(3);
BENCHMARK_CAPTURE(TrainStep, gpt2_124M_1x1024_bf16, "d12", 1, 1024, 1, DeviceChoice::kCpu,
                  kOnCpuInBf16)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime()
    ->Iterations(3);
BENCHMARK_CAPTURE(TrainStep, gpt2_124M_ring_of_2, "d12", 4, 256, 2)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime()
    ->MinTime(10);
BENCHMARK_CAPTURE(TrainStep, nanogpt_cpu, "nanogpt_cpu", 12, 64, 1)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime()
    ->MinTime(3);
BENCHMARK_CAPTURE(TrainStep, llama_tiny_ring_of_2, "llama_tiny", 8, 256, 2)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime()
    ->MinTime(3);
BENCHMARK_CAPTURE(TrainStep, llama_tiny_2_ranks_exact, "llama_tiny", 8, 256, 2, DeviceChoice::kCpu,
                  Settings{true, true, 0})
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime()
    ->MinTime(3);

// Registers three kinds: deterministic (the default), sums in any order as PyTorch by default, and
// exact with these chunks.
void RegisterCuda(const std::string& model, int64_t batch, int64_t seqlen,
                  const std::vector<int64_t>& exact_chunks) {
  std::vector<std::pair<std::string, Settings>> all = {
      {"", {}},
      {"_nondeterministic", {false}},
      {"_fp8", {true, false, 0, Precision::kFp8}},
      {"_fp8_rowwise", {true, false, 0, Precision::kFp8, LinearPrecision::kFloat8Rows}},
      {"_fp8_blocks", {true, false, 0, Precision::kFp8, LinearPrecision::kFloat8Blocks}},
      {"_fp8_nondeterministic", {false, false, 0, Precision::kFp8}}};
  for (const int64_t chunk : exact_chunks) {
    all.push_back(
        {absl::StrCat("_exact", chunk == 0 ? "" : absl::StrCat("_", chunk)), {true, true, chunk}});
  }
  for (const auto& [suffix, settings] : all) {
    benchmark::RegisterBenchmark(absl::StrCat("TrainStep/cuda_", model, suffix).c_str(),
                                 [=, settings = settings](benchmark::State& state) {
                                   TrainStep(state, model, batch, seqlen, /*ranks=*/1,
                                             DeviceChoice::kCuda, settings);
                                 })
        ->Unit(benchmark::kMillisecond)
        ->UseRealTime()
        ->MinTime(3);
  }
}

}  // namespace
}  // namespace burst

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  if (burst::CudaDeviceCount() > 0) {
    burst::RegisterCuda("d12", 64, 1024, {1024, 16384});
    burst::RegisterCuda("llama_1b", 1, 16384, {0, 4096, 8192});
    burst::RegisterCuda("llama_8b_layers", 2, 8192, {});
  }
  benchmark::RunSpecifiedBenchmarks();
}
