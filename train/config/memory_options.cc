// The options that save memory: their rows, conflicts, checks, and the planner's choices.
#include "train/config/memory_options.h"

#include <algorithm>
#include <vector>

#include "burst/attention/ulysses_attention.h"
#include "burst/base/status.h"
#include "train/config/option_group.h"

namespace burst {
namespace {

void AddRows(TrainConfig* c, OptionTable* t) {
  t->Group("memory");
  t->Add("recompute", &c->recompute, ParseRecompute)
      .Basic()
      .MayChange()
      .Says("; $0 recomputation in the backward pass")
      .Help(
          "Recompute layers in the backward pass: full, selective (all but attention), or "
          "sequence (attention of the first half, too). none: store everything.");
  t->Removed("recompute_every", "give --recompute_segment, or --recompute=selective");
  t->Removed("attention_fp8", "give --precision=fp8");
  t->Add("recompute_segment", &c->recompute_segment)
      .Min(1)
      .Unit("layers")
      .MayChange()
      .Says(" of $0 layers in a row")
      .Help("Store only the input of every N-th layer for --recompute.");
  t->Add("ffn_chunk", &c->ffn_chunk)
      .Min(0)
      .Unit("tokens")
      .MayChange()
      .Says("; feed-forwards of $0 tokens at a time")
      .Help(
          "Compute feed-forwards N tokens at a time and again in the backward pass; results "
          "change by roundings. 0: all at once.");
  t->Add("head_chunk", &c->head_chunk)
      .Min(0)
      .Unit("KV heads")
      .MayChange()
      .Says("; attention of $0 KV heads at a time")
      .Help(
          "Compute attention N KV heads at a time and project them again in the backward pass; "
          "results change by roundings. 0: all at once.");
  t->Add("zero", &c->zero)
      .Min(0)
      .Max(3)
      .MayChange()
      .Help(
          "Divide between ranks (ZeRO) 1: the optimizer's state, 2: gradients, too, 3: "
          "parameters, too. 0: nothing.");
  t->Add("offload", &c->offload, kOffloads)
      .MayChange()
      .Help(
          "Keep activations (what recomputed layers store), optimizer (moments and fp32 weights), "
          "or all in the memory of the host. none: on the GPU.");
  t->Add("offload_resident", &c->offload_resident)
      .Min(0)
      .Max(1 << 20)
      .Unit("GiB")
      .MayChange()
      .Help(
          "Keep N GiB of an offloaded optimizer on the GPU between steps, so that less moves. 0: "
          "nothing.");
}

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
constexpr Side kOptimizerStays = {"offload", "without --offload=optimizer or all",
                                  "optimizer or all", "",
                                  [](const Config& c) { return !OffloadsOptimizer(c.offload); }};
constexpr Side kResident = {"offload_resident", "--offload_resident", "0", "--offload_resident=1",
                            [](const Config& c) { return c.offload_resident > 0; }};
constexpr Side kOffloadActivations = {
    "offload", "--offload=activations or all", "none or optimizer",
    "--offload=activations --device=cuda",
    [](const Config& c) { return OffloadsActivations(c.offload); }};
constexpr Side kZero = {"zero", "--zero", "0", "--zero=1 --ranks=2",
                        [](const Config& c) { return c.zero > 0; }};
constexpr Side kZeroGradients = {"zero", "--zero=2 or 3", "0 or 1", "--zero=2 --dp=2",
                                 [](const Config& c) { return c.zero > 1; }};
constexpr Side kNoCopies = {"tp pp", "--tp, --pp without --dp", "1", "--tp=2 --dp=1",
                            [](const Config& c) { return c.state_ranks() == 1; }};
// The first and the last stage share a part of a ParameterUnit, which ZeRO would divide
// differently.
constexpr Side kTiedPipeline = {
    "pp", "--pp for a GPT-2 with tied embeddings", "1", "--pp=2 --model=d12", [](const Config& c) {
      return c.pp > 1 && c.model.family == Family::kGpt2 && c.model.tied_embeddings;
    }};
constexpr Side kEma = {"ema", "--ema", "0", "--ema=0.99",
                       [](const Config& c) { return c.ema > 0; }};
constexpr Side kAllHeadsNorm = {"model", "with a model of qk_norm=all", "another one",
                                R"(--model={"layers":2,"width":32,"heads":2,"qk_norm":"all"})",
                                [](const Config& c) { return c.model.qk_norm == QkNorm::kAll; }};

constexpr TrainConflict kConflicts[] = {
    {kZero, kOneRank, "one rank has nothing to divide", "give 0"},
    {kZero, kNoCopies, "no two ranks have the same parameters", "give a larger --dp, or 0"},
    {kZeroGradients, kTiedPipeline,
     "the first and the last stage would divide the parameters that they share differently",
     "give 0 or 1"},
    {kFfnChunk, kTensorParallel, "the ranks exchange all tokens around a feed-forward", kLeaveOut},
    {kHeadChunk, kTensorParallel, "the heads are divided between the ranks already", kLeaveOut},
    {kHeadChunk, kAllHeadsNorm, "a group has some of the heads", kLeaveOut},
    {kRecomputeSequence, kHeadChunk, "attention in groups of heads stores no part of its result",
     "give selective or full, or leave --head_chunk out"},
    {kSegments, kNoRecompute, "all layers of a segment are recomputed", "give --recompute"},
    {kOffload, kCpu, "the memory of the CPU is the memory of the host", "give --device=cuda"},
    {kResident, kOptimizerStays, "the whole optimizer is on the GPU already",
     "give --offload=optimizer, or leave it out"},
    {kEma, kOffloadOptimizer, "the average stays on the GPU", kLeaveOut},
    {kOffloadActivations, kPipeline, "micro-batches overlap", "give optimizer, or leave it out"},
    {kOffloadActivations, kNoRecompute, "it moves what recomputed layers keep",
     "give --recompute, or optimizer"},
    {kZeroGradients, kExact, "every rank needs all gradients", "give 0 or 1"},
    {kHeadChunk, kExact, "chunks of tokens take all heads", kLeaveOut},
    {kRecomputeSequence, kExact, "half a sequence is not a chunk", "give selective or full"},
};

absl::Status Check(const ResolvedConfig& config) {
  if (config.head_chunk == 0) return absl::OkStatus();
  const ModelConfig model = config.model.WithDefaults();
  if (model.kv_heads % config.head_chunk != 0) {
    return InvalidOption("head_chunk", "must be a divisor of the ", model.kv_heads,
                         " KV heads; got ", config.head_chunk, "; give 1, or leave it out");
  }
  if (config.strategy != Strategy::kUlysses) return absl::OkStatus();
  const int64_t heads = model.heads / model.kv_heads * config.head_chunk;
  return OrBurst(CheckHeadsDivide("--sp with --strategy=ulysses and --head_chunk", heads,
                                  config.head_chunk, config.mesh.sequence));
}

// Returns the fewest KV heads that attention can take at a time, which is the number that Ulysses
// divides.
int64_t FewestKvHeads(const ResolvedConfig& config) {
  const int64_t kv_heads = config.model.WithDefaults().kv_heads;
  const int64_t ranks = config.strategy == Strategy::kUlysses        ? config.mesh.sequence
                        : config.strategy == Strategy::kBurstUlysses ? config.ulysses
                                                                     : 1;
  return kv_heads % ranks == 0 ? ranks : kv_heads;
}

// Keeps the values with which `fixed`, changed by set(value, config), has no conflict.
template <typename T, typename Set>
void KeepAllowed(const ResolvedConfig& fixed, const Set& set, std::vector<T>* values) {
  const auto refused = [&](const T& value) {
    ResolvedConfig config = fixed;
    set(value, &config);
    return !Allowed(config);
  };
  values->erase(std::remove_if(values->begin(), values->end(), refused), values->end());
}

// Adds parts of layers to the choice of whole layers: of the feed-forwards alone, then also of
// attention.
void AddChunks(const ResolvedConfig& fixed, const MayChoose& may_choose,
               std::vector<SetOptions>* chunks) {
  constexpr int64_t kFfnChunk = 16384;  // tokens: long enough for GEMMs at their full rate
  const auto set = [](const SetOptions& chunk, ResolvedConfig* c) { chunk(c); };
  const int64_t local_tokens = fixed.batch / fixed.mesh.data * fixed.seqlen / fixed.mesh.sequence;
  if (may_choose("ffn_chunk") && fixed.ffn_chunk == 0 && local_tokens > kFfnChunk) {
    chunks->push_back([](ResolvedConfig* c) { c->ffn_chunk = kFfnChunk; });
    KeepAllowed(fixed, set, chunks);
  }
  const int64_t fewest = FewestKvHeads(fixed);
  if (may_choose("head_chunk") && fixed.head_chunk == 0 &&
      fewest < fixed.model.WithDefaults().kv_heads) {
    chunks->push_back([fewest, ffn = chunks->back()](ResolvedConfig* c) {
      ffn(c);
      c->head_chunk = fewest;
    });
    KeepAllowed(fixed, set, chunks);
  }
}

}  // namespace

const OptionGroup kMemoryOptions = {AddRows, kConflicts, Check};

void Recomputation::Set(ResolvedConfig* config) const {
  config->recompute = kind;
  config->recompute_segment = segment;
}

MemoryChoices MemoryChoicesOf(const ResolvedConfig& given, const MayChoose& may_choose) {
  MemoryChoices choices{{{given.recompute, given.recompute_segment}},
                        {[](ResolvedConfig*) {}},
                        {given.zero},
                        {given.offload}};
  ResolvedConfig fixed = given;  // the options without those that may be chosen
  if (may_choose("offload")) fixed.offload = Offload::kNone;
  if (may_choose("recompute") && may_choose("recompute_segment")) {
    fixed.recompute = Recompute::kFull;
    fixed.recompute_segment = 1;
    choices.recomputes = {
        {Recompute::kNone}, {Recompute::kSelective}, {Recompute::kSequence}, {Recompute::kFull}};
    for (int64_t segment = 2; 2 * segment <= given.model.layers && segment <= 8; segment *= 2) {
      choices.recomputes.push_back({Recompute::kFull, segment});
    }
    KeepAllowed(
        fixed, [](const Recomputation& r, ResolvedConfig* c) { r.Set(c); }, &choices.recomputes);
  }
  AddChunks(fixed, may_choose, &choices.chunks);
  if (may_choose("zero")) {
    choices.stages = {0, 1, 2, 3};
    KeepAllowed(
        fixed, [](int64_t stage, ResolvedConfig* c) { c->zero = stage; }, &choices.stages);
  }
  if (may_choose("offload")) {
    choices.offloads = {Offload::kNone, Offload::kActivations, Offload::kOptimizer, Offload::kAll};
    KeepAllowed(
        fixed, [](Offload offload, ResolvedConfig* c) { c->offload = offload; }, &choices.offloads);
  }
  return choices;
}

}  // namespace burst
