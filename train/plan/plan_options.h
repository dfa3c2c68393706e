// The options of //train:plan: the GPUs, and the step.
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
  TrainConfig train;                     // the options shared with //train
};

// Returns the table of options. It refers to `options`, which must outlive it.
OptionTable PlanOptionTable(PlanOptions* options);

// Returns the GPU that the options describe, and the number of GPUs.
absl::StatusOr<GpuModel> GpuOf(const PlanOptions& options, int64_t* count);

// Returns the configuration of the step as //train would run it on `gpus` GPUs.
absl::StatusOr<ResolvedConfig> ConfigOf(const PlanOptions& options, int64_t gpus, int64_t seqlen);

// A way to use the GPUs for the step, with an unchanged batch.
struct MeshChoice {
  ResolvedConfig config;
  std::string options;  // "--dp=2 --sp=4 --strategy=ulysses"; empty for the first, ConfigOf's
};
// Returns the meshes to try. If the mesh may be chosen, these have every number of data-parallel
// groups, and every number of pipeline stages up to --accumulate. They have powers of two of chunks
// a stage. If the strategy may be chosen, they have each strategy that may be the fastest. Meshes
// that ResolveConfig refuses are left out.
absl::StatusOr<std::vector<MeshChoice>> MeshesOf(const PlanOptions& options, int64_t gpus,
                                                 int64_t seqlen, bool mesh, bool strategy);

}  // namespace burst
