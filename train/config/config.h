// The configuration of a training run: one struct, one table of options, and the values that follow
// from them.
//
// TrainConfig is what the user gives; ResolveConfig checks it before anything starts and makes a
// ResolvedConfig of it. The rest of the program sees only ResolvedConfig. A new option needs a
// field of PlainOptions, or a field of TrainConfig and one of ResolvedConfig. It also needs a row
// in the file of its group, NAME_options.cc, with its conflicts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "burst/attention/burst_attention.h"
#include "burst/attention/strategy.h"
#include "burst/base/enum_names.h"
#include "burst/cli/options.h"
#include "burst/comm/agreement.h"
#include "burst/comm/launch/process_launch.h"
#include "burst/comm/mesh.h"
#include "burst/tensor/tensor.h"
#include "model/config.h"
#include "model/execution/plan.h"
#include "train/data/json_line.h"
#include "train/data/tokenizer.h"
#include "train/huggingface/pretrained.h"
#include "train/optimizer/lr_schedule.h"

namespace burst {

enum class CommChoice { kAuto, kThreads, kTcp, kMpi, kNccl };
inline constexpr EnumName<CommChoice> kCommChoices[] = {{CommChoice::kAuto, "auto"},
                                                        {CommChoice::kThreads, "threads"},
                                                        {CommChoice::kTcp, "tcp"},
                                                        {CommChoice::kMpi, "mpi"},
                                                        {CommChoice::kNccl, "nccl"}};

enum class DeviceChoice { kAuto, kCpu, kCuda };  // kAuto: a GPU where there is one
inline constexpr EnumName<DeviceChoice> kDeviceChoices[] = {
    {DeviceChoice::kAuto, "auto"}, {DeviceChoice::kCpu, "cpu"}, {DeviceChoice::kCuda, "cuda"}};

enum class Precision { kAuto, kFp32, kTf32, kBf16, kFp8 };  // kAuto: bf16 on GPUs, fp32 on the CPU
inline constexpr EnumName<Precision> kPrecisions[] = {{Precision::kAuto, "auto"},
                                                      {Precision::kFp32, "fp32"},
                                                      {Precision::kTf32, "tf32"},
                                                      {Precision::kBf16, "bf16"},
                                                      {Precision::kFp8, "fp8"}};

inline constexpr EnumName<LinearPrecision> kFp8Recipes[] = {
    {LinearPrecision::kFloat8, "tensorwise"},
    {LinearPrecision::kFloat8Rows, "rowwise"},
    {LinearPrecision::kFloat8Blocks, "blocks"}};

enum class OptimizerKind { kAdamW, kMuon };
inline constexpr EnumName<OptimizerKind> kOptimizers[] = {{OptimizerKind::kAdamW, "adamw"},
                                                          {OptimizerKind::kMuon, "muon"}};

enum class Offload { kNone, kActivations, kOptimizer, kAll };  // what is in the host's memory
inline constexpr EnumName<Offload> kOffloads[] = {{Offload::kNone, "none"},
                                                  {Offload::kActivations, "activations"},
                                                  {Offload::kOptimizer, "optimizer"},
                                                  {Offload::kAll, "all"}};
inline bool OffloadsActivations(Offload offload) {
  return offload == Offload::kActivations || offload == Offload::kAll;
}
inline bool OffloadsOptimizer(Offload offload) {
  return offload == Offload::kOptimizer || offload == Offload::kAll;
}

// The files of a checkpoint. kAuto: one for each rank if ranks have different parts of the state.
enum class CheckpointFiles { kAuto, kOne, kRanks, kNone };
inline constexpr EnumName<CheckpointFiles> kCheckpointFiles[] = {{CheckpointFiles::kAuto, "auto"},
                                                                 {CheckpointFiles::kOne, "one"},
                                                                 {CheckpointFiles::kRanks, "ranks"},
                                                                 {CheckpointFiles::kNone, "none"}};

// The value of --resume. kAuto continues a run that has checkpoints and starts one that has none.
enum class Resume { kNo, kYes, kAuto };
inline constexpr EnumName<Resume> kResumes[] = {
    {Resume::kNo, "false"}, {Resume::kYes, "true"}, {Resume::kAuto, "auto"}};

inline constexpr int64_t kDefaultSteps = 1000;

// Options that have the same value before and after they are resolved (but paths become absolute).
// A field's initial value is the option's default; its row says what it is for.
struct PlainOptions : LayerMemory {
  std::string data = "kjv";  // "kjv": the King James Bible that is built in
  std::string val_data;
  LineFormat lines;
  bool packed = false;
  std::string data_cache;  // empty: .data-cache next to the run's folder

  int64_t seqlen = 256;

  int64_t batch = 8;
  int64_t accumulate = 1;
  int64_t steps = -1;  // -1: as `tokens` or `epochs` say, else kDefaultSteps; then resolved
  int64_t tokens = 0;  // 0: as `steps` says
  double epochs = 0;   // 0: as `steps` says
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  double muon_momentum = 0.95;
  double weight_decay = 0.1;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double clip = 1.0;  // 0: no clipping
  double z_loss = 0;  // LossTerms::z
  double ema = 0;     // the decay of averaged weights; 0: none
  int64_t seed = 1;

  Offload offload = Offload::kNone;
  int64_t offload_resident = 0;  // GiB of an offloaded optimizer that stay on the GPU
  int64_t zero = 0;              // the stage of StateSharding
  int64_t pp = 1;                // the number of pipeline stages
  int64_t pp_chunks = 1;         // the runs of layers of each stage
  Strategy strategy = Strategy::kBurst;
  Layout layout = Layout::kZigzag;
  BackwardDirection ring_backward = BackwardDirection::kAuto;
  RingGradDType ring_grad_dtype = RingGradDType::kFp32;
  LinearPrecision fp8_recipe = LinearPrecision::kFloat8;
  int64_t bf16_layers = 0;  // at each end of an fp8 model
  bool deterministic = true;
  bool exact = false;
  int64_t exact_chunk = 0;  // in tokens; with `exact` 0 becomes a divisor of seqlen
  int64_t patience = 600;   // in seconds; 0: without end
  bool plan = true;         // a step that does not fit a GPU is refused before the first one

  std::string out;  // empty: runs/<model>-<number>
  bool resume = false;
  int64_t eval_every = 200;        // 0: no evaluation
  int64_t eval_batches = 16;       // 0: all of the validation data
  int64_t checkpoint_every = 200;  // 0: at the end only
  int64_t keep = 3;                // checkpoints, in addition to the best
  int64_t log_every = 10;
  bool tensorboard = false;
};

// The options as the user gives them. -1 and kAuto mean that ResolveConfig chooses, as the help
// says.
struct TrainConfig : PlainOptions {
  std::string tokenizer = "auto";  // "auto", "byte", "char", or the path of a tokenizer

  std::string model = "llama_tiny";  // a preset, a JSON file, JSON itself, or a folder with weights
  double dropout = -1;               // -1: the model's
  double attention_dropout = -1;     // -1: the model's
  double attention_softcap = -1;     // 0: none; -1: the model's
  double logits_softcap = -1;        // 0: none; -1: the model's
  bool attention_sinks = false;      // true: also where the model's JSON or preset has none
  double rope_theta = -1;            // -1: the model's
  double yarn_factor = -1;           // -1: the model's RoPE
  int64_t yarn_context = -1;         // -1: the model's context
  int64_t vocab = -1;                // -1: the model's
  std::string ignore_fields;         // of config.json, separated by commas
  int64_t window = -1;               // 0: none; -1: the model's

  double lr = 2e-3;
  double min_lr = -1;   // -1: lr / 10
  int64_t warmup = -1;  // -1: a twentieth of the steps, at most 100
  LrShape schedule = LrShape::kCosine;

  DeviceChoice device = DeviceChoice::kAuto;
  Precision precision = Precision::kAuto;
  int64_t ranks = -1;  // -1: 2 threads, one GPU, or what a launcher started
  int64_t dp = -1;     // -1: ranks / (pp sp tp)
  int64_t sp = -1;     // -1: ranks / (dp pp tp)
  int64_t tp = -1;     // -1: 1
  CommChoice comm = CommChoice::kAuto;
  int64_t ulysses = -1;         // -1: as many as divide the ranks and the KV heads
  int64_t ranks_per_node = -1;  // -1: a launcher's; 0: one flat ring
  int64_t threads = -1;         // threads of each rank; -1: cores / ranks

  CheckpointFiles checkpoint_files = CheckpointFiles::kAuto;
  Resume resume_mode = Resume::kNo;  // --resume; the field `resume` is its meaning for this run

  std::string config;         // a file of options
  std::string profile_steps;  // "FIRST-LAST" or "STEP"; empty: none
  int64_t sample = -1;        // tokens at the end; -1: 256 for text, 0 for shards

  // Returns whether an option of the mesh says how many ranks there are.
  bool SaysMesh() const { return dp != -1 || sp != -1 || tp != -1 || pp > 1; }
  // Returns the ranks that these options say: all of them, or a divisor of their number.
  int64_t MeshRanks() const {
    return std::max<int64_t>(1, dp) * pp * std::max<int64_t>(1, sp) * std::max<int64_t>(1, tp);
  }
  // Returns whether the mesh may have this number of ranks. What these options leave open may be
  // any.
  bool MeshMayHave(int64_t number) const {
    return dp != -1 && sp != -1 ? number == MeshRanks() : number % MeshRanks() == 0;
  }
};

// Returns the names in --ignore_fields.
std::vector<std::string> IgnoredFields(const TrainConfig& config);

// Returns the table of options, with a row for each field of `config`.
OptionTable TrainOptions(TrainConfig* config);

// Reads the options. The command line wins over the --config file, the file over the configuration
// of the run in --out (with --resume), and that over the defaults. A mesh that contradicts the
// --ranks of the run drops them.
absl::StatusOr<TrainConfig> TrainConfigFromArguments(int argc, char** argv);

std::string TrainHelp();

enum class CommKind { kThreads, kTcp, kMpi, kNccl };

// A checked configuration, whose values are final.
struct ResolvedConfig : PlainOptions {
  std::optional<Tokenizer::Kind> tokenizer;  // none: a file's, or the one that suits the data
  std::string tokenizer_path;                // empty: none
  ModelConfig model;                         // dropouts are the run's; its vocab may still be 0
  std::string model_name;                    // for people: the preset, the file's name, or "custom"
  std::optional<Pretrained> pretrained;      // a new run starts from these weights
  std::string lost_folder;  // the folder of --model from which a resumed run began, if it is gone
  int64_t window = 0;       // keys that a query sees; 0: all before it
  LrSchedule lr;
  DeviceType device = DeviceType::kCpu;
  DType dtype = DType::kFloat32;  // the dtype of activations
  bool tf32 = false;
  bool fp8 = false;  // linear products of layers in 8 bits; dtype is then bfloat16
  CommKind comm = CommKind::kThreads;
  int ranks = 1;
  Mesh mesh;               // the ranks' mesh
  int ulysses = 1;         // ranks of a sequence that share heads, for kBurstUlysses
  int ranks_per_node = 0;  // ranks of a sequence on a node of a double ring; 0: a flat ring
  int threads = 1;         // threads of each rank
  // Whether the ranks of a tensor group divide the tokens between its GEMMs (TensorParallel). Only
  // //benchmarks:scaling says no, for Megatron-LM's first version.
  bool spreads_stream = true;
  CheckpointFiles checkpoint_files = CheckpointFiles::kOne;  // not kAuto
  std::optional<int64_t> sample;  // tokens at the end; none: as suits the data
  int64_t profile_first = 0;      // steps that are profiled, from 1; 0: none
  int64_t profile_last = 0;

  // Returns the number of a stage's ranks with equal parameters. With `zero` they divide the state.
  int state_ranks() const { return mesh.stage_size() / mesh.tensor; }
  // Returns the options of CreateAttention that follow from this configuration.
  BurstAttentionOptions AttentionOptions() const;
  Mask AttentionMask() const { return Mask::SlidingWindow(window); }

  // Returns the sentences about options for the header of the run (Option::Says).
  std::string Sentences() const;
  // Returns the options whose values differ from `before`'s, as on the command line.
  std::vector<std::string> ChangesFrom(const PlainOptions& before) const;
  // Chooses `checkpoint_files` where the user has not, also again after a change of `zero`.
  void ResolveCheckpointFiles();
  // Sets the steps of --epochs, and the learning rates that follow, when the data is known. Does
  // nothing without the option. Errors name an option.
  absl::Status SetEpochs(int64_t sequences_per_epoch);

  // Returns the options as the user gave them, with absolute paths.
  const TrainConfig& given() const { return given_; }

  // Returns the text of config.json, for --config. A -1 stays, so a resumed run chooses its value
  // anew. The model's JSON takes the place of its file's name.
  std::string ToJson() const;
  // Returns the options that must be equal in all processes of a job. `one_host` says that all
  // processes are on one host.
  std::vector<AgreedItem> AgreedOptions(bool one_host) const;
  // Checks that the run of this config.json may continue with these options. FailedPrecondition
  // names the first option whose change would make another run. Data and model are compared
  // elsewhere.
  absl::Status CheckResume(absl::string_view config_json) const;

 private:
  friend absl::StatusOr<ResolvedConfig> ResolveConfig(const TrainConfig&, const Launch&);
  TrainConfig given_;
};

// Checks every option, and every pair that can contradict. InvalidArgument names the option, its
// value and valid values. Reads the model's file if one is named.
absl::StatusOr<ResolvedConfig> ResolveConfig(const TrainConfig& given, const Launch& launch);

// Returns the device of the option --device. InvalidArgument means that there is no GPU.
absl::StatusOr<DeviceType> ResolveDevice(DeviceChoice choice, int gpus);

// Returns the version, and all options whose scope says that they must agree. `one_host` says that
// all processes are on one host, so paths must agree, too.
std::vector<AgreedItem> AgreedOptions(const OptionTable& options, bool one_host);

// Returns whether all processes of this process's launcher are on one host.
bool LaunchIsOnOneHost();

}  // namespace burst
