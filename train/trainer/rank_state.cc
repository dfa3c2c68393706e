#include "train/trainer/rank_state.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "burst/attention/exact_attention.h"
#include "burst/attention/strategy.h"
#include "burst/base/status.h"
#include "burst/comm/mesh.h"
#include "burst/device/device.h"
#include "model/tensor_parallel.h"
#include "train/checkpoint/checkpoint.h"
#include "train/huggingface/pretrained.h"
#include "train/optimizer/gradient_reducer.h"
#include "train/optimizer/muon_matrices.h"
#include "train/optimizer/sharded_state.h"

namespace burst {
namespace {

// Returns how an offloaded optimizer's state goes to the GPU. Three pieces take at most 48 MiB
// each. A piece takes long compared with a launch, and is short compared with the whole state.
StreamedState StreamedStateOf(const ResolvedConfig& config, const ParameterList& parameters) {
  if (!OffloadsOptimizer(config.offload)) return {};
  constexpr int64_t kLeast = int64_t{64} << 10, kMost = int64_t{4} << 20, kPieces = 64;
  constexpr int64_t kGib = int64_t{1} << 30;
  const int64_t numel = parameters.shard_numel();
  const int64_t tensors = parameters.dtype() != parameters.master_dtype() ? 3 : 2;
  // More than all, because a resident piece is padded to a multiple of 64 elements.
  const int64_t most_resident = tensors * (numel + numel / 100);
  const int64_t resident = config.offload_resident * (kGib / SizeOf(parameters.master_dtype()));
  return {std::clamp(numel / kPieces / 64 * 64, kLeast, kMost), std::min(resident, most_resident)};
}

// Returns the ranges of this rank's shard whose weights decay.
std::vector<DecayRange> DecayRanges(const ParameterList& parameters) {
  std::vector<DecayRange> ranges;
  for (int i = 0; i < parameters.size(); ++i) {
    const ParameterPiece piece = parameters.PieceOf(i, parameters.sharding().rank);
    if (parameters[i].decay && piece.length > 0) {
      ranges.push_back({piece.at, piece.at + piece.length});
    }
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const DecayRange& a, const DecayRange& b) { return a.begin < b.begin; });
  return ranges;
}

// Computes what offloaded activations need: the most tokens of a pass on any rank. The memory is
// reserved before a rank waits for another's kernels, because page-locking must happen before that.
ExecutionPlan::Offload OffloadOf(const ResolvedConfig& config) {
  if (!OffloadsActivations(config.offload)) return {};
  const Mesh& mesh = config.mesh;
  const int ranks = mesh.sequence * (config.spreads_stream ? mesh.tensor : 1);
  // A rank has at most one token or chunk more than an equal share, rounded up.
  const int64_t step = config.exact ? std::min(config.exact_chunk, config.seqlen) : 1;
  const int64_t share = (config.seqlen / step + ranks - 1) / ranks + 1;
  const int64_t length = std::min(config.seqlen, share * step);
  int64_t attended = length;
  if (mesh.tensor > 1) attended = std::min(config.seqlen, share * ranks / mesh.sequence);
  const bool keeps_half = config.recompute == Recompute::kSequence;
  if (keeps_half && (mesh.sequence == 1 || config.layout == Layout::kZigzag ||
                     config.layout == Layout::kStriped)) {
    attended = attended / 2 + 1;
  }
  // Ulysses also keeps the result of the heads that it computed.
  const bool exchanges = config.strategy == Strategy::kUlysses ||
                         (config.strategy == Strategy::kBurstUlysses && config.ulysses > 1);
  const int64_t sequences = config.batch / mesh.data;
  return {true, sequences * length, sequences * attended,
          exchanges && mesh.sequence > 1 && !keeps_half ? 2 : 1};
}

ExecutionPlan PlanOf(const ResolvedConfig& config, int64_t step_tokens) {
  ExecutionPlan plan = {config};
  if (config.fp8) {
    plan.linear_precision = config.fp8_recipe;
    plan.rounded_layers = {config.bf16_layers, config.model.layers - config.bf16_layers};
  }
  if (config.exact) plan.exact = {config.exact_chunk, step_tokens};
  plan.offload = OffloadOf(config);
  return plan;
}

ExactAttentionOptions ExactOptions(const ResolvedConfig& config, int64_t step_tokens) {
  ExactAttentionOptions options;
  options.layout = config.layout;
  options.chunk = std::min(config.exact_chunk, config.seqlen);
  options.rows = config.exact_chunk / options.chunk;
  // The loss is a mean over at most `step_tokens` tokens. Elements of a part of dK or dV may be
  // 2^22 / chunks times those of a single token's loss, in steps of 2^-30.
  const int exponent = std::ilogb(static_cast<double>(step_tokens)) + 1;
  options.grid = ExactGrid::For(std::ldexp(1.0, -30 - exponent), config.seqlen / options.chunk);
  return options;
}

bool HasGroups(const Mesh& mesh) { return mesh.data > 1 || mesh.stages > 1 || mesh.tensor > 1; }

bool AllFinite(const Tensor& numbers) {
  const std::vector<double> values = numbers.ToVector<double>();
  return std::all_of(values.begin(), values.end(), [](double x) { return std::isfinite(x); });
}

}  // namespace

RankState::RankState(const TrainingSetup& setup, Communicator* comm)
    : setup(setup), config(setup.config), comm(comm), stage(comm) {}

absl::StatusOr<std::unique_ptr<RankState>> RankState::Create(const TrainingSetup& setup,
                                                             Communicator* comm) {
  std::unique_ptr<RankState> rank(new RankState(setup, comm));
  BURST_RETURN_IF_ERROR(rank->MakeGroups());
  BURST_RETURN_IF_ERROR(rank->MakeAttention());
  BURST_RETURN_IF_ERROR(rank->MakeModel());
  BURST_RETURN_IF_ERROR(rank->MakeOptimizer());
  return rank;
}

absl::Status RankState::MakeGroups() {
  const Mesh& mesh = config.mesh;
  if (mesh.sequence > 1 && HasGroups(mesh)) {
    BURST_ASSIGN_OR_RETURN(sequence, SplitSequence(mesh, *comm));
  }
  // Tensor parallelism has a communicator of its own, so that its exchanges do not wait for the
  // reductions of parameter gradients.
  if (mesh.tensor > 1) {
    BURST_ASSIGN_OR_RETURN(tensor, SplitTensor(mesh, *comm));
  }
  if (mesh.stages > 1) {
    BURST_ASSIGN_OR_RETURN(own_stage, comm->Split(mesh.stage(comm->rank()), comm->rank()));
    stage = own_stage.get();
    BURST_ASSIGN_OR_RETURN(pipeline, Pipeline::Create(mesh, static_cast<int>(config.pp_chunks),
                                                      config.model.tied_embeddings, comm));
  }
  return absl::OkStatus();
}

absl::Status RankState::MakeAttention() {
  const Mesh& mesh = config.mesh;
  Communicator* const group = HasGroups(mesh) ? sequence.get() : comm;
  if (config.exact) {
    BURST_ASSIGN_OR_RETURN(attention,
                           ExactAttention::Create(ExactOptions(config, step_tokens()), group));
    return absl::OkStatus();
  }
  BURST_ASSIGN_OR_RETURN(
      attention, CreateAttention(config.strategy, config.AttentionOptions(), config.ulysses, group,
                                 RankGroup{mesh.tensor, mesh.tensor_rank(comm->rank())}));
  return absl::OkStatus();
}

namespace {

// cuBLASLt has scales of parts of a tensor for Hopper alone.
absl::Status CheckFloat8(const ResolvedConfig& config) {
  const int capability = CudaComputeCapability(0);
  if (capability < 89) {
    return InvalidOption("precision",
                         "must be bf16 unless the GPU is of compute capability 8.9 or later (Ada, "
                         "Hopper); got fp8 and ",
                         CudaDeviceName(0), "; give bf16");
  }
  if (config.fp8_recipe != LinearPrecision::kFloat8 && capability != 90) {
    return InvalidOption("fp8_recipe", "must be tensorwise unless the GPU is a Hopper; got ",
                         NameOf(config.fp8_recipe, kFp8Recipes), " and ", CudaDeviceName(0),
                         "; give tensorwise");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status RankState::MakeModel() {
  if (config.fp8 && !setup.simulated) BURST_RETURN_IF_ERROR(CheckFloat8(config));
  const Mesh& mesh = config.mesh;
  TensorParallel parallel;
  if (tensor != nullptr) parallel = TensorParallel(tensor.get(), config.spreads_stream);
  std::optional<uint64_t> seed;
  if (!setup.resumed.has_value() && !config.pretrained.has_value() && !setup.simulated) {
    seed = static_cast<uint64_t>(config.seed);
  }
  StateSharding sharding;
  if (config.zero > 0) {
    sharding = {static_cast<int>(config.zero), config.state_ranks(), stage->rank() / mesh.tensor};
  }
  sharding.optimizer_on_host = OffloadsOptimizer(config.offload);
  const PipelinePart part{mesh.stage(comm->rank()), mesh.stages,
                          static_cast<int>(config.pp_chunks)};
  BURST_ASSIGN_OR_RETURN(model, Transformer::Create(config.model, config.dtype, seed, config.device,
                                                    parallel, sharding, part));
  model->SetExecution(PlanOf(config, step_tokens()));
  return absl::OkStatus();
}

absl::Status RankState::MakeExchange() {
  const auto keep = [&](auto made) {
    if (pipeline != nullptr) made->set_stages(pipeline->stages(), pipeline->tied());
    exchange = std::move(made);
  };
  if (config.zero == 0) {
    BURST_ASSIGN_OR_RETURN(auto reducer,
                           GradientReducer::Create(model->parameters(), stage, tensor.get()));
    keep(std::move(reducer));
    return absl::OkStatus();
  }
  BURST_ASSIGN_OR_RETURN(auto shards,
                         ShardedState::Create(model->parameters(), stage, tensor.get()));
  model->set_parameter_use(shards.get());
  keep(std::move(shards));
  return absl::OkStatus();
}

absl::Status RankState::MakeOptimizer() {
  BURST_RETURN_IF_ERROR(MakeExchange());
  const ParameterList& parameters = model->parameters();
  std::unique_ptr<Muon> muon;
  if (config.optimizer == OptimizerKind::kMuon) {
    muon = std::make_unique<Muon>(MuonMatrices(parameters, model->config()), config.muon_momentum,
                                  config.zero > 0 ? stage : tensor.get());
  }
  optimizer = std::make_unique<AdamW>(
      AdamWOptions{config.beta1, config.beta2, config.eps, config.weight_decay},
      parameters.shard_numel(), parameters.master_dtype(), DecayRanges(parameters), config.device,
      StreamedStateOf(config, parameters), std::move(muon));
  if (config.ema > 0) optimizer->KeepAverage(config.ema);
  return absl::OkStatus();
}

ParameterList::KeptBytes RankState::kept_bytes() const {
  ParameterList::KeptBytes kept = model->parameters().kept_bytes();
  int64_t* const optimizer_bytes =
      OffloadsOptimizer(config.offload) ? &kept.optimizer_on_host : &kept.optimizer;
  for (const AdamW::StateTensor& tensor : optimizer->state()) {
    *optimizer_bytes += tensor.flat.size_bytes();
  }
  kept.optimizer += optimizer->resident_bytes();
  return kept;
}

absl::Status RankState::Load() {
  if (setup.resumed.has_value()) {
    const std::string path = CheckpointPath(config.out);
    const absl::Status loaded =
        LoadCheckpoint(path, &model->parameters(), optimizer.get(), setup.resumed->identity);
    const absl::Status status = AgreeOrWait(loaded, comm);
    return status.ok() ? status : CannotResume(status, path);
  }
  if (!config.pretrained.has_value()) return absl::OkStatus();
  absl::Status loaded = LoadPretrained(*config.pretrained, &model->parameters());
  if (!loaded.ok()) {
    loaded = absl::Status(loaded.code(), absl::StrCat("--model: ", loaded.message()));
  }
  return AgreeOrWait(loaded, comm);
}

absl::Status RankState::FinishGradients(const Tensor& norm) {
  BURST_RETURN_IF_ERROR(exchange->Finish(norm));
  return comm->Wait(Channel::kCollective);
}

bool RankState::IsFinite() const {
  const ParameterList& parameters = model->parameters();
  std::vector<Tensor> state;
  for (const AdamW::StateTensor& tensor : optimizer->state()) state.push_back(tensor.flat);
  for (size_t unit = 0; unit < parameters.units().size(); ++unit) {
    state.push_back(parameters.MasterPiece(static_cast<int>(unit)));
  }
  const auto count = static_cast<int64_t>(state.size());
  optimizer->WriteBack();
  SynchronizeDevice(model->device());  // completes what the device writes to the host
  const Tensor norms = Tensor::Zeros({count}, DType::kFloat64, model->device());
  const Tensor on_host = Tensor::Zeros({count}, DType::kFloat64);
  for (int64_t i = 0; i < count; ++i) {
    const bool here = state[i].device() == DeviceType::kCpu;
    L2Norm(state[i], (here ? on_host : norms).Slice(0, i, 1));
  }
  return AllFinite(norms) && AllFinite(on_host);
}

absl::StatusOr<bool> RankState::OnAnyRank(bool condition) const {
  const Tensor sum = Tensor::FromVector<double>({condition ? 1.0 : 0.0}, {1});
  BURST_RETURN_IF_ERROR(comm->AllReduceSum(sum));
  return sum.data<double>()[0] > 0;
}

std::pair<int64_t, int64_t> LocalBatches::Share(int64_t count) const {
  const ResolvedConfig& config = rank_.config;
  const int64_t groups = config.mesh.data;
  const int64_t group = config.mesh.data_rank(rank_.comm->rank());
  // In an exact run a group has whole chunks, of which the last one may be shorter.
  const int64_t rows = config.exact ? std::max<int64_t>(1, config.exact_chunk / config.seqlen) : 1;
  const int64_t chunks = (count + rows - 1) / rows;
  const auto begin = [&](int64_t g) { return std::min(count, chunks * g / groups * rows); };
  return {begin(group), begin(group + 1)};
}

absl::StatusOr<SequenceBatch> LocalBatches::PartOf(const GlobalBatch& sequences) {
  const ResolvedConfig& config = rank_.config;
  if (schedules_.windowed == nullptr || config.packed) {
    BURST_ASSIGN_OR_RETURN(
        schedules_, MakeLayerSchedules(config.model, *rank_.attention, sequences.seqlen,
                                       config.AttentionMask().WithDocuments(sequences.documents)));
  }
  return SliceForRank(sequences, schedules_, config.device);
}

}  // namespace burst
