#include "train/plan/plan_options.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "burst/comm/launch/process_launch.h"
#include "train/config/conflicts.h"
#include "train/plan/gpu_models.h"
#include "train/plan/plan.h"

namespace burst {
namespace {

constexpr double kGiB = double{1 << 30};

}  // namespace

// Makes the table of all options of //train, except those that a plan does not use.
OptionTable PlanOptionTable(PlanOptions* c) {
  const OptionTable train = TrainOptions(&c->train);
  OptionTable t;
  t.Group("GPUs");
  t.Add("gpus", &c->gpus)
      .Basic()
      .Help("Plan for N GPUs of a kind, each a rank: H100 (by data sheets) or H200 (measured).");
  t.Add("gpus_per_node", &c->gpus_per_node)
      .Min(1)
      .Help("Connect N GPUs of a node by fast links, and others by the network.");
  t.Add("memory", &c->memory)
      .Above(0)
      .Or(-1)
      .Unit("GiB")
      .Help("Give a GPU N GiB for the program. -1: as its kind has.");
  t.Add("host_memory", &c->host_memory)
      .Above(0)
      .Or(-1)
      .Unit("GiB")
      .Help("Give each GPU N GiB of the memory of the host. -1: as the step needs.");
  t.Add("links", &c->links)
      .Above(0)
      .Or(-1)
      .Unit("GB/s")
      .Help(
          "Send N GB/s from a GPU to others of its node, in each direction. -1: as its kind has.");
  t.Add("network", &c->network)
      .Above(0)
      .Or(-1)
      .Unit("GB/s")
      .Help("Send N GB/s from a GPU to other nodes, in each direction. -1: 45.");
  t.Group("question");
  t.Add("fit", &c->fit)
      .Basic()
      .Help(
          "Choose the mesh, --strategy and the options of memory that are not given, so that the "
          "step is the fastest one that fits.");
  t.AddList("seqlens", &c->seqlens, ParseCount)
      .Basic()
      .Help("Print a table over these lengths, in place of --seqlen.");
  t.AddList("counts", &c->counts, ParseCount)
      .Basic()
      .Help("Print a table over these numbers of GPUs, in place of the one in --gpus.");
  t.Add("plot", &c->plot)
      .Help("Draw the table as an SVG: seconds of a step over its length, by number of GPUs.");
  t.Group("step");
  t.AddShared(train, "model").Basic();
  for (const char* name : {"seqlen", "batch", "accumulate", "precision", "recompute"}) {
    t.AddShared(train, name).Basic();
  }
  t.AddSharedGroup(train, "model");
  constexpr char kUnread[] = "Without effect if the model says its vocabulary, unless --packed.";
  t.AddShared(train, "data", kUnread);
  t.AddShared(train, "tokenizer", kUnread);
  for (const char* name : {"packed", "optimizer", "ema", "fp8_recipe", "bf16_layers", "dp", "sp",
                           "tp", "pp", "pp_chunks"}) {
    t.AddShared(train, name);
  }
  t.AddSharedGroup(train, "memory");
  t.AddShared(train, "checkpoint_files", "A plan counts the copies in the memory of the host.");
  t.AddSharedGroup(train, "attention over ranks");
  AddConflictsToHelp(&t);
  return t;
}

// Reads --gpus, such as "4xH200".
absl::StatusOr<GpuModel> GpuOf(const PlanOptions& c, int64_t* count) {
  const std::vector<std::string> parts = absl::StrSplit(c.gpus, absl::MaxSplits('x', 1));
  if (parts.size() != 2 || !absl::SimpleAtoi(parts[0], count) || *count < 1) {
    return InvalidOption("gpus", "must be a number and a kind; got ", c.gpus,
                         "; give, for example, 4xH200");
  }
  absl::StatusOr<GpuModel> gpu = FindGpuModel(parts[1]);
  if (!gpu.ok()) return InvalidOption("gpus", gpu.status().message());
  for (const auto& [value, unit, field] :
       {std::tuple(c.memory, kGiB, &gpu->memory),
        std::tuple(c.host_memory, kGiB, &gpu->host_memory), std::tuple(c.links, 1e9, &gpu->links),
        std::tuple(c.network, 1e9, &gpu->network)}) {
    if (value != -1) *field = value * unit;
  }
  return gpu;
}

absl::StatusOr<ResolvedConfig> ConfigOf(const PlanOptions& c, int64_t gpus, int64_t seqlen) {
  if (gpus > kMostPlannedRanks) {
    return InvalidOption("gpus", "must be at most ", kMostPlannedRanks, "; got ", gpus,
                         "; give fewer");
  }
  TrainConfig train = c.train;
  train.device = DeviceChoice::kCuda;
  train.eval_every = 0;
  train.ranks = gpus;
  train.seqlen = seqlen;
  Launch launch;
  launch.gpus = static_cast<int>(gpus);
  if (gpus > c.gpus_per_node) {  // a launcher starts a process on each
    launch.processes = static_cast<int>(gpus);
    if (gpus % c.gpus_per_node == 0) launch.ranks_per_node = static_cast<int>(c.gpus_per_node);
  }
  return ResolveConfig(train, launch);
}

absl::StatusOr<std::vector<MeshChoice>> MeshesOf(const PlanOptions& c, int64_t gpus, int64_t seqlen,
                                                 bool mesh, bool strategy) {
  std::vector<MeshChoice> choices;
  BURST_ASSIGN_OR_RETURN(ResolvedConfig given, ConfigOf(c, gpus, seqlen));
  const Mesh given_mesh = given.mesh;
  const int64_t given_chunks = given.pp_chunks, layers = given.model.layers;
  const Strategy given_strategy = given.strategy;
  choices.push_back({std::move(given), ""});
  const auto consider = [&](int64_t dp, int64_t pp, int64_t chunks, int64_t tp, Strategy kind) {
    const int64_t sp = gpus / (dp * pp * tp);
    PlanOptions changed = c;
    changed.train.dp = dp;
    changed.train.sp = sp;
    changed.train.tp = tp;
    changed.train.pp = pp;
    changed.train.pp_chunks = chunks;
    changed.train.strategy = kind;
    absl::StatusOr<ResolvedConfig> config = ConfigOf(changed, gpus, seqlen);
    if (!config.ok()) return;
    const Mesh& m = config->mesh;
    const auto is_it = [&](const MeshChoice& choice) {
      const Mesh& other = choice.config.mesh;
      return other.data == m.data && other.stages == m.stages && other.tensor == m.tensor &&
             choice.config.pp_chunks == chunks &&
             (choice.config.strategy == kind || m.sequence == 1);
    };
    if (std::any_of(choices.begin(), choices.end(), is_it)) return;
    std::string options;
    const auto add = [&](bool adds, const std::string& option) {
      if (adds) absl::StrAppend(&options, options.empty() ? "" : " ", option);
    };
    const bool other_stages = m.stages != given_mesh.stages;
    const bool other_tensor = m.tensor != given_mesh.tensor;
    add(m.data != given_mesh.data || other_stages || other_tensor,
        absl::StrCat("--dp=", dp, " --sp=", sp));
    add(other_stages, absl::StrCat("--pp=", pp));
    add(chunks != given_chunks, absl::StrCat("--pp_chunks=", chunks));
    add(tp > 1 && other_tensor, absl::StrCat("--tp=", tp));
    add(kind != given_strategy, absl::StrCat("--strategy=", Name(kind)));
    choices.push_back({*std::move(config), std::move(options)});
  };
  // Tensor parallelism sends too much for a network between nodes.
  const int64_t most_stages = std::max<int64_t>(given_mesh.stages, mesh ? c.train.accumulate : 1);
  const int64_t most_tensor =
      std::max<int64_t>(given_mesh.tensor, mesh ? std::min(gpus, c.gpus_per_node) : 1);
  std::vector<Strategy> kinds = {given_strategy};
  if (strategy) {
    kinds.insert(kinds.end(), {Strategy::kBurst, Strategy::kBurstUlysses, Strategy::kUlysses});
  }
  const auto consider_all = [&](int64_t dp, int64_t pp, int64_t chunks, int64_t tp) {
    for (const Strategy kind : kinds) consider(dp, pp, chunks, tp, kind);
  };
  if (!mesh) {
    consider_all(given_mesh.data, given_mesh.stages, given_chunks, given_mesh.tensor);
    return choices;
  }
  for (int64_t pp = 1; pp <= most_stages; ++pp) {
    for (int64_t dp = 1; dp * pp <= gpus; ++dp) {
      for (int64_t tp = 1; tp <= most_tensor && dp * pp * tp <= gpus; ++tp) {
        if (gpus % (dp * pp * tp) != 0) continue;
        for (int64_t chunks = 1; chunks == 1 || (pp > 1 && chunks * pp <= layers); chunks *= 2) {
          consider_all(dp, pp, chunks, tp);
        }
      }
    }
  }
  return choices;
}

}  // namespace burst
