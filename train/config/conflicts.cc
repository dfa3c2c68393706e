#include "train/config/conflicts.h"

namespace burst {
namespace {

using Config = ResolvedConfig;
using Side = Trait<ResolvedConfig>;

// A side has options, its text, what the first option must be instead, an example, and when it
// holds.
constexpr Side kHeadChunk = {"head_chunk", "--head_chunk", "0", "--head_chunk=1",
                             [](const Config& c) { return c.head_chunk > 0; }};
constexpr Side kFfnChunk = {"ffn_chunk", "--ffn_chunk", "0", "--ffn_chunk=64",
                            [](const Config& c) { return c.ffn_chunk > 0; }};
constexpr Side kRecomputeSequence = {
    "recompute", "--recompute=sequence", "none, selective or full", "--recompute=sequence",
    [](const Config& c) { return c.recompute == Recompute::kSequence; }};
constexpr Side kNoRecompute = {"recompute", "without --recompute", "selective, sequence or full",
                               "", [](const Config& c) { return c.recompute == Recompute::kNone; }};
constexpr Side kSegments = {"recompute_segment", "--recompute_segment above 1", "1",
                            "--recompute_segment=2",
                            [](const Config& c) { return c.recompute_segment > 1; }};
constexpr Side kOffload = {"offload", "--offload", "none", "--offload=optimizer",
                           [](const Config& c) { return c.offload != Offload::kNone; }};
constexpr Side kOffloadOptimizer = {"offload", "--offload=optimizer or all", "none or activations",
                                    "--offload=optimizer --device=cuda",
                                    [](const Config& c) { return OffloadsOptimizer(c.offload); }};
constexpr Side kOffloadActivations = {
    "offload", "--offload=activations or all", "none or optimizer",
    "--offload=activations --device=cuda",
    [](const Config& c) { return OffloadsActivations(c.offload); }};

constexpr Side kZero = {"zero", "--zero", "0", "--zero=1 --ranks=2",
                        [](const Config& c) { return c.zero > 0; }};
constexpr Side kZeroGradients = {"zero", "--zero=2 or 3", "0 or 1", "--zero=2 --dp=2",
                                 [](const Config& c) { return c.zero > 1; }};
constexpr Side kOneRank = {"ranks", "on one rank", "more", "--ranks=1",
                           [](const Config& c) { return c.ranks == 1; }};
constexpr Side kNoCopies = {"tp pp", "--tp, --pp without --dp", "1", "--tp=2 --dp=1",
                            [](const Config& c) { return c.state_ranks() == 1; }};

constexpr Side kTensorParallel = {"tp", "--tp", "1", "--tp=2",
                                  [](const Config& c) { return c.mesh.tensor > 1; }};
constexpr Side kSequenceParallel = {"sp", "--sp above 1", "1", "--sp=2",
                                    [](const Config& c) { return c.mesh.sequence > 1; }};
constexpr Side kPipeline = {"pp", "--pp", "1", "--pp=2", [](const Config& c) { return c.pp > 1; }};
constexpr Side kNoPipeline = {"pp", "without --pp", "above 1", "",
                              [](const Config& c) { return c.pp == 1; }};
constexpr Side kPipelineChunks = {"pp_chunks", "--pp_chunks above 1", "1", "--pp_chunks=2",
                                  [](const Config& c) { return c.pp_chunks > 1; }};
// The first and the last stage share a part of a ParameterUnit, which ZeRO would divide
// differently.
constexpr Side kTiedPipeline = {
    "pp", "--pp for a GPT-2 with tied embeddings", "1", "--pp=2 --model=d12", [](const Config& c) {
      return c.pp > 1 && c.model.family == Family::kGpt2 && c.model.tied_embeddings;
    }};

constexpr Side kSingle = {"strategy", "--strategy=single", "another one", "--strategy=single",
                          [](const Config& c) { return c.strategy == Strategy::kSingle; }};
constexpr Side kUlysses = {"strategy", "--strategy=ulysses or burst+ulysses", "burst or ring",
                           "--strategy=ulysses", [](const Config& c) {
                             return c.strategy == Strategy::kUlysses ||
                                    c.strategy == Strategy::kBurstUlysses;
                           }};
constexpr Side kNotBurstUlysses = {
    "strategy", "without --strategy=burst+ulysses", "burst+ulysses", "",
    [](const Config& c) { return c.strategy != Strategy::kBurstUlysses; }};
constexpr Side kInexactStrategy = {"strategy", "--strategy=ring, ulysses or burst+ulysses",
                                   "burst or single", "--strategy=ring", [](const Config& c) {
                                     return c.strategy != Strategy::kBurst &&
                                            c.strategy != Strategy::kSingle;
                                   }};
constexpr Side kOneDirection = {"strategy", "--strategy=single, ring or ulysses",
                                "burst or burst+ulysses", "--strategy=ulysses",
                                [](const Config& c) {
                                  const bool same = c.strategy == Strategy::kRing &&
                                                    c.ring_backward == BackwardDirection::kRing;
                                  return !HasDirections(c.strategy) && !same;
                                }};
constexpr Side kNoRing = {"strategy", "--strategy=single or ulysses",
                          "burst, ring or burst+ulysses", "--strategy=ulysses",
                          [](const Config& c) { return !HasRing(c.strategy); }};
constexpr Side kUlyssesRanks = {"ulysses", "--ulysses", "-1", "--ulysses=1",
                                [](const Config& c) { return c.given().ulysses != -1; }};
constexpr Side kRingBackward = {
    "ring_backward", "--ring_backward", "auto", "--ring_backward=burst",
    [](const Config& c) { return c.ring_backward != BackwardDirection::kAuto; }};
constexpr Side kBf16RingGradients = {
    "ring_grad_dtype", "--ring_grad_dtype=bf16", "fp32", "--ring_grad_dtype=bf16",
    [](const Config& c) { return c.ring_grad_dtype != RingGradDType::kFp32; }};
constexpr Side kRanksPerNode = {"ranks_per_node", "--ranks_per_node", "-1 or 0",
                                "--ranks_per_node=1",
                                [](const Config& c) { return c.given().ranks_per_node > 0; }};

constexpr Side kExact = {"exact", "--exact", "false", "--exact",
                         [](const Config& c) { return c.exact; }};
constexpr Side kNotExact = {"exact", "without --exact", "true", "",
                            [](const Config& c) { return !c.exact; }};
constexpr Side kExactChunk = {"exact_chunk", "--exact_chunk", "0", "--exact_chunk=16",
                              [](const Config& c) { return c.given().exact_chunk != 0; }};
constexpr Side kNotDeterministic = {"deterministic", "--nodeterministic", "true",
                                    "--nodeterministic",
                                    [](const Config& c) { return !c.deterministic; }};

constexpr Side kFp8 = {"precision", "--precision=fp8", "bf16, fp32 or tf32", "--precision=fp8",
                       [](const Config& c) { return c.fp8; }};
constexpr Side kNotFp8 = {"precision", "without --precision=fp8", "fp8", "",
                          [](const Config& c) { return !c.fp8; }};
constexpr Side kFp8Recipe = {
    "fp8_recipe", "--fp8_recipe=rowwise or blocks", "tensorwise", "--fp8_recipe=blocks",
    [](const Config& c) { return c.fp8_recipe != LinearPrecision::kFloat8; }};
constexpr Side kBf16Layers = {"bf16_layers", "--bf16_layers", "0", "--bf16_layers=1",
                              [](const Config& c) { return c.bf16_layers > 0; }};
constexpr Side kNotBf16 = {"precision", "--precision=fp32 or tf32", "bf16", "--precision=fp32",
                           [](const Config& c) { return c.dtype != DType::kBFloat16; }};
constexpr Side kGpuPrecision = {"precision", "--precision=tf32 or fp8", "auto, fp32 or bf16",
                                "--precision=tf32", [](const Config& c) {
                                  return c.given().precision == Precision::kTf32 ||
                                         c.given().precision == Precision::kFp8;
                                }};
constexpr Side kNotMuon = {"optimizer", "without --optimizer=muon", "muon", "",
                           [](const Config& c) { return c.optimizer != OptimizerKind::kMuon; }};
constexpr Side kMuonMomentum = {
    "muon_momentum", "--muon_momentum", "0.95", "--muon_momentum=0.9",
    [](const Config& c) { return c.muon_momentum != TrainConfig().muon_momentum; }};
constexpr Side kEma = {"ema", "--ema", "0", "--ema=0.99",
                       [](const Config& c) { return c.ema > 0; }};
constexpr Side kSoftcap = {"model.attention_softcap", "--model.attention_softcap", "0",
                           "--model.attention_softcap=30",
                           [](const Config& c) { return c.model.attention_softcap != 0; }};
constexpr Side kAllHeadsNorm = {"model", "with a model of qk_norm=all", "another one",
                                R"(--model={"layers":2,"width":32,"heads":2,"qk_norm":"all"})",
                                [](const Config& c) { return c.model.qk_norm == QkNorm::kAll; }};
constexpr Side kAttentionDropout = {"model.attention_dropout", "--model.attention_dropout", "0",
                                    "--model.attention_dropout=0.5",
                                    [](const Config& c) { return c.model.attention_dropout != 0; }};

constexpr Side kCpu = {"device", "on the CPU", "cuda", "--device=cpu",
                       [](const Config& c) { return c.device == DeviceType::kCpu; }};
constexpr Side kGpu = {"device", "on GPUs", "cpu", "--device=cuda",
                       [](const Config& c) { return c.device == DeviceType::kCuda; }};
constexpr Side kCpuComm = {"comm", "--comm=tcp or mpi", "auto", "--comm=mpi", [](const Config& c) {
                             return c.comm == CommKind::kTcp || c.comm == CommKind::kMpi;
                           }};
constexpr Side kNccl = {"comm", "--comm=nccl", "auto, threads, tcp or mpi", "--comm=nccl",
                        [](const Config& c) { return c.comm == CommKind::kNccl; }};
constexpr Side kProfile = {"profile_steps", "--profile_steps", "empty", "--profile_steps=3",
                           [](const Config& c) { return !c.given().profile_steps.empty(); }};
constexpr Side kOneFile = {
    "checkpoint_files", "--checkpoint_files=one", "auto or ranks", "--checkpoint_files=one",
    [](const Config& c) { return c.given().checkpoint_files == CheckpointFiles::kOne; }};
constexpr Side kFilePerRank = {"checkpoint_files", "--checkpoint_files=ranks", "auto or one",
                               "--checkpoint_files=ranks --ranks=2", [](const Config& c) {
                                 return c.given().checkpoint_files == CheckpointFiles::kRanks;
                               }};
constexpr Side kNoCheckpoints = {
    "checkpoint_files", "--checkpoint_files=none", "auto, one or ranks", "--checkpoint_files=none",
    [](const Config& c) { return c.given().checkpoint_files == CheckpointFiles::kNone; }};
constexpr Side kCheckpointEvery = {"checkpoint_every", "--checkpoint_every above 0", "0",
                                   "--checkpoint_every=5", [](const Config& c) {
                                     return c.checkpoint_every > 0 &&
                                            c.checkpoint_every != TrainConfig().checkpoint_every;
                                   }};
constexpr Side kKeep = {"keep", "--keep", "3", "--keep=5",
                        [](const Config& c) { return c.keep != TrainConfig().keep; }};
constexpr Side kSample = {"sample", "--sample above 0", "0", "--sample=9",
                          [](const Config& c) { return c.given().sample > 0; }};
constexpr Side kSteps = {"steps", "--steps", "-1", "--steps=10",
                         [](const Config& c) { return c.given().steps != -1; }};
constexpr Side kTokens = {"tokens", "--tokens", "0", "--tokens=100000",
                          [](const Config& c) { return c.tokens > 0; }};
constexpr Side kEpochs = {"epochs", "--epochs", "0", "--epochs=2",
                          [](const Config& c) { return c.epochs > 0; }};
constexpr Side kMinLr = {"min_lr", "--min_lr", "-1", "--min_lr=1e-5", [](const Config& c) {
                           return c.given().min_lr != -1 && c.given().min_lr != c.given().lr;
                         }};
constexpr Side kConstantLr = {"schedule", "--schedule=constant", "another one",
                              "--schedule=constant",
                              [](const Config& c) { return c.lr.shape == LrShape::kConstant; }};
constexpr Side kResume = {"resume", "--resume", "false", "--resume=auto", [](const Config& c) {
                            return c.resume || c.given().resume_mode != Resume::kNo;
                          }};
constexpr Side kNoOut = {"out", "without --out", "a folder", "",
                         [](const Config& c) { return c.out.empty(); }};

constexpr char kLeaveOut[] = "leave it out";

constexpr TrainConflict kConflicts[] = {
    // Conflicts of a strategy and a mesh.
    {kSingle, kSequenceParallel, "one rank keeps the whole sequence",
     "give --sp=1 or another strategy"},
    {kTensorParallel, kUlysses, "both divide the heads", "give --strategy=burst or ring"},
    {kUlyssesRanks, kNotBurstUlysses, "it is the size of that strategy's groups", kLeaveOut},
    {kRingBackward, kOneDirection, "the backward of that strategy has one direction", kLeaveOut},
    {kBf16RingGradients, kNoRing, "it is the type of gradients in rings", kLeaveOut},
    {kBf16RingGradients, kNotBf16, "activations must be bf16, too", "give --precision=bf16"},
    {kRanksPerNode, kNoRing, "it divides rings", kLeaveOut},
    {kPipelineChunks, kNoPipeline, "it divides the layers of a stage", "give --pp"},
    {kZero, kOneRank, "one rank has nothing to divide", kLeaveOut},
    {kZero, kNoCopies, "no two ranks have the same parameters",
     "give a larger --dp, or leave it out"},
    {kZeroGradients, kTiedPipeline,
     "the first and the last stage would divide the parameters that they share differently",
     "give 0 or 1"},
    {kOneFile, kPipeline, "every stage writes its own", "give auto"},
    {kFilePerRank, kOneRank, "one rank has nothing to share", "give auto"},

    // Conflicts of options that save memory.
    {kFfnChunk, kTensorParallel, "the ranks exchange all tokens around a feed-forward", kLeaveOut},
    {kHeadChunk, kTensorParallel, "the heads are divided between the ranks already", kLeaveOut},
    {kHeadChunk, kAllHeadsNorm, "a group has some of the heads", kLeaveOut},
    {kRecomputeSequence, kHeadChunk, "attention in groups of heads stores no part of its result",
     "give selective or full, or leave --head_chunk out"},
    {kSegments, kNoRecompute, "all layers of a segment are recomputed", "give --recompute"},
    {kOffload, kCpu, "the memory of the CPU is the memory of the host", "give --device=cuda"},
    {kEma, kOffloadOptimizer, "the average stays on the GPU", kLeaveOut},
    {kOffloadActivations, kPipeline, "micro-batches overlap", "give optimizer, or leave it out"},
    {kOffloadActivations, kNoRecompute, "it moves what recomputed layers keep",
     "give --recompute, or optimizer"},

    // Conflicts of results that do not depend on the number of ranks.
    {kInexactStrategy, kExact, "ranks gather keys and values", kLeaveOut},
    {kTensorParallel, kExact, "its sums depend on the number of ranks", kLeaveOut},
    {kExact, kPipeline, "chunks of tokens pass all layers of a rank"},
    {kZeroGradients, kExact, "every rank needs all gradients", "give 0 or 1"},
    {kHeadChunk, kExact, "chunks of tokens take all heads", kLeaveOut},
    {kRecomputeSequence, kExact, "half a sequence is not a chunk", "give selective or full"},
    {kNotDeterministic, kExact, "sums in any order are not exact", kLeaveOut},
    {kRingBackward, kExact, "exact runs have no ring", kLeaveOut},
    {kBf16RingGradients, kExact, "exact runs have no ring", kLeaveOut},
    {kRanksPerNode, kExact, "exact runs have no ring", kLeaveOut},
    {kFp8, kExact, "a scale depends on the tokens of a rank", "give bf16"},
    {kSoftcap, kExact, "exact kernels do not change scores", "give 0"},
    {kAttentionDropout, kExact, "exact kernels do not change scores", "give 0"},
    {kExactChunk, kNotExact, "it is the size of the chunks of an exact run", "give --exact"},

    // Conflicts of number formats.
    {kGpuPrecision, kCpu, "the CPU multiplies in fp32", "give --device=cuda"},
    {kFp8Recipe, kNotFp8, "it chooses the scales of fp8", "give --precision=fp8"},
    {kBf16Layers, kNotFp8, "all layers have one precision", "give --precision=fp8"},

    // Conflicts of the schedule and the launch.
    {kTokens, kSteps, "both say how long the run is", kLeaveOut},
    {kEpochs, kSteps, "both say how long the run is", kLeaveOut},
    {kEpochs, kTokens, "both say how long the run is", kLeaveOut},
    {kMinLr, kConstantLr, "the rate stays what it is", kLeaveOut},
    {kCpuComm, kGpu, "it does not reach into GPUs", "leave it out with --device=cuda"},
    {kMuonMomentum, kNotMuon, "AdamW has --beta1", kLeaveOut},
    {kCheckpointEvery, kNoCheckpoints, "nothing is saved", kLeaveOut},
    {kKeep, kNoCheckpoints, "nothing is saved", kLeaveOut},
    {kSample, kNoCheckpoints, "the last checkpoint writes the sample", kLeaveOut},
    {kNccl, kCpu, "it connects GPUs", "give --device=cuda, or threads, tcp or mpi"},
    {kProfile, kCpu, "a CPU is profiled by perf without help", "give --device=cuda"},
    {kResume, kNoOut, "that names the run to continue", "give --out"},
};

}  // namespace

absl::Status CheckConflicts(const ResolvedConfig& config) {
  if (Allowed(config)) return absl::OkStatus();
  TrainConfig given;
  const OptionTable table = TrainOptions(&given);
  given = config.given();  // set after the table has seen the defaults
  return CheckConflicts(kConflicts, config, table);
}

bool Allowed(const ResolvedConfig& config) { return Allowed(kConflicts, config); }

void AddConflictsToHelp(OptionTable* table) { AddConflictsToHelp(kConflicts, table); }

std::string ConflictPage() { return ConflictPage(kConflicts); }

absl::Span<const TrainConflict> TrainConflicts() { return kConflicts; }

}  // namespace burst
