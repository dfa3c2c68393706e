#include "benchmarks/scaling/options.h"

#include <algorithm>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"
#include "burst/cli/flags.h"

ABSL_FLAG(std::string, experiment, "attention",
          "attention (time, memory and bytes of attention alone), error (of its results, against "
          "double precision), prefill (latency of a whole model's prefill) or training (time, "
          "memory and loss of whole steps).");
ABSL_FLAG(
    std::string, strategies, "single,burst,ring",
    "How attention is spread over ranks: single (one rank), burst, ring (RingAttention), ulysses "
    "(all-to-all over heads), burst+ulysses (both); tp (tensor parallel) and tp+sp (with the "
    "tokens "
    "spread between layers): of attention alone what they send around it counts as its part.");
// Empty: not given.
ABSL_FLAG(std::string, ranks, "",
          "Ranks that share a sequence (single has one), 2 unless given; on cuda each has a GPU of "
          "its own, only --experiment=error shares. Under mpirun, torchrun or srun as many of the "
          "processes, all of them unless given.");
ABSL_FLAG(std::string, seqlens, "",
          "Tokens of a sequence, over all ranks. Unless given 1024,2048,4096; of training 256.");
ABSL_FLAG(std::string, batches, "", "Sequences of a batch. Unless given 1; of training 8.");
ABSL_FLAG(int64_t, heads, 4, "Query heads.");
ABSL_FLAG(int64_t, kv_heads, 0, "Key and value heads, which divide the query heads. 0: as many.");
ABSL_FLAG(int64_t, head_dim, 64, "Channels of a head.");
ABSL_FLAG(std::string, mask, "full", "full or causal.");
ABSL_FLAG(std::string, layout, "zigzag",
          "How a sequence is spread over ranks: contiguous, zigzag or striped. With tp and tp+sp "
          "always contiguous, the best for them.");
ABSL_FLAG(
    std::string, backward, "auto",
    "What travels in the backward of burst and burst+ulysses: queries (burst), keys and values "
    "(ring), or auto: what is fewer bytes.");
ABSL_FLAG(int64_t, ulysses, -1,
          "Ranks that share heads in burst+ulysses. -1: as many as divide the ranks and the key "
          "heads.");
ABSL_FLAG(
    int64_t, ranks_per_node, 0,
    "A double ring, for clusters: so many neighbouring ranks are on one node. 0: a flat ring.");
ABSL_FLAG(std::string, ring_grad_dtype, "fp32",
          "What gradients are while they travel around a ring: fp32, or bf16 with --dtype=bf16.");
ABSL_FLAG(
    std::string, tiles, "on",
    "on: attention tile by tile. off: by whole score matrices, on the CPU, for small lengths.");
ABSL_FLAG(
    std::string, tile_keys, "",
    "Keys of a tile, on the CPU: a list, to see what tile size does. Empty: the kernels' own.");
ABSL_FLAG(std::string, model, "llama_tiny",
          "Of prefill and training: a preset or a JSON file, as for //train.");
ABSL_FLAG(std::string, data, "kjv", "Of training: text, as for //train.");
ABSL_FLAG(int64_t, steps, 20, "Of training: optimizer steps.");
ABSL_FLAG(std::string, recompute, "none",
          "Of training: what the backward computes again (none, selective, full), as for //train.");
ABSL_FLAG(std::string, device, "auto", "cpu, cuda, or auto: cuda where a GPU is found.");
ABSL_FLAG(std::string, dtype, "auto", "fp32, fp64 (cpu), bf16 (cuda), or auto: bf16 on GPUs.");
ABSL_FLAG(int64_t, threads, -1, "Threads of a rank on the CPU. -1: cores / the most ranks.");
ABSL_FLAG(int64_t, repeats, 3,
          "Measurements of a case, of which the median counts (of prefill the fastest).");
ABSL_FLAG(bool, compare, true,
          "Of attention: measure each case also without communication and without a ring. With "
          "--nocompare, time alone: for sequences that take minutes.");
ABSL_FLAG(std::string, out, "runs/scaling",
          "Folder for the tables, as CSV and JSON, and a plot, each named after the experiment.");

namespace burst {
namespace {

constexpr Experiment kExperiments[] = {Experiment::kAttention, Experiment::kError,
                                       Experiment::kPrefill, Experiment::kTraining};

const std::vector<FlagGroup>& Groups() {
  static const auto* groups = new std::vector<FlagGroup>{
      {"What",
       {"experiment", "strategies", "ranks", "seqlens", "batches", "layout", "backward", "ulysses",
        "ranks_per_node", "ring_grad_dtype"}},
      {"Attention alone", {"heads", "kv_heads", "head_dim", "mask", "tiles", "tile_keys", "dtype"}},
      {"Whole models", {"model", "data", "steps", "recompute"}},
      {"How", {"device", "threads", "repeats", "compare", "out"}},
  };
  return *groups;
}

absl::Status Invalid(absl::string_view option, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("--", option, ": ", what));
}

absl::Status AtLeast(int64_t least, const char* option, int64_t value) {
  if (value >= least) return absl::OkStatus();
  return Invalid(option, absl::StrCat(value, " is less than ", least));
}

bool Given(const char* option) {
  const absl::CommandLineFlag* flag = absl::FindCommandLineFlag(option);
  return flag->CurrentValue() != flag->DefaultValue();
}

// What other experiments use must not be given to this one.
absl::Status CheckUsed(Experiment experiment) {
  std::vector<const char*> unused;
  switch (experiment) {
    case Experiment::kAttention:
      unused = {"model", "data", "steps", "recompute"};
      break;
    case Experiment::kError:
      unused = {"model", "data", "steps", "recompute", "repeats", "compare"};
      break;
    case Experiment::kPrefill:
      unused = {"heads", "kv_heads", "head_dim", "mask",      "tiles",  "tile_keys",
                "dtype", "data",     "steps",    "recompute", "compare"};
      break;
    case Experiment::kTraining:
      unused = {"heads",     "kv_heads", "head_dim", "mask",   "tiles",
                "tile_keys", "dtype",    "repeats",  "compare"};
      break;
  }
  for (const char* option : unused) {
    if (Given(option)) {
      return Invalid(option, absl::StrCat("not used by --experiment=", Name(experiment)));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Experiment> ParseExperiment(const std::string& name) {
  std::string names;
  for (Experiment experiment : kExperiments) {
    if (name == Name(experiment)) return experiment;
    absl::StrAppend(&names, names.empty() ? "" : ", ", Name(experiment));
  }
  return Invalid("experiment", absl::StrCat("'", name, "' is none of ", names));
}

// A list of names, none twice; parse(name) -> absl::StatusOr<T>.
template <typename T>
absl::StatusOr<std::vector<T>> ParseNames(absl::string_view option, const std::string& text,
                                          absl::StatusOr<T> (*parse)(absl::string_view name)) {
  std::vector<T> values;
  for (absl::string_view name : absl::StrSplit(text, ',')) {
    const absl::StatusOr<T> value = parse(name);
    if (!value.ok()) return Invalid(option, value.status().message());
    if (std::count(values.begin(), values.end(), *value) > 0) {
      return Invalid(option, absl::StrCat(name, " is there twice"));
    }
    values.push_back(*value);
  }
  return values;
}

absl::StatusOr<DeviceType> ParseDevice(const std::string& name, int gpus) {
  if (name == "cpu") return DeviceType::kCpu;
  if (name == "auto") return gpus > 0 ? DeviceType::kCuda : DeviceType::kCpu;
  if (name != "cuda")
    return Invalid("device", absl::StrCat("'", name, "' is not auto, cpu or cuda"));
  if (gpus > 0) return DeviceType::kCuda;
  return Invalid("device", "cuda needs an NVIDIA GPU and a build with CUDA; none was found");
}

absl::StatusOr<DType> ParseDType(const std::string& name, DeviceType device) {
  if (name == "auto") return device == DeviceType::kCuda ? DType::kBFloat16 : DType::kFloat32;
  if (name == "fp32") return DType::kFloat32;
  if (name == "fp64") return DType::kFloat64;
  if (name == "bf16") return DType::kBFloat16;
  return Invalid("dtype", absl::StrCat("'", name, "' is not auto, fp32, fp64 or bf16"));
}

}  // namespace

const char* Name(Experiment experiment) {
  switch (experiment) {
    case Experiment::kAttention:
      return "attention";
    case Experiment::kError:
      return "error";
    case Experiment::kPrefill:
      return "prefill";
    case Experiment::kTraining:
      return "training";
  }
  return "?";
}

absl::StatusOr<std::vector<int64_t>> ParseNumbers(absl::string_view option,
                                                  absl::string_view text) {
  std::vector<int64_t> numbers;
  for (absl::string_view part : absl::StrSplit(text, ',')) {
    int64_t number = 0;
    if (!absl::SimpleAtoi(part, &number) || number < 1) {
      return Invalid(
          option, absl::StrCat("'", part, "' in '", text, "' is not a whole number of at least 1"));
    }
    if (std::count(numbers.begin(), numbers.end(), number) > 0) {
      return Invalid(option, absl::StrCat(number, " is there twice"));
    }
    numbers.push_back(number);
  }
  return numbers;
}

absl::StatusOr<ScalingOptions> ScalingOptionsFromArguments(int argc, char** argv,
                                                           const Launch& launch) {
  BURST_RETURN_IF_ERROR(ParseArguments(Groups(), argc, argv));
  BURST_RETURN_IF_ERROR(launch.error);
  ScalingOptions options;
  BURST_ASSIGN_OR_RETURN(options.experiment, ParseExperiment(absl::GetFlag(FLAGS_experiment)));
  BURST_RETURN_IF_ERROR(CheckUsed(options.experiment));
  const bool training = options.experiment == Experiment::kTraining;
  BURST_ASSIGN_OR_RETURN(options.strategies,
                         ParseNames("strategies", absl::GetFlag(FLAGS_strategies), ParseStrategy));
  const bool processes = launch.processes > 1;
  if (processes && options.experiment != Experiment::kAttention) {
    return Invalid(
        "experiment",
        absl::StrCat(Name(options.experiment), " runs its ranks as threads; of ", launch.processes,
                     " processes (", launch.launcher, ") it can be only attention"));
  }
  const auto numbers = [](const char* option, const std::string& given,
                          const std::string& otherwise) {
    return ParseNumbers(option, given.empty() ? otherwise : given);
  };
  BURST_ASSIGN_OR_RETURN(options.ranks, numbers("ranks", absl::GetFlag(FLAGS_ranks),
                                                processes ? absl::StrCat(launch.processes) : "2"));
  BURST_ASSIGN_OR_RETURN(options.seqlens, numbers("seqlens", absl::GetFlag(FLAGS_seqlens),
                                                  training ? "256" : "1024,2048,4096"));
  BURST_ASSIGN_OR_RETURN(options.batches,
                         numbers("batches", absl::GetFlag(FLAGS_batches), training ? "8" : "1"));

  AttentionProblem& problem = options.problem;
  problem.heads = absl::GetFlag(FLAGS_heads);
  problem.kv_heads = absl::GetFlag(FLAGS_kv_heads);
  problem.head_dim = absl::GetFlag(FLAGS_head_dim);
  BURST_RETURN_IF_ERROR(AtLeast(1, "heads", problem.heads));
  BURST_RETURN_IF_ERROR(AtLeast(0, "kv_heads", problem.kv_heads));
  BURST_RETURN_IF_ERROR(AtLeast(1, "head_dim", problem.head_dim));
  if (problem.kv_heads == 0) problem.kv_heads = problem.heads;
  const std::string mask = absl::GetFlag(FLAGS_mask);
  if (mask != "full" && mask != "causal") {
    return Invalid("mask", absl::StrCat("'", mask, "' is neither full nor causal"));
  }
  problem.causal = mask == "causal";
  const absl::StatusOr<Layout> layout = ParseLayout(absl::GetFlag(FLAGS_layout));
  if (!layout.ok()) return Invalid("layout", layout.status().message());
  problem.layout = *layout;
  const auto backward = ParseBackwardDirection(absl::GetFlag(FLAGS_backward));
  if (!backward.ok()) return Invalid("backward", backward.status().message());
  problem.backward = *backward;
  const int64_t ulysses = absl::GetFlag(FLAGS_ulysses);
  if (ulysses != -1) BURST_RETURN_IF_ERROR(AtLeast(1, "ulysses", ulysses));
  problem.ulysses = static_cast<int>(ulysses);
  const int64_t per_node = absl::GetFlag(FLAGS_ranks_per_node);
  BURST_RETURN_IF_ERROR(AtLeast(0, "ranks_per_node", per_node));
  problem.ranks_per_node = static_cast<int>(per_node);
  const auto travelling = ParseRingGradDType(absl::GetFlag(FLAGS_ring_grad_dtype));
  if (!travelling.ok()) return Invalid("ring_grad_dtype", travelling.status().message());
  problem.ring_grad_dtype = *travelling;
  const std::string tiles = absl::GetFlag(FLAGS_tiles);
  if (tiles != "on" && tiles != "off") {
    return Invalid("tiles", absl::StrCat("'", tiles, "' is neither on nor off"));
  }
  problem.tiles = tiles == "on";
  if (Given("tile_keys")) {
    BURST_ASSIGN_OR_RETURN(options.tile_keys,
                           ParseNumbers("tile_keys", absl::GetFlag(FLAGS_tile_keys)));
  }
  problem.tile_keys = options.tile_keys[0];  // one for all: any number is as good
  BURST_ASSIGN_OR_RETURN(problem.device, ParseDevice(absl::GetFlag(FLAGS_device), launch.gpus));
  BURST_ASSIGN_OR_RETURN(problem.dtype, ParseDType(absl::GetFlag(FLAGS_dtype), problem.device));

  options.model = absl::GetFlag(FLAGS_model);
  options.data = absl::GetFlag(FLAGS_data);
  options.steps = absl::GetFlag(FLAGS_steps);
  BURST_ASSIGN_OR_RETURN(options.recompute,
                         ParseNames("recompute", absl::GetFlag(FLAGS_recompute), ParseRecompute));
  // The first one pays for fresh memory and is not timed.
  BURST_RETURN_IF_ERROR(AtLeast(2, "steps", options.steps));

  const int64_t most_ranks = *std::max_element(options.ranks.begin(), options.ranks.end());
  if (processes && most_ranks > launch.processes) {
    return Invalid("ranks", absl::StrCat(most_ranks, " ranks need as many processes; ",
                                         launch.launcher, " started ", launch.processes));
  }
  if (!processes && problem.device == DeviceType::kCuda &&
      options.experiment != Experiment::kError && most_ranks > launch.gpus) {
    return Invalid("ranks",
                   absl::StrCat(most_ranks, " ranks need as many GPUs; there are ", launch.gpus));
  }
  const int64_t threads = absl::GetFlag(FLAGS_threads);
  if (threads != -1) BURST_RETURN_IF_ERROR(AtLeast(1, "threads", threads));
  const int64_t sharing = processes ? 1 : most_ranks;  // launch.cores
  options.threads =
      static_cast<int>(threads != -1 ? threads : std::max<int64_t>(1, launch.cores / sharing));
  options.repeats = absl::GetFlag(FLAGS_repeats);
  options.compare = absl::GetFlag(FLAGS_compare);
  BURST_RETURN_IF_ERROR(AtLeast(1, "repeats", options.repeats));
  options.out = ResolvePath(absl::GetFlag(FLAGS_out));
  if (options.out.empty()) return Invalid("out", "a folder is needed");

  const auto any = [&](const auto& predicate) {
    return std::any_of(options.strategies.begin(), options.strategies.end(), predicate);
  };
  if (Given("backward") && !any(HasDirections)) {
    return Invalid("backward", "not used by any of --strategies");
  }
  if (Given("ulysses") && !any([](Strategy s) { return s == Strategy::kBurstUlysses; })) {
    return Invalid("ulysses", "not used by any of --strategies; it is for burst+ulysses");
  }
  for (const char* option : {"ranks_per_node", "ring_grad_dtype"}) {
    if (Given(option) && !any(HasRing)) {
      return Invalid(option, "not used by any of --strategies; it is for rings");
    }
  }
  if (options.experiment == Experiment::kError && any(IsTensorParallel)) {
    return Invalid("strategies",
                   "tp and tp+sp compute each head as single does, with its errors; they are not "
                   "for --experiment=error");
  }
  const bool attention_alone =
      options.experiment == Experiment::kAttention || options.experiment == Experiment::kError;
  for (Strategy strategy : options.strategies) {
    for (int64_t ranks : RanksFor(strategy, options.ranks)) {
      if (attention_alone) {
        BURST_RETURN_IF_ERROR(CheckProblem(strategy, problem, static_cast<int>(ranks)));
      }
    }
  }
  return options;
}

bool WantsScalingHelp(int argc, char** argv) { return WantsHelp(argc, argv); }

std::string ScalingHelp() {
  return HelpText(
      "Measures attention spread over ranks: by length, batch, ranks and strategy.\n\n"
      "  bazel run -c opt //benchmarks:scaling -- --seqlens=2048,8192 --ranks=2,4\n\n"
      "Lists are separated by commas; every combination is a row.\n",
      Groups());
}

}  // namespace burst
