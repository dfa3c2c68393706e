// Everything a training run is told: one struct, checked before anything starts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "burst/attention/burst_attention.h"
#include "burst/attention/strategy.h"
#include "burst/comm/launch/process_launch.h"
#include "burst/comm/mesh.h"
#include "burst/tensor/tensor.h"
#include "model/config.h"
#include "train/optimizer/lr_schedule.h"

namespace burst {

enum class TokenizerChoice { kAuto, kByte, kChar };  // kAuto: char for text, none for shards
enum class CommKind { kAuto, kThreads, kMpi, kNccl };
enum class DeviceChoice { kAuto, kCpu, kCuda };       // kAuto: a GPU where there is one
enum class Precision { kAuto, kFp32, kTf32, kBf16 };  // kAuto: bf16 on GPUs, fp32 on the CPU
const char* Name(Precision precision);

// A field's default is its option's. -1 means "chosen by ResolveConfig", as the help says.
struct TrainConfig {
  // Data.
  std::string data = "kjv";  // "kjv": the King James Bible that is built in
  std::string val_data;
  TokenizerChoice tokenizer = TokenizerChoice::kAuto;
  bool packed = false;

  // Model.
  std::string model = "llama_tiny";  // a preset, a JSON file, or JSON itself
  double dropout = -1;               // -1: the model's
  int64_t seqlen = 256;
  int64_t window = 0;

  // Optimization.
  int64_t batch = 8;
  int64_t accumulate = 1;
  int64_t steps = 1000;
  double lr = 2e-3;
  double min_lr = -1;   // -1: lr / 10
  int64_t warmup = -1;  // -1: a twentieth of the steps, at most 100
  LrShape schedule = LrShape::kCosine;
  double weight_decay = 0.1;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double clip = 1.0;  // 0: no clipping
  int64_t seed = 1;

  // Devices and ranks.
  DeviceChoice device = DeviceChoice::kAuto;
  Precision precision = Precision::kAuto;
  Recompute recompute = Recompute::kNone;
  int64_t ranks = -1;  // -1: 2 threads, one GPU, or what a launcher started
  int64_t dp = -1;     // -1: ranks / sp
  int64_t sp = -1;     // -1: ranks / dp
  CommKind comm = CommKind::kAuto;
  Strategy strategy = Strategy::kBurst;
  int64_t ulysses = -1;         // -1: as many as divide the ranks and the key heads
  int64_t ranks_per_node = -1;  // -1: a launcher's; 0: one flat ring
  Layout layout = Layout::kZigzag;
  BackwardDirection backward = BackwardDirection::kAuto;
  RingGradDType ring_grad_dtype = RingGradDType::kFp32;
  int64_t threads = -1;  // a rank; -1: cores / ranks
  bool deterministic = true;

  // Output.
  std::string out;  // empty: runs/<model>-<number>
  bool resume = false;
  int64_t eval_every = 200;        // 0: no evaluation
  int64_t eval_batches = 16;       // 0: all of the validation data
  int64_t checkpoint_every = 200;  // 0: at the end only
  int64_t log_every = 10;
  int64_t sample = -1;  // tokens at the end; -1: 256 for text, 0 for shards

  bool operator==(const TrainConfig& other) const;
};

// The options' names, in the order of the help.
std::vector<std::string> OptionNames();

// Sets one option from its text. InvalidArgument, naming the option and what would be valid.
absl::Status SetOption(TrainConfig* config, absl::string_view name, absl::string_view text);

// A checked configuration and what follows from it.
struct ResolvedConfig {
  // As given, but with absolute paths, and with the JSON in place of a model's file. A -1 stays, so
  // that it is chosen anew when the run is resumed.
  TrainConfig options;
  ModelConfig model;       // its vocab may still be 0
  std::string model_name;  // for people: the preset, the file's name, or "custom"
  LrSchedule lr;
  DeviceType device = DeviceType::kCpu;
  DType dtype = DType::kFloat32;  // of activations
  bool tf32 = false;
  CommKind comm = CommKind::kThreads;  // not kAuto
  int ranks = 1;
  Mesh mesh;               // of the ranks
  int ulysses = 1;         // ranks of a sequence that share heads, for Strategy::kBurstUlysses
  int ranks_per_node = 0;  // of a sequence, in a double ring; 0: a flat one
  int threads = 1;         // of each rank
};

// Checks every option and every pair of them that can contradict. InvalidArgument, naming the
// option, its value and what would be valid. Reads the model's file where one is named.
absl::StatusOr<ResolvedConfig> ResolveConfig(const TrainConfig& options, const Launch& launch);

// One JSON object with an entry an option, to be given to --config; `out` and `resume`, which
// belong to one start of the program, are left out.
std::string TrainConfigToJson(const TrainConfig& config);
absl::StatusOr<TrainConfig> TrainConfigFromJson(absl::string_view json);

// Whether a run made with `before` may go on with `after`: FailedPrecondition naming the first
// option whose change would make another run of it. The model is compared elsewhere, resolved.
absl::Status CheckResume(const TrainConfig& before, const TrainConfig& after);

}  // namespace burst
