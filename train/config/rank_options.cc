// The options that spread a run over devices and ranks.
#include <string>
#include <utility>

#include "burst/base/status.h"
#include "burst/kernels/limits.h"
#include "model/tensor_parallel.h"
#include "train/config/option_group.h"

namespace burst {
namespace {

void AddDevices(TrainConfig* c, OptionTable* t) {
  t->Add("device", &c->device, kDeviceChoices)
      .Basic()
      .MayChange()
      .Help("Train on cpu or cuda. auto: cuda where a GPU is found.");
  t->Add("precision", &c->precision, kPrecisions)
      .Basic()
      .MayChange()
      .Help(
          "Compute in fp32, tf32, bf16 (fp32 master weights and sums), or fp8 (bf16 with 8-bit "
          "linear products). auto: bf16 on GPUs, fp32 on CPUs.");
  t->Add("fp8_recipe", &c->fp8_recipe, kFp8Recipes)
      .Help(
          "Scale fp8 by tensors (tensorwise), by rows (rowwise), or by 128 numbers of a row and "
          "128 "
          "x 128 weights (blocks).");
  t->Add("bf16_layers", &c->bf16_layers)
      .Min(0)
      .Unit("layers")
      .Help("With --precision=fp8, keep the first N and the last N layers in bf16.");
}

void AddMesh(TrainConfig* c, OptionTable* t) {
  t->Add("ranks", &c->ranks)
      .Basic()
      .Min(1)
      .Max(kMaxRanks)
      .Or(-1)
      .MayChange()
      .Help(
          "Run N threads or GPUs as ranks. -1: dp times pp times sp times tp, a launcher's "
          "processes, else 2 threads or 1 GPU.");
  const struct {
    const char* name;
    int64_t* field;
    const char* help;
  } meshes[] = {
      {"dp", &c->dp, "Divide the batch over N groups of ranks. -1: ranks / (pp sp tp)."},
      {"sp", &c->sp, "Divide sequences over a ring of N ranks. -1: ranks / (dp pp tp)."},
      {"tp", &c->tp,
       "Divide weights, heads and hidden channels over N ranks (tensor parallelism). -1: 1."}};
  for (const auto& mesh : meshes) {
    t->Add(mesh.name, mesh.field)
        .Min(1)
        .Max(kMaxRanks)
        .Or(-1)
        .Unit("ranks")
        .MayChange()
        .Help(mesh.help);
  }
  t->Add("pp", &c->pp)
      .Min(1)
      .Max(kMaxRanks)
      .Unit("stages")
      .MayChange()
      .Help(
          "Divide the layers over N pipeline stages, which are idle (pp - 1) / (accumulate "
          "pp_chunks) of the time.");
  t->Add("pp_chunks", &c->pp_chunks)
      .Min(1)
      .MayChange()
      .Help(
          "Give each stage of --pp N runs of layers, which are idle for less time. 1: the "
          "schedule 1F1B.");
}

void AddRows(TrainConfig* c, OptionTable* t) {
  t->Group("devices and ranks");
  AddDevices(c, t);
  AddMesh(c, t);
  t->Add("plan", &c->plan)
      .MayChange()
      .Help(
          "Refuse a run that does not fit the memory before its first step, and say what to "
          "change (//train:plan).");
  t->Add("comm", &c->comm, kCommChoices)
      .MayChange()
      .Help(
          "Connect threads, or processes of a launcher by tcp, mpi (CPUs) or nccl (GPUs). auto: "
          "threads, under a launcher nccl or tcp.");
  t->Add("threads", &c->threads)
      .Min(1)
      .Max(1024)
      .Or(-1)
      .MayChange()
      .Of(Scope::kProcess)
      .Help("Give each rank N threads of the CPU. -1: cores / ranks.");
  t->Add("patience", &c->patience)
      .Min(0)
      .Unit("seconds")
      .MayChange()
      .Of(Scope::kProcess)
      .Help(
          "End the run after N seconds without progress on any rank, and say where every rank is. "
          "0: never.");
}

constexpr Side kNoPipeline = {"pp", "without --pp", "above 1", "",
                              [](const Config& c) { return c.pp == 1; }};
constexpr Side kPipelineChunks = {"pp_chunks", "--pp_chunks above 1", "1", "--pp_chunks=2",
                                  [](const Config& c) { return c.pp_chunks > 1; }};
constexpr Side kNotFp8 = {"precision", "without --precision=fp8", "fp8", "",
                          [](const Config& c) { return !c.fp8; }};
constexpr Side kFp8Recipe = {
    "fp8_recipe", "--fp8_recipe=rowwise or blocks", "tensorwise", "--fp8_recipe=blocks",
    [](const Config& c) { return c.fp8_recipe != LinearPrecision::kFloat8; }};
constexpr Side kBf16Layers = {"bf16_layers", "--bf16_layers", "0", "--bf16_layers=1",
                              [](const Config& c) { return c.bf16_layers > 0; }};
constexpr Side kGpuPrecision = {"precision", "--precision=tf32 or fp8", "auto, fp32 or bf16",
                                "--precision=tf32", [](const Config& c) {
                                  return c.given().precision == Precision::kTf32 ||
                                         c.given().precision == Precision::kFp8;
                                }};
constexpr Side kGpu = {"device", "on GPUs", "cpu", "--device=cuda",
                       [](const Config& c) { return c.device == DeviceType::kCuda; }};
constexpr Side kCpuComm = {"comm", "--comm=tcp or mpi", "auto", "--comm=mpi", [](const Config& c) {
                             return c.comm == CommKind::kTcp || c.comm == CommKind::kMpi;
                           }};
constexpr Side kNccl = {"comm", "--comm=nccl", "auto, threads, tcp or mpi", "--comm=nccl",
                        [](const Config& c) { return c.comm == CommKind::kNccl; }};

constexpr TrainConflict kConflicts[] = {
    {kPipelineChunks, kNoPipeline, "it divides the layers of a stage", "give --pp"},
    {kGpuPrecision, kCpu, "the CPU multiplies in fp32", "give --device=cuda"},
    {kFp8Recipe, kNotFp8, "it chooses the scales of fp8", "give --precision=fp8"},
    {kBf16Layers, kNotFp8, "all layers have one precision", "give --precision=fp8"},
    {kCpuComm, kGpu, "it does not reach into GPUs", "leave it out with --device=cuda"},
    {kNccl, kCpu, "it connects GPUs", "give --device=cuda, or threads, tcp or mpi"},
};

absl::Status CheckKernels(const ResolvedConfig& config) {
  constexpr int64_t kFp8Channels = 16;
  const ModelConfig model = config.model.WithDefaults();
  if (config.device == DeviceType::kCuda && !k16BitHeadDims.Has(model.head_dim)) {
    return InvalidOption("model", "head_dim (width / heads) must be a multiple of ",
                         k16BitHeadDims.multiple, " and at most ", k16BitHeadDims.most,
                         " with --device=cuda; got ", model.head_dim,
                         "; give another number of heads");
  }
  if (!config.fp8) return absl::OkStatus();
  if (2 * config.bf16_layers >= model.layers) {
    return InvalidOption("bf16_layers", "must be less than half of the ", model.layers,
                         " layers; got ", config.bf16_layers, "; give less, or --precision=bf16");
  }
  const int64_t ranks = config.mesh.tensor;
  for (const auto& [name, channels] :
       {std::pair("width", model.width), std::pair("ffn", model.ffn / ranks),
        std::pair("heads times head_dim", model.attention_channels() / ranks)}) {
    if (channels % kFp8Channels == 0) continue;
    return InvalidOption(
        "precision", "must be bf16 unless all channels of a rank are multiples of ", kFp8Channels,
        "; got fp8, and ", name, " of a rank is ", channels, "; give bf16");
  }
  return absl::OkStatus();
}

absl::Status CheckStages(const ResolvedConfig& config) {
  const int64_t layers = config.model.WithDefaults().layers;
  if (config.pp > layers / config.pp_chunks) {
    return InvalidOption("pp", "must be at most the layers of the model, ", layers,
                         ", over --pp_chunks=", config.pp_chunks, "; got ", config.pp,
                         "; give fewer stages");
  }
  if (config.pp_chunks == 1 || config.accumulate % config.pp == 0) return absl::OkStatus();
  return InvalidOption("pp_chunks", "must be 1 unless --pp=", config.pp,
                       " divides --accumulate=", config.accumulate, "; got ", config.pp_chunks,
                       "; give a multiple of --pp to --accumulate");
}

absl::Status CheckTensorParallel(const ResolvedConfig& config) {
  if (config.mesh.tensor == 1) return absl::OkStatus();
  return TensorParallel::Check("--tp", config.model.WithDefaults(), config.mesh.tensor);
}

absl::Status Check(const ResolvedConfig& config) {
  BURST_RETURN_IF_ERROR(CheckKernels(config));
  BURST_RETURN_IF_ERROR(CheckStages(config));
  return CheckTensorParallel(config);
}

}  // namespace

const OptionGroup kRankOptions = {AddRows, kConflicts, Check};

}  // namespace burst
