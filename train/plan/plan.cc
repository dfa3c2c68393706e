#include "train/plan/plan.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "burst/base/parallel.h"
#include "burst/base/status.h"
#include "burst/comm/simulated/simulated_communicator.h"
#include "model/ops/cuda/matmul.h"
#include "train/trainer/trainer.h"

namespace burst {
namespace {

// A corpus of one document, whose tokens are all 0.
class BlankCorpus : public Corpus {
 public:
  explicit BlankCorpus(int64_t size) : size_(size) {}

  uint64_t digest() const override { return 0; }
  int64_t size() const override { return size_; }
  absl::Status Read(int64_t, int64_t count, int32_t* out) const override {
    std::fill_n(out, count, 0);
    return absl::OkStatus();
  }
  absl::Status DocumentStarts(int64_t, int64_t, std::vector<int64_t>*) const override {
    return absl::OkStatus();
  }
  int64_t second_document() const override { return size_; }
  absl::Status CheckVocab(int64_t) const override { return absl::OkStatus(); }

 private:
  const int64_t size_;
};

template <typename T>
std::vector<StepPlan::Part<T>> LargestFirst(const std::map<std::string, T>& amounts) {
  std::vector<StepPlan::Part<T>> parts;
  for (const auto& [place, amount] : amounts) parts.push_back({place, amount});
  std::stable_sort(parts.begin(), parts.end(),
                   [](const auto& a, const auto& b) { return a.amount > b.amount; });
  return parts;
}

// Runs three steps. The first one is not measured. The third follows the second without a pause, as
// in training.
absl::Status MeasureRank(const TrainingSetup& setup, Communicator& comm, SimulatedGpu& gpu,
                         StepPlan* plan) {
  const ScopedThreadPool pool(1);
  const Tensor workspace =
      Tensor::Empty({static_cast<int64_t>(cuda::kMatMulWorkspaceBytes / sizeof(float))},
                    DType::kFloat32, DeviceType::kCuda);
  BURST_ASSIGN_OR_RETURN(const auto trainer, Trainer::Create(setup, &comm, /*verbose=*/false));
  BURST_RETURN_IF_ERROR(trainer->Step(0).status());
  gpu.ResetPeak();
  BURST_RETURN_IF_ERROR(trainer->Step(1, /*enqueue_next=*/true).status());
  // Kernels of the first three steps.
  const std::map<std::string, double> kernels = gpu.KernelSeconds();
  BURST_ASSIGN_OR_RETURN(const StepMetrics metrics, trainer->Step(2));
  const ParameterList::KeptBytes kept = trainer->kept_bytes();
  plan->parameters = kept.values;
  plan->gradients = kept.gradients;
  plan->optimizer = kept.optimizer;
  plan->host_bytes = trainer->host_bytes();
  plan->peak_bytes = gpu.memory().peak_bytes;
  plan->largest_tensor = gpu.largest_allocation();
  plan->at_peak = LargestFirst(gpu.AtPeak());
  plan->step_seconds = 1e-3 * metrics.step_ms;
  plan->by_place = LargestFirst(kernels);
  for (auto& part : plan->by_place) plan->kernel_seconds += part.amount /= 3;
  plan->tokens_per_second = metrics.tokens_per_second / comm.world_size();
  plan->pipeline_bubble = metrics.pipeline_bubble;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<StepPlan> PlanStep(const TrainingSetup& setup, const GpuModel& gpu,
                                  int gpus_per_node) {
  std::mutex mutex;
  StepPlan worst;
  double seconds = 0;
  int64_t host_bytes = 0;
  StepPlan busiest;
  BURST_RETURN_IF_ERROR(RunSimulatedRanks(
      setup.config.ranks, gpus_per_node, gpu, [&](Communicator& comm, SimulatedGpu& own) {
        StepPlan plan;
        BURST_RETURN_IF_ERROR(MeasureRank(setup, comm, own, &plan));
        std::lock_guard<std::mutex> lock(mutex);
        seconds = std::max(seconds, plan.step_seconds);
        host_bytes += plan.host_bytes;
        if (plan.kernel_seconds > busiest.kernel_seconds) busiest = plan;
        if (plan.peak_bytes > worst.peak_bytes) worst = std::move(plan);
        return absl::OkStatus();
      }));
  worst.tokens_per_second *= worst.step_seconds / seconds;
  worst.step_seconds = seconds;
  worst.host_bytes = host_bytes / setup.config.ranks;
  worst.kernel_seconds = busiest.kernel_seconds;
  worst.by_place = std::move(busiest.by_place);
  return worst;
}

TrainingSetup PlanOf(const TrainingSetup& run) {
  TrainingSetup plan;
  plan.config = run.config;
  plan.data = run.data;
  plan.simulated = std::make_shared<PlannedSequences>();
  return plan;
}

absl::StatusOr<TrainingSetup> PreparePlan(const ResolvedConfig& config) {
  if (config.packed || config.model.vocab == 0) {
    BURST_ASSIGN_OR_RETURN(const TrainingSetup run, PrepareTraining(config));
    return PlanOf(run);
  }
  TrainingSetup setup;
  setup.config = config;
  setup.config.model = config.model.WithDefaults();
  const auto corpus = std::make_shared<BlankCorpus>(2 * config.seqlen + 2);
  setup.data.train = {corpus, 0, corpus->size()};
  setup.data.validation = setup.data.train;
  return PlanOf(setup);
}

}  // namespace burst
