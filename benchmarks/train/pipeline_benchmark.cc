// Compares the measured bubble of a pipeline (StepMetrics::pipeline_bubble) with the formula, (p -
// 1) / (v m). Stages are threads of one core each, at most as many as there are cores. The model's
// stages take equally long.
//
//   bazel run //benchmarks/train:pipeline_benchmark
//
// Each row is the median of kSteps steps. Other work on the machine makes it too large: it slows
// one stage for a moment, and the other stages wait.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "benchmarks/harness/harness.h"
#include "benchmarks/train/prepare_here.h"
#include "burst/base/parallel.h"
#include "burst/base/print_error.h"
#include "burst/base/status.h"
#include "burst/comm/communicator.h"
#include "train/config/config.h"
#include "train/pipeline/schedule.h"
#include "train/run/launch.h"
#include "train/trainer/trainer.h"

namespace burst {
namespace {

constexpr int kSteps = 41;

// The model. Its vocabulary is small, so embeddings and head take little time compared with a
// layer.
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
  BURST_ASSIGN_OR_RETURN(const TrainingSetup setup, PrepareHere(options));
  std::vector<double> bubbles;
  BURST_RETURN_IF_ERROR(RunRanksInProcess(setup.config, [&](Communicator& comm) -> absl::Status {
    BURST_ASSIGN_OR_RETURN(const auto trainer, Trainer::Create(setup, &comm, /*verbose=*/false));
    for (int step = 0; step <= kSteps; ++step) {  // the first one warms up
      BURST_ASSIGN_OR_RETURN(const StepMetrics metrics, trainer->Step(step));
      if (comm.rank() == 0 && step > 0) bubbles.push_back(*metrics.pipeline_bubble);
    }
    return absl::OkStatus();
  }));
  return Median(std::move(bubbles));
}

absl::Status Run() {
  const TemporaryFolder folder;
  const std::string data = folder / "text.txt";
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

}  // namespace
}  // namespace burst

int main() {
  const absl::Status status = burst::Run();
  if (!status.ok()) burst::PrintError(status);
  return status.ok() ? 0 : 1;
}
