// Compares the measured bubble of a pipeline (StepMetrics::pipeline_bubble) with the formula, (p -
// 1) / (v m). Stages are threads of one core each, at most as many as there are cores. The model's
// stages take equally long.
//
//   bazel run //benchmarks/train:pipeline_benchmark
//
// Each row is the median of kSteps steps. On a machine that has other work it is too large: that
// makes one stage slower for a moment, and others wait for it.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "burst/base/parallel.h"
#include "burst/base/status.h"
#include "burst/comm/communicator.h"
#include "train/config/config.h"
#include "train/pipeline/schedule.h"
#include "train/run/launch.h"
#include "train/run/setup.h"
#include "train/trainer/trainer.h"

namespace burst {
namespace {

constexpr int kSteps = 41;

// Its vocabulary has few characters, so embeddings and head take little time compared with a layer.
constexpr char kModel[] =
    R"({"family":"llama","layers":8,"width":128,"heads":2,"kv_heads":2,"ffn":512,"dropout":0})";

absl::StatusOr<double> MeasuredBubble(const PipelineShape& shape, const std::string& data) {
  TrainConfig options;
  options.data = data;
  options.model = kModel;
  options.device = DeviceChoice::kCpu;
  options.seqlen = 256;
  options.batch = 1;
  options.eval_every = 0;
  options.threads = 1;
  options.ranks = shape.stages;
  options.sp = 1;
  options.pp = shape.stages;
  options.pp_chunks = shape.chunks;
  options.accumulate = shape.micro_batches;
  options.out = absl::StrCat(data, ".run");
  Launch launch;
  launch.cores = NumCores();
  BURST_ASSIGN_OR_RETURN(const ResolvedConfig config, ResolveConfig(options, launch));
  BURST_ASSIGN_OR_RETURN(const TrainingSetup setup, PrepareTraining(config));
  std::vector<double> bubbles;
  BURST_RETURN_IF_ERROR(RunRanksInProcess(config, [&](Communicator& comm) -> absl::Status {
    BURST_ASSIGN_OR_RETURN(const auto trainer, Trainer::Create(setup, &comm, /*verbose=*/false));
    for (int step = 0; step <= kSteps; ++step) {  // the first one warms up
      BURST_ASSIGN_OR_RETURN(const StepMetrics metrics, trainer->Step(step));
      if (comm.rank() == 0 && step > 0) bubbles.push_back(*metrics.pipeline_bubble);
    }
    return absl::OkStatus();
  }));
  std::nth_element(bubbles.begin(), bubbles.begin() + kSteps / 2, bubbles.end());
  return bubbles[kSteps / 2];
}

absl::Status Run(const std::string& folder) {
  const std::string data = folder + "/text.txt";
  std::ofstream text(data);
  for (int i = 0; i < 20000; ++i) text << i * 7919 % 10007 << " ";
  text.close();
  std::printf("%7s %7s %14s %9s %9s\n", "stages", "chunks", "micro-batches", "formula", "measured");
  for (int stages = 2; stages <= std::min(8, NumCores()); stages *= 2) {
    for (int chunks = 1; chunks * stages <= 8; chunks *= 2) {
      for (const int groups : {1, 2, 4}) {
        const PipelineShape shape = {stages, chunks, groups * stages};
        BURST_ASSIGN_OR_RETURN(const double measured, MeasuredBubble(shape, data));
        std::printf("%7d %7d %14d %9.4f %9.4f\n", stages, chunks, shape.micro_batches,
                    PipelineBubble(shape), measured);
        std::fflush(stdout);
      }
    }
  }
  return absl::OkStatus();
}

int Main() {
  namespace fs = std::filesystem;
  const fs::path folder = fs::temp_directory_path() / absl::StrCat("burst_pipeline_", getpid());
  fs::create_directories(folder);
  const absl::Status status = Run(folder);
  std::error_code ignored;
  fs::remove_all(folder, ignored);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace burst

int main() { return burst::Main(); }
