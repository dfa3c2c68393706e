// The options of //benchmarks:scaling, checked before anything runs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "benchmarks/scaling/problem.h"
#include "burst/comm/communicator.h"
#include "burst/comm/launch/process_launch.h"
#include "train/config/agreed_options.h"
#include "train/config/config.h"

namespace burst {

enum class Experiment {
  kAttention,   // time, memory, bytes of attention alone
  kError,       // of attention's results, against double precision
  kPrefill,     // latency of a whole model's prefill
  kGeneration,  // the same, and of the tokens after it, whose keys and values ranks share
  kTraining,    // time, memory and loss of whole training steps
};
const char* Name(Experiment experiment);

struct ScalingOptions {
  Experiment experiment = Experiment::kAttention;
  std::vector<Method> strategies;
  std::vector<int64_t> ranks, seqlens, batches;
  std::vector<int64_t> tile_keys;  // {0} unless given: the kernels' own
  // Attention alone: all but batch, seqlen and (but for the first) tile_keys, which the lists give.
  AttentionProblem problem;
  // Whole models, as //train would be told: all but what the lists give.
  TrainConfig train;
  std::vector<Recompute> recompute;

  int threads = 1;     // of each rank, on the CPU
  int64_t tokens = 1;  // that are generated
  int64_t repeats = 1;
  bool compare = true;
  std::string out;                 // absolute
  std::vector<AgreedItem> agreed;  // what processes must have alike
  // Ranks are these processes, of which each measures; null: threads. Not an option but how the
  // program was started.
  Communicator* processes = nullptr;
};

// InvalidArgument, naming the option, if an option is unknown, invalid, contradictory, or not used
// by the experiment.
absl::StatusOr<ScalingOptions> ScalingOptionsFromArguments(int argc, char** argv,
                                                           const Launch& launch);
std::string ScalingHelp();

}  // namespace burst
