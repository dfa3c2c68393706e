// Computes the values that follow from the options and the launch, and finds contradictions.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <numeric>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"
#include "train/config/config.h"
#include "train/config/conflicts.h"
#include "train/config/option_group.h"
#include "train/data/corpus.h"

namespace burst {
namespace {

// Returns the steps of the run. With --epochs the data will say how many; until then it returns the
// most.
int64_t ResolveSteps(const TrainConfig& c) {
  if (c.epochs > 0) return std::numeric_limits<int64_t>::max();
  const int64_t step_tokens = c.seqlen * c.batch * c.accumulate;
  if (c.tokens > 0) return 1 + (c.tokens - 1) / step_tokens;
  return c.steps == -1 ? kDefaultSteps : c.steps;
}

// `c` has the resolved steps.
absl::StatusOr<LrSchedule> ResolveLr(const TrainConfig& c) {
  const bool constant = c.schedule == LrShape::kConstant;
  LrSchedule lr{c.schedule, c.lr, c.min_lr, c.warmup, c.steps};
  if (lr.min_lr == -1) lr.min_lr = constant ? c.lr : c.lr / 10;
  if (lr.min_lr > c.lr) {
    return InvalidOption("min_lr", "must be at most --lr=", c.lr, "; got ", lr.min_lr,
                         "; give less, or leave it out");
  }
  if (lr.warmup == -1) lr.warmup = std::min<int64_t>(100, c.steps / 20);
  if (lr.warmup > c.steps) {
    return InvalidOption("warmup", "must be at most --steps=", c.steps, "; got ", lr.warmup,
                         "; give less, or leave it out");
  }
  return lr;
}

absl::Status ResolvePrecision(const TrainConfig& c, const Launch& launch, ResolvedConfig* config) {
  const bool on_cpu = c.comm == CommChoice::kMpi || c.comm == CommChoice::kTcp;
  BURST_ASSIGN_OR_RETURN(
      config->device,
      ResolveDevice(on_cpu && c.device == DeviceChoice::kAuto ? DeviceChoice::kCpu : c.device,
                    launch.gpus));
  const bool cuda = config->device == DeviceType::kCuda;
  config->fp8 = c.precision == Precision::kFp8;
  if (c.precision == Precision::kBf16 ||
      (cuda && (c.precision == Precision::kAuto || c.precision == Precision::kFp8))) {
    config->dtype = DType::kBFloat16;
  }
  config->tf32 = c.precision == Precision::kTf32;
  return absl::OkStatus();
}

// Chooses what connects a launcher's processes: NCCL if they have GPUs, else sockets.
CommKind ChooseComm(CommChoice choice, bool cuda, bool launched) {
  switch (choice) {
    case CommChoice::kThreads:
      return CommKind::kThreads;
    case CommChoice::kTcp:
      return CommKind::kTcp;
    case CommChoice::kMpi:
      return CommKind::kMpi;
    case CommChoice::kNccl:
      return CommKind::kNccl;
    case CommChoice::kAuto:
      return !launched ? CommKind::kThreads : cuda ? CommKind::kNccl : CommKind::kTcp;
  }
  return CommKind::kThreads;
}

absl::Status ResolveComm(const TrainConfig& c, const Launch& launch, ResolvedConfig* config) {
  const bool cuda = config->device == DeviceType::kCuda;
  const bool launched = launch.processes > 1 || !launch.error.ok();
  config->comm = ChooseComm(c.comm, cuda, launched);
  if (config->comm == CommKind::kMpi) return absl::OkStatus();
  if (config->comm == CommKind::kThreads) {
    if (launch.processes == 1) return absl::OkStatus();
    return InvalidOption(
        "comm", "must be another one in the processes of a launcher; got threads, ",
        "which would train ", launch.processes, " separate models, one in each process of ",
        launch.launcher, "; leave it out");
  }
  const char* name = config->comm == CommKind::kNccl ? "nccl" : "tcp";
  if (!launch.error.ok()) return InvalidOption("comm", name, ": ", launch.error.message());
  if (!launch.token_error.ok()) {
    return InvalidOption("comm", name, ": ", launch.token_error.message());
  }
  if (launch.processes > 1) return absl::OkStatus();
  return InvalidOption("comm",
                       "must be threads or auto unless mpirun, torchrun or srun started the ",
                       "processes; got ", name, "; for ", cuda ? "the GPUs" : "threads",
                       " of this machine give --ranks alone");
}

// Refuses many more threads than the machine has cores, because it would run out of memory or
// threads. `ranks` is the number of ranks in this process.
absl::Status CheckThreads(const ResolvedConfig& config, int ranks, int cores) {
  constexpr int64_t kMostOfACore = 64;
  const int64_t most = kMostOfACore * cores, threads = config.threads;
  if (ranks * threads <= most) return absl::OkStatus();
  const std::string limit = absl::StrCat("at most ", most, ", ", kMostOfACore, " for each of the ",
                                         cores, cores == 1 ? " core" : " cores", " that are there");
  if (threads == 1) return InvalidOption("ranks", ranks, " threads are too many here: ", limit);
  return InvalidOption("threads", threads, " times ", ranks, ranks == 1 ? " rank" : " ranks",
                       " are too many here: ", limit);
}

absl::Status ResolveRanks(const TrainConfig& c, const Launch& launch, ResolvedConfig* config) {
  config->ranks = static_cast<int>(c.ranks);
  config->threads = static_cast<int>(c.threads);
  if (config->comm == CommKind::kThreads) {
    const bool cuda = config->device == DeviceType::kCuda;
    if (c.ranks == -1) config->ranks = cuda || c.strategy == Strategy::kSingle ? 1 : 2;
    if (c.ranks == -1 && c.SaysMesh()) {
      config->ranks = static_cast<int>(c.MeshRanks());
    }
    if (cuda && config->ranks > launch.gpus) {
      return InvalidOption("ranks", "must be at most the ", launch.gpus,
                           launch.gpus == 1 ? " GPU" : " GPUs", " of this machine; got ",
                           config->ranks, "; a rank needs its own");
    }
    if (c.threads == -1) config->threads = std::max(1, launch.cores / config->ranks);
    return cuda ? absl::OkStatus() : CheckThreads(*config, config->ranks, launch.cores);
  }
  if (c.ranks == -1) config->ranks = launch.processes;
  if (config->ranks != launch.processes) {
    return InvalidOption("ranks", "must be the ", launch.processes,
                         launch.processes == 1 ? " process" : " processes", " that ",
                         launch.launcher, " started; got ", c.ranks,
                         "; give --ranks=", launch.processes, " or -1");
  }
  if (c.threads == -1) config->threads = std::max(1, launch.cores);
  return CheckThreads(*config, 1, launch.cores);
}

absl::Status ResolveMesh(const TrainConfig& c, ResolvedConfig* config) {
  if (config->ranks % c.pp != 0) {
    return InvalidOption("pp", "must be a divisor of the number of ranks, ", config->ranks,
                         "; got ", c.pp, "; give another number of ranks");
  }
  const int64_t tp = std::max<int64_t>(1, c.tp);
  const char* const of = c.pp > 1 ? " of a stage of --pp, " : ", ";
  int64_t ranks = config->ranks / c.pp;  // ranks of a stage
  if (ranks % tp != 0) {
    return InvalidOption("tp", "must be a divisor of the number of ranks", of, ranks, "; got ",
                         c.tp, "; give another number of ranks");
  }
  ranks /= tp;
  const int64_t sp = c.sp != -1 ? c.sp : c.dp != -1 ? ranks / c.dp : ranks;
  const int64_t dp = c.dp != -1 ? c.dp : ranks / sp;
  if (dp * sp != ranks) {
    const bool both = c.dp != -1 && c.sp != -1;
    return InvalidOption(
        c.dp != -1 ? "dp" : "sp",
        both ? absl::StrCat("must be, times --sp=", sp, ",") : "must be a divisor of",
        " the number of ranks", tp > 1 ? " by --tp" : "", of, ranks, "; got ",
        c.dp != -1 ? c.dp : c.sp, "; give another number of ranks, or leave one out");
  }
  if (c.batch % dp != 0) {
    return InvalidOption("batch", "must be a multiple of --dp=", dp,
                         ", whose groups get equal shares; got ", c.batch, "; give a multiple");
  }
  config->mesh.data = static_cast<int>(dp);
  config->mesh.stages = static_cast<int>(c.pp);
  config->mesh.sequence = static_cast<int>(sp);
  config->mesh.tensor = static_cast<int>(tp);
  return absl::OkStatus();
}

// Sets the size of a burst+ulysses group: the largest number that divides the ranks and the heads.
void ResolveUlysses(const TrainConfig& c, ResolvedConfig* config) {
  if (c.strategy != Strategy::kBurstUlysses) return;
  const int64_t kv_heads = c.HeadsAtATime(config->model.WithDefaults().kv_heads);
  const int64_t most = std::gcd<int64_t>(config->mesh.sequence, kv_heads);
  config->ulysses = static_cast<int>(c.ulysses != -1 ? c.ulysses : most);
}

// Returns the default chunk, or 0 if no multiple of 16 divides seqlen.
int64_t DefaultExactChunk(int64_t seqlen) {
  constexpr int64_t kStep = 16, kMost = 8192, kLeastChunks = 8;
  int64_t smallest = 0, largest = 0;
  for (int64_t chunk = kStep; chunk <= std::min(seqlen, kMost); chunk += kStep) {
    if (seqlen % chunk != 0) continue;
    if (smallest == 0) smallest = chunk;
    if (seqlen / chunk >= kLeastChunks) largest = chunk;
  }
  return largest > 0 ? largest : smallest;
}

absl::Status ResolveExact(const TrainConfig& c, ResolvedConfig* config) {
  if (!c.exact) return absl::OkStatus();
  if (c.exact_chunk == 0) {
    config->exact_chunk = DefaultExactChunk(c.seqlen);
    if (config->exact_chunk > 0) return absl::OkStatus();
    return InvalidOption("seqlen", "must be one of the multiples of 16 with --exact; got ",
                         c.seqlen, "; give a multiple");
  }
  const bool divides = c.seqlen % c.exact_chunk == 0;
  if (c.exact_chunk % 16 != 0 || (!divides && c.exact_chunk % c.seqlen != 0)) {
    return InvalidOption("exact_chunk", "must be a multiple of 16 that divides --seqlen=", c.seqlen,
                         ", or a multiple of that; got ", c.exact_chunk, "; leave it out");
  }
  const int64_t sequences = c.exact_chunk / c.seqlen, share = c.batch / config->mesh.data;
  if (divides || share % sequences == 0) return absl::OkStatus();
  return InvalidOption("exact_chunk", "must be sequences that divide the ", share,
                       " of --batch=", c.batch, " that are a rank's; got ", c.exact_chunk, ", ",
                       sequences, " sequences; give less");
}

// Reads --profile_steps: "12" or "10-12".
absl::Status ResolveProfile(const TrainConfig& c, ResolvedConfig* config) {
  if (c.profile_steps.empty()) return absl::OkStatus();
  const std::vector<std::string> ends = absl::StrSplit(c.profile_steps, '-');
  if (ends.size() > 2 || !absl::SimpleAtoi(ends.front(), &config->profile_first) ||
      !absl::SimpleAtoi(ends.back(), &config->profile_last) || config->profile_first < 1 ||
      config->profile_last < config->profile_first) {
    return InvalidOption("profile_steps", "must be a step or a range of steps; got ",
                         c.profile_steps, "; give one, such as 12, or two, such as 10-12");
  }
  if (config->profile_last > c.steps) {
    return InvalidOption("profile_steps", "must be at most --steps=", c.steps, "; got ",
                         c.profile_steps, "; give earlier ones");
  }
  return absl::OkStatus();
}

// Makes a double ring if the option asks for it. It also makes one if a sequence's ranks are on
// several hosts with the same number of ranks on each. A group of tensor parallelism is one rank of
// a sequence.
absl::Status ResolveNodes(const TrainConfig& c, const Launch& launch, ResolvedConfig* config) {
  const int sp = config->mesh.sequence, tp = config->mesh.tensor;
  if (c.ranks_per_node == -1) {
    const bool whole = config->comm != CommKind::kThreads && launch.ranks_per_node % tp == 0;
    const int64_t found = whole ? launch.ranks_per_node / tp : 0;
    if (HasRing(c.strategy) && found > 0 && found < sp && sp % found == 0 &&
        found % config->ulysses == 0) {
      config->ranks_per_node = static_cast<int>(found);
    }
    return absl::OkStatus();
  }
  if (c.ranks_per_node == 0) return absl::OkStatus();
  if (sp % c.ranks_per_node != 0) {
    return InvalidOption("ranks_per_node", "must be a divisor of the ", sp,
                         sp == 1 ? " rank" : " ranks", " of a sequence; got ", c.ranks_per_node,
                         "; leave it out");
  }
  if (c.ranks_per_node % config->ulysses != 0) {
    return InvalidOption("ranks_per_node", "must be a multiple of --ulysses=", config->ulysses,
                         "; got ", c.ranks_per_node, "; leave it out");
  }
  config->ranks_per_node = static_cast<int>(c.ranks_per_node);
  return absl::OkStatus();
}

// Checks that products of options are not too large for any machine.
absl::Status CheckProducts(const TrainConfig& c) {
  constexpr int64_t kMaxTokens = int64_t{1} << 31;
  if (c.seqlen > kMaxTokens / c.batch) {
    return InvalidOption("seqlen", "must be at most 2^31 tokens, times --batch=", c.batch, "; got ",
                         c.seqlen, "; give less of one of them");
  }
  int64_t ranks = 1;
  std::pair<int64_t, const char*> largest = {0, ""};
  for (const auto& option : {std::pair(c.dp, "dp"), std::pair(c.pp, "pp"), std::pair(c.sp, "sp"),
                             std::pair(c.tp, "tp")}) {
    ranks *= std::max<int64_t>(1, option.first);
    if (option.first > largest.first) largest = option;
  }
  if (ranks <= kMaxRanks) return absl::OkStatus();
  return InvalidOption(largest.second,
                       "must be, times the others of --dp, --pp, --sp and --tp, at ", "most ",
                       kMaxRanks, " ranks; got ", largest.first, ", which makes ", ranks,
                       "; give less of one of them");
}

}  // namespace

BurstAttentionOptions ResolvedConfig::AttentionOptions() const {
  BurstAttentionOptions attention;
  attention.layout = layout;
  attention.scores.softcap = model.attention_softcap;
  attention.scores.dropout = model.attention_dropout;
  attention.backward = ring_backward;
  attention.ring_grad_dtype = ring_grad_dtype;
  attention.ranks_per_node = ranks_per_node;
  attention.deterministic = deterministic;
  return attention;
}

absl::Status ResolvedConfig::SetEpochs(int64_t sequences_per_epoch) {
  if (epochs == 0) return absl::OkStatus();
  constexpr double kMost = 1e15;
  const double count =
      epochs * static_cast<double>(sequences_per_epoch) / static_cast<double>(batch * accumulate);
  if (count > kMost) {
    return InvalidOption("epochs", "must be at most ", kMost, " steps; got ", epochs,
                         " epochs, which are ", count, " steps; give less");
  }
  TrainConfig c = given_;
  c.steps = steps = static_cast<int64_t>(std::ceil(count));
  BURST_ASSIGN_OR_RETURN(lr, ResolveLr(c));
  return ResolveProfile(c, this);
}

absl::StatusOr<DeviceType> ResolveDevice(DeviceChoice choice, int gpus) {
  if (choice == DeviceChoice::kCpu || (choice == DeviceChoice::kAuto && gpus == 0)) {
    return DeviceType::kCpu;
  }
  if (gpus > 0) return DeviceType::kCuda;
  return InvalidOption("device",
                       "must be cpu or auto without an NVIDIA GPU and a build with CUDA; ",
                       "got cuda; leave it out");
}

absl::StatusOr<ResolvedConfig> ResolveConfig(const TrainConfig& given, const Launch& launch) {
  TrainConfig c = given;  // gets absolute paths, and the JSON in place of a model's file
  BURST_RETURN_IF_ERROR(TrainOptions(&c).CheckBounds());
  BURST_RETURN_IF_ERROR(CheckProducts(c));
  if (c.data.empty()) {
    return InvalidOption("data", "must not be empty; give a text file, a folder or a pattern of ",
                         ".bin shards");
  }
  BURST_ASSIGN_OR_RETURN(std::vector<MixturePart> parts, ParseMixture(c.data));
  for (MixturePart& part : parts) {
    if (part.path != "kjv") part.path = ResolvePath(part.path);
  }
  c.data = MixtureText(parts);
  c.val_data = ResolvePath(c.val_data);
  c.data_cache = ResolvePath(c.data_cache);
  c.out = ResolvePath(c.out);

  ResolvedConfig config;
  if (c.tokenizer.empty()) {
    return InvalidOption("tokenizer", "must not be empty; give auto, char or a file");
  }
  if (c.tokenizer != "auto" && c.tokenizer != "byte" && c.tokenizer != "char") {
    config.tokenizer_path = c.tokenizer = ResolvePath(c.tokenizer);
    std::error_code error;  // a name may be too long for a file
    if (!std::filesystem::exists(c.tokenizer, error)) {
      return InvalidOption("tokenizer", "must be auto, char, byte, or a file or folder; got ",
                           c.tokenizer, "; give one that is there");
    }
  }
  BURST_ASSIGN_OR_RETURN(
      config.model, ReadModel(&c, &config.model_name, &config.pretrained, &config.lost_folder));
  static_cast<PlainOptions&>(config) = c;
  config.window = c.window;
  if (c.window == -1) config.window = config.pretrained ? config.pretrained->window : 0;
  config.given_ = c;
  config.steps = c.steps = ResolveSteps(c);
  if (c.tokenizer == "byte") config.tokenizer = Tokenizer::Kind::kByte;
  if (c.tokenizer == "char") config.tokenizer = Tokenizer::Kind::kChar;
  if (c.sample != -1) config.sample = c.sample;
  BURST_ASSIGN_OR_RETURN(config.lr, ResolveLr(c));
  BURST_RETURN_IF_ERROR(ResolveProfile(c, &config));
  BURST_RETURN_IF_ERROR(ResolvePrecision(c, launch, &config));
  BURST_RETURN_IF_ERROR(ResolveComm(c, launch, &config));
  BURST_RETURN_IF_ERROR(ResolveRanks(c, launch, &config));
  BURST_RETURN_IF_ERROR(ResolveMesh(c, &config));
  BURST_RETURN_IF_ERROR(CheckConflicts(config));
  ResolveUlysses(c, &config);
  BURST_RETURN_IF_ERROR(CheckNumbers(config));
  BURST_RETURN_IF_ERROR(ResolveExact(c, &config));
  BURST_RETURN_IF_ERROR(ResolveNodes(c, launch, &config));
  config.ResolveCheckpointFiles();
  return config;
}

}  // namespace burst
