// What //train:plan is asked: the GPUs, and the step.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "burst/cli/options.h"
#include "burst/device/simulated_gpu.h"
#include "train/config/config.h"

namespace burst {

struct PlanOptions {
  std::string gpus = "1xH200";
  int64_t gpus_per_node = 8;
  double memory = -1, links = -1, network = -1;  // -1: the GPU's own
  double host_memory = -1;                       // -1: as much as is needed
  bool fit = false;
  std::vector<int64_t> seqlens, counts;  // empty: train.seqlen; what `gpus` says
  std::string plot;                      // path of a picture of the table; empty: none
  TrainConfig train;                     // the options that are those of //train
};

// Refers to `options`, which must outlive it.
OptionTable PlanOptionTable(PlanOptions* options);

// The GPU that the options describe, and how many there are.
absl::StatusOr<GpuModel> GpuOf(const PlanOptions& options, int64_t* count);

// The step as //train would make it on so many GPUs.
absl::StatusOr<ResolvedConfig> ConfigOf(const PlanOptions& options, int64_t gpus, int64_t seqlen);

// The same step, of the same batch, with its GPUs put to other uses.
struct MeshChoice {
  ResolvedConfig config;
  std::string options;  // "--dp=2 --sp=4 --strategy=ulysses"; of the first, ConfigOf's: none
};
// Every number of data-parallel groups and, up to --accumulate, of pipeline stages, with a power of
// two of chunks each, if the mesh may be chosen, with every strategy that may be the fastest, if
// that may; those that ResolveConfig refuses are left out.
absl::StatusOr<std::vector<MeshChoice>> MeshesOf(const PlanOptions& options, int64_t gpus,
                                                 int64_t seqlen, bool mesh, bool strategy);

}  // namespace burst
