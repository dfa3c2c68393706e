// nanoGPT's CPU setting on tinyshakespeare: 4 layers, 4 heads, width 128, block 64, batch 12, 2,000
// steps, lr 1e-3 to 1e-4 (cosine), no dropout, characters as tokens, the last tenth for validation.
// nanoGPT's README reports a validation loss of 1.88, estimated on 20 random batches; this is the
// loss over all of the validation data. Seeds differ by about 0.01.
//
//   bazel run -c opt //benchmarks:convergence_benchmark -- --data=/path/to/tinyshakespeare.txt
//
// Counters: val_loss over all of the validation data; steps/s.

#include <benchmark/benchmark.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "burst/base/parallel.h"
#include "burst/base/status.h"
#include "burst/comm/thread_communicator.h"
#include "train/config.h"
#include "train/trainer.h"
#include "train/training_setup.h"

namespace burst {
namespace {

namespace fs = std::filesystem;

std::string* data_path = new std::string;

absl::Status NanoGptCpu(int64_t ranks, double* val_loss) {
  const std::string out = fs::temp_directory_path() / absl::StrCat("burst_convergence_", getpid());
  TrainConfig options;
  options.data = *data_path;
  options.model = "nanogpt_cpu";
  options.seqlen = 64;
  options.batch = 12;
  options.steps = 2000;
  options.lr = 1e-3;
  options.min_lr = 1e-4;
  options.warmup = 20;
  options.beta2 = 0.995;
  options.weight_decay = 0;
  options.eval_every = options.steps;
  options.eval_batches = 0;  // all of the validation data
  options.checkpoint_every = 0;
  options.ranks = ranks;
  options.out = out;
  Launch launch;
  launch.cores = NumCores();
  BURST_ASSIGN_OR_RETURN(const ResolvedConfig config, ResolveConfig(options, launch));
  BURST_ASSIGN_OR_RETURN(const TrainingSetup setup, PrepareTraining(config));
  const absl::Status status = RunRanks(config.ranks, [&](Communicator& comm) -> absl::Status {
    const ScopedThreadPool pool(setup.config.threads);
    BURST_ASSIGN_OR_RETURN(const auto trainer, Trainer::Create(setup, &comm, /*verbose=*/false));
    for (int64_t step = 0; step < options.steps; ++step) {
      BURST_RETURN_IF_ERROR(trainer->Step(step).status());
    }
    BURST_ASSIGN_OR_RETURN(const double loss, trainer->Evaluate());
    if (comm.rank() == 0) *val_loss = loss;
    return absl::OkStatus();
  });
  std::error_code ignored;
  fs::remove_all(out, ignored);
  return status;
}

void Convergence(benchmark::State& state) {
  double val_loss = 0;
  for (auto _ : state) {
    const absl::Status status = NanoGptCpu(state.range(0), &val_loss);
    if (!status.ok()) return state.SkipWithError(status.ToString().c_str());
  }
  state.counters["val_loss"] = val_loss;
  state.counters["steps/s"] =
      benchmark::Counter(2000.0 * state.iterations(), benchmark::Counter::kIsRate);
}

BENCHMARK(Convergence)
    ->ArgName("ranks")
    ->Arg(1)
    ->Arg(2)
    ->Iterations(1)
    ->Unit(benchmark::kSecond)
    ->UseRealTime();

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
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
