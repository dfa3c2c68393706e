// Trains in nanoGPT's settings on tinyshakespeare: characters as tokens, the last tenth for
// validation.
//
// CPU: 4 layers, 4 heads, width 128, block 64, batch 12, 2,000 steps, lr 1e-3 to 1e-4 (cosine), no
// dropout. nanoGPT's README reports a validation loss of 1.88, estimated on 20 random batches.
//
// GPU (absent without one): 6 layers, 6 heads, width 384, block 256, batch 64, 5,000 steps, lr 1e-3
// to 1e-4, beta2 0.99, dropout 0.2. nanoGPT reports 1.4697, the best of its evaluations.
//
// Our losses are over all of the validation data. Seeds differ by about 0.01.
//
//   bazel run //benchmarks/train:convergence_benchmark --
//   --data=/path/to/tinyshakespeare.txt
//
// Counters: val_loss after the last step, best_val_loss of the evaluations (one every 250 steps),
// and steps/s.

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "benchmarks/harness/harness.h"
#include "benchmarks/train/prepare_here.h"
#include "burst/base/status.h"
#include "burst/device/device.h"
#include "train/config/config.h"
#include "train/run/launch.h"
#include "train/trainer/trainer.h"

namespace burst {
namespace {

std::string* data_path = new std::string;

constexpr int64_t kEvalEvery = 250;

struct Outcome {
  double last = 0;
  double best = HUGE_VAL;
};

absl::Status Train(const TrainConfig& options, Outcome* outcome) {
  BURST_ASSIGN_OR_RETURN(const TrainingSetup setup, PrepareHere(options));
  return RunRanksInProcess(setup.config, [&](Communicator& comm) -> absl::Status {
    BURST_ASSIGN_OR_RETURN(const auto trainer, Trainer::Create(setup, &comm, /*verbose=*/false));
    for (int64_t step = 1; step <= options.steps; ++step) {
      const bool evaluate = step % kEvalEvery == 0 || step == options.steps;
      BURST_RETURN_IF_ERROR(trainer->Step(step - 1, /*enqueue_next=*/!evaluate).status());
      if (!evaluate) continue;
      BURST_ASSIGN_OR_RETURN(const std::optional<double> loss, trainer->Evaluate());
      if (comm.rank() == 0) *outcome = {*loss, std::min(outcome->best, *loss)};
    }
    return absl::OkStatus();
  });
}

void Convergence(benchmark::State& state, TrainConfig options) {
  options.data = *data_path;
  options.eval_every = kEvalEvery;
  options.eval_batches = 0;  // all of the validation data
  options.checkpoint_every = 0;
  const TemporaryFolder folder;
  options.out = folder / "run";
  Outcome outcome;
  for (auto _ : state) {
    const absl::Status status = Train(options, &outcome);
    if (!status.ok()) return state.SkipWithError(status.ToString().c_str());
  }
  state.counters["val_loss"] = outcome.last;
  state.counters["best_val_loss"] = outcome.best;
  state.counters["steps/s"] = benchmark::Counter(
      static_cast<double>(options.steps * state.iterations()), benchmark::Counter::kIsRate);
}

TrainConfig NanoGptCpu(int64_t ranks, int64_t seed) {
  TrainConfig options;
  options.device = DeviceChoice::kCpu;
  options.model = "nanogpt_cpu";
  options.seqlen = 64;
  options.batch = 12;
  options.steps = 2000;
  options.lr = 1e-3;
  options.min_lr = 1e-4;
  options.warmup = 100;
  options.beta2 = 0.99;
  options.ranks = ranks;
  options.seed = seed;
  return options;
}

TrainConfig NanoGptGpu(int64_t seed) {
  TrainConfig options;
  options.device = DeviceChoice::kCuda;
  options.model = "nanogpt_gpu";
  options.seqlen = 256;
  options.batch = 64;
  options.steps = 5000;
  options.lr = 1e-3;
  options.min_lr = 1e-4;
  options.warmup = 100;
  options.beta2 = 0.99;
  options.dropout = 0.2;
  options.seed = seed;
  return options;
}

void Register(const std::string& name, const TrainConfig& options) {
  benchmark::RegisterBenchmark(name.c_str(),
                               [=](benchmark::State& state) { Convergence(state, options); })
      ->Iterations(1)
      ->Unit(benchmark::kSecond)
      ->UseRealTime();
}

void RegisterAll() {
  for (const int64_t ranks : {1, 2}) {
    Register(absl::StrCat("nanogpt_cpu/ranks:", ranks), NanoGptCpu(ranks, 1));
  }
  for (const int64_t seed : {2, 3}) {
    Register(absl::StrCat("nanogpt_cpu/seed:", seed), NanoGptCpu(1, seed));
  }
  if (CudaDeviceCount() == 0) return;
  for (const int64_t seed : {1, 2}) {
    Register(absl::StrCat("nanogpt_gpu/seed:", seed), NanoGptGpu(seed));
  }
}

}  // namespace
}  // namespace burst

int main(int argc, char** argv) {
  constexpr char kData[] = "--data=";
  int kept = 1;
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], kData, std::strlen(kData)) == 0) {
      *burst::data_path = argv[i] + std::strlen(kData);
    } else {
      argv[kept++] = argv[i];
    }
  }
  argc = kept;
  if (burst::data_path->empty()) {
    std::fprintf(stderr,
                 "convergence_benchmark needs --data=PATH, tinyshakespeare as one text file\n");
    return 2;
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  burst::RegisterAll();
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
