#include "benchmarks/scaling/options.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "burst/base/enum_names.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"
#include "burst/cli/options.h"

namespace burst {
namespace {

enum class MaskKind { kFull, kCausal };
constexpr EnumName<MaskKind> kMasks[] = {{MaskKind::kFull, "full"}, {MaskKind::kCausal, "causal"}};

enum class Tiles { kOn, kOff };
constexpr EnumName<Tiles> kTiles[] = {{Tiles::kOn, "on"}, {Tiles::kOff, "off"}};

enum class DTypeChoice { kAuto, kFp32, kFp64, kBf16 };
constexpr EnumName<DTypeChoice> kDTypes[] = {{DTypeChoice::kAuto, "auto"},
                                             {DTypeChoice::kFp32, "fp32"},
                                             {DTypeChoice::kFp64, "fp64"},
                                             {DTypeChoice::kBf16, "bf16"}};

constexpr EnumName<Experiment> kExperiments[] = {{Experiment::kAttention, "attention"},
                                                 {Experiment::kError, "error"},
                                                 {Experiment::kPrefill, "prefill"},
                                                 {Experiment::kGeneration, "generation"},
                                                 {Experiment::kTraining, "training"}};

// The options as the user gives them.
struct ScalingConfig {
  ScalingConfig() {
    train.steps = 20;
    train.ranks_per_node = 0;
  }

  Experiment experiment = Experiment::kAttention;
  std::vector<Method> strategies = {Strategy::kSingle, Strategy::kBurst, Strategy::kRing};
  std::vector<int64_t> ranks, seqlens, batches;  // empty: the experiment's default
  TrainConfig train;  // the options shared with //train: the table says which
  int64_t heads = 4;
  int64_t kv_heads = 0;  // 0: as many as query heads
  int64_t head_dim = 64;
  MaskKind mask = MaskKind::kFull;
  Tiles tiles = Tiles::kOn;
  std::vector<int64_t> tile_keys;  // empty: the kernels' own
  DTypeChoice dtype = DTypeChoice::kAuto;
  std::vector<Recompute> recompute = {Recompute::kNone};
  int64_t tokens = 16;
  int64_t repeats = 3;
  bool compare = true;
  std::string out = "runs/scaling";
};

OptionTable Options(ScalingConfig* c) {
  const OptionTable train = TrainOptions(&c->train);
  OptionTable t;
  t.Group("What");
  t.Add("experiment", &c->experiment, kExperiments)
      .Help(
          "attention (time, memory and bytes of attention alone), error (of its results, against "
          "double precision), prefill (time to first token of a whole model), generation (that, "
          "and "
          "the time of a token after it) or training (time, memory and loss of whole steps).");
  t.AddList("strategies", &c->strategies, ParseMethod)
      .Help(absl::StrCat(train["strategy"].help,
                         " Or tp or tp+sp: tensor parallelism of all ranks. A list. Of attention "
                         "alone, what tp and tp+sp send around it counts as their part."));
  t.AddList("ranks", &c->ranks, ParseCount)
      .Help(
          "Ranks that share a sequence (single has one), 2 unless given; on cuda each owns one "
          "GPU, only --experiment=error shares. Under mpirun, torchrun or srun as many of the "
          "processes, all of them unless given.");
  t.AddList("seqlens", &c->seqlens, ParseCount)
      .Help("Tokens of a sequence, over all ranks. Unless given 1024,2048,4096; of training 256.");
  t.AddList("batches", &c->batches, ParseCount)
      .Help("Sequences of a batch. Unless given 1; of training 8.");
  t.AddShared(train, "layout", "With tp and tp+sp always contiguous, the best for them.");
  t.AddShared(train, "ring_backward");
  t.AddShared(train, "ulysses");
  t.AddShared(train, "ranks_per_node", "Here a number of at least 0.");
  t.AddShared(train, "ring_grad_dtype");

  t.Group("Attention alone");
  t.Add("heads", &c->heads).Help("Query heads.");
  t.Add("kv_heads", &c->kv_heads).Help("KV heads, which divide the query heads. 0: as many.");
  t.Add("head_dim", &c->head_dim).Help("Channels of a head.");
  t.Add("mask", &c->mask, kMasks).Help("full or causal.");
  t.Add("tiles", &c->tiles, kTiles)
      .Help(
          "on: attention tile by tile. off: by whole score matrices, on the CPU, for small "
          "lengths.");
  t.AddList("tile_keys", &c->tile_keys, ParseCount)
      .Help(
          "Keys of a tile, on the CPU: a list, to see what tile size does. Empty: the kernels' "
          "own.");
  t.Add("dtype", &c->dtype, kDTypes).Help("fp32, fp64 (cpu), bf16, or auto: bf16 on GPUs.");

  t.Group("Whole models");
  t.AddShared(train, "model");
  t.AddShared(train, "data", "Of training alone.");
  t.AddShared(train, "steps", "Of training alone.");
  t.AddList("recompute", &c->recompute, ParseRecompute)
      .Help(absl::StrCat(train["recompute"].help, " A list. Of training alone."));
  t.AddShared(train, "ffn_chunk");
  t.AddSharedGroup(train, "memory", "Of training alone.");
  t.Add("tokens", &c->tokens)
      .Help(
          "Tokens to generate, after one that is not timed; the median counts. Of generation "
          "alone.");

  t.Group("How");
  t.AddShared(train, "device");
  t.AddShared(train, "threads");
  t.Add("repeats", &c->repeats).Help("Measurements of a case, of which the median counts.");
  t.Add("compare", &c->compare)
      .Help(
          "Of attention: measure each case also without communication and without a ring. With "
          "--nocompare, time alone: for sequences that take minutes.");
  t.Add("out", &c->out)
      .Of(Scope::kHost)
      .Help("Folder for the tables, as CSV and JSON, and a plot, each named after the experiment.");
  return t;
}

// Checks that options of other experiments are not given.
absl::Status CheckUsed(const OptionTable& table, Experiment experiment) {
  constexpr auto kAttention = Experiment::kAttention, kError = Experiment::kError,
                 kPrefill = Experiment::kPrefill, kGeneration = Experiment::kGeneration,
                 kTraining = Experiment::kTraining;
  TrainConfig train;
  std::vector<std::string> of_training = {"data", "steps", "recompute"};
  const OptionTable of_train = TrainOptions(&train);
  for (const Option& option : of_train.options()) {
    const bool others = option.name == "ffn_chunk" || option.name == "recompute";
    if (option.group == "memory" && !others) of_training.push_back(option.name);
  }
  const struct {
    std::vector<std::string> options;
    std::vector<Experiment> experiments;
  } used[] = {
      {{"heads", "kv_heads", "head_dim", "mask", "tiles", "tile_keys", "dtype"},
       {kAttention, kError}},
      {{"model", "ffn_chunk"}, {kPrefill, kGeneration, kTraining}},
      {{"tokens"}, {kGeneration}},
      {of_training, {kTraining}},
      {{"repeats"}, {kAttention, kPrefill}},
      {{"compare"}, {kAttention}},
  };
  for (const auto& [options, experiments] : used) {
    if (std::count(experiments.begin(), experiments.end(), experiment) > 0) continue;
    for (const std::string& option : options) {
      if (!table.Given(option)) continue;
      return InvalidOption(option, "not used by --experiment=", Name(experiment));
    }
  }
  return absl::OkStatus();
}

// Checks that options of other strategies are not given.
absl::Status CheckStrategies(const OptionTable& table, const ScalingConfig& c) {
  const auto any = [&](const auto& predicate) {
    return std::any_of(c.strategies.begin(), c.strategies.end(), predicate);
  };
  if (table.Given("ring_backward") && !any([](Method m) { return HasDirections(m.strategy); })) {
    return InvalidOption("ring_backward", "not used by any of --strategies");
  }
  const bool recomputes = std::any_of(c.recompute.begin(), c.recompute.end(),
                                      [](Recompute r) { return r != Recompute::kNone; });
  if (table.Given("recompute_segment") && !recomputes) {
    return InvalidOption("recompute_segment", "not used without --recompute");
  }
  if (OffloadsActivations(c.train.offload) && !recomputes) {
    return InvalidOption("offload", NameOf(c.train.offload, kOffloads),
                         " is not used without --recompute; give optimizer");
  }
  const bool several = c.ranks.empty() || *std::max_element(c.ranks.begin(), c.ranks.end()) > 1;
  if (table.Given("zero") && !(several && any([](Method m) { return !m.single(); }))) {
    return InvalidOption("zero", "not used on one rank");
  }
  if (table.Given("ulysses") && !any([](Method m) { return m == Strategy::kBurstUlysses; })) {
    return InvalidOption("ulysses", "not used by any of --strategies; it is for burst+ulysses");
  }
  for (const char* option : {"ranks_per_node", "ring_grad_dtype"}) {
    if (table.Given(option) && !any([](Method m) { return HasRing(m.strategy); })) {
      return InvalidOption(option, "not used by any of --strategies; it is for rings");
    }
  }
  const bool tensor_parallel = any([](Method m) { return m.tensor_parallel(); });
  if (c.experiment == Experiment::kGeneration && tensor_parallel) {
    return InvalidOption("strategies",
                         "tp and tp+sp divide the model, not its keys and values; they are not for "
                         "--experiment=generation");
  }
  if (c.experiment == Experiment::kError && tensor_parallel) {
    return InvalidOption("strategies",
                         "tp and tp+sp compute each head as single does, with its errors; they are "
                         "not for --experiment=error");
  }
  return absl::OkStatus();
}

absl::Status AtLeast(int64_t least, const char* option, int64_t value) {
  if (value >= least) return absl::OkStatus();
  return InvalidOption(option, value, " is less than ", least);
}

absl::Status CheckRanges(const ScalingConfig& c) {
  BURST_RETURN_IF_ERROR(AtLeast(1, "heads", c.heads));
  BURST_RETURN_IF_ERROR(AtLeast(0, "kv_heads", c.kv_heads));
  BURST_RETURN_IF_ERROR(AtLeast(1, "head_dim", c.head_dim));
  const TrainConfig& t = c.train;
  if (t.ulysses != -1) BURST_RETURN_IF_ERROR(AtLeast(1, "ulysses", t.ulysses));
  BURST_RETURN_IF_ERROR(AtLeast(0, "ranks_per_node", t.ranks_per_node));
  // The first step allocates memory and is not timed.
  BURST_RETURN_IF_ERROR(AtLeast(2, "steps", t.steps));
  if (t.threads != -1) BURST_RETURN_IF_ERROR(AtLeast(1, "threads", t.threads));
  BURST_RETURN_IF_ERROR(AtLeast(1, "tokens", c.tokens));
  BURST_RETURN_IF_ERROR(AtLeast(1, "repeats", c.repeats));
  if (c.strategies.empty()) return InvalidOption("strategies", "at least one is needed");
  if (c.recompute.empty()) return InvalidOption("recompute", "at least one is needed");
  if (c.out.empty()) return InvalidOption("out", "a folder is needed");
  return absl::OkStatus();
}

AttentionProblem ResolveProblem(const ScalingConfig& c, DeviceType device) {
  AttentionProblem problem;
  problem.heads = c.heads;
  problem.kv_heads = c.kv_heads == 0 ? c.heads : c.kv_heads;
  problem.head_dim = c.head_dim;
  problem.causal = c.mask == MaskKind::kCausal;
  problem.layout = c.train.layout;
  problem.backward = c.train.ring_backward;
  problem.ulysses = static_cast<int>(c.train.ulysses);
  problem.ranks_per_node = static_cast<int>(c.train.ranks_per_node);
  problem.ring_grad_dtype = c.train.ring_grad_dtype;
  problem.tiles = c.tiles == Tiles::kOn;
  if (!c.tile_keys.empty()) problem.tile_keys = c.tile_keys[0];  // the check needs any one of them
  problem.device = device;
  const bool bf16 = c.dtype == DTypeChoice::kBf16 ||
                    (c.dtype == DTypeChoice::kAuto && device == DeviceType::kCuda);
  problem.dtype = bf16                            ? DType::kBFloat16
                  : c.dtype == DTypeChoice::kFp64 ? DType::kFloat64
                                                  : DType::kFloat32;
  return problem;
}

}  // namespace

const char* Name(Experiment experiment) { return NameOf(experiment, kExperiments); }

absl::StatusOr<ScalingOptions> ScalingOptionsFromArguments(int argc, char** argv,
                                                           const Launch& launch) {
  ScalingConfig c;
  OptionTable table = Options(&c);
  BURST_RETURN_IF_ERROR(table.ParseArguments(argc, argv));
  BURST_RETURN_IF_ERROR(launch.error);
  BURST_RETURN_IF_ERROR(CheckRanges(c));
  BURST_RETURN_IF_ERROR(CheckUsed(table, c.experiment));
  BURST_RETURN_IF_ERROR(CheckStrategies(table, c));

  const bool processes = launch.processes > 1;
  if (processes && c.experiment != Experiment::kAttention) {
    return InvalidOption("experiment", Name(c.experiment), " runs its ranks as threads; of ",
                         launch.processes, " processes (", launch.launcher,
                         ") it can be only attention");
  }
  ScalingOptions options;
  options.agreed = AgreedOptions(table, LaunchIsOnOneHost());
  options.experiment = c.experiment;
  options.strategies = c.strategies;
  const bool training = c.experiment == Experiment::kTraining;
  const auto unless_given = [](std::vector<int64_t>* given, std::vector<int64_t> otherwise) {
    return given->empty() ? std::move(otherwise) : std::move(*given);
  };
  options.ranks = unless_given(&c.ranks, {processes ? launch.processes : 2});
  options.seqlens = unless_given(
      &c.seqlens, training ? std::vector<int64_t>{256} : std::vector<int64_t>{1024, 2048, 4096});
  options.batches = unless_given(&c.batches, {training ? 8 : 1});

  BURST_ASSIGN_OR_RETURN(const DeviceType device, ResolveDevice(c.train.device, launch.gpus));
  options.problem = ResolveProblem(c, device);
  options.tile_keys = unless_given(&c.tile_keys, {0});
  options.recompute = c.recompute;
  options.tokens = c.tokens;
  options.repeats = c.repeats;
  options.compare = c.compare;
  options.out = ResolvePath(c.out);

  const int64_t most_ranks = *std::max_element(options.ranks.begin(), options.ranks.end());
  if (processes && most_ranks > launch.processes) {
    return InvalidOption("ranks", most_ranks, " ranks need as many processes; ", launch.launcher,
                         " started ", launch.processes);
  }
  if (!processes && device == DeviceType::kCuda && c.experiment != Experiment::kError &&
      most_ranks > launch.gpus) {
    return InvalidOption("ranks", most_ranks, " ranks need as many GPUs; there are ", launch.gpus);
  }
  const int64_t sharing = processes ? 1 : most_ranks;  // launch.cores
  options.threads = static_cast<int>(
      c.train.threads != -1 ? c.train.threads : std::max<int64_t>(1, launch.cores / sharing));
  options.train = c.train;
  options.train.device = device == DeviceType::kCuda ? DeviceChoice::kCuda : DeviceChoice::kCpu;
  options.train.threads = options.threads;
  options.train.comm = CommChoice::kThreads;

  if (c.experiment == Experiment::kAttention || c.experiment == Experiment::kError) {
    for (Method method : options.strategies) {
      for (int64_t ranks : RanksFor(method, options.ranks)) {
        BURST_RETURN_IF_ERROR(CheckProblem(method, options.problem, static_cast<int>(ranks)));
      }
    }
  }
  return options;
}

std::string ScalingHelp() {
  ScalingConfig defaults;
  return Options(&defaults).Help(
      "Measures attention and whole models over ranks: by length, batch, ranks and strategy.\n\n"
      "  bazel run //benchmarks:scaling -- --seqlens=2048,8192 --ranks=2,4\n\n"
      "Lists are separated by commas; every combination is a row.\n");
}

}  // namespace burst
