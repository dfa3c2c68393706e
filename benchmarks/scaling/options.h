// The options of //benchmarks:scaling, checked before anything runs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "benchmarks/scaling/problem.h"
#include "burst/comm/communicator.h"
#include "burst/comm/launch/process_launch.h"
#include "train/config/config.h"

namespace burst {

enum class Experiment {
  kAttention,   // time, memory, bytes of attention alone
  kError,       // errors of attention's results against double precision
  kPrefill,     // latency of a whole model's prefill
  kGeneration,  // latency of the prefill and of the tokens after it; ranks share keys and values
  kTraining,    // time, memory and loss of whole training steps
};
const char* Name(Experiment experiment);

struct ScalingOptions {
  Experiment experiment = Experiment::kAttention;
  std::vector<Method> strategies;
  std::vector<int64_t> ranks, seqlens, batches;
  std::vector<int64_t> tile_keys;  // {0} unless given: the kernels' own
  // The problem of attention alone. The lists give batch, seqlen and tile_keys after the first one.
  AttentionProblem problem;
  // The options of whole models, as //train takes them, without those that the lists give.
  TrainConfig train;
  std::vector<Recompute> recompute;

  int threads = 1;     // threads of each rank, on the CPU
  int64_t tokens = 1;  // tokens to generate
  int64_t repeats = 1;
  bool compare = true;
  std::string out;                 // an absolute path
  std::vector<AgreedItem> agreed;  // values that must be equal in all processes
  // The ranks, if a launcher started the program as several processes; null: ranks are threads.
  Communicator* processes = nullptr;
};

// Returns InvalidArgument that names the option if an option is unknown, invalid, contradictory, or
// not used by the experiment.
absl::StatusOr<ScalingOptions> ScalingOptionsFromArguments(int argc, char** argv,
                                                           const Launch& launch);
std::string ScalingHelp();

}  // namespace burst
